"""Several gateway processes on one port, under one parent, on a real NATS server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from baton.cli.servers import free_port
from baton.cli.trace import ask
from baton.messages.attempts import Cancel, DecodeTask
from tests.harness.gateway.actors import MODEL, Actors, Worker
from tests.harness.gateway.process import actors, gateway, spawn, wait_ready
from tests.harness.limits import HANG_S

TOKENS = 60
SLOW_S = 0.5
"""Time between tokens at which an answer lasts for half a minute, unless the worker is told to hurry."""
STREAMS_MAX = 64


@dataclass
class Stream:
    """One streamed answer, read as it comes."""

    request: str = ""
    events: list[str] = field(default_factory=list[str])
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, url: str) -> None:
        body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        async with (
            httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if line:
                    self.events.append(line)
                if not self.began.is_set():
                    self.request = json.loads(line.removeprefix("data: "))["id"].removeprefix("cmpl-")
                    self.began.set()

    @property
    def is_whole(self) -> bool:
        return len(self.events) > TOKENS / 2 and self.events[-1] == "data: [DONE]"


@dataclass
class World:
    """Two gateway processes, their parent, and one worker."""

    parent: psutil.Process
    process: asyncio.subprocess.Process
    url: str
    status_url: str
    worker: Worker
    cast: Actors
    output: list[bytes]
    group: asyncio.TaskGroup

    def processes(self) -> list[psutil.Process]:
        return self.parent.children()

    def pid_of(self, gateway_id: str) -> int:
        (pid,) = re.findall(rf" (\d+) INFO baton_gateway.server: gateway {gateway_id} listens", self.log)
        return int(pid)

    @property
    def log(self) -> str:
        return b"".join(self.output).decode()

    def owner(self, stream: Stream) -> int:
        """Return the process that serves a stream."""
        tasks = [task for task in self.worker.received if isinstance(task, DecodeTask)]
        (gateway_id,) = {task.gateway for task in tasks if task.context.request.startswith(stream.request)}
        return self.pid_of(gateway_id)

    async def stream(self) -> tuple[Stream, asyncio.Task[None]]:
        """Open a stream, and wait for its first token."""
        stream = Stream()
        reading = self.group.create_task(_forgive(stream.read(self.url)))
        await asyncio.wait_for(stream.began.wait(), HANG_S)
        return stream, reading

    async def streams_on(self, pids: Sequence[int]) -> dict[int, list[tuple[Stream, asyncio.Task[None]]]]:
        """Open streams until each of the processes serves one at least."""
        found: dict[int, list[tuple[Stream, asyncio.Task[None]]]] = {}
        for _ in range(STREAMS_MAX):
            stream, reading = await self.stream()
            found.setdefault(self.owner(stream), []).append((stream, reading))
            if set(pids) <= found.keys():
                return found
        raise AssertionError(f"after {STREAMS_MAX} connections, only these serve: {list(found)} of {pids}")

    async def until(self, condition: Callable[[], object]) -> None:
        await self.cast.wait_for(condition)

    async def ask(self) -> int:
        async with httpx.AsyncClient(base_url=self.url, timeout=HANG_S) as client:
            return (await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})).status_code


async def _forgive(reading: Coroutine[object, object, None]) -> None:
    with suppress(httpx.HTTPError):  # A stream that was cut is seen in its events.
        await reading


@asynccontextmanager
async def two_processes(nats_url: str, *flags: str) -> AsyncGenerator[World]:
    output: list[bytes] = []
    async with AsyncExitStack() as stack:
        cast = await stack.enter_async_context(actors(nats_url))
        cast.say("abc " * TOKENS, ends=False)
        worker = cast.workers["d1"]
        port = free_port()
        everything = ("--processes", "2", "--status-port", str(port), *flags)
        process, url = await stack.enter_async_context(gateway(nats_url, *everything, output=output))
        status_url = f"http://127.0.0.1:{port}"
        await wait_ready(status_url)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        parent = psutil.Process(process.pid)
        yield World(parent, process, url, status_url, worker, cast, output, group)


def counts(metrics: str) -> dict[str, float]:
    """Return the requests that each process has answered."""
    name = "gen_ai_server_request_duration_seconds_count"
    found = re.findall(rf'^{name}{{process="(\d+)".*}} (\S+)$', metrics, re.MULTILINE)
    return {process: float(count) for process, count in found}


async def test_both_serve_and_one_scrape_counts_the_requests_of_both(nats_url: str) -> None:
    async with two_processes(nats_url) as world:
        first, second = (process.pid for process in world.processes())
        streams = await world.streams_on([first, second])
        await asyncio.gather(*(reading for each in streams.values() for _, reading in each))
        assert all(stream.is_whole for each in streams.values() for stream, _ in each)
        async with httpx.AsyncClient(base_url=world.status_url) as client:
            metrics = (await client.get("/metrics")).text
            assert (await client.get("/health")).status_code == 200
        assert sorted(counts(metrics).values()) == sorted(map(len, streams.values()))
        assert metrics.count("# TYPE baton_ready gauge") == 1
        for each in streams.values():
            async with asyncio.timeout(HANG_S):
                answers = await ask(world.cast.bus, f"cmpl-{each[0][0].request}")  # As `baton trace` does.
                while answers.services < 2:  # One that answers late is left out.
                    answers = await ask(world.cast.bus, f"cmpl-{each[0][0].request}")
            assert len({span.instance for span in answers.spans}) == 1


async def test_a_killed_process_takes_only_its_own_streams_and_comes_back(nats_url: str) -> None:
    async with two_processes(nats_url) as world:
        world.worker.script.interval_s = SLOW_S
        victim, other = world.processes()
        streams = await world.streams_on([victim.pid, other.pid])
        victim.kill()
        await world.until(lambda: "was killed (SIGKILL)" in world.log)
        async with httpx.AsyncClient(base_url=world.status_url) as client:
            assert (await client.get("/ready")).status_code == 200
            assert "baton_ready{" in (await client.get("/metrics")).text
        world.worker.script.interval_s = 0.0
        statuses = [await world.ask() for _ in range(20)]
        await asyncio.gather(*(reading for each in streams.values() for _, reading in each))
        assert all(stream.is_whole for stream, _ in streams[other.pid])
        assert statuses == [200] * 20
        await wait_ready(world.status_url)
        await world.until(lambda: world.log.count("Started server process") == 3)
        await world.streams_on([process.pid for process in world.processes()])


async def test_sigterm_drains_both(nats_url: str) -> None:
    async with two_processes(nats_url) as world:
        world.worker.script.interval_s = SLOW_S
        processes = world.processes()
        streams = await world.streams_on([process.pid for process in processes])
        world.process.send_signal(signal.SIGTERM)
        await world.until(lambda: world.log.count("answers, 30 s at most") == 2)
        world.worker.script.interval_s = 0.0
        await asyncio.gather(*(reading for each in streams.values() for _, reading in each))
        assert all(stream.is_whole for each in streams.values() for stream, _ in each)
        assert await asyncio.wait_for(world.process.wait(), HANG_S) == 0
        assert not any(process.is_running() for process in processes)


async def test_sighup_restarts_one_after_the_other_and_cuts_no_stream(nats_url: str) -> None:
    async with two_processes(nats_url) as world:
        world.worker.script.interval_s = SLOW_S
        old = {process.pid for process in world.processes()}
        streams = await world.streams_on(list(old))
        world.process.send_signal(signal.SIGHUP)
        await world.until(lambda: "answers, 30 s at most" in world.log)
        assert {process.pid for process in world.processes()} == old
        assert "restarting gateway-1" not in world.log, "the second one waits for the first"
        world.worker.script.interval_s = 0.0
        while {process.pid for process in world.processes()} & old or len(world.processes()) < 2:
            assert await world.ask() == 200
        await world.until(lambda: world.log.count("Started server process") == 4)
        await asyncio.gather(*(reading for each in streams.values() for _, reading in each))
        assert all(stream.is_whole for each in streams.values() for stream, _ in each)


@pytest.mark.nightly
async def test_sigterm_during_a_restart_in_turn_cuts_no_stream(nats_url: str) -> None:
    async with two_processes(nats_url) as world:
        world.worker.script.interval_s = SLOW_S
        streams = await world.streams_on([process.pid for process in world.processes()])
        world.process.send_signal(signal.SIGHUP)
        await world.until(lambda: "answers, 30 s at most" in world.log)
        world.process.send_signal(signal.SIGTERM)
        await world.until(lambda: world.log.count("answers, 30 s at most") == 2)
        world.worker.script.interval_s = 0.0
        await asyncio.gather(*(reading for each in streams.values() for _, reading in each))
        assert all(stream.is_whole for each in streams.values() for stream, _ in each)
        assert await asyncio.wait_for(world.process.wait(), HANG_S) == 0


@pytest.mark.nightly
async def test_a_second_signal_ends_both_at_once_and_tells_the_workers(nats_url: str) -> None:
    async with two_processes(nats_url) as world:
        world.worker.script.stall_at = 2
        processes = world.processes()
        streams = await world.streams_on([process.pid for process in processes])
        world.process.send_signal(signal.SIGTERM)
        await world.until(lambda: world.log.count("answers, 30 s at most") == 2)
        assert not world.worker.got(Cancel)
        world.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(world.process.wait(), HANG_S) == 0
        await world.until(lambda: len(world.worker.got(Cancel)) == sum(map(len, streams.values())))


@pytest.mark.nightly
async def test_processes_end_with_their_parent_however_it_ends(nats_url: str) -> None:
    async with two_processes(nats_url) as world:
        processes = world.parent.children(recursive=True)
        world.process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 30.0)
        assert not alive


@pytest.mark.parametrize(
    ("flags", "status", "sentence"),
    [
        (("--processes", "0"), 2, "--processes is malformed"),
        (("--processes", "65"), 2, "--processes is malformed"),
        (("--status-fd", "99"), 1, "status cannot be served on descriptor 99 (--status-fd)"),
        (("--processes", "2", "--nats-url", "nats://127.0.0.1:1"), 1, "ended with status 1 while it started"),
    ],
)
async def test_bad_values_are_one_sentence(flags: tuple[str, ...], status: int, sentence: str) -> None:
    process = await spawn("--port", "0", *flags)
    _, errors = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == status
    assert sentence in errors.decode().splitlines()[-1]
    assert "Traceback" not in errors.decode()


@pytest.mark.parametrize("taken_by_sharing", [False, True])
async def test_a_port_in_use_is_one_sentence(taken_by_sharing: bool) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=taken_by_sharing) as taken:
        port = taken.getsockname()[1]
        process = await spawn("--port", str(port), "--processes", "2")
        _, errors = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 1
    assert errors.decode().splitlines()[-1] == f"baton-gateway: port {port} is in use: choose another one with --port"
