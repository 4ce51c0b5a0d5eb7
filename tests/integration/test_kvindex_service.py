"""The index over real NATS and Redis: follows, resyncs, restarts, and outlives its database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from baton_kvindex.counters import ResyncReason

from baton import subjects
from baton.bus import NatsBus
from baton.errors import ModelNotFound
from baton.messages.base import Context, ErrorReport, Refused
from baton.messages.index import Match, Tier
from baton.messages.workers import Goodbye
from baton.telemetry import Metrics
from tests.harness.index.services import indexing, until
from tests.harness.index.worker import MODEL, Cache, chain, match, until_held, working, written
from tests.harness.servers import start_nats, start_redis


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(nats_url, name="test")
    yield made
    await made.close()


@pytest.fixture
def prefix() -> str:
    return f"test:{uuid4().hex[:8]}"


async def test_it_follows_events_and_answers(nats_url: str, redis_url: str, prefix: str, bus: NatsBus) -> None:
    async with working(bus) as worker, indexing(nats_url, redis_url, prefix) as service:
        await worker.store("abcd")
        await until_held(bus, worker, "abcdx", 4)
        await worker.remove(chain("abcd")[-16:])
        await until_held(bus, worker, "abcd", 3)
        assert worker.queries == 0
        assert (await match(bus, chain("abcd"), "another model")) == {}
        assert service.reconciler.counters.resyncs[ResyncReason.GAP] == 0


async def test_odd_questions_are_refused_and_harm_nothing(
    nats_url: str, redis_url: str, prefix: str, bus: NatsBus
) -> None:
    async with working(bus) as worker, indexing(nats_url, redis_url, prefix) as service:
        await worker.store("ab")
        await until_held(bus, worker, "ab", 2)
        broken = Match(context=Context(request="r", budget_s=1.0), model_digest=MODEL, blocks=b"odd")
        for message in (broken, Goodbye(address=worker.address)):
            answer = await bus.request(subjects.MATCH, message, timeout_s=1.0)
            assert isinstance(answer, Refused)
            assert answer.error.code == "malformed_message"
        wrong = Refused(error=ErrorReport.of(ModelNotFound("not for the index")))
        await bus.publish(subjects.HEARTBEAT, wrong)
        await bus.append(subjects.KV_STREAM, subjects.kv_events("odd"), wrong, message_id=uuid4().hex)
        # Events from another subject, a worker whose name is no part of a subject, and notices about no worker.
        events = worker.stored("abc")
        await bus.append(subjects.KV_STREAM, subjects.kv_events("odd"), events, message_id=uuid4().hex)
        await bus.publish(subjects.HEARTBEAT, Cache(name="no subject.*", sequence=3).heartbeat())
        for subject in (subjects.PLACED, subjects.AUDITS):
            await bus.publish(subject, wrong)
        await worker.send(events)
        await until_held(bus, worker, "abc", 3)
        await until(lambda: service.reconciler.counters.malformed == 2)
        await asyncio.sleep(0.2)


async def test_a_lost_event_is_healed_by_a_resync(nats_url: str, redis_url: str, prefix: str, bus: NatsBus) -> None:
    async with working(bus) as worker, indexing(nats_url, redis_url, prefix) as service:
        await worker.store("abcdefg")
        await until_held(bus, worker, "abcdefg", 7)
        await worker.store("xyz", lost=True)
        await worker.store("abcdefgh")
        await until_held(bus, worker, "xyz", 3)
        await until_held(bus, worker, "abcdefgh", 8)
        assert service.reconciler.counters.resyncs[ResyncReason.GAP] == 1
        assert worker.cursors == {0, 1, 2, 3}, "eleven blocks are four pages"


async def test_a_lost_tail_is_healed_by_heartbeats(nats_url: str, redis_url: str, prefix: str, bus: NatsBus) -> None:
    async with working(bus) as worker, indexing(nats_url, redis_url, prefix, behind_s=0.3) as service:
        await worker.store("a")
        await until_held(bus, worker, "a", 1)
        await worker.store("ab", lost=True)
        await until_held(bus, worker, "ab", 2)
        assert service.reconciler.counters.resyncs[ResyncReason.BEHIND] >= 1


@pytest.mark.parametrize("phantom", [False, True])
async def test_planted_drift_is_found_and_repaired_within_seconds(
    nats_url: str, redis_url: str, prefix: str, bus: NatsBus, phantom: bool
) -> None:
    async with working(bus) as worker, indexing(nats_url, redis_url, prefix) as service:
        await worker.store("abcd")
        await until_held(bus, worker, "abcd", 4)
        planted = chain("xyz") if phantom else chain("ab")[16:]
        await asyncio.sleep(0.3)
        assert service.reconciler.counters.resyncs[ResyncReason.DRIFT] == 0
        index = service.reconciler._trees.assign(worker.name, MODEL)  # pyright: ignore[reportPrivateUsage]
        if phantom:
            index.store(worker.name, b"", planted)
        else:
            index.remove(worker.name, planted)
        await until(lambda: service.reconciler.counters.resyncs[ResyncReason.DRIFT] == 1)
        await until_held(bus, worker, "abcd", 4)
        await until_held(bus, worker, "xyz", 0)
        await asyncio.sleep(0.3)
        assert service.reconciler.counters.resyncs[ResyncReason.DRIFT] == 1, "it agrees again"
    assert (await written(redis_url, prefix, worker))[Tier.DEVICE] == worker.held


async def test_a_goodbye_drops_a_worker_at_once(nats_url: str, redis_url: str, prefix: str, bus: NatsBus) -> None:
    async with (
        working(bus) as leaving,
        working(bus) as staying,
        indexing(nats_url, redis_url, prefix, lost_after_s=60.0),
    ):
        for worker in (leaving, staying):
            await worker.store("abc")
            await until_held(bus, worker, "abc", 3)
        leaving.silent = True
        await bus.publish(subjects.HEARTBEAT, Goodbye(address=leaving.address))
        await until_held(bus, leaving, "abc", 0)
        await until_held(bus, staying, "abc", 3)


async def test_silence_drops_a_worker(nats_url: str, redis_url: str, prefix: str, bus: NatsBus) -> None:
    async with working(bus) as worker, indexing(nats_url, redis_url, prefix):
        await worker.store("abc")
        await until_held(bus, worker, "abc", 3)
        worker.silent = True
        await until_held(bus, worker, "abc", 0)
        worker.silent = False
        await until_held(bus, worker, "abc", 3)


async def test_a_restart_goes_on_from_redis_and_the_stream(
    nats_url: str, redis_url: str, prefix: str, bus: NatsBus
) -> None:
    async with working(bus) as worker:
        async with indexing(nats_url, redis_url, prefix):
            # Nothing of this is in the stream, so only Redis can bring it back.
            await worker.store("abc", lost=True)
            await until_held(bus, worker, "abc", 3)
            await worker.store("abcd")
            await until_held(bus, worker, "abcd", 4)
        worker.answers_queries = False
        worker.queries = 0
        await worker.store("abcde")
        async with indexing(nats_url, redis_url, prefix) as service:
            await until_held(bus, worker, "abcde", 5)
            assert service.reconciler.counters.applied == 1, "only what came while it was down"
        assert worker.queries == 0


async def test_an_empty_redis_and_stream_are_rebuilt_from_the_workers(
    nats_url: str, redis_url: str, prefix: str, bus: NatsBus
) -> None:
    async with working(bus) as worker:
        for path in ("abcdef", "abxyz", "q"):
            await worker.store(path, lost=True)
        async with indexing(nats_url, redis_url, prefix):
            await until_held(bus, worker, "abcdef", 6)
            await until_held(bus, worker, "abxyz", 5)


async def test_a_page_that_never_comes_is_asked_for_again(
    nats_url: str, redis_url: str, prefix: str, bus: NatsBus
) -> None:
    async with working(bus) as worker:
        worker.answers_queries = False
        await worker.store("abc", lost=True)
        async with indexing(nats_url, redis_url, prefix, resync_page_timeout_s=0.2):
            await until(lambda: worker.queries >= 2)
            worker.answers_queries = True
            await until_held(bus, worker, "abc", 3)


async def test_redis_may_die_and_come_back(nats_url: str, prefix: str, bus: NatsBus) -> None:
    metrics = Metrics("kvindex")

    def is_up() -> bool:
        return "baton_index_store_up 1.0" in metrics.render("")[1].decode().splitlines()

    with start_redis() as redis:
        changes: dict[str, Any] = {"write_retry_s": 0.1, "redis_timeout_s": 0.5, "metrics": metrics}
        async with working(bus) as worker, indexing(nats_url, redis.url, prefix, **changes) as service:
            await worker.store("abc")
            await until_held(bus, worker, "abc", 3)
            await until(lambda: not service.reconciler.journal)
            assert is_up()
            redis.kill()
            await worker.store("abcd", lost=False)
            await until_held(bus, worker, "abcd", 4)
            await until(lambda: not is_up())
            redis.start()
            await until(is_up)
        assert (await written(redis.url, prefix, worker))[Tier.DEVICE] == worker.held


async def test_a_redis_that_lost_everything_is_rewritten(nats_url: str, prefix: str, bus: NatsBus) -> None:
    with start_redis() as redis:
        async with working(bus) as worker, indexing(nats_url, redis.url, prefix) as service:
            await worker.store("abc")
            await until_held(bus, worker, "abc", 3)
            await until(lambda: not service.reconciler.journal)
            redis.kill()
            for saved in redis.folder.glob("appendonly*"):
                saved.unlink()
            redis.start()
            await worker.store("x")
            await until_held(bus, worker, "x", 1)
        assert (await written(redis.url, prefix, worker))[Tier.DEVICE] == worker.held


async def test_without_redis_it_starts_and_serves(nats_url: str, prefix: str, bus: NatsBus) -> None:
    async with working(bus) as worker, indexing(nats_url, "redis://127.0.0.1:1", prefix):
        await worker.store("abc")
        await until_held(bus, worker, "abc", 3)


async def test_a_nats_server_that_restarts_is_followed_again(redis_url: str, prefix: str) -> None:
    with start_nats() as nats:
        bus = await NatsBus.connect(nats.url, name="test")
        try:
            async with working(bus) as worker, indexing(nats.url, redis_url, prefix):
                await worker.store("abc")
                await until_held(bus, worker, "abc", 3)
                nats.kill()
                nats.start()
                await worker.store("abcd", lost=True)
                await until_held(bus, worker, "abcd", 4)
                await worker.store("abcde")
                await until_held(bus, worker, "abcde", 5)
        finally:
            await bus.close()
