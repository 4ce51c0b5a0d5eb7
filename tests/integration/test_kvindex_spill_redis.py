"""An index with no spare memory, with real NATS and Redis: all idle branches are in Redis, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
import redis.asyncio as redis
from baton_kvindex.cold import ColdIndex
from baton_kvindex.config import IndexSettings
from baton_kvindex.counters import ResyncReason
from baton_kvindex.service import IndexService

from baton.bus import NatsBus
from baton.errors import ConfigurationError
from tests.harness.index.services import indexing, until
from tests.harness.index.worker import Worker, chain, match, until_held, working
from tests.harness.limits import HANG_S
from tests.harness.nodes import make_node
from tests.harness.servers import Server, start_redis

PATHS = [letter * 20 + " is a prompt, and long enough to be worth a stub" for letter in "abcdef"]


@pytest.fixture
async def bus(nats_url: str) -> AsyncGenerator[NatsBus]:
    made = await NatsBus.connect(nats_url, name="test")
    yield made
    await made.close()


@pytest.fixture
async def worker(bus: NatsBus) -> AsyncGenerator[Worker]:
    async with working(bus) as made:
        made.page_blocks = 1000
        yield made


def cold_blocks(service: IndexService) -> int:
    return sum(index.cold_blocks for index in service.reconciler.models().values() if isinstance(index, ColdIndex))


async def all_cold(service: IndexService, worker: Worker) -> None:
    await until(lambda: cold_blocks(service) == len(worker.held) > 0)


def agrees(service: IndexService, worker: Worker) -> bool:
    return service.reconciler.fingerprint(worker.name) == worker.fingerprint()


async def test_what_is_cold_matches_changes_and_survives_a_restart(
    nats_url: str, redis_url: str, bus: NatsBus, worker: Worker
) -> None:
    settings: dict[str, Any] = {"memory_bytes_max": 1, "cold_timeout_s": 20.0, "cold_patience_s": 20.0}
    async with indexing(nats_url, redis_url, worker.name, **settings) as service:
        for path in PATHS:
            await worker.store(path)
        await until_held(bus, worker, PATHS[0], len(PATHS[0]))
        await all_cold(service, worker)
        for path in PATHS:
            assert await match(bus, chain(path + " and something new")) == {worker.name: len(path)}
        await all_cold(service, worker)
        await worker.remove(chain(PATHS[0])[-320:])
        await worker.store(PATHS[1] + " goes on")
        await until_held(bus, worker, PATHS[0], len(PATHS[0]) - 20)
        await until_held(bus, worker, PATHS[1] + " goes on", len(PATHS[1]) + 8)
        await until(lambda: agrees(service, worker))
        resyncs = service.reconciler.counters.resyncs
        assert (resyncs[ResyncReason.DRIFT], resyncs[ResyncReason.COLD]) == (0, 0)
    async with indexing(nats_url, redis_url, worker.name, **settings) as service:
        await until(lambda: cold_blocks(service) > 0)
        await until_held(bus, worker, PATHS[1] + " goes on", len(PATHS[1]) + 8)
        await until(lambda: agrees(service, worker))
        resyncs = service.reconciler.counters.resyncs
        assert (resyncs[ResyncReason.DRIFT], resyncs[ResyncReason.COLD]) == (0, 0)


async def test_nothing_is_left_in_redis_of_an_index_that_ended(nats_url: str, worker: Worker) -> None:
    with start_redis() as server:
        async with indexing(nats_url, server.url, "p", memory_bytes_max=1) as service:
            await worker.store(PATHS[0])
            await all_cold(service, worker)
            assert len(await cold_keys(server)) == 1
        assert await cold_keys(server) == []


async def test_a_redis_that_hangs_delays_no_match(nats_url: str, bus: NatsBus, worker: Worker) -> None:
    with start_redis() as server:
        async with indexing(
            nats_url, server.url, "p", memory_bytes_max=1, cold_patience_s=2 * HANG_S, redis_timeout_s=2 * HANG_S
        ) as service:
            await worker.store(PATHS[0])
            await until_held(bus, worker, PATHS[0], len(PATHS[0]))
            await all_cold(service, worker)
            server.pause()
            assert await match(bus, chain(PATHS[0])) == {}
            await worker.remove(chain(PATHS[0])[-16:])
            async with AsyncExitStack() as stack:
                other = await stack.enter_async_context(working(bus))
                await other.store(PATHS[1])
                await until_held(bus, other, PATHS[1], len(PATHS[1]))
                assert await match(bus, chain(PATHS[1])) == {other.name: len(PATHS[1])}
                server.resume()
                await until_held(bus, worker, PATHS[0], len(PATHS[0]) - 1)
            assert service.reconciler.counters.resyncs[ResyncReason.COLD] == 0


@pytest.mark.parametrize("loss", ["emptied", "away for long"])
async def test_a_worker_is_resynced_when_redis_loses_its_cold_branches(
    nats_url: str, bus: NatsBus, worker: Worker, loss: str
) -> None:
    with start_redis() as server:
        async with indexing(nats_url, server.url, "p", memory_bytes_max=1, cold_patience_s=0.5) as service:
            for path in PATHS:
                await worker.store(path)
            await all_cold(service, worker)
            if loss == "emptied":
                client = redis.Redis.from_url(server.url)  # pyright: ignore[reportUnknownMemberType]
                await client.flushall()  # pyright: ignore[reportUnknownMemberType]
                await client.aclose()
            else:
                server.kill()
            for path in PATHS:
                await until_held(bus, worker, path, len(path))
            await until(lambda: agrees(service, worker))
            assert worker.queries
            assert service.reconciler.counters.resyncs[ResyncReason.COLD]
            if loss == "away for long":
                server.start()
            await all_cold(service, worker)


async def test_a_bound_without_redis_is_a_wrong_setting(nats_url: str, bus: NatsBus) -> None:
    with pytest.raises(ConfigurationError, match="memory_bytes_max"):
        IndexService(IndexSettings(memory_bytes_max=1), make_node("kvindex", bus), store=None)


async def cold_keys(server: Server) -> list[bytes]:
    client = redis.Redis.from_url(server.url)  # pyright: ignore[reportUnknownMemberType]
    async with asyncio.timeout(HANG_S):
        keys = cast("list[bytes]", await client.keys("*:cold:*"))  # pyright: ignore[reportUnknownMemberType]
    await client.aclose()
    return keys
