"""Two indexes side by side, as processes: both answer, one writes, and the other one goes on when that is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.bus import NatsBus
from tests.cluster import Service
from tests.index_actors import Worker, match, until_held, working, written
from tests.servers import Server, start_nats, start_redis

pytestmark = pytest.mark.timeout(60)

PREFIX = "baton:kvindex"
WRITES = "this index writes"
FAILOVER_S = 2.0


class Pair:
    """Two index processes and one worker, which stores a block every few milliseconds."""

    def __init__(self, folder: Path, nats: Server, redis: Server, bus: NatsBus, worker: Worker) -> None:
        self.folder = folder
        self.nats = nats
        self.redis = redis
        self.bus = bus
        self.worker = worker
        self.services: list[Service] = []

    async def start(self, *flags: str) -> Service:
        name = f"kvindex-{len(self.services)}"
        command = [sys.executable, "-m", "baton_kvindex", "--nats-url", self.nats.url, "--redis-url", self.redis.url]
        service = Service(name, [*command, *flags], self.folder / f"{name}.log", dict(os.environ))
        self.services.append(service)
        await service.start()
        await until(lambda: said(service, "the index answers"))
        return service

    async def store_for_ever(self) -> None:
        while True:
            await self.worker.store(chr(0x4E00 + self.worker.sequence % 5000))
            await asyncio.sleep(0.02)

    async def until_written(self, condition: Callable[[dict[bytes, bytes]], bool]) -> None:
        """Wait until what Redis has of the worker is as wanted."""
        async with asyncio.timeout(15.0):
            while True:
                if condition(await written(self.redis.url, PREFIX, self.worker)):
                    return
                await asyncio.sleep(0.02)

    async def assert_true(self) -> None:
        """What both answer and what is written is what the worker holds."""
        await self.until_written(lambda blocks: blocks == self.worker.held)
        for _ in range(20):
            held = await match(self.bus, next(iter(self.worker.held)))
            assert held == {self.worker.name: 1}
        assert self.worker.queries == 0, "nobody had to ask the worker"


def said(service: Service, words: str) -> bool:
    return words in service.log.read_text()


async def until(condition: Callable[[], bool], *, within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def storing(pair: Pair) -> AsyncGenerator[None]:
    task = asyncio.create_task(pair.store_for_ever())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    with start_nats() as nats, start_redis() as redis:
        bus = await NatsBus.connect(nats.url, name="test")
        async with working(bus) as worker:
            made = Pair(tmp_path, nats, redis, bus, worker)
            try:
                yield made
            finally:
                for service in made.services:
                    print(f"--- {service.name}\n{service.tail()}")
                    await service.end()
        await bus.close()


async def test_the_other_index_writes_on_when_the_writer_is_killed(pair: Pair) -> None:
    first = await pair.start()
    await until(lambda: said(first, WRITES))
    second = await pair.start()
    async with storing(pair):
        await pair.until_written(lambda blocks: len(blocks) > 10)
        assert not said(second, WRITES)
        first.signal(signal.SIGKILL)
        killed_s = time.monotonic()
        at = pair.worker.sequence
        await pair.until_written(lambda blocks: len(blocks) > at)
        took_s = time.monotonic() - killed_s
        assert took_s < FAILOVER_S, f"{took_s:.2f} s"
        third = await pair.start()
    await pair.assert_true()
    assert not said(third, WRITES)
    assert await second.end() == 0
    await until(lambda: said(third, WRITES))
    await until_held(pair.bus, pair.worker, chr(0x4E00), 1)
    await pair.worker.store("x")
    await pair.assert_true()


async def test_a_writer_that_slept_is_refused_by_redis(pair: Pair) -> None:
    """It believes in its lease for longer than the other one waits, so nothing but Redis can refuse it."""
    first = await pair.start("--writer-ttl-s", "4", "--write-interval-s", "0.3")
    await until(lambda: said(first, WRITES))
    second = await pair.start("--writer-ttl-s", "1.5")
    async with storing(pair):
        await pair.until_written(lambda blocks: len(blocks) > 20)
        first.signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        await until(lambda: said(second, WRITES))
        assert time.monotonic() - stopped_s < 3.0
        first.signal(signal.SIGCONT)
        await until(lambda: said(first, "a late write was refused"))
    await pair.assert_true()
    assert [await service.end() for service in (first, second)] == [0, 0]
    await pair.start()
    await pair.assert_true()


async def test_nobody_writes_while_nats_is_down_and_afterwards_one_does(pair: Pair) -> None:
    for _ in range(2):
        await pair.start()
    await pair.worker.store("ab")
    await until_held(pair.bus, pair.worker, "ab", 2)
    await until(lambda: any(said(service, WRITES) for service in pair.services))
    pair.nats.kill()
    await until(lambda: any(said(service, "no longer the index") for service in pair.services))
    pair.nats.start()
    await until_held(pair.bus, pair.worker, "ab", 2, within_s=10.0)
    await pair.worker.store("abc")
    await until_held(pair.bus, pair.worker, "abc", 3)
    await pair.until_written(lambda blocks: blocks == pair.worker.held)
