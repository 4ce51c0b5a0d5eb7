"""The scheduler's shell, on the bus in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.prediction import WAIT_S
from baton_scheduler.service import SchedulerService

from baton import subjects
from baton.bus import Delivery, MemoryBus, MemoryNetwork
from baton.messages.base import Context, Refused
from baton.messages.codec import AnyMessage
from baton.messages.index import Match, Matched
from baton.messages.placement import Disaggregation, Place, Placement
from baton.messages.workers import Goodbye, Role
from baton.node.ports import Randomness
from baton.stop import Stop
from tests.harness.heartbeats import heartbeat
from tests.harness.limits import HANG_S
from tests.harness.nodes import living, make_node

PREFILL = heartbeat("p1", Role.PREFILL)
DECODE = heartbeat("d1", Role.DECODE)


def place(request: str = "r", *, budget_s: float = 5.0, **changes: Any) -> Place:
    return msgspec.structs.replace(
        Place(
            context=Context(request=request, budget_s=budget_s),
            model="tiny",
            blocks=bytes(32),
            prompt_tokens=64,
            output_tokens_max=16,
        ),
        **changes,
    )


class Gateway:
    """Speaks to the scheduler, and plays the index where a test wants one."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.bus = MemoryBus(network)
        self.held: dict[str, int] = {}
        self.matches: list[Match] = []
        self.index_delay_s = 0.0
        self.unanswered = 0

    async def hear(self, *heartbeats: AnyMessage) -> None:
        for each in heartbeats:
            await self.bus.publish(subjects.HEARTBEAT, each)

    async def ask(self, message: AnyMessage) -> AnyMessage:
        return await self.bus.request(subjects.PLACE, message, timeout_s=10.0)

    async def place(self, request: str = "r", **changes: Any) -> Placement:
        answer = await self.ask(place(request, **changes))
        assert isinstance(answer, Placement), answer
        return answer

    async def refusal(self, message: AnyMessage) -> str:
        answer = await self.ask(message)
        assert isinstance(answer, Refused), answer
        return answer.error.code

    async def play_index(self) -> None:
        await self.bus.subscribe(subjects.MATCH, self._on_match, group=subjects.INDEXES)
        await self.bus.subscribe(subjects.MATCH_ALL, self._on_match)

    async def play_frozen_index(self) -> None:
        """One that stands still and is still in its queue group, for as long as the server does not know."""

        async def say_nothing(_: Delivery) -> None:
            self.unanswered += 1

        await self.bus.subscribe(subjects.MATCH, say_nothing, group=subjects.INDEXES)
        await self.bus.subscribe(subjects.MATCH_ALL, say_nothing)

    async def _on_match(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, Match)
        self.matches.append(delivery.message)
        await asyncio.sleep(self.index_delay_s)
        await delivery.respond(Matched(held=self.held))


@asynccontextmanager
async def scheduling(
    network: MemoryNetwork,
    stop: Stop | None = None,
    random: Randomness | None = None,
    bus: MemoryBus | None = None,
    **changes: Any,
) -> AsyncGenerator[asyncio.Task[None]]:
    settings = msgspec.structs.replace(SchedulerSettings(learn_s=0.001, lost_after_s=HANG_S), **changes)
    bus = bus or MemoryBus(network)
    node = make_node("scheduler", bus)
    if random is not None:
        node = replace(node, ports=replace(node.ports, random=random))
    async with living(SchedulerService(settings, node), stop) as running:
        yield running
    await bus.close()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway(MemoryNetwork())
    yield made
    await made.bus.close()
    await made.bus.network.close()


async def test_a_placement_names_workers_reason_and_prediction(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network):
        await gateway.play_index()
        await gateway.hear(PREFILL, DECODE)
        gateway.held = {"p1": 1}
        placement = await gateway.place(disaggregation=Disaggregation.ALWAYS)
        assert (placement.prefill, placement.decode) == (PREFILL.address, DECODE.address)
        assert placement.predicted.cached_tokens == 32
        assert "p1" in placement.reason
        assert gateway.matches[0].model_digest == "digest"
        assert gateway.matches[0].context.trace, "the trace goes on to the index"


async def test_the_deployment_decides_where_the_request_does_not(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, disaggregation=Disaggregation.ALWAYS):
        await gateway.hear(PREFILL, DECODE)
        assert (await gateway.place()).prefill is not None
        assert (await gateway.place(disaggregation=Disaggregation.NEVER)).prefill is None


async def test_without_an_index_it_places_and_says_so(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network):
        await gateway.hear(PREFILL, DECODE)
        placement = await gateway.place()
        assert "index did not answer" in placement.reason
        await gateway.play_index()
        assert "index did not answer" not in (await gateway.place()).reason


async def test_an_index_that_does_not_answer_is_waited_for_side_by_side(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, index_timeout_s=0.5):
        await gateway.play_frozen_index()
        await gateway.hear(PREFILL, DECODE)
        placing = [asyncio.create_task(gateway.place(f"r{number}")) for number in range(8)]
        while gateway.unanswered < len(placing):
            await asyncio.sleep(0)
            assert not any(task.done() for task in placing)
        placements = await asyncio.gather(*placing)
        assert all("index did not answer" in placement.reason for placement in placements)


async def test_an_index_that_stands_still_leaves_no_placement_blind(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, index_timeout_s=HANG_S):
        await gateway.play_frozen_index()
        await gateway.play_index()
        gateway.held = {"d1": 1}
        await gateway.hear(PREFILL, DECODE)
        questions = (gateway.place(f"r{number}", disaggregation=Disaggregation.NEVER) for number in range(8))
        placements = await asyncio.gather(*questions)
        assert gateway.unanswered, "the frozen one was asked"
        assert all("index did not answer" not in placement.reason for placement in placements)
        assert {placement.predicted.cached_tokens for placement in placements} == {32}


async def test_a_burst_between_two_heartbeats_is_spread_and_then_refused(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, disaggregation=Disaggregation.NEVER):
        await gateway.hear(*(heartbeat(f"d{number}", Role.DECODE, running_max=4) for number in range(3)))
        placements = [await gateway.place(f"r{number}", blocks=b"", output_tokens_max=4000) for number in range(12)]
        used = [placement.decode.worker for placement in placements]
        assert sorted(used.count(worker) for worker in set(used)) == [4, 4, 4]
        answer = await gateway.ask(place("more", blocks=b""))
        assert isinstance(answer, Refused)
        assert answer.error.code == "overloaded"
        # Of four slots, one is missing; the prompts placed there come before it.
        assert answer.error.retry_after_s is not None
        assert WAIT_S / 4 < answer.error.retry_after_s < WAIT_S / 4 + 1


async def test_refusals_are_typed(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network):
        assert await gateway.refusal(place()) == "model_not_found"
        await gateway.hear(PREFILL)
        assert await gateway.refusal(place()) == "no_workers"
        await gateway.hear(DECODE)
        assert await gateway.refusal(place(model="other")) == "model_not_found"
        assert await gateway.refusal(place(budget_s=0.0)) == "deadline_exceeded"
        assert await gateway.refusal(place(prompt_tokens=0)) == "invalid_request"
        assert await gateway.refusal(place(prompt_tokens=5000)) == "context_length_exceeded"
        assert await gateway.refusal(place(blocks=b"odd")) == "malformed_message"
        assert await gateway.refusal(Matched(held={})) == "malformed_message"
        await gateway.place()
        await gateway.hear(Goodbye(address=PREFILL.address), Goodbye(address=DECODE.address))
        assert await gateway.refusal(place()) == "no_workers"


async def test_lost_workers_are_not_unknown(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, lost_after_s=0.2):
        await gateway.hear(PREFILL, DECODE)
        while not isinstance(answer := await gateway.ask(place()), Refused):  # noqa: ASYNC110 - each asks anew.
            await asyncio.sleep(0.02)
        assert answer.error.code == "no_workers"


async def test_it_answers_what_came_before_it_leaves(gateway: Gateway) -> None:
    stop = Stop()
    await gateway.play_index()
    gateway.index_delay_s = 0.02
    async with (
        scheduling(gateway.bus.network, stop) as leaving,
        scheduling(gateway.bus.network),
    ):
        await gateway.hear(heartbeat("d1", Role.DECODE, running_max=100, kv_blocks_total=100_000))
        asked = [asyncio.create_task(gateway.ask(place(f"r{number}"))) for number in range(6)]
        await asyncio.sleep(0)
        stop.asked.set()
        assert all(isinstance(answer, Placement) for answer in await asyncio.gather(*asked))
        await asyncio.wait_for(leaving, HANG_S)
        await gateway.place("later")


async def test_nonsense_on_the_heartbeat_subject_harms_nothing(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network):
        await gateway.hear(PREFILL, DECODE, heartbeat("odd", Role.DECODE, block_tokens=0), Matched(held={}))
        gateway.bus.publish_payload(subjects.HEARTBEAT, b"\xff\x00")
        assert (await gateway.place()).decode == DECODE.address


async def test_too_many_at_once_are_refused(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, placements_max=2, index_timeout_s=0.2):
        await gateway.play_index()
        gateway.index_delay_s = 1.0
        await gateway.hear(PREFILL, DECODE)
        answers = await asyncio.gather(*(gateway.ask(place(f"r{number}")) for number in range(5)))
        codes = [answer.error.code for answer in answers if isinstance(answer, Refused)]
        assert codes == ["overloaded"] * 3
        gateway.index_delay_s = 0.0
        await gateway.place("later")


async def test_schedulers_count_each_others_placements_before_a_heartbeat_tells(gateway: Gateway) -> None:
    """Two workers with one free slot each: without a word between the schedulers both would choose by chance."""
    network = gateway.bus.network
    for request in range(8):
        buses = [MemoryBus(network), MemoryBus(network)]

        async def handled(subject: str, count: int, buses: list[MemoryBus] = buses) -> None:
            subscriptions = [each for bus in buses for each in bus.subscriptions if each.subject == subject]
            while any(each.counts.handled < count for each in subscriptions):  # noqa: ASYNC110 - the bus counts.
                await asyncio.sleep(0)

        async with scheduling(network, bus=buses[0]), scheduling(network, bus=buses[1]):
            await gateway.hear(heartbeat("d1", running_max=1), heartbeat("d2", running_max=1))
            # One that does not know a worker yet counts nothing for it.
            await handled(subjects.HEARTBEAT, 2)
            chosen: set[str] = set()
            for number in range(2):
                chosen.add((await gateway.place(f"r{request}-{number}", blocks=b"")).decode.worker)
                await handled(subjects.PLACED, number + 1)
            assert chosen == {"d1", "d2"}
            assert await gateway.refusal(place("one-too-many", blocks=b"")) == "overloaded"


async def test_a_gateway_is_answered_before_others_are_told_and_they_before_its_next_match(gateway: Gateway) -> None:
    seen: list[str] = []

    async def hear_placed(_: Delivery) -> None:
        seen.append("placed")

    async def match(delivery: Delivery) -> None:
        seen.append("match")
        await delivery.respond(Matched(held={}))

    async with scheduling(gateway.bus.network):
        # The index hears both in order: they come over one connection.
        index = MemoryBus(gateway.bus.network)
        await index.subscribe(subjects.PLACED, hear_placed)
        await index.subscribe(subjects.MATCH, match, group=subjects.INDEXES)
        await gateway.hear(DECODE)
        for number in range(2):
            await gateway.place(f"r{number}")
            seen.append("answer")
        await index.close()
    assert seen[:5] == ["match", "answer", "placed", "match", "answer"]


class BrokenRandom(Random):
    def sample(self, population: Any, k: int, *, counts: Any = None) -> Any:
        raise ZeroDivisionError("a bug")


async def test_a_bug_ends_one_placement_and_not_the_scheduler(gateway: Gateway) -> None:
    async with scheduling(gateway.bus.network, random=BrokenRandom(0)) as running:
        await gateway.hear(DECODE)
        for _ in range(2):
            assert await gateway.refusal(place()) == "internal_error"
        assert not running.done()
