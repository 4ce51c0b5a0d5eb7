"""A scheduler that hears of failures: which workers and pairs it passes over, and when it takes them nevertheless."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from baton_scheduler.breakers import JITTER, OPEN_S, TRIAL_S

from baton import subjects
from baton.bus import Delivery, MemoryNetwork
from baton.messages.attempts import Fault
from baton.messages.base import WorkerAddress
from baton.messages.placement import Disaggregation, Placement
from baton.messages.workers import Heartbeat, Role
from tests.harness.heartbeats import heartbeat
from tests.harness.holding import BEAT_S, World
from tests.unit.test_scheduler_service import Gateway, place, scheduling

PREFILL = heartbeat("p1", Role.PREFILL)
GOOD, BAD = heartbeat("good"), heartbeat("bad")
BUSIER = heartbeat("good", running=4)
"""Without a breaker, the other one is preferred."""


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway(MemoryNetwork())
    yield made
    await made.bus.close()
    await made.bus.network.close()


async def report(
    gateway: Gateway | World, *workers: Heartbeat, pair: tuple[str, str] | None = None, times: int = 3
) -> None:
    addresses = tuple(WorkerAddress(worker=each.address.worker, generation=1) for each in workers)
    for number in range(times):
        fault = Fault(request=f"r{number}", attempt=0, workers=addresses, pair=pair, code="engine_failed")
        await gateway.bus.publish(subjects.FAULTS, fault)


async def test_a_worker_that_fails_is_passed_over_and_the_reason_names_it(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, disaggregation=Disaggregation.NEVER):
        await gateway.hear(BUSIER, BAD)
        before = await gateway.place(blocks=b"")
        assert (before.decode.worker, "passed over" in before.reason) == ("bad", False)
        await report(gateway, BAD)
        after = await gateway.place(blocks=b"")
        assert after.decode.worker == "good"
        assert after.reason.endswith("passed over: bad (failures).")


async def test_every_scheduler_hears_of_it(gateway: Gateway) -> None:
    network = gateway.bus.network
    async with scheduling(network, disaggregation=Disaggregation.NEVER):
        async with scheduling(network, disaggregation=Disaggregation.NEVER):
            await gateway.hear(BUSIER, BAD)
            await report(gateway, BAD)
            places = [(await gateway.place(f"r{number}", blocks=b"")).decode.worker for number in range(2)]
            assert places == ["good"] * 2
        assert (await gateway.place(blocks=b"")).decode.worker == "good", "whichever is left"


async def test_where_no_other_is_left_it_is_taken_nevertheless(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, disaggregation=Disaggregation.NEVER):
        await gateway.hear(GOOD, BAD)
        await report(gateway, GOOD, BAD)
        assert (await gateway.place(blocks=b"")).decode.worker in {"good", "bad"}
        assert await gateway.refusal(place(blocks=b"", exclude=("bad", "good"))) == "no_workers"


async def test_a_worker_that_failed_this_request_is_better_than_one_that_fails_all(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, disaggregation=Disaggregation.NEVER):
        await gateway.hear(GOOD, BAD)
        await report(gateway, BAD)
        assert await gateway.refusal(place(blocks=b"", exclude=("good",))) == "no_workers", (
            "the gateway lifts its exclusions"
        )
        assert (await gateway.place(blocks=b"")).decode.worker == "good"


async def test_a_worker_that_is_merely_full_is_waited_for(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, disaggregation=Disaggregation.NEVER):
        await gateway.hear(GOOD, BAD)
        await report(gateway, BAD)
        assert await gateway.refusal(place(blocks=b"", unavailable=("good",))) == "overloaded"


async def test_a_long_prompt_goes_to_the_only_worker_that_can_hold_it(gateway: Gateway) -> None:
    large = heartbeat("bad", context_tokens_max=8192)
    async with scheduling(gateway.bus.network, disaggregation=Disaggregation.NEVER):
        await gateway.hear(GOOD, large)
        await report(gateway, BAD)
        assert (await gateway.place(blocks=b"", prompt_tokens=5000)).decode.worker == "bad"


async def test_a_pair_is_passed_over_and_its_workers_are_not(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, disaggregation=Disaggregation.ALWAYS):
        await gateway.hear(PREFILL, BUSIER, BAD)
        await report(gateway, pair=("p1", "bad"), times=2)
        placement = await gateway.place(blocks=b"")
        assert placement.decode.worker == "good"
        assert "passed over: p1 → bad (failures)" in placement.reason


async def test_a_probe_counts_nowhere(gateway: Gateway) -> None:
    """Else it would be the one request that tries a worker, and nothing would come of it."""
    told: list[object] = []

    async def hear(delivery: Delivery) -> None:
        told.append(delivery.message)

    async with scheduling(gateway.bus.network, disaggregation=Disaggregation.NEVER):
        await gateway.bus.subscribe(subjects.PLACED, hear)
        await gateway.hear(heartbeat("d", running_max=1))
        for _ in range(3):
            await gateway.place(blocks=b"", probe=True)
        await gateway.place(blocks=b"")
    assert len(told) == 1


async def test_a_worker_whose_trial_never_came_is_tried_by_another_request() -> None:
    """The one request that tries a worker may be lost or cancelled on its way; the worker must not wait for it."""
    world = World()
    await world.start()
    async with world.scheduler(disaggregation=Disaggregation.NEVER):
        await world.beat("good", running=4)
        await world.beat("bad")
        await report(world, BAD)
        await world.pass_time(OPEN_S * (1 + JITTER))
        assert await decode_of(world, "trial") == "bad", "the back-off is over"
        assert await decode_of(world, "beside-it") == "good"
        await world.pass_time(TRIAL_S + BEAT_S)
        assert await decode_of(world, "next") == "bad", "idle all the time: the first one never came"


async def decode_of(world: World, request: str) -> str:
    answer = await world.ask(request, blocks=b"")
    assert isinstance(answer, Placement), answer
    return answer.decode.worker
