"""One behaviour suite for every bus, in memory and on a real NATS server: buckets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from bus_world import World, label_of, message, nats_world

from baton.bus import Bus
from baton.errors import Conflict, InvalidRequest
from tests.harness.servers import start_nats


async def value(bus: Bus, bucket: str, key: str = "key") -> tuple[str, int] | None:
    entry = await bus.get(bucket, key)
    return None if entry is None else (label_of(entry.message), entry.revision)


async def test_a_key_is_made_changed_and_deleted_by_who_knows_its_revision(world: World, name: str) -> None:
    mine, other = await world.open(), await world.open()
    assert await value(mine, name) is None
    first = await mine.put(name, "key", message("a"), revision=0)
    assert await value(other, name) == ("a", first)
    second = await other.put(name, "key", message("b"), revision=first)
    assert second > first > 0
    assert await value(mine, name) == ("b", second)
    await mine.delete(name, "key", revision=second)
    assert await value(other, name) is None
    third = await other.put(name, "key", message("c"), revision=0)
    assert third > second
    assert await value(mine, name) == ("c", third)


async def test_who_knows_an_older_revision_or_none_changes_nothing(world: World, name: str) -> None:
    bus = await world.open()
    for revision in (1, 1 << 60):
        with pytest.raises(Conflict):
            await bus.put(name, "key", message("x"), revision=revision)
        with pytest.raises(Conflict):
            await bus.delete(name, "key", revision=revision)
    first = await bus.put(name, "key", message("a"), revision=0)
    second = await bus.put(name, "key", message("b"), revision=first)
    for revision in (0, first, second + 1):
        with pytest.raises(Conflict):
            await bus.put(name, "key", message("x"), revision=revision)
        with pytest.raises(Conflict):
            await bus.delete(name, "key", revision=revision)
    assert await value(bus, name) == ("b", second)
    await bus.delete(name, "key", revision=second)
    with pytest.raises(Conflict):
        await bus.put(name, "key", message("x"), revision=second)


async def test_of_many_who_change_a_key_at_once_one_succeeds(world: World, name: str) -> None:
    buses = [await world.open() for _ in range(4)]
    revision = 0
    for round_ in range(5):
        tries = [bus.put(name, "key", message(f"{round_} {n}"), revision=revision) for n, bus in enumerate(buses)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        won = [result for result in results if isinstance(result, int)]
        assert len(won) == 1
        assert sum(isinstance(result, Conflict) for result in results) == 3
        revision = won[0]
        assert await value(buses[0], name) == (f"{round_} {results.index(revision)}", revision)


async def test_keys_and_buckets_are_apart_from_each_other(world: World, name: str) -> None:
    bus = await world.open()
    first = await bus.put(name, "a", message("a"), revision=0)
    second = await bus.put(name, "b", message("b"), revision=0)
    assert second > first
    await bus.put(f"{name}x", "a", message("other"), revision=0)
    assert await value(bus, name, "a") == ("a", first)
    assert await bus.put(name, "a", message("again"), revision=first) > second


@pytest.mark.parametrize("odd", ["", "two.parts", "wild.*", "*", "a b"])
async def test_an_odd_name_is_refused(world: World, odd: str) -> None:
    bus = await world.open()
    for bucket, key in ((odd, "key"), ("bucket", odd)):
        with pytest.raises(InvalidRequest):
            await bus.get(bucket, key)
        with pytest.raises(InvalidRequest):
            await bus.put(bucket, key, message("x"), revision=0)


async def test_revisions_grow_over_a_server_that_lost_the_bucket() -> None:
    async with AsyncExitStack() as stack:
        with start_nats() as server:
            bus = await (await nats_world(stack, server)).open()
            old = 0
            for number in range(5):
                old = await bus.put("bucket", "key", message(number), revision=old)
            await stack.aclose()
            server.kill()
            server.wipe()
            server.start()
            bus = await (await nats_world(stack, server)).open()
            with pytest.raises(Conflict):
                await bus.put("bucket", "key", message("stale"), revision=old)
            assert await bus.put("bucket", "key", message("new"), revision=0) > old
            await stack.aclose()
