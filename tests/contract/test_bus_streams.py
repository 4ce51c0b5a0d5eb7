"""One behaviour suite for every bus, in memory and on a real NATS server: streams."""

from __future__ import annotations

import asyncio

import pytest
from bus_world import Inbox, World, label_of, message

from baton.bus import BusLimits, Delivery
from baton.errors import ConfigurationError


async def test_a_stream_numbers_messages_and_stores_each_id_once(world: World, name: str) -> None:
    bus = await world.open()

    async def append(subject: str, label: object, message_id: str) -> int:
        return await bus.append(f"{name}-s", f"{name}.s.{subject}", message(label), message_id=message_id)

    assert [await append("a", 1, "a/1"), await append("b", 2, "b/1"), await append("a", 3, "a/2")] == [1, 2, 3]
    assert await append("a", "again", "a/1") == 1
    assert await append("a", 4, "a/3") == 4
    inbox = Inbox()
    await bus.follow(f"{name}-s", f"{name}.s.*", inbox)
    assert await inbox.wait(4) == ["1", "2", "3", "4"]
    assert [delivery.stream_sequence for delivery in inbox.deliveries] == [1, 2, 3, 4]
    assert [delivery.subject[-1] for delivery in inbox.deliveries] == ["a", "b", "a", "a"]


async def test_a_follower_starts_after_a_sequence_and_goes_on_with_what_is_new(world: World, name: str) -> None:
    bus, inbox = await world.open(), Inbox()
    for number in range(1, 6):
        await bus.append(f"{name}-s", f"{name}.s.a", message(number), message_id=str(number))
    await bus.follow(f"{name}-s", f"{name}.s.a", inbox, after=3)
    assert await inbox.wait(2) == ["4", "5"]
    await bus.append(f"{name}-s", f"{name}.s.b", message("of another subject"), message_id="6")
    await bus.append(f"{name}-s", f"{name}.s.a", message(7), message_id="7")
    assert await inbox.wait(3) == ["4", "5", "7"]
    assert inbox.deliveries[2].stream_sequence == 7


async def test_following_may_begin_before_the_first_message(world: World, name: str) -> None:
    bus, inbox = await world.open(), Inbox()
    await bus.follow(f"{name}-s", f"{name}.s.*", inbox)
    await asyncio.sleep(0.05)
    assert await bus.append(f"{name}-s", f"{name}.s.a", message("first"), message_id="1") == 1
    assert await inbox.wait(1) == ["first"]


async def test_a_recreated_stream_is_read_from_its_start(world: World, name: str) -> None:
    bus, inbox = await world.open(), Inbox()
    await bus.append(f"{name}-s", f"{name}.s.a", message("new"), message_id="1")
    await bus.follow(f"{name}-s", f"{name}.s.*", inbox, after=1000)
    assert await inbox.wait(1) == ["new"]


async def test_a_slow_follower_loses_nothing(world: World, name: str) -> None:
    bus, inbox = await world.open(limits=BusLimits(pending_messages_max=4)), Inbox()

    async def slow(delivery: Delivery) -> None:
        if len(inbox.deliveries) % 100 == 0:
            await asyncio.sleep(0.01)
        await inbox(delivery)

    subscription = await bus.follow(f"{name}-s", f"{name}.s.*", slow)
    for number in range(700):
        await bus.append(f"{name}-s", f"{name}.s.a", message(number), message_id=str(number))
    assert await inbox.wait(700) == [str(number) for number in range(700)]
    assert subscription.counts.dropped == 0


async def test_a_follower_passes_over_what_is_malformed_or_fails(world: World, name: str) -> None:
    bus, inbox = await world.open(), Inbox()

    async def fails_once(delivery: Delivery) -> None:
        if label_of(delivery.message) == "bad":
            raise KeyError("a bug")
        await inbox(delivery)

    subscription = await bus.follow(f"{name}-s", f"{name}.s.*", fails_once)
    await bus.append(f"{name}-s", f"{name}.s.a", message("bad"), message_id="1")
    await bus.append(f"{name}-s", f"{name}.s.a", message("good"), message_id="2")
    assert await inbox.wait(1) == ["good"]
    assert subscription.counts.malformed == 0


async def test_a_follower_ends_when_told(world: World, name: str) -> None:
    bus, inbox = await world.open(), Inbox()
    subscription = await bus.follow(f"{name}-s", f"{name}.s.*", inbox)
    await bus.append(f"{name}-s", f"{name}.s.a", message(1), message_id="1")
    await inbox.wait(1)
    await subscription.unsubscribe()
    await bus.append(f"{name}-s", f"{name}.s.a", message(2), message_id="2")
    await asyncio.sleep(0.05)
    assert inbox.labels == ["1"]


async def test_a_subject_outside_the_stream_is_a_configuration_error(world: World, name: str) -> None:
    bus = await world.open()
    await bus.append(f"{name}-s", f"{name}.s.a", message(1), message_id="1")
    with pytest.raises(ConfigurationError):
        await bus.append(f"{name}-s", f"{name}.elsewhere.a", message(1), message_id="1")
