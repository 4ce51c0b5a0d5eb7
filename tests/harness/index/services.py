"""The index with real NATS and Redis, in this process or as two processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from baton_kvindex.config import IndexSettings
from baton_kvindex.service import IndexService
from baton_kvindex.store import RedisStore

from baton.bus import NatsBus
from baton.messages.index import Tier
from baton.node.service import serve
from baton.stop import Stop
from baton.telemetry import Metrics
from tests.harness.cluster import Service
from tests.harness.index.worker import Worker, match, working, written
from tests.harness.limits import HANG_S
from tests.harness.nodes import make_node
from tests.harness.servers import Server, start_nats, start_redis

PREFIX = "baton:kvindex"
WRITES = "this index writes"


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
        """Wait until the worker's entries in Redis satisfy `condition`."""
        async with asyncio.timeout(HANG_S):
            while True:
                if condition((await written(self.redis.url, PREFIX, self.worker))[Tier.DEVICE]):
                    return
                await asyncio.sleep(0.02)

    async def assert_true(self) -> None:
        """Assert that both answers and the stored state match the worker's cache."""
        await self.until_written(lambda blocks: blocks == self.worker.held)
        for _ in range(20):
            held = await match(self.bus, next(iter(self.worker.held)))
            assert held == {self.worker.name: 1}
        assert self.worker.queries == 0, "the worker was not asked"


def said(service: Service, words: str) -> bool:
    return words in service.log.read_text()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running_pair(folder: Path) -> AsyncGenerator[Pair]:
    async with AsyncExitStack() as stack:
        nats, redis = stack.enter_context(start_nats()), stack.enter_context(start_redis())
        bus = await NatsBus.connect(nats.url, name="test")
        stack.push_async_callback(bus.close)
        worker = await stack.enter_async_context(working(bus))
        pair = Pair(folder, nats, redis, bus, worker)
        try:
            yield pair
        finally:
            for service in pair.services:
                print(f"--- {service.name}\n{service.tail(60)}")
                await service.end()


@asynccontextmanager
async def indexing(
    nats_url: str, redis_url: str, prefix: str, *, metrics: Metrics | None = None, **changes: Any
) -> AsyncGenerator[IndexService]:
    """Run the index on its own connection until the block ends."""
    plain = IndexSettings(nats_url=nats_url, redis_url=redis_url, redis_prefix=prefix, write_interval_s=0.02)
    settings = msgspec.structs.replace(plain, **changes)
    bus = await NatsBus.connect(nats_url, name="kvindex")
    node, store = make_node("kvindex", bus), None
    if metrics is not None:
        node = replace(node, metrics=metrics)
    if redis_url:
        clock, timeout_s = node.ports.clock, settings.redis_timeout_s
        store = RedisStore(redis_url, clock=clock, prefix=prefix, timeout_s=timeout_s)
    service = IndexService(settings, node, store)
    running = asyncio.create_task(serve(service, stop := Stop()))
    try:
        yield service
        assert not running.done(), running.exception()
    finally:
        stop.asked.set()
        await running
        await bus.close()
