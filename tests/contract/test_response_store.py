"""The store of responses: one suite over memory and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import uuid4

import pytest
from baton_gateway.responses.redis_store import PAGE_ENTRIES, RedisStore
from baton_gateway.responses.store import Key, MemoryStore, NewRecord, ResponseStore, Turn

from baton.clock import SystemClock
from baton.errors import StoreUnavailable
from baton.redis import RedisConnection
from tests.contract.conftest import Connect
from tests.harness.servers import start_redis

BYTES_MAX = 10_000
OWNER = "gw-1"
HEAD = b'{"status":"in_progress"}'
DONE = b'{"status":"completed"}'
OUTPUT = b'[{"id":"a"}]'
ITEMS = (b'{"id":"i0"}', b'{"id":"i1"}')

Make = Callable[..., ResponseStore]


@pytest.fixture(params=["memory", "redis"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes stores; those in Redis have keys that no other test uses."""
    connect: Connect | None = request.getfixturevalue("redis") if request.param == "redis" else None

    def make(*, ttl_s: float = 60.0, lease_s: float = 60.0) -> ResponseStore:
        clock = SystemClock()
        if connect is None:
            return MemoryStore(clock, ttl_s=ttl_s, bytes_max=BYTES_MAX, lease_s=lease_s)
        prefix = f"test:{uuid4().hex}"
        return RedisStore(connect(), clock=clock, prefix=prefix, ttl_s=ttl_s, bytes_max=BYTES_MAX, lease_s=lease_s)

    return make


@pytest.fixture
def store(make: Make) -> ResponseStore:
    return make()


def key(name: str = "resp_1", tenant: str = "t") -> Key:
    return Key(tenant, name)


def new(*, previous: str = "", background: bool = True, head: bytes = HEAD) -> NewRecord:
    return NewRecord(
        owner=OWNER, previous=previous, background=background, keeps_events=background, head=head, items=ITEMS
    )


def event(number: int) -> bytes:
    return b'{"type":"response.x","sequence_number":%d}' % number


def events(first: int, count: int) -> list[bytes]:
    return [event(number) for number in range(first, first + count)]


async def all_events(store: ResponseStore, first: int = 0) -> list[bytes]:
    """Return the events from number `first` on, as a reader does that goes on where its page ended."""
    read: list[bytes] = []
    while True:
        page = await store.events(key(), first + len(read))
        assert page is not None
        if not page.events:
            return read
        read += page.events


async def until_lost(store: ResponseStore) -> None:
    """Wait until the owner's lease has expired."""
    while (record := await store.read(key())) is not None and not record.owner_lost:  # noqa: ASYNC110 - as above.
        await asyncio.sleep(0.02)


async def test_what_was_created_is_read(store: ResponseStore) -> None:
    await store.create(key(), new(previous="resp_0"))
    record = await store.read(key())
    assert record is not None
    assert (record.owner, record.owner_lost, record.running, record.background) == (OWNER, False, True, True)
    assert (record.head, record.output, record.events, record.keeps_events) == (HEAD, b"[]", 0, True)
    assert await store.items(key()) == list(ITEMS)
    assert await store.turn(key()) == Turn(previous="resp_0", running=True, items=ITEMS, output=b"[]")


async def test_a_creation_that_is_repeated_changes_nothing(store: ResponseStore) -> None:
    for _ in range(2):
        await store.create(key(), new())
        assert await store.items(key()) == list(ITEMS)
    assert await store.append(key(), 0, events(0, 2), HEAD)
    await store.create(key(), new())
    record = await store.read(key())
    assert record is not None
    assert (record.events, await all_events(store)) == (2, events(0, 2))
    assert await store.finish(key(), 2, [], DONE, OUTPUT)
    await store.create(key(), new())
    assert await store.turn(key()) == Turn(previous="", running=False, items=ITEMS, output=OUTPUT)


async def test_nothing_of_another_name_or_tenant_is_found(store: ResponseStore) -> None:
    await store.create(key(), new())
    for other in (key("resp_2"), key(tenant="u"), key(tenant="")):
        assert await store.read(other) is None
        assert await store.items(other) is None
        assert await store.turn(other) is None
        assert await store.events(other, 0) is None
        assert not await store.append(other, 0, events(0, 1), HEAD)
        assert not await store.finish(other, 0, events(0, 1), DONE, OUTPUT)
        assert not await store.lose(other, 0, events(0, 1), DONE)
        assert not await store.delete(other)
    assert await store.read(key()) is not None


async def test_events_are_read_from_every_number(store: ResponseStore) -> None:
    await store.create(key(), new())
    first = 0
    for count in (3, 1, 5, 2):
        assert await store.append(key(), first, events(first, count), HEAD)
        first += count
    record = await store.read(key())
    assert record is not None
    assert record.events == first
    for number in range(first + 2):
        assert await all_events(store, number) == events(number, max(0, first - number))


async def test_more_events_than_a_page(store: ResponseStore) -> None:
    await store.create(key(), new())
    count = 2 * PAGE_ENTRIES
    for number in range(count):
        await store.append(key(), number, [event(number)], HEAD)
    await store.finish(key(), count, [], DONE, OUTPUT)
    assert await all_events(store) == events(0, count)
    page = await store.events(key(), count)
    assert page is not None
    assert not page.running


async def test_repeating_a_write_changes_nothing(store: ResponseStore) -> None:
    await store.create(key(), new())
    for _ in range(3):
        assert await store.append(key(), 0, events(0, 2), HEAD)
    for _ in range(3):
        assert await store.append(key(), 2, events(2, 1), HEAD)
    assert await all_events(store) == events(0, 3)


async def test_after_its_end_a_response_does_not_change(store: ResponseStore) -> None:
    await store.create(key(), new())
    assert await store.append(key(), 0, events(0, 1), b"")
    record = await store.read(key())
    assert record is not None
    assert record.head == HEAD
    assert await store.finish(key(), 1, events(1, 1), DONE, OUTPUT)
    assert not await store.append(key(), 2, events(2, 1), HEAD)
    assert not await store.finish(key(), 2, events(2, 1), HEAD, b"[]")
    assert not await store.lose(key(), 2, events(2, 1), HEAD)
    record = await store.read(key())
    assert record is not None
    assert (record.running, record.head, record.output, record.events) == (False, DONE, OUTPUT, 2)
    assert await all_events(store) == events(0, 2)


async def test_only_a_response_whose_owner_is_lost_is_ended_by_others(make: Make) -> None:
    store = make(lease_s=0.2)
    await store.create(key(), new())
    assert await store.append(key(), 0, events(0, 2), HEAD)
    assert not await store.lose(key(), 2, events(2, 1), DONE)
    await until_lost(store)
    page = await store.events(key(), 0)
    assert page is not None
    assert page.owner_lost
    assert not await store.lose(key(), 1, events(1, 1), DONE), "its events must be those that were read"
    await store.renew(OWNER)
    assert not await store.lose(key(), 2, events(2, 1), DONE), "the owner is back"
    await until_lost(store)
    assert await store.lose(key(), 2, events(2, 1), DONE)
    assert not await store.append(key(), 2, events(2, 1), HEAD), "the owner is too late"
    record = await store.read(key())
    assert record is not None
    assert (record.running, record.head, record.output) == (False, DONE, b"[]")
    assert await all_events(store) == events(0, 3)


async def test_cancellations_reach_their_owner_until_it_has_cancelled(store: ResponseStore) -> None:
    await store.ask_cancel(key("resp_1"), OWNER)
    await store.ask_cancel(key("resp_2", ""), OWNER)
    await store.ask_cancel(key("resp_3"), "gw-2")
    for _ in range(2):
        assert sorted(await store.renew(OWNER)) == [key("resp_2", ""), key("resp_1")], "an answer may be lost"
    assert await store.renew(OWNER, [key("resp_2", "")]) == [key("resp_1")]
    assert await store.renew(OWNER, [key("resp_1")]) == []
    await store.ask_cancel(key("resp_1"), OWNER)
    assert await store.renew(OWNER) == [key("resp_1")]


async def test_owners_stay_while_redis_is_full() -> None:
    clock, lease = SystemClock(), f"full:1:owner:{OWNER}"
    with start_redis() as server:
        connection = RedisConnection(server.url, clock=clock, timeout_s=5.0)
        client, answer = connection.client, connection.answer
        try:
            store = RedisStore(connection, clock=clock, prefix="full", ttl_s=60.0, bytes_max=BYTES_MAX, lease_s=60.0)
            await store.create(key(), new())
            await answer(client.config_set("maxmemory", "1"))  # pyright: ignore[reportUnknownMemberType]
            await answer(client.pexpire(lease, 30_000))
            assert await store.renew(OWNER) == []
            assert await answer(client.pttl(lease)) > 30_000
            with pytest.raises(StoreUnavailable):
                await store.append(key(), 0, events(0, 1), HEAD)
        finally:
            await connection.close()


async def test_deleted_responses_are_gone(store: ResponseStore) -> None:
    await store.create(key(), new())
    await store.append(key(), 0, events(0, 2), HEAD)
    assert await store.delete(key())
    assert not await store.delete(key())
    assert await store.read(key()) is None
    assert not await store.append(key(), 2, events(2, 1), HEAD)
    assert await store.read(key()) is None


async def test_responses_expire(make: Make) -> None:
    store = make(ttl_s=1.0)
    await store.create(key(), new())
    await store.append(key(), 0, events(0, 2), HEAD)
    while await store.read(key()) is not None:  # noqa: ASYNC110 - time has to pass.
        await asyncio.sleep(0.02)
    assert await store.items(key()) is None
    assert await store.events(key(), 0) is None


async def test_a_tenant_without_room_loses_what_was_used_least_lately(make: Make) -> None:
    store = make(ttl_s=1000.0)
    long = b"x" * (BYTES_MAX // 4)
    await store.create(key("other", "u"), new(head=long))
    for name in ("a", "b", "c"):
        await store.create(key(name), new(head=long))
        await asyncio.sleep(0.002)
    assert await store.turn(key("a")) is not None
    await store.create(key("d"), new(head=long))
    found = {name for name in "abcd" if await store.read(key(name)) is not None}
    assert found == {"a", "c", "d"}
    assert await store.read(key("other", "u")) is not None
    await store.create(key("e"), new(head=b"x" * (2 * BYTES_MAX)))
    assert {name for name in "abcde" if await store.read(key(name)) is not None} == {"e"}
