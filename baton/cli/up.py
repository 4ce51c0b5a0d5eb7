"""`baton up`: everything on this machine, started in order, watched, and ended together."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import shutil
import signal
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from baton.bus import Bus, NatsBus
from baton.cli import servers
from baton.cli.asking import NATS_URL_FILE
from baton.cli.deployment import (
    DRAIN_S,
    Wishes,
    check_wishes,
    choose_device,
    model_folder,
    service_programs,
    worker_programs,
)
from baton.cli.processes import Child, Program, describe_exit, keep_alive
from baton.cli.readiness import Roster, http_status
from baton.errors import BatonError, ConfigurationError, Unavailable
from baton.messages import Role

Tell = Callable[[str], None]

READY_TIMEOUT_S: Final = 120.0
BUS_TIMEOUT_S: Final = 5.0
PROBE_INTERVAL_S: Final = 0.1
PROGRESS_INTERVAL_S: Final = 10.0
READY_TEXT: Final = """
  curl -N {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "stream": true, "max_tokens": 40,
    "messages": [{{"role": "user", "content": "Hello!"}}]}}'
"""
END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def up(wishes: Wishes, environ: Mapping[str, str], tell: Tell) -> None:
    """Serve until a signal ends it. Raises BatonError with a sentence for the user when it cannot start."""
    check_wishes(wishes)
    if wishes.tiny and not wishes.tiny_model_folder.exists():
        tell("making a tiny model with random weights")
    model_path = model_folder(wishes)
    with _own_run_folder(wishes):
        logging.basicConfig(
            filename=wishes.logs_folder / "up.log", format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        asyncio.run(_Launch(wishes, model_path, environ, tell).run())


@contextmanager
def _own_run_folder(wishes: Wishes) -> Generator[None]:
    """Empty the run folder and hold it: what it kept describes workers that are gone."""
    folder = wishes.run_folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another `baton up` uses {folder}: end it, or choose another port, such as PORT={wishes.port + 1}"
            ) from error
        shutil.rmtree(folder, ignore_errors=True)
        wishes.logs_folder.mkdir(mode=0o700, parents=True)
        yield


class _Launch:
    """One run of `baton up`."""

    def __init__(self, wishes: Wishes, model_path: Path, environ: Mapping[str, str], tell: Tell) -> None:
        self._wishes = wishes
        self._model_path = model_path
        self._environ = environ
        self._tell = tell
        self._servers: list[Child] = []
        self._services: list[Child] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._roster = Roster()
        self._bus: Bus | None = None

    async def run(self) -> None:
        end_wanted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in END_SIGNALS:
            loop.add_signal_handler(number, self._on_end_signal, end_wanted)
        ending = asyncio.create_task(end_wanted.wait())
        starting = asyncio.create_task(self._start())
        try:
            await asyncio.wait((starting, ending), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await ending
        finally:
            for task in (starting, ending, *self._keepers):
                task.cancel()
            await asyncio.gather(starting, ending, *self._keepers, return_exceptions=True)
            await self._end()

    def _on_end_signal(self, end_wanted: asyncio.Event) -> None:
        if end_wanted.is_set():
            self._tell("ending at once")
            for child in (*self._services, *self._servers):
                child.kill()
        else:
            self._tell(
                f"ending: the gateway finishes what streams ({DRAIN_S} s at most), then workers, scheduler and index, "
                "then the servers (once more: all at once)"
            )
            end_wanted.set()

    async def _end(self) -> None:
        """End in the order in which requests come: the gateway finishes its streams while all it needs is there."""
        if self._bus is not None:
            await self._bus.close()
        gateway = [child for child in self._services if child.name == "gateway"]
        others = [child for child in self._services if child.name != "gateway"]
        for children in (gateway, others, self._servers):
            await asyncio.gather(*(child.stop() for child in children))

    # ------------------------------------------------------------ starting

    async def _start(self) -> None:
        nats_url, redis_url = await self._start_servers()
        servers.write_private(self._wishes.run_folder / NATS_URL_FILE, nats_url)
        self._bus = await NatsBus.connect(nats_url, name="baton-up", timeout_s=BUS_TIMEOUT_S)
        await self._roster.follow(self._bus)
        await self._start_services(nats_url, redis_url)
        for program in worker_programs(
            self._wishes, model_path=self._model_path, nats_url=nats_url, environ=self._environ
        ):
            await self._start_worker(program)
        await self._wait_until_serving()
        self._tell_ready()

    async def _start_servers(self) -> tuple[str, str]:
        """Start NATS and Redis unless the user names running ones; return their addresses."""
        folder, urls = self._wishes.run_folder, [self._wishes.nats_url, self._wishes.redis_url]
        for index, describe in enumerate((servers.nats_server, servers.redis_server)):
            if urls[index]:
                continue
            server = describe(folder, self._environ)
            child = Child(server.program)
            self._servers.append(child)
            child.start()
            await self._ready(servers.wait_until_serving(server), child)
            self._keep(child)
            urls[index] = server.url
            self._tell(f"{child.name} runs on port {server.port}")
        return urls[0], urls[1]

    async def _start_services(self, nats_url: str, redis_url: str) -> None:
        programs = service_programs(self._wishes, nats_url=nats_url, redis_url=redis_url, environ=self._environ)
        children = [Child(program) for program in programs]
        for child in children:
            self._services.append(child)
            child.start()
        await self._ready(self._gateway_answers("/health"), *children)
        for child in children:
            self._keep(child)
        self._tell("kvindex, scheduler and gateway run")

    async def _start_worker(self, program: Program) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        child = Child(program)
        self._services.append(child)
        engine = self._wishes.engines[Role(child.name.partition("-")[0])]
        self._tell(f"{child.name}: starting {engine} on {choose_device(self._wishes.device)}")
        child.start()
        await self._ready(self._roster.next_life(child.name, after=None), child)
        self._tell(f"{child.name}: ready after {loop.time() - started_s:.0f} s")
        self._keep(child, worker=True)

    async def _ready(self, ready: Coroutine[object, object, object], *children: Child) -> None:
        """Wait until fresh children serve. Raises when one ends or they take too long, with the last words."""
        waiting = asyncio.create_task(ready)
        ends = {asyncio.create_task(child.wait()): child for child in children}
        loop = asyncio.get_running_loop()
        timeout_s = max(child.program.start_timeout_s for child in children)
        give_up_at_s = loop.time() + timeout_s
        try:
            while (left_s := give_up_at_s - loop.time()) > 0:
                step_s = min(PROGRESS_INTERVAL_S, left_s)
                await asyncio.wait((waiting, *ends), timeout=step_s, return_when=asyncio.FIRST_COMPLETED)
                for ended, child in ends.items():
                    if ended.done():
                        raise _start_failed(child, describe_exit(ended.result()))
                if waiting.done():
                    waiting.result()
                    return
                self._tell(f"{children[-1].name}: still starting, {timeout_s - give_up_at_s + loop.time():.0f} s")
            raise _start_failed(children[-1], f"was not ready within {timeout_s:g} s")
        finally:
            for task in (waiting, *ends):
                task.cancel()
            await asyncio.gather(waiting, *ends, return_exceptions=True)

    async def _gateway_answers(self, path: str) -> None:
        host, port = self._wishes.local_host, self._wishes.port
        while (await http_status(host, port, path))[0] != 200:  # noqa: ASYNC110 - another process.
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _wait_until_serving(self) -> None:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._gateway_answers("/ready")
        except TimeoutError as error:
            status, body = await http_status(self._wishes.local_host, self._wishes.port, "/ready")
            raise Unavailable(
                f"all processes run, but the gateway is not ready after {READY_TIMEOUT_S:g} s "
                f"({status}: {body.strip()}); the logs are in {self._wishes.logs_folder}"
            ) from error

    # ------------------------------------------------------------ running

    def _keep(self, child: Child, *, worker: bool = False) -> None:
        self._keepers.append(asyncio.create_task(keep_alive(child, self._tell)))
        if worker:
            self._keepers.append(asyncio.create_task(self._announce_returns(child.name)))

    async def _announce_returns(self, worker: str) -> None:
        while True:
            await self._roster.next_life(worker, after=self._roster.generation(worker))
            self._tell(f"{worker} is back")

    def _tell_ready(self) -> None:
        wishes = self._wishes
        workers = f"{wishes.prefill} prefill and {wishes.decode} decode"
        engines = " → ".join(wishes.started_engines)
        self._tell(f"ready: {wishes.address}/v1 serves {wishes.model_name} ({workers}, {engines})")
        key = ' -H "Authorization: Bearer $API_KEY"' if wishes.api_key else ""
        print(READY_TEXT.format(address=wishes.address, model=wishes.model_name, key=key))
        print(f"  Where an answer's time went:  make trace PORT={wishes.port} ID=chatcmpl-…")
        if "simulated" in wishes.started_engines:
            print("  The engine is simulated: its text is noise. A real one:  make up")
        elif wishes.tiny:
            print("  The model is tiny, with random weights made here: its text is noise. A real one, a folder or a")
            print("  hub id:  make up MODEL=Qwen/Qwen3-0.6B")
        print(f"  Logs: {wishes.logs_folder}   Ctrl-C ends everything.", flush=True)


def _start_failed(child: Child, happened: str) -> BatonError:
    """Return the error for a child that did not start: its own sentence where it has one, else its last lines."""
    tail = child.log_tail()
    for line in reversed(tail.splitlines()):
        program, _, sentence = line.strip().partition(": ")
        if program.startswith("baton-"):
            return ConfigurationError(f"{child.name} did not start: {sentence}")
    return Unavailable(f"{child.name} {happened}; its last lines (all of them: {child.program.log_path}):\n{tail}")
