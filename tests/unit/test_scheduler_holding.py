"""Requests that a scheduler holds, on the bus in memory and a clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from random import Random
from typing import Any

import pytest

from baton import subjects
from baton.bus import Delivery
from baton.messages.base import Context, Refused
from baton.messages.placement import PRIORITY_BEGUN, Held, Placement, QueuePositions, Released, Withdraw
from baton.messages.workers import Goodbye
from tests.harness.heartbeats import heartbeat
from tests.harness.holding import BEAT_S, FULL, World, open_world, placed_elsewhere


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with open_world() as made:
        yield made


async def test_a_request_is_held_until_a_worker_has_room(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("r")
        await world.pass_time(1.0)
        assert world.released() == {}
        await world.beat("d1", running=7)
        assert world.released() == {"r": "d1"}
        assert [placed.context.request for placed in world.placed] == ["r"], "the others are told"


async def test_without_leave_to_hold_an_overloaded_deployment_refuses(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        answer = await world.ask("r", hold_s=0.0)
        assert isinstance(answer, Refused)
        assert answer.error.code == "overloaded"


async def test_one_that_only_a_busy_worker_can_hold_waits_for_that(world: World) -> None:
    async with world.scheduler():
        await world.beat("large")
        await world.beat("small", kv_blocks_total=10)
        await world.hold("r", prompt_tokens=1000, unavailable=("large",))
        await world.pass_time(0.5)
        assert world.released() == {"r": "large"}


async def test_each_waits_for_its_own_best_worker_and_not_behind_another_one(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.beat("d2", **FULL)
        await world.hold("wants-d2", exclude=("d1",))
        await world.hold("wants-any")
        await world.beat("d1", running=7)
        assert world.released() == {"wants-any": "d1"}


async def test_many_that_cannot_begin_do_not_hide_one_that_can(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.beat("d2", **FULL)
        for number in range(300):
            await world.hold(f"wants-d2-{number}", exclude=("d1",), due_in_s=-1.0)
        await world.hold("wants-d1", exclude=("d2",), due_in_s=1.0)
        world.workers["d1"] = heartbeat("d1", running=7)
        await world.pass_time(4.0)
        assert world.released() == {"wants-d1": "d1"}


async def test_one_that_arrives_is_placed_at_once_where_those_held_cannot_begin(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.beat("d2", running=7)
        await world.hold("wants-d1", exclude=("d2",))
        await world.clock.advance(0.1)
        assert isinstance(await world.ask("new"), Placement)


async def test_one_that_arrives_when_none_is_held_any_more_is_placed_at_once(world: World) -> None:
    async def beat(_: Delivery) -> None:
        await world.bus.publish(subjects.HEARTBEAT, world.workers["d1"])

    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("r")
        await world.pass_time(1.0)
        # While the index is asked again, another heartbeat says that there is room.
        await world.bus.subscribe(subjects.MATCH, beat)
        await world.beat("d1", running=6)
        assert world.released() == {"r": "d1"}
        await world.clock.advance(0.1)
        assert isinstance(await world.ask("new"), Placement)


async def test_the_order_is_the_queues(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        for number in range(3):
            await world.hold(f"flood-{number}", tenant="flood", due_in_s=1.0)
        await world.hold("guest", tenant="guest", due_in_s=2.0)
        await world.hold("begun", tenant="flood", priority=PRIORITY_BEGUN, due_in_s=3.0)
        await world.pass_time(BEAT_S)
        assert world.positions() == ["begun", "guest", "flood-0", "flood-1", "flood-2"]
        await world.beat("d1", running=4)
        assert list(world.released()) == ["begun", "guest", "flood-0"], "now the flood has had more than its share"
        await world.pass_time(1.0)
        assert list(world.released())[3] == "flood-1", "it has waited until the worker was free of prompts"


async def test_a_tenant_pays_for_what_other_schedulers_placed(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("a", tenant="a", due_in_s=1.0)
        await world.hold("b", tenant="b", due_in_s=2.0)
        await world.bus.publish(subjects.PLACED, placed_elsewhere("a"))
        await world.pass_time(BEAT_S)
        assert world.positions() == ["b", "a"]


async def test_positions_come_in_one_message_for_each_gateway(world: World) -> None:
    world.gateways = ("g", "h")
    async with world.scheduler():
        await world.beat("d1", **FULL)
        for number in range(20):
            await world.hold(f"r{number:02}", gateway="gh"[number % 2], due_in_s=number)
        world.heard.clear()
        await world.clock.advance(BEAT_S)
        messages = [each for each in world.heard if isinstance(each, QueuePositions)]
        assert sorted(len(each.positions) for each in messages) == [10, 10]
        assert sorted(number for each in messages for _, _, number, _ in each.positions) == list(range(20))


async def test_a_request_that_is_asked_for_twice_is_held_and_placed_once(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("r")
        await world.hold("r")
        await world.pass_time(BEAT_S)
        assert world.positions() == ["r"]
        await world.beat("d1", running=0)
        await world.pass_time(BEAT_S)
        assert len([each for each in world.heard if isinstance(each, Released)]) == 1


async def test_a_request_that_is_asked_for_again_counts_from_then(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", running=0)
        await world.hold("r", unavailable=("d1",), context=Context(request="r", budget_s=0.3))
        await world.clock.advance(0.2)
        await world.hold("r", unavailable=("d1",), context=Context(request="r", budget_s=0.3))
        await world.clock.advance(0.2)
        assert world.released() == {}, "neither late nor placed on a worker that was busy just now"
        await world.clock.advance(0.09)
        assert world.released() == {"r": "d1"}


async def test_a_withdrawn_request_is_never_placed(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("leaves")
        await world.hold("stays")
        for message in (Withdraw(request="leaves", attempt=0), Withdraw(request="unknown", attempt=0)):
            await world.bus.publish(subjects.WITHDRAWALS, message)
        await world.pass_time(BEAT_S)
        assert world.positions() == ["stays"]
        await world.beat("d1", running=0)
        assert list(world.released()) == ["stays"]


async def test_requests_of_a_gateway_that_is_gone_are_dropped(world: World) -> None:
    world.gateways = ("g", "h")
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("dead", gateway="h", hold_s=60.0)
        await world.hold("alive", hold_s=60.0)
        world.gateways = ("g",)
        await world.pass_time(6.0)
        await world.beat("d1", running=0)
        assert [placed.context.request for placed in world.placed] == ["alive"]


async def test_a_request_is_held_no_longer_than_it_may_be(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("patient", hold_s=5.0)
        await world.hold("hasty", hold_s=1.0)
        await world.hold("late", hold_s=60.0, context=Context(request="late", budget_s=2.0))
        await world.pass_time(1.5)
        assert world.released() == {"hasty": "overloaded"}
        await world.pass_time(1.0)
        assert world.released() == {"hasty": "overloaded", "late": "deadline_exceeded"}
        refused = next(each.error for each in world.heard if isinstance(each, Released))
        assert refused is not None
        assert refused.retry_after_s


async def test_refusals_say_when_the_turn_would_come(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        for number in range(30):
            await world.hold(f"r{number:02}", due_in_s=number, hold_s=60.0, prompt_tokens=1000)
        # Two are placed in each second.
        for _ in range(20):
            await world.beat("d1", running=7)
            await world.beat("d1", **FULL)
            await world.pass_time(0.5)
        world.heard.clear()
        await world.hold("hasty", hold_s=0.5, due_in_s=99.0, ttft_s=8.0)
        await world.pass_time(0.75)
        answers = {each.request: each.error for each in world.heard if isinstance(each, Released)}
        assert (error := answers["hasty"]) is not None
        assert error.code == "overloaded"
        assert error.retry_after_s is not None
        positions = [each for each in world.heard if isinstance(each, QueuePositions)][-1].positions
        turns_s = [turn_s for *_, turn_s in positions]
        assert turns_s == sorted(turns_s)
        assert turns_s[-1] == pytest.approx(len(positions) * 10.0 / (30 - len(positions)), rel=0.5)
        assert error.retry_after_s == pytest.approx(turns_s[-1], rel=0.2)


async def test_a_full_queue_refuses_or_gives_up_one_of_the_tenant_that_has_the_most(world: World) -> None:
    async with world.scheduler(held_max=2):
        await world.beat("d1", **FULL)
        await world.hold("first", tenant="flood", due_in_s=1.0)
        await world.hold("second", tenant="flood", due_in_s=2.0)
        answer = await world.ask("third", tenant="flood")
        assert isinstance(answer, Refused)
        assert answer.error.code == "overloaded"
        await world.hold("guest", tenant="guest")
        await world.clock.settle()
        assert world.released() == {"second": "overloaded"}


async def test_held_requests_learn_that_all_workers_are_gone(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("r")
        await world.bus.publish(subjects.HEARTBEAT, Goodbye(address=world.workers.pop("d1").address))
        await world.clock.advance(0.02)
        assert world.released() == {"r": "no_workers"}


async def test_held_requests_learn_that_all_workers_are_lost(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("r")
        world.workers.clear()
        await world.pass_time(2.0)
        assert world.released() == {"r": "no_workers"}


async def test_a_worker_that_was_busy_counts_as_full_until_its_next_heartbeat(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", running=0)
        await world.hold("r", unavailable=("d1",))
        await world.beat("d1", running=0)
        assert world.released() == {}
        await world.pass_time(BEAT_S)
        await world.beat("d1", running=0)
        assert world.released() == {"r": "d1"}


async def test_a_scheduler_that_drains_hands_back_and_holds_no_more(world: World) -> None:
    async with world.scheduler() as first:
        await world.beat("d1", **FULL)
        for number in range(5):
            await world.hold(f"r{number}")
        async with world.scheduler():
            first.asked.set()
            await world.pass_time(BEAT_S)
            assert world.released() == {f"r{number}": "handed back" for number in range(5)}
            world.heard.clear()
            for number in range(5):
                await world.hold(f"r{number}")
            await world.beat("d1", running=0)
            assert set(world.released().values()) == {"d1"}


async def test_a_burst_is_placed_in_turn_and_nothing_is_refused(world: World) -> None:
    async with world.scheduler(placements_max=4):
        for number in range(8):
            await world.beat(f"d{number}", running_max=64, kv_blocks_total=10_000)
        answers = [asyncio.create_task(world.ask(f"r{number}")) for number in range(400)]
        await world.clock.settle()
        kinds = [type(await answer) for answer in answers]
        assert set(kinds) == {Placement, Held}
        await world.pass_time(1.0)
        assert len(world.released()) == kinds.count(Held)
        assert len({placed.context.request for placed in world.placed}) == 400


async def test_what_the_index_said_is_renewed_while_a_request_is_held(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("r")
        await world.beat("d1", **FULL)
        assert len(world.matches) == 1, "not at every change"
        await world.pass_time(3.0)
        assert 3 <= len(world.matches) <= 4


class BrokenRandom(Random):
    """Randomness with a bug that shows once it is `broken`."""

    broken = False

    def sample(self, population: Any, k: int, *, counts: Any = None) -> Any:
        if self.broken:
            raise ZeroDivisionError("a bug")
        return super().sample(population, k, counts=counts)


async def test_a_bug_ends_one_held_request_and_not_the_scheduler(world: World) -> None:
    random = BrokenRandom(0)
    async with world.scheduler(random):
        await world.beat("d1", **FULL)
        await world.hold("r")
        random.broken = True
        await world.beat("d1", running=0)
        assert world.released() == {"r": "internal_error"}
        random.broken = False
        await world.beat("d1", **FULL)
        await world.hold("next")


@pytest.mark.parametrize(
    "changes",
    [
        {"gateway": ""},
        {"gateway": "a b"},
        {"priority": -1},
        {"due_in_s": float("nan")},
        {"ttft_s": float("inf")},
        {"tpot_s": -1.0},
        {"weight": 0.0},
        {"weight": float("nan")},
    ],
)
async def test_nonsense_is_refused(world: World, changes: dict[str, Any]) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        answer = await world.ask("r", **changes)
        assert isinstance(answer, Refused)
        assert answer.error.code == "malformed_message"
