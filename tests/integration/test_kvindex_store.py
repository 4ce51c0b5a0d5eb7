"""The durable form in a real Redis."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
import redis.asyncio as redis
from baton_kvindex.durable import Batch, SavedWorker, WorkerChange, WorkerState
from baton_kvindex.index import Run, link
from baton_kvindex.packing import EvictedBranch
from baton_kvindex.store import VERSION, RedisStore, StoreEmptied, StoreFenced

from baton.clock import SystemClock
from baton.errors import ConfigurationError, StoreUnavailable
from tests.harness.index.worker import Saved, load_all
from tests.harness.limits import HANG_S
from tests.harness.servers import start_redis

STATE = WorkerState(generation=2, model_digest="digest", sequence=7)


def changed(
    *, runs: list[Run] | None = None, stored: dict[bytes, bytes] | None = None, removed: tuple[bytes, ...] = ()
) -> WorkerChange:
    return WorkerChange(state=STATE, runs=runs, stored=stored or {}, removed=removed)


def ids(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def links(saved: Saved, worker: str) -> dict[bytes, bytes]:
    return {block: parent for run in saved.workers[worker].runs for block, parent in link(run.parent, run.blocks)}


@pytest.fixture
def prefix() -> str:
    return f"test:{uuid4().hex[:8]}"


@pytest.fixture
async def store(redis_url: str, prefix: str) -> AsyncIterator[RedisStore]:
    made = RedisStore(redis_url, clock=SystemClock(), prefix=prefix, timeout_s=2.0)
    await made.claim(1)
    yield made
    await made.close()


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[redis.Redis]:
    made = redis.Redis.from_url(redis_url)  # pyright: ignore[reportUnknownMemberType]
    yield made
    await made.aclose()


async def test_an_empty_database_is_an_empty_index(store: RedisStore) -> None:
    assert await load_all(store) == Saved()


async def test_what_was_written_is_loaded(store: RedisStore) -> None:
    long = ids(2500)
    whole = Run(parent=b"", blocks=b"".join(long))
    await store.write(Batch(3, {"a": changed(runs=[whole]), "b": changed(stored={long[0]: b""})}), 1)
    added = ids(1)[0]
    await store.write(Batch(4, {"a": changed(stored={added: long[-1]}, removed=(long[1],)), "b": None}), 1)
    saved = await load_all(store)
    assert saved.stream_sequence == 4
    assert saved.workers.keys() == {"a"}
    assert saved.workers["a"].state == STATE
    expected = dict(link(b"", whole.blocks)) | {added: long[-1]}
    del expected[long[1]]
    assert links(saved, "a") == expected


async def test_a_rewrite_replaces_and_an_empty_one_clears(store: RedisStore) -> None:
    old, new = ids(2)
    await store.write(Batch(1, {"a": changed(stored={old: b""}), "b": changed(stored={old: b""})}), 1)
    empty: list[Run] = []
    await store.write(Batch(2, {"a": changed(runs=[Run(parent=b"", blocks=new)]), "b": changed(runs=empty)}), 1)
    saved = await load_all(store)
    assert links(saved, "a") == {new: b""}
    assert saved.workers["b"] == SavedWorker(STATE, [])


async def test_nothing_is_written_on_top_of_a_database_that_was_emptied(
    store: RedisStore, raw: redis.Redis, prefix: str
) -> None:
    first, second = ids(2)
    await store.write(Batch(1, {"a": changed(stored={first: b""})}), 1)
    await raw.delete(f"{prefix}:{VERSION}:state", f"{prefix}:{VERSION}:workers", f"{prefix}:{VERSION}:blocks:a")
    with pytest.raises(StoreEmptied):
        await store.write(Batch(2, {"a": changed(stored={second: first})}), 1)
    assert await load_all(store) == Saved()
    assert await store.claim(1) == {}
    await store.write(Batch(2, {"a": changed(runs=[Run(parent=b"", blocks=first + second)])}), 1)
    assert links(await load_all(store), "a") == {first: b"", second: first}


async def test_a_writer_that_was_replaced_writes_nothing_more(
    store: RedisStore, redis_url: str, prefix: str, raw: redis.Redis
) -> None:
    first, second, late = ids(3)
    await store.write(Batch(1, {"a": changed(stored={first: b""})}), 1)
    other = RedisStore(redis_url, clock=SystemClock(), prefix=prefix, timeout_s=2.0)
    assert await other.claim(1 << 70) == {"a": STATE}
    for batch in (
        Batch(9, {"a": changed(stored={late: b""})}),
        Batch(9, {"a": changed(runs=[])}),
        Batch(9, {"a": None}),
    ):
        with pytest.raises(StoreFenced):
            await store.write(batch, 1)
    with pytest.raises(StoreFenced):
        await store.claim(2)
    await other.write(Batch(2, {"a": changed(stored={second: first})}), 1 << 70)
    saved = await load_all(other)
    assert saved.stream_sequence == 2
    assert links(saved, "a") == {first: b"", second: first}
    await other.close()


async def test_a_claim_between_a_late_writers_look_and_its_write_refuses_it(
    store: RedisStore, redis_url: str, prefix: str
) -> None:
    """Wherever the late writer is overtaken, its worker is written completely or not at all."""
    (old,) = ids(1)
    other = RedisStore(redis_url, clock=SystemClock(), prefix=prefix, timeout_s=2.0)
    refused = 0
    for fence in range(2, 60):
        await store.claim(fence - 1)
        await store.write(Batch(fence, {"a": changed(runs=[Run(parent=b"", blocks=old)])}), fence - 1)
        run = Run(parent=b"", blocks=b"".join(ids(3)))
        late = asyncio.create_task(store.write(Batch(0, {"a": changed(runs=[run])}), fence - 1))
        await asyncio.sleep(fence * 2e-5)
        await other.claim(fence)
        try:
            await late
        except StoreUnavailable:
            refused += 1
            assert links(await load_all(other), "a") == {old: b""}
        else:
            assert links(await load_all(other), "a") == dict(link(b"", run.blocks))
    assert refused
    await other.close()


async def test_what_a_writer_left_half_written_expires(store: RedisStore, raw: redis.Redis, prefix: str) -> None:
    run = Run(parent=b"", blocks=b"".join(ids(3)))
    await store.write(Batch(1, {"a": changed(runs=[run])}), 1)
    assert await raw.ttl(f"{prefix}:{VERSION}:blocks:a") == -1, "in place it stays"
    await store.claim(2)
    with pytest.raises(StoreFenced):
        await store.write(Batch(1, {"a": changed(runs=[run])}), 1)
    assert 0 < await raw.ttl(f"{prefix}:{VERSION}:aside:1:a") <= 60


class SlowRuns(list[Run]):
    """Runs that are slow to read, the first time."""

    delay_s = 1.2

    def __iter__(self) -> Iterator[Run]:
        time.sleep(self.delay_s)
        self.delay_s = 0.0
        return super().__iter__()


async def test_a_batch_may_take_longer_to_write_than_its_parts_are_kept(redis_url: str, prefix: str) -> None:
    store = RedisStore(redis_url, clock=SystemClock(), prefix=prefix, timeout_s=2.0, aside_s=3)
    await store.claim(1)
    workers = {name: changed(runs=SlowRuns([Run(parent=b"", blocks=ids(1)[0])])) for name in "abcd"}
    await store.write(Batch(1, workers), 1)
    assert {len(worker.runs) for worker in (await load_all(store)).workers.values()} == {1}
    await store.close()


async def test_nothing_is_written_without_its_expiry(redis_url: str, raw: Any, prefix: str) -> None:
    await raw.acl_setuser(prefix, enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-expire"])
    url = redis_url.replace("redis://", f"redis://{quote(prefix)}:any@")
    store = RedisStore(url, clock=SystemClock(), prefix=prefix, timeout_s=2.0)
    await store.claim(1)
    with pytest.raises(StoreUnavailable):
        await store.write(Batch(1, {"a": changed(runs=[Run(parent=b"", blocks=ids(1)[0])])}), 1)
    branch = EvictedBranch(name=b"branch", blocks=ids(1)[0], rows=())
    with pytest.raises(StoreUnavailable):
        await store.cold("one").put([branch])
    await store.close()
    await raw.acl_deluser(prefix)
    assert await raw.keys(f"{prefix}*") == [f"{prefix}:{VERSION}:state".encode()]


async def test_another_version_is_neither_read_nor_changed(store: RedisStore, raw: redis.Redis, prefix: str) -> None:
    other = f"{prefix}:{VERSION + 1}"
    await raw.hset(f"{other}:state", mapping={"stream_sequence": 99, "fence": 1 << 60})
    await raw.hset(f"{other}:workers", "a", b"what a later version says of it")
    assert await load_all(store) == Saved()
    await store.write(Batch(3, {"a": changed(stored={ids(1)[0]: b""})}), 1)
    assert (await load_all(store)).workers.keys() == {"a"}
    assert await raw.hgetall(f"{other}:workers") == {b"a": b"what a later version says of it"}


async def test_damage_costs_the_damaged_worker_only(store: RedisStore, raw: redis.Redis, prefix: str) -> None:
    (block,) = ids(1)
    await store.write(Batch(9, dict.fromkeys(("good", "blocks", "state"), changed(stored={block: b""}))), 1)
    await raw.hset(f"{prefix}:{VERSION}:blocks:blocks", "short", "x")
    await raw.hset(f"{prefix}:{VERSION}:workers", "state", b"\xc1")
    saved = await load_all(store)
    assert saved.workers.keys() == {"good"}
    await raw.hset(f"{prefix}:{VERSION}:state", "stream_sequence", "nonsense")
    assert (await load_all(store)).stream_sequence == 0
    await raw.delete(f"{prefix}:{VERSION}:workers")
    await raw.set(f"{prefix}:{VERSION}:workers", "of another type")
    with pytest.raises(StoreUnavailable):
        await load_all(store)


async def test_a_database_that_is_away_or_stands_still_is_unavailable_in_time() -> None:
    with start_redis() as server:
        store = RedisStore(server.url, clock=SystemClock(), prefix="p", timeout_s=0.5)
        batch = Batch(1, {"a": changed(stored={ids(1)[0]: b""})})
        await store.claim(1)
        await store.write(batch, 1)
        server.pause()
        async with asyncio.timeout(HANG_S):
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await store.write(batch, 1)
        server.resume()
        await store.write(batch, 1)
        server.kill()
        with pytest.raises(StoreUnavailable):
            await store.write(batch, 1)
        with pytest.raises(StoreUnavailable):
            await load_all(store)
        server.start()
        await store.write(batch, 1)
        await store.close()


async def test_a_database_that_stands_still_during_a_write_is_unavailable_in_time() -> None:
    stands_still = False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer like Redis, up to the question for the fence, and nothing from then on."""
        nonlocal stands_still
        while head := await reader.readline():
            words = [await reader.readexactly(int((await reader.readline())[1:]) + 2) for _ in range(int(head[1:]))]
            command = words[0].strip()
            stands_still |= command == b"HGET"
            if not stands_still:
                writer.write(b"%0\r\n" if command == b"HELLO" else b"+OK\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        store = RedisStore(f"redis://127.0.0.1:{port}", clock=SystemClock(), prefix="p", timeout_s=0.2)
        async with asyncio.timeout(HANG_S):
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await store.write(Batch(1, {}), 1)
        await store.close()
    assert stands_still


async def test_a_cancelled_write_is_cancelled(store: RedisStore) -> None:
    """The client must not swallow a cancellation: the service would never end."""
    for attempt in range(300):
        write = asyncio.create_task(store.write(Batch(attempt, {"a": changed(stored={ids(1)[0]: b""})}), 1))
        await asyncio.sleep(attempt * 2e-6)
        if not write.done():
            write.cancel()
            await asyncio.wait([write])
            assert write.cancelled()


def test_an_address_that_is_none_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigurationError, match="redis_url"):
        RedisStore("nonsense", clock=SystemClock(), prefix="p", timeout_s=1.0)
