"""The faults of the in-memory network, and its streams' limits, on a clock that the test moves."""

from __future__ import annotations

import pytest

from baton.bus import BusFaults, BusLimits, Delivery, MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.errors import BusUnavailable, DeadlineExceeded
from baton.messages.workers import GatewayBeat


async def _run(seed: int, faults: BusFaults, messages: int = 200) -> list[tuple[int, float]]:
    """Send numbered messages at once; return number and time of each as it arrived."""
    clock = ManualClock()
    network = MemoryNetwork(clock=clock, seed=seed, faults=faults)
    sender, receiver = MemoryBus(network), MemoryBus(network)
    arrived: list[tuple[int, float]] = []

    async def keep(delivery: Delivery) -> None:
        assert isinstance(delivery.message, GatewayBeat)
        arrived.append((int(delivery.message.gateway), clock.now_s()))

    await receiver.subscribe("a", keep)
    for number in range(messages):
        await sender.publish("a", GatewayBeat(gateway=str(number)))
    await clock.advance(10.0)
    await sender.close()
    await receiver.close()
    await network.close()
    return arrived


async def test_without_faults_all_arrive_at_once() -> None:
    assert await _run(1, BusFaults()) == [(number, 0.0) for number in range(200)]


async def test_messages_are_dropped_and_duplicated() -> None:
    dropped = [number for number, _ in await _run(1, BusFaults(drop=0.3))]
    assert 100 < len(dropped) < 180
    assert dropped == sorted(set(dropped))
    doubled = [number for number, _ in await _run(1, BusFaults(duplicate=0.3))]
    assert set(doubled) == set(range(200))
    assert 230 < len(doubled) < 290


async def test_delays_keep_order_unless_reordered() -> None:
    delayed = await _run(1, BusFaults(delay_s_max=1.0))
    assert [number for number, _ in delayed] == list(range(200))
    assert 0.0 <= delayed[0][1] < delayed[-1][1] <= 1.0
    reordered = [number for number, _ in await _run(1, BusFaults(delay_s_max=1.0, reorder=0.5))]
    assert sorted(reordered) == list(range(200))
    assert reordered != sorted(reordered)


async def test_the_same_seed_is_the_same_run() -> None:
    faults = BusFaults(drop=0.1, duplicate=0.1, delay_s_max=1.0, reorder=0.2)
    first = await _run(7, faults)
    assert await _run(7, faults) == first
    assert await _run(8, faults) != first


async def test_answers_suffer_faults_as_well() -> None:
    clock = ManualClock()
    network = MemoryNetwork(clock=clock, faults=BusFaults(drop=1.0))
    bus = MemoryBus(network)

    async def echo(delivery: Delivery) -> None:
        await delivery.respond(delivery.message)

    await bus.subscribe("a", echo)
    with pytest.raises(DeadlineExceeded):
        await bus.request("a", GatewayBeat(gateway="x"), timeout_s=0)
    await bus.close()


async def test_an_unreachable_network_says_so_and_comes_back() -> None:
    network = MemoryNetwork()
    bus = MemoryBus(network)
    network.reachable = False
    with pytest.raises(BusUnavailable):
        await bus.publish("a", GatewayBeat(gateway="x"))
    network.reachable = True
    await bus.publish("a", GatewayBeat(gateway="x"))
    await bus.close()


async def test_a_stream_forgets_by_age_and_bytes_and_ids_after_their_window() -> None:
    clock = ManualClock()
    limits = BusLimits(stream_age_s_max=300.0, stream_bytes_max=1000, duplicate_window_s=120.0)
    bus = MemoryBus(MemoryNetwork(clock=clock), limits=limits)

    async def append(number: int, *, message_id: str) -> int:
        return await bus.append("S", "s.a", GatewayBeat(gateway=f"{number:0200d}"), message_id=message_id)

    async def read() -> list[int]:
        got: list[int] = []

        async def keep(delivery: Delivery) -> None:
            got.append(delivery.stream_sequence)

        follower = await bus.follow("S", "s.*", keep)
        await clock.settle()
        await follower.unsubscribe()
        return got

    assert await append(1, message_id="1") == 1
    await clock.advance(119.0)
    assert await append(1, message_id="1") == 1
    await clock.advance(2.0)
    assert await append(1, message_id="1") == 2
    assert await read() == [1, 2]
    await clock.advance(180.0)
    assert await append(3, message_id="3") == 3
    assert await read() == [2, 3]
    for number in range(4, 9):
        await append(number, message_id=str(number))
    assert await read() == [5, 6, 7, 8]
    await bus.close()
