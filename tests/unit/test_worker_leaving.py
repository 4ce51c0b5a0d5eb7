"""How a worker leaves, changes its role, and ends with its engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from baton import subjects
from baton.bus import Delivery
from baton.engines.engine import EngineDelta, Leg
from baton.errors import EngineFailed, Unavailable
from baton.messages.attempts import Accepted, Acknowledge, Busy, Cancel, FinishReason
from baton.messages.base import Refused
from baton.messages.codec import AnyMessage
from baton.messages.workers import ChangeRole, GatewayBeat, Goodbye, Heartbeat, Role, RoleChange
from tests.harness.worker import GENERATION, World, context, decode_task, open_world, prefill_task


@pytest.fixture
async def decode() -> AsyncGenerator[World]:
    async with open_world(Role.DECODE) as world:
        yield world


async def test_draining_refuses_finishes_and_says_goodbye(decode: World) -> None:
    await decode.ask(decode_task())
    decode.stop.asked.set()
    await decode.clock.settle()
    refusal = await decode.ask(decode_task("late"))
    assert isinstance(refusal, Busy)
    assert refusal.reason == "draining"
    assert decode.heartbeat().draining
    await decode.clock.advance(3.0)
    await decode.step(EngineDelta(tokens=[1], finish=FinishReason.STOP))
    finish = decode.frames()[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.STOP
    await decode.tell(Acknowledge(context=context()))
    await decode.clock.advance(0.1)
    await decode.running
    assert isinstance(decode.received[-1], Goodbye)


async def test_an_idle_worker_that_drains_still_refuses_what_was_placed_before_it_said_so(decode: World) -> None:
    decode.stop.asked.set()
    await decode.clock.settle()
    await decode.clock.advance(0.9)
    refusal = await decode.ask(decode_task("on its way"))
    assert isinstance(refusal, Busy)
    assert refusal.reason == "draining"
    await decode.clock.advance(0.2)
    await decode.running
    assert isinstance(decode.received[-1], Goodbye)


async def test_a_worker_whose_name_a_later_process_has_is_not_ready_any_more(
    decode: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def hear_from(generation: int) -> None:
        beat = decode.heartbeat()
        address = msgspec.structs.replace(beat.address, generation=generation)
        namesake = msgspec.structs.replace(beat, address=address)
        await decode.gateway_bus.publish(subjects.generation("w0"), namesake)
        await decode.clock.settle()

    await hear_from(GENERATION - 1)
    await decode.clock.advance(2.0)
    await decode.service.check_ready()
    for _ in range(2):
        await hear_from(GENERATION + 1)
    with pytest.raises(Unavailable, match="a later process has the name w0"):
        await decode.service.check_ready()
    assert caplog.text.count("a later process has the name w0") == 1


async def test_a_later_process_tells_the_earlier_ones_of_its_name(decode: World) -> None:
    told: list[AnyMessage] = []

    async def hear(delivery: Delivery) -> None:
        told.append(delivery.message)

    await decode.gateway_bus.subscribe(subjects.generation("w0"), hear)
    await decode.clock.advance(2.0)
    assert {beat.address.generation for beat in told if isinstance(beat, Heartbeat)} == {GENERATION}


async def test_draining_says_when_it_leaves_and_leaves_once_the_last_attempt_was_moved(decode: World) -> None:
    await decode.ask(decode_task())
    assert decode.heartbeat().leaves_in_s == 0.0
    decode.stop.asked.set()
    await decode.clock.settle()
    assert decode.heartbeat().leaves_in_s == 30.0
    await decode.clock.advance(3.0)
    assert decode.heartbeat().leaves_in_s == pytest.approx(27.0, abs=0.3)
    await decode.tell(Cancel(context=context(), reason="moved"))
    await decode.clock.advance(0.1)
    await decode.running
    assert isinstance(decode.received[-1], Goodbye)


async def change_role(world: World, role: Role, *, epoch: int = 0, generation: int = GENERATION) -> AnyMessage:
    order = ChangeRole(generation=generation, role_epoch=epoch, role=role)
    answer = asyncio.create_task(world.gateway_bus.request(subjects.role("w0"), order, timeout_s=1.0))
    await world.clock.settle()
    return await answer


async def test_a_change_of_role_lets_attempts_finish_and_keeps_the_generation(decode: World) -> None:
    await decode.ask(decode_task())
    assert await change_role(decode, Role.PREFILL) == RoleChange(role=Role.PREFILL, role_epoch=1)
    beat = decode.heartbeat()
    assert (beat.role, beat.next_role, beat.draining, beat.leaves_in_s) == (Role.DECODE, Role.PREFILL, True, 5.0)
    refusal = await decode.ask(decode_task("late"))
    assert isinstance(refusal, Busy)
    assert refusal.reason == "draining"
    await decode.step(EngineDelta(tokens=[1], finish=FinishReason.LENGTH))
    await decode.clock.advance(0.25)
    beat = decode.heartbeat()
    assert (beat.role, beat.next_role, beat.draining, beat.leaves_in_s) == (Role.PREFILL, None, False, 0.0)
    assert (beat.address.generation, beat.address.role_epoch) == (GENERATION, 1)
    [finished] = [frame for frame in decode.frames() if frame.finish]
    assert finished.finish
    assert finished.finish.reason is FinishReason.LENGTH
    assert decode.shown("baton_worker_role_changes_total") == 1


async def test_tasks_for_the_old_role_are_refused_and_those_for_the_new_one_run(decode: World) -> None:
    await change_role(decode, Role.PREFILL)
    await decode.clock.advance(0.25)
    for late in (decode_task(), prefill_task(), msgspec.structs.replace(decode_task(), role_epoch=1)):
        refusal = await decode.ask(late)
        assert isinstance(refusal, Busy)
        assert refusal.reason == "role"
    assert isinstance(await decode.ask(msgspec.structs.replace(prefill_task(), role_epoch=1)), Accepted)
    assert decode.engine.requests["r", 0].leg is Leg.PREFILL


async def test_what_outlasts_a_change_goes_on_beside_the_new_role(decode: World) -> None:
    await decode.ask(decode_task())
    await change_role(decode, Role.PREFILL)
    for _ in range(21):
        await decode.gateway_bus.publish(subjects.GATEWAY_BEAT, GatewayBeat(gateway="g"))
        await decode.clock.advance(0.25)
    assert decode.heartbeat().role is Role.PREFILL
    assert isinstance(await decode.ask(msgspec.structs.replace(prefill_task("p"), role_epoch=1)), Accepted)
    await decode.step(EngineDelta(tokens=[1], finish=FinishReason.STOP))
    assert [frame.finish.reason for frame in decode.frames() if frame.finish] == [FinishReason.STOP]


async def test_orders_that_cannot_be_followed_get_a_typed_refusal(decode: World) -> None:
    for wrong, code in (({"generation": 6}, "conflict"), ({"epoch": 3}, "conflict")):
        refusal = await change_role(decode, Role.PREFILL, **wrong)
        assert isinstance(refusal, Refused)
        assert refusal.error.code == code
    nonsense = decode.gateway_bus.request(subjects.role("w0"), GatewayBeat(gateway="g"), timeout_s=1.0)
    asked = asyncio.create_task(nonsense)
    await decode.clock.settle()
    answer = await asked
    assert isinstance(answer, Refused)
    assert answer.error.code == "malformed_message"
    decode.stop.asked.set()
    await decode.clock.settle()
    refusal = await change_role(decode, Role.PREFILL)
    assert isinstance(refusal, Refused)
    assert refusal.error.code == "unavailable"
    assert decode.heartbeat().next_role is None


async def test_a_worker_that_is_stopped_in_a_change_of_role_leaves(decode: World) -> None:
    await decode.ask(decode_task())
    await change_role(decode, Role.PREFILL)
    decode.stop.asked.set()
    await decode.step(EngineDelta(tokens=[1], finish=FinishReason.LENGTH))
    await decode.clock.advance(0.5)
    beat = decode.heartbeat()
    assert (beat.role, beat.next_role, beat.draining) == (Role.DECODE, None, True)


async def test_a_drain_out_of_time_ends_what_runs_as_lost(decode: World) -> None:
    await decode.ask(decode_task())
    decode.stop.asked.set()
    for _ in range(33):
        await decode.gateway_bus.publish(subjects.GATEWAY_BEAT, GatewayBeat(gateway="g"))
        await decode.clock.advance(1.0)
    await decode.running
    [frame] = decode.frames()
    assert frame.finish is not None
    assert frame.finish.error is not None
    assert frame.finish.error.code == "worker_lost"


async def test_a_dead_engine_ends_the_worker_and_its_attempts(decode: World) -> None:
    await decode.ask(decode_task())
    decode.engine.die("the engine's process was killed")
    await decode.clock.settle()
    with pytest.raises(EngineFailed, match="was killed"):
        await decode.running
    [frame] = decode.frames()
    assert frame.finish is not None
    assert frame.finish.error is not None
    assert isinstance(decode.received[-1], Goodbye)
