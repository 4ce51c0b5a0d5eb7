"""One behaviour suite for every bus, in memory and on a real NATS server: published messages kept in a stream."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import permutations

import pytest
from bus_world import NOT_A_MESSAGE, Inbox, World, label_of, message, nats_world

from baton.bus import Bus, Retention
from baton.errors import InvalidRequest, MalformedMessage
from tests.harness.limits import HANG_S
from tests.harness.servers import start_nats

HOUR = Retention(age_s_max=3600.0, bytes_max=1 << 20)


async def read(bus: Bus, stream: str, subject: str, after: int | None = None) -> tuple[str, int] | None:
    found = await bus.read(stream, subject, after=after)
    return None if found is None else (label_of(found.message), found.stream_sequence)


async def read_all(bus: Bus, stream: str, subject: str) -> list[str]:
    """Return the labels of all messages on a subject, in order."""
    labels: list[str] = []
    after = 0
    while (found := await bus.read(stream, subject, after=after)) is not None:
        assert found.subject == subject
        assert found.stream_sequence > after
        labels.append(label_of(found.message))
        after = found.stream_sequence
    return labels


async def until_kept(bus: Bus, stream: str, subject: str, label: str) -> None:
    """Wait until a message is the last one on its subject: publishing does not wait for the stream."""
    async with asyncio.timeout(HANG_S):
        while (found := await read(bus, stream, subject)) is None or found[0] != label:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_is_published_is_kept_and_read_by_its_subject(world: World, name: str) -> None:
    bus, inbox = await world.open(), Inbox()
    await bus.publish(f"{name}.a", message("before"))
    await bus.keep(name, f"{name}.*", HOUR)
    await bus.subscribe(f"{name}.a", inbox)
    for subject, label in (("a", "1"), ("b", "2"), ("a", "3")):
        await bus.publish(f"{name}.{subject}", message(label))
    await until_kept(bus, name, f"{name}.a", "3")
    assert await read_all(bus, name, f"{name}.a") == ["1", "3"]
    assert await read_all(bus, name, f"{name}.b") == ["2"]
    assert await read(bus, name, f"{name}.a", after=1) == ("3", 3)
    assert await read(bus, name, f"{name}.a", after=3) is None
    assert await read(bus, name, f"{name}.c") is None
    assert await inbox.wait(2) == ["1", "3"], "subscribers get them as before"


async def test_bounds_are_widened_and_known(world: World, name: str) -> None:
    bus, other = await world.open(), await world.open()
    assert await other.retention(name) is None
    assert await read(other, name, f"{name}.a") is None, "there is no stream"
    await bus.keep(name, f"{name}.*", HOUR)
    assert await other.retention(name) == HOUR
    await bus.publish(f"{name}.a", message("kept"))
    await until_kept(bus, name, f"{name}.a", "kept")
    longer = Retention(age_s_max=7200.0, bytes_max=2 << 20)
    for _ in range(2):
        assert await bus.keep(name, f"{name}.*", longer) == longer
        assert await other.retention(name) == longer
    assert await read_all(other, name, f"{name}.a") == ["kept"]


async def test_the_widest_bounds_apply_in_whatever_order_they_are_asked_for(world: World, name: str) -> None:
    bus, other = await world.open(), await world.open()
    asked = [Retention(age_s_max=60.0, bytes_max=3 << 20), HOUR, Retention(age_s_max=7200.0, bytes_max=2 << 20)]
    widest = Retention(age_s_max=7200.0, bytes_max=3 << 20)
    for number, order in enumerate(permutations(asked)):
        stream = f"{name}{number}"
        for keeper, retention in zip((bus, other, bus), order, strict=True):
            assert await keeper.keep(stream, f"{stream}.*", retention) == await other.retention(stream)
        assert await other.retention(stream) == widest


async def test_messages_leave_when_they_are_old(world: World, name: str) -> None:
    bus = await world.open()
    await bus.keep(name, f"{name}.*", Retention(age_s_max=0.2, bytes_max=1 << 20))
    await bus.publish(f"{name}.a", message("old"))
    async with asyncio.timeout(HANG_S):
        while await bus.read(name, f"{name}.a") is not None:  # noqa: ASYNC110 - the server drops it.
            await asyncio.sleep(0.01)


async def test_the_oldest_leave_when_there_are_too_many_bytes(world: World, name: str) -> None:
    bus = await world.open()
    await bus.keep(name, f"{name}.*", Retention(age_s_max=3600.0, bytes_max=4000))
    for number in range(100):
        await bus.publish(f"{name}.a", message(f"{number:0100}"))
    await until_kept(bus, name, f"{name}.a", f"{99:0100}")
    left = await read_all(bus, name, f"{name}.a")
    assert 10 < len(left) < 40
    assert [int(label) for label in left] == list(range(100 - len(left), 100))


async def test_a_malformed_message_is_said_to_be_so(world: World, name: str) -> None:
    bus = await world.open()
    await bus.keep(name, f"{name}.*", HOUR)
    await world.send_raw(f"{name}.a", NOT_A_MESSAGE)
    await bus.publish(f"{name}.b", message("behind it"))
    await until_kept(bus, name, f"{name}.b", "behind it")
    with pytest.raises(MalformedMessage):
        await bus.read(name, f"{name}.a")


@pytest.mark.parametrize("odd", ["", "a b", "a.*", "a..b", "a.>", "a\n"])
async def test_an_odd_subject_is_refused(world: World, name: str, odd: str) -> None:
    bus = await world.open()
    with pytest.raises(InvalidRequest):
        await bus.read(name, odd)


async def test_a_server_that_is_killed_and_comes_back_has_kept_them() -> None:
    async with AsyncExitStack() as stack:
        with start_nats() as server:
            bus = await (await nats_world(stack, server)).open()
            await bus.keep("kept", "kept.*", HOUR)
            await bus.publish("kept.a", message("before"))
            await until_kept(bus, "kept", "kept.a", "before")
            await stack.aclose()
            server.kill()
            server.start()
            bus = await (await nats_world(stack, server)).open()
            assert await read_all(bus, "kept", "kept.a") == ["before"]
            assert await bus.retention("kept") == HOUR
            await stack.aclose()
