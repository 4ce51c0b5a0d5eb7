"""Who of the held requests may have a worker: objectives, and tenants' shares of a deployment that is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from baton_scheduler.queue import REMEMBER_S

from baton import subjects
from baton.messages.base import Refused
from baton.messages.placement import Held, Placement
from tests.harness.heartbeats import heartbeat
from tests.harness.holding import BEAT_S, FULL, World, open_world, placed_elsewhere


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with open_world() as made:
        yield made


async def test_a_request_with_an_objective_waits_for_a_share_of_it(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("patient")
        await world.hold("strict", ttft_s=2.0, due_in_s=2.0)
        answer = await world.ask("waited", ttft_s=2.0, due_in_s=1.5)
        assert isinstance(answer, Refused)
        assert answer.error.code == "overloaded"
        await world.pass_time(0.4)
        assert world.released() == {}
        await world.pass_time(0.2)
        assert world.released() == {"strict": "overloaded"}


async def test_an_objective_counts_the_prompts_before_it(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", prefill_tokens_queued=20_000)
        assert isinstance(await world.ask("patient"), Placement)
        await world.hold("strict", ttft_s=2.0, due_in_s=2.0)
        assert isinstance(await world.ask("lax", ttft_s=60.0, due_in_s=60.0), Held), "what may wait waits here"


async def test_a_tpot_objective_waits_for_a_fast_worker(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1")
        await world.hold("strict", tpot_s=1e-6)
        assert isinstance(await world.ask("lax", tpot_s=1.0), Placement)
        await world.pass_time(1.0)
        assert world.released() == {}


async def test_a_tenant_that_had_more_than_its_share_leaves_workers_free_for_others(world: World) -> None:
    strict: dict[str, Any] = {"ttft_s": 2.0, "due_in_s": 2.0}
    async with world.scheduler():
        await world.beat("d1", prefill_tokens_queued=30_000)
        for number in range(2):
            await world.hold(f"flood-{number}", tenant="flood", **strict)
        for tenant in ("flood", "flood", "guest"):
            await world.bus.publish(subjects.PLACED, placed_elsewhere(tenant))
        await world.beat("d1", prefill_tokens_queued=300)
        assert world.released() == {}, "a wait of 0.3 s is short enough for one request only"
        await world.beat("d1", prefill_tokens_queued=0)
        assert list(world.released()) == ["flood-0"]
        await world.pass_time(0.4)
        assert list(world.released()) == ["flood-0", "flood-1"], "the first prompt is computed"


async def test_a_flood_leaves_workers_free_by_the_others_part_of_the_traffic(world: World) -> None:
    """Prompts of 0.5 s on four workers: the flood has had a third of the tokens, more than its fifth by weight."""
    async with world.scheduler():
        names = [f"d{number}" for number in range(4)]
        for name in names:
            await world.beat(name, **FULL)
        for number in range(8):
            await world.hold(f"flood-{number}", tenant="flood", prompt_tokens=500, output_tokens_max=84)
        for tenant, weight in (("flood", 1.0), ("guest", 4.0), ("guest", 4.0)):
            for _ in range(20):
                await world.bus.publish(subjects.PLACED, placed_elsewhere(tenant, weight))
        world.workers = {name: heartbeat(name) for name in names}
        await world.pass_time(0.1)
        assert len(set(world.released().values())) == len(world.released()) == 3, "the fourth worker is left free"


async def test_a_tenant_that_had_more_than_its_share_may_use_an_idle_worker_that_is_slow(world: World) -> None:
    """Even an idle worker takes 9 ms for a token; a sixth of the objective is to be left to the guest."""
    async with world.scheduler():
        await world.beat("d1", **FULL)
        for number in range(2):
            await world.hold(f"flood-{number}", tenant="flood", prompt_tokens=1, tpot_s=0.0105)
        for tenant in ("flood", "guest", "flood"):
            await world.bus.publish(subjects.PLACED, placed_elsewhere(tenant))
        await world.beat("d1", running=1)
        assert world.released() == {}, "10 ms beside another answer"
        await world.beat("d1", running=0)
        assert list(world.released()) == ["flood-0"], "the next one would not be alone"


async def test_shares_of_a_past_overload_are_forgotten(world: World) -> None:
    strict: dict[str, Any] = {"ttft_s": 2.0, "due_in_s": 2.0, "tenant": "flood"}
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.hold("guest", tenant="guest")
        for tenant in ("flood", "flood", "guest"):
            await world.bus.publish(subjects.PLACED, placed_elsewhere(tenant))
        await world.beat("d1", prefill_tokens_queued=300)
        assert list(world.released()) == ["guest"]
        await world.beat("d1", prefill_tokens_queued=300)
        assert isinstance(await world.ask("soon", **strict, hold_s=0.0), Refused), "a wait of 0.3 s is too long for it"
        await world.pass_time(REMEMBER_S + 1.0)
        assert isinstance(await world.ask("later", **strict, hold_s=0.0), Placement)


async def test_a_new_request_does_not_take_the_room_of_a_tenant_that_was_given_less(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        await world.beat("d2", running=6)
        await world.hold("guest", tenant="guest", exclude=("d2",))
        await world.clock.advance(0.1)
        assert isinstance(await world.ask("first", tenant="flood"), Placement)
        await world.hold("second", tenant="flood")
        await world.clock.advance(0.1)
        assert world.released() == {"second": "d2"}, "the guest waits for another worker"


async def test_weights_are_shares(world: World) -> None:
    async with world.scheduler():
        await world.beat("d1", **FULL)
        for number in range(6):
            await world.hold(f"light-{number}", tenant="light", due_in_s=number)
            await world.hold(f"heavy-{number}", tenant="heavy", weight=2.0, due_in_s=number)
        await world.pass_time(BEAT_S)
        assert Counter(each.partition("-")[0] for each in world.positions()[:6]) == {"light": 2, "heavy": 4}
