"""A complete Baton deployment on this machine: real NATS, Redis and service processes that tests kill and pause."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import httpx
import psutil

from baton import subjects
from baton.bus import Bus, Delivery, NatsBus
from baton.messages.attempts import AttemptState, Digest, Frames, Prefilled
from baton.messages.workers import ChangeRole, Heartbeat, Role, RoleChange
from benchmarks.remote_engine.settings import EngineName
from tests.harness.fork_server import Kind, forked
from tests.harness.limits import HANG_S, START_S
from tests.harness.outcome import RUNNING
from tests.harness.processes import runs
from tests.harness.servers import start_nats, start_redis

Answer = TypeVar("Answer")


@dataclass
class Service:
    """One process of the cluster. Its output goes to `log`."""

    name: str
    command: list[str]
    log: Path
    environment: Mapping[str, str]
    kind: Kind = "services"
    """Kind of the fork server that forks it."""
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        environ = forked(self.environment, self.kind)
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environ
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None, f"{self.name} was not started"
        self.process.send_signal(number)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended by itself, with an error."""
        return self.process is not None and (self.process.returncode or 0) > 0

    async def end(self, *, grace_s: float = HANG_S) -> int:
        """End the process as a supervisor would and return its exit status; its children must have ended too."""
        if self.process is None:
            return 0
        children = _descendants(self.process.pid)
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), grace_s)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        give_up_at_s = time.monotonic() + HANG_S
        while (alive := list(filter(runs, children))) and time.monotonic() < give_up_at_s:  # noqa: ASYNC110 - other processes.
            await asyncio.sleep(0.02)
        for child in alive:
            child.kill()
        assert not alive, f"{self.name} left processes behind: {alive}"
        return self.process.returncode or 0

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@dataclass
class Observer:
    """A passive subscriber on the bus that keeps the newest digest of each worker, heartbeats and frames."""

    digests: dict[tuple[str, str], Digest] = field(default_factory=dict[tuple[str, str], Digest])
    """(worker, subject of a gateway) → the newest digest."""
    heartbeats: dict[str, Heartbeat] = field(default_factory=dict[str, Heartbeat])
    tokens_seen: dict[str, int] = field(default_factory=dict[str, int])
    """request → output tokens streamed so far."""
    workers: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """request → workers that have sent a frame of it to its gateway."""
    finished: set[str] = field(default_factory=set[str])
    requests: set[str] = field(default_factory=set[str])
    """Every request seen on the bus."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def see(self, delivery: Delivery) -> None:
        match delivery.message:
            case Heartbeat() as heartbeat:
                self.heartbeats[heartbeat.address.worker] = heartbeat
            case Digest() as digest:
                self.digests[digest.worker, delivery.subject] = digest
                self.requests.update(entry.request for entry in digest.entries)
            case Frames() as frames:
                for frame in frames.frames:
                    self.requests.add(frame.request)
                    self.workers.setdefault(frame.request, set()).add(frames.worker)
                    count = frame.index + len(frame.tokens) // 4
                    self.tokens_seen[frame.request] = max(count, self.tokens_seen.get(frame.request, 0))
                    if frame.finish is not None:
                        self.finished.add(frame.request)
            case Prefilled() as prefilled:
                self.requests.add(prefilled.context.request)
                self.workers.setdefault(prefilled.context.request, set()).add(prefilled.worker)
            case _:
                return
        self.changed.set()

    async def until(self, condition: Callable[[], object], *, timeout_s: float = HANG_S) -> None:
        """Wait until `condition()` is true; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def served_new(self, worker: str, *, timeout_s: float) -> None:
        """Wait until this worker sends something of a request that the bus has not carried before."""
        old = frozenset(self.requests)
        await self.until(
            lambda: any(worker in workers for request, workers in self.workers.items() if request not in old),
            timeout_s=timeout_s,
        )

    async def worker_in(self, role: Role, *states: AttemptState, attempts: int = 1, timeout_s: float = HANG_S) -> str:
        """Return the worker of this role that next reports `attempts` attempts at new requests in one of these states.

        A request is new if the bus has not carried it before: an answer may overtake the digest that lists it.
        """
        self.digests.clear()
        old = frozenset(self.requests)
        found: list[str] = []

        def look() -> bool:
            counts = Counter(
                digest.worker
                for digest in self.digests.values()
                for entry in digest.entries
                if entry.state in states and entry.request not in old
            )
            found[:] = [
                worker for worker, count in counts.items() if count >= attempts and self.heartbeats[worker].role is role
            ]
            return bool(found)

        await self.until(look, timeout_s=timeout_s)
        return found[0]

    async def caught_in(
        self, role: Role, *states: AttemptState, ask: Callable[[int], Coroutine[object, object, Answer]]
    ) -> tuple[int, asyncio.Task[Answer], str]:
        """Ask until a worker of this role reports the attempt in one of these states.

        A state may be over before a digest shows it, on a busy machine. `ask` is given the number of the try; returns
        the number, the answer that is still coming, and the worker.
        """
        for number in itertools.count():
            answer = asyncio.create_task(ask(number))
            seen = asyncio.create_task(self.worker_in(role, *states))
            await asyncio.wait((answer, seen), return_when=asyncio.FIRST_COMPLETED)
            if seen.done():
                return number, answer, seen.result()
            seen.cancel()
            answer.result()
        raise AssertionError


class Cluster:
    """Starts services as their own processes and speaks to the gateway as a client would."""

    def __init__(self, folder: Path, *, model: Path, nats_url: str, redis_url: str) -> None:
        self.folder = folder
        self.model = model
        self.nats_url = nats_url
        self.redis_url = redis_url
        self.services: dict[str, Service] = {}
        self.observer = Observer()
        self.bus: Bus | None = None

    @property
    def url(self) -> str:
        return self.gateway_url("gateway")

    def gateway_url(self, name: str) -> str:
        """Address of a gateway, which takes a free port itself: one chosen here could be taken by then."""
        return f"http://{self._address(name, 'listens')}"

    def status_address(self, name: str) -> str:
        """Host and port of a service's status endpoint."""
        return self._address(name, "status is served")

    async def metrics(self, name: str) -> dict[str, float]:
        """Return a service's metrics by series."""
        async with httpx.AsyncClient(timeout=HANG_S) as client:
            text = (await client.get(f"http://{self.status_address(name)}/metrics")).text
        return {series: float(value) for series, value in re.findall(r"^(baton_\S+) (\S+)$", text, re.MULTILINE)}

    def _address(self, name: str, what: str) -> str:
        # The newest line, in case the service was restarted.
        lines = re.findall(rf"{what} on (\S+) port (\d+)", self.services[name].log.read_text())
        if not lines:
            raise ConnectionError(f"{name} does not listen yet")
        return ":".join(lines[-1])

    async def start(
        self, name: str, module: str, *flags: str, python: str = sys.executable, kind: Kind = "services"
    ) -> Service:
        command = [python, "-m", module, "--nats-url", self.nats_url, "--status-port", "0", *flags]
        service = Service(name, command, self.folder / f"{name}.log", dict(os.environ), kind)
        self.services[name] = service
        await service.start()
        return service

    async def start_control_plane(
        self, *, gateway_flags: Sequence[str] = (), scheduler_flags: Sequence[str] = (), disaggregation: str = "always"
    ) -> None:
        await self.start("kvindex", "baton_kvindex", "--redis-url", self.redis_url)
        await self.start("scheduler", "baton_scheduler", "--disaggregation", disaggregation, *scheduler_flags)
        await self.start_gateway("gateway", *gateway_flags)

    async def start_gateway(self, name: str, *flags: str) -> Service:
        listen = ("--host", "127.0.0.1", "--port", "0")
        return await self.start(name, "baton_gateway", *listen, "--redis-url", self.redis_url, *flags)

    async def observe(self) -> None:
        bus = await NatsBus.connect(self.nats_url, name="observer")
        self.bus = bus
        await bus.subscribe("baton.heartbeat", self.observer.see)
        await bus.subscribe("baton.gateway.*.frames", self.observer.see)

    async def start_worker(
        self,
        role: Role,
        name: str,
        *flags: str,
        engine: EngineName | Literal["simulated"] = "simulated",
        options: Mapping[str, object] | None = None,
        module: str = "",
        python: str = sys.executable,
    ) -> Service:
        return await self.start(
            name,
            module or f"baton_{role}",
            *("--worker", name, "--model", str(self.model), "--model-name", "tiny", "--engine", engine),
            *("--engine-options", json.dumps(dict(options or {}))),
            *flags,
            python=python,
            kind="services" if engine == "simulated" else engine,
        )

    async def change_role(self, worker: str, role: Role, *, timeout_s: float = HANG_S) -> None:
        """Change a worker's role, and wait until it has served a new request in it: requests must come meanwhile."""
        assert self.bus is not None
        beats = self.observer.heartbeats
        address = beats[worker].address
        order = ChangeRole(generation=address.generation, role_epoch=address.role_epoch, role=role)
        answer = await self.bus.request(subjects.role(worker), order, timeout_s=timeout_s)
        assert isinstance(answer, RoleChange), answer
        await self.observer.until(lambda: beats[worker].role is role and not beats[worker].draining)
        await self.observer.served_new(worker, timeout_s=timeout_s)

    async def wait_log(self, name: str, text: str, *, timeout_s: float = HANG_S) -> None:
        """Wait until a service has logged `text`."""
        async with asyncio.timeout(timeout_s):
            while text not in self.services[name].log.read_text(errors="replace"):  # noqa: ASYNC110 - another process.
                await asyncio.sleep(0.05)

    async def wait_worker(self, name: str, *, timeout_s: float = START_S) -> None:
        """Wait until one worker sends heartbeats."""
        ended = asyncio.create_task(self._ended(name))
        beats = asyncio.create_task(self.observer.until(lambda: name in self.observer.heartbeats, timeout_s=timeout_s))
        done, waiting = await asyncio.wait((ended, beats), return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if ended in done:
            raise RuntimeError(f"{name} did not start:\n{self.services[name].tail()}")
        await beats

    async def _ended(self, name: str) -> None:
        process = self.services[name].process
        assert process is not None, f"{name} was not started"
        await process.wait()

    async def wait_ready(self, *, gateway: str = "gateway", timeout_s: float = START_S) -> None:
        """Wait until every worker that was started sends heartbeats and the gateway answers /ready."""
        workers = {name for name, service in self.services.items() if "--worker" in service.command}
        give_up_at_s = time.monotonic() + timeout_s
        async with httpx.AsyncClient() as client:
            while True:
                ready = False
                if workers <= self.observer.heartbeats.keys():
                    with suppress(httpx.HTTPError, ConnectionError):
                        ready = (await client.get(f"{self.gateway_url(gateway)}/ready", timeout=2.0)).status_code == 200
                if ready:
                    return
                dead = [service for service in self.services.values() if service.process and service.process.returncode]
                if dead or time.monotonic() > give_up_at_s:
                    logs = "\n".join(
                        f"--- {service.name}\n{service.tail()}" for service in dead or self.services.values()
                    )
                    raise RuntimeError(f"the cluster did not become ready:\n{logs}")
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        if self.bus is not None:
            await self.bus.close()
        # Gateways first, so that no request is retried while workers leave.
        gateways = {name for name in self.services if name.startswith("gateway")}
        failed = [name for name, service in self.services.items() if service.has_failed]
        for names in (gateways, self.services.keys() - gateways):
            await asyncio.gather(*(self.services[name].end() for name in names))
        assert not failed, "\n".join(f"{name} has failed:\n{self.services[name].tail()}" for name in failed)


@asynccontextmanager
async def running_cluster(folder: Path, *, model: Path) -> AsyncGenerator[Cluster]:
    """Run NATS, Redis and the services that the test starts; end them all, and show logs when the test fails."""
    with start_nats() as nats, start_redis() as redis:
        cluster = Cluster(folder, model=model, nats_url=nats.url, redis_url=redis.url)
        async with _ended(cluster):
            await cluster.observe()
            yield cluster


@asynccontextmanager
async def running_plane(folder: Path, *, model: Path) -> AsyncGenerator[Cluster]:
    """Run NATS, Redis and a control plane with default settings, for workers that come and go."""
    with start_nats() as nats, start_redis() as redis:
        plane = Cluster(folder, model=model, nats_url=nats.url, redis_url=redis.url)
        async with _ended(plane):
            await plane.start_control_plane()
            yield plane


@asynccontextmanager
async def below(plane: Cluster, folder: Path) -> AsyncGenerator[Cluster]:
    """Run the workers that the test starts below a control plane that outlives them."""
    cluster = Cluster(folder, model=plane.model, nats_url=plane.nats_url, redis_url=plane.redis_url)
    cluster.services |= plane.services
    async with _ended(cluster, kept=plane.services):
        await cluster.observe()
        yield cluster


@asynccontextmanager
async def _ended(cluster: Cluster, kept: Collection[str] = ()) -> AsyncGenerator[None]:
    """End the cluster's services afterwards, except those `kept`; show all logs if the test fails."""
    is_whole = False
    try:
        yield
        is_whole = not RUNNING.has_failed
    finally:
        if not is_whole:
            for service in cluster.services.values():
                print(f"--- {service.name}\n{service.tail()}")
        for name in kept:
            del cluster.services[name]
        await cluster.close()
