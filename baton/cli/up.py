"""`baton up`: everything on this machine, started in order, watched, and ended together."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import shutil
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from baton.cli import servers
from baton.cli.asking import NATS_URL_FILE, REDIS_URL_FILE
from baton.cli.deployment import (
    Deployment,
    check_deployment,
    gpu_shares,
    metrics_targets,
    model_folder,
    resolve,
    role_of,
    service_programs,
    worker_programs,
)
from baton.cli.doctor import describe_findings
from baton.cli.engine_defaults import CUDA_MEMORY_SHARE
from baton.cli.gpu_shares import VISIBLE, visible_gpus
from baton.clock import SystemClock
from baton.devices.backends import nearest_adapters
from baton.devices.findings import find
from baton.devices.survey import Survey, read_survey
from baton.engines.options import WHOLE_ON_CUDA
from baton.errors import BatonError, ConfigurationError, StoreUnavailable, Unavailable
from baton.messages.workers import Role
from baton.processes.child import Child, Program, describe_exit
from baton.processes.keep_alive import START_INTERVAL_S, StartFailed, keep_alive, until_ready
from baton.processes.probes import http_status
from baton.redis import connected
from baton.stop import EXIT_MISCONFIGURED

Tell = Callable[[str], None]
"""Shows the user a message; never raises, as the deployment lives on without its output."""

METRICS_TARGETS_FILE: Final = "metrics-targets.json"
NVIDIA_DRIVER: Final = Path("/dev/nvidiactl")
READY_TIMEOUT_S: Final = 120.0
PROGRESS_INTERVAL_S: Final = 10.0
REDIS_TIMEOUT_S: Final = 2.0
READY_TEXT: Final = """
  curl -N {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "stream": true, "max_tokens": 40,
    "messages": [{{"role": "user", "content": "Hello!"}}]}}'
"""
END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def up(deployment: Deployment, environ: Mapping[str, str], tell: Tell) -> None:
    """Serve until a signal ends it. Raises BatonError with a sentence for the user if it cannot start."""
    survey = read_survey() if NVIDIA_DRIVER.exists() else None
    gpus = survey.gpus.gpus if survey else ()
    deployment = resolve(deployment, gpu=survey is not None, find_gpus=lambda: visible_gpus(gpus, environ.get(VISIBLE)))
    if survey:
        deployment = replace(deployment, adapters=nearest_adapters(survey))
    check_deployment(deployment)
    if deployment.device == "cuda":
        if not deployment.prefill:
            tell(f"{WHOLE_ON_CUDA}: no prefill workers are started")
        for line in describe_gpus(deployment, survey):
            tell(line)
    if deployment.tiny and not deployment.tiny_model_folder.exists():
        tell("making a tiny model with random weights")
    model_path = model_folder(deployment)
    with _own_run_folder(deployment):
        logging.basicConfig(
            filename=deployment.logs_folder / "up.log", format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        asyncio.run(_Launch(deployment, model_path, environ, tell).run())


def describe_gpus(deployment: Deployment, survey: Survey | None) -> Iterator[str]:
    """Yield the problems that this machine has, and each worker's share of its GPUs."""
    if survey:
        yield from (line for one in find(survey) if one.kind == "problem" for line in describe_findings([one]))
    names = {gpu.index: gpu.name for gpu in survey.gpus.gpus} if survey else {}
    for worker, share in gpu_shares(deployment).items():
        where = " and ".join(f"GPU {index} ({names[index]})" for index in share.gpus) or "the GPU that CUDA chooses"
        yield f"{worker}: {where}, {CUDA_MEMORY_SHARE / share.workers:.0%} of its memory if no option says otherwise"
        if adapters := deployment.adapters_of(share):
            yield f"{worker}: RDMA by the adapters nearest to it, {adapters}, if no setting names others"


@contextmanager
def _own_run_folder(deployment: Deployment) -> Generator[None]:
    """Empty the run folder and lock it: its old content describes workers that are gone."""
    folder = deployment.run_folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another `baton up` uses {folder}: end it, or choose another port, such as PORT={deployment.port + 1}"
            ) from error
        shutil.rmtree(folder, ignore_errors=True)
        deployment.logs_folder.mkdir(mode=0o700, parents=True)
        yield


class _Launch:
    """One run of `baton up`."""

    def __init__(self, deployment: Deployment, model_path: Path, environ: Mapping[str, str], tell: Tell) -> None:
        self._deployment = deployment
        self._model_path = model_path
        self._environ = environ
        self._tell = tell
        self._servers: list[Child] = []
        self._services: list[Child] = []
        self._keepers: list[asyncio.Task[None]] = []

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
                # A keeper ends by a bug only, and its process would not be started again.
                done, _ = await asyncio.wait((ending, *self._keepers), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in (starting, ending, *self._keepers):
                task.cancel()
            await asyncio.gather(starting, ending, *self._keepers, return_exceptions=True)
            await self._end()

    def _on_end_signal(self, end_wanted: asyncio.Event) -> None:
        if end_wanted.is_set():
            for child in (*self._services, *self._servers):
                child.kill()
            self._tell("ending at once")
        else:
            end_wanted.set()
            self._tell(
                f"ending: the gateway finishes what streams ({self._deployment.drain_s} s at most), then workers, "
                "scheduler and index, then the servers (once more: all at once)"
            )

    async def _end(self) -> None:
        """End in the order of a request's path: the gateway finishes its streams while all it needs is there."""
        gateway = [child for child in self._services if child.name == "gateway"]
        others = [child for child in self._services if child.name != "gateway"]
        for children in (gateway, others, self._servers):
            await asyncio.gather(*(child.stop() for child in children))
        # Commands that ask this deployment find it by these files. The lock of the run folder is still held.
        for name in (NATS_URL_FILE, REDIS_URL_FILE, METRICS_TARGETS_FILE):
            (self._deployment.run_folder / name).unlink(missing_ok=True)

    # ------------------------------------------------------------ starting

    async def _start(self) -> None:
        nats_url, redis_url = await self._start_servers()
        for name, url in ((NATS_URL_FILE, nats_url), (REDIS_URL_FILE, redis_url)):
            servers.write_private(self._deployment.run_folder / name, url)
        services = service_programs(self._deployment, nats_url=nats_url, redis_url=redis_url, environ=self._environ)
        workers = worker_programs(
            self._deployment, model_path=self._model_path, nats_url=nats_url, environ=self._environ
        )
        targets = self._deployment.run_folder / METRICS_TARGETS_FILE
        targets.write_text(metrics_targets([*services, *workers]), encoding="utf-8")
        await self._start_children(self._services, *services)
        self._tell("kvindex, scheduler and gateway run")
        for program in workers:
            await self._start_worker(program)
        await self._wait_until_serving()
        self._tell_ready()

    async def _start_servers(self) -> tuple[str, str]:
        """Start NATS and Redis unless the user names running ones; return their addresses."""
        folder, urls = self._deployment.run_folder, [self._deployment.nats_url, self._deployment.redis_url]
        if self._deployment.redis_url:
            await self._check_redis(self._deployment.redis_url)
        for index, describe in enumerate((servers.nats_server, servers.redis_server)):
            if urls[index]:
                continue
            server = describe(folder, self._environ)
            await self._start_children(self._servers, server.program)
            urls[index] = server.url
            self._tell(f"{server.program.name} runs on port {server.port}")
        return urls[0], urls[1]

    async def _check_redis(self, url: str) -> None:
        """Say so if the user's Redis does not serve: services start without it, and wait for it."""
        async with connected(url, clock=SystemClock(), timeout_s=REDIS_TIMEOUT_S) as redis:
            assert redis is not None, "the address is not empty"
            try:
                await redis.answer(redis.client.ping())  # pyright: ignore[reportUnknownMemberType]
            except StoreUnavailable as error:
                self._tell(
                    f"REDIS_URL: {error}\n  Everything starts without it. Until it serves, stored responses, stored "
                    "API keys and idempotency keys are refused, and the index is not saved."
                )

    async def _start_worker(self, program: Program) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        engine = self._deployment.engines[role_of(program.name)]
        self._tell(f"{program.name}: starting {engine} on {self._deployment.device}")
        await self._start_children(self._services, program)
        self._tell(f"{program.name}: ready after {loop.time() - started_s:.0f} s")

    async def _start_children(self, among: list[Child], *programs: Program) -> None:
        """Start programs and wait until all are ready; from then on they are kept alive.

        Raises if one ends or they take too long, with the tail of the log.
        """
        children = [Child(program) for program in programs]
        for child in children:
            among.append(child)
            child.start()
        reported_s = 0.0

        def report(waited_s: float) -> None:
            nonlocal reported_s
            if waited_s - reported_s >= PROGRESS_INTERVAL_S:
                reported_s = waited_s
                self._tell(f"{children[-1].name}: still starting, {waited_s:.0f} s")

        try:
            await until_ready(children, report)
        except StartFailed as failed:
            raise _start_failed(failed.child, failed.status) from None
        self._keepers += [asyncio.create_task(keep_alive(child, self._tell)) for child in children]

    async def _wait_until_serving(self) -> None:
        host, port = self._deployment.local_host, self._deployment.port
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while (await http_status(host, port, "/ready"))[0] != 200:  # noqa: ASYNC110 - another process.
                    await asyncio.sleep(START_INTERVAL_S)
        except TimeoutError as error:
            status, body = await http_status(host, port, "/ready")
            raise Unavailable(
                f"all processes run, but the gateway is not ready after {READY_TIMEOUT_S:g} s "
                f"({status}: {body.strip()}); the logs are in {self._deployment.logs_folder}"
            ) from error

    # ------------------------------------------------------------ running

    def _tell_ready(self) -> None:
        deployment = self._deployment
        workers = f"{deployment.counts[Role.PREFILL]} prefill and {deployment.counts[Role.DECODE]} decode"
        engines = " → ".join(deployment.started_engines)
        key = ' -H "Authorization: Bearer $API_KEY"' if deployment.api_key else ""
        lines = [
            f"ready: {deployment.address}/v1 serves {deployment.model_name} ({workers}, {engines})",
            READY_TEXT.format(address=deployment.address, model=deployment.model_name, key=key),
            f"  Where an answer's time went:  make trace PORT={deployment.port} ID=chatcmpl-…",
        ]
        if "simulated" in deployment.started_engines:
            lines.append("  The engine is simulated: its text is noise. A real one:  make up")
        elif deployment.tiny:
            lines.append(
                "  The model is tiny, with random weights made here: its text is noise. A real one, a folder or a\n"
                "  hub id:  make up MODEL=Qwen/Qwen3-0.6B"
            )
        lines.append(f"  Metrics of all processes, for Prometheus:  {deployment.run_folder / METRICS_TARGETS_FILE}")
        lines.append(f"  Logs: {deployment.logs_folder}   Ctrl-C ends everything.")
        self._tell("\n".join(lines))


def _start_failed(child: Child, status: int | None) -> BatonError:
    """Return the error for a child that ended while it started: its own sentence if it has one."""
    if status is None:
        return _with_last_lines(child, f"was not ready within {child.program.start_timeout_s:g} s")
    for line in reversed(child.log_tail().splitlines()):
        program, _, sentence = line.strip().partition(": ")
        if program.startswith("baton-"):
            kind = ConfigurationError if status == EXIT_MISCONFIGURED else Unavailable
            return kind(f"{child.name} did not start: {sentence}")
    return _with_last_lines(child, describe_exit(status))


def _with_last_lines(child: Child, happened: str) -> BatonError:
    return Unavailable(
        f"{child.name} {happened}; its last lines (all of them: {child.program.log_path}):\n{child.log_tail()}"
    )
