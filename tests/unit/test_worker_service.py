"""Attempts of a worker with a scripted engine: taken, refused, streamed, ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import msgspec
import pytest

from baton import subjects
from baton.bus import Delivery
from baton.engines.engine import EngineDelta, EngineLoad, Leg
from baton.engines.scripted import FACTS, ScriptedEngine
from baton.errors import ConfigurationError, DeadlineExceeded, EngineFailed, InvalidRequest, TransferFailed
from baton.messages.attempts import (
    Accepted,
    Acknowledge,
    AttemptState,
    Busy,
    Cancel,
    DecodeTask,
    FinishReason,
    Join,
    Lend,
    Prefilled,
    PrefillFailed,
    PrefillTask,
    Resend,
    Sampling,
    TokenChunk,
)
from baton.messages.base import Refused, WorkerAddress, pack_tokens, unpack_tokens
from baton.messages.codec import AnyMessage
from baton.messages.index import Match
from baton.messages.workers import GatewayBeat, Role
from baton.node.service import serve
from baton.worker.admission import Identity
from baton.worker.attempt import Limits
from baton.worker.role import WorkerRole
from baton.worker.service import Timers, WorkerService
from tests.harness.worker import GENERATION, PROMPT, World, context, decode_task, open_world, prefill_task

NO_AGENTS = WorkerAddress(worker="p1", generation=3)


@pytest.fixture
async def decode() -> AsyncGenerator[World]:
    async with open_world(Role.DECODE) as world:
        yield world


@pytest.fixture
async def prefill() -> AsyncGenerator[World]:
    async with open_world(Role.PREFILL) as world:
        yield world


async def test_what_the_engine_does_not_take_is_refused_before_anything_is_held(decode: World) -> None:
    decode.engine.refuses = InvalidRequest("no such parameter", param="mode")
    answer = await decode.ask(decode_task())
    assert isinstance(answer, Refused)
    assert (answer.error.code, answer.error.param) == ("invalid_request", "mode")
    assert await decode.state() is None
    assert ("r", 0) not in decode.engine.requests
    assert decode.shown('baton_worker_refusals_total{reason="parameters"}') == 1
    decode.engine.refuses = None
    assert isinstance(await decode.ask(decode_task()), Accepted), "the refusal leaves no tombstone"


async def test_prefill_takes_what_is_decodes_business(prefill: World) -> None:
    prefill.engine.refuses = InvalidRequest("no such parameter", param="mode")
    assert isinstance(await prefill.ask(prefill_task()), Accepted)


async def test_an_attempt_streams_ends_and_is_forgotten(decode: World) -> None:
    assert await decode.ask(decode_task()) == Accepted(worker="w0", generation=GENERATION)
    request = decode.engine.requests["r", 0]
    assert (request.leg, list(request.tokens), request.budget_s) == (Leg.DECODE, PROMPT, 60.0)
    await decode.step(EngineDelta(tokens=[1, 2], transferred_tokens=99, transferred_bytes=1234))
    await decode.step(EngineDelta(tokens=[3]))
    await decode.step(EngineDelta(tokens=[4], finish=FinishReason.LENGTH))
    frames = decode.frames()
    assert [(f.index, unpack_tokens(f.tokens)) for f in frames] == [(0, [1, 2]), (2, [3]), (3, [4]), (4, [])]
    assert [f.usage is not None for f in frames] == [True, False, False, False]
    finish = frames[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (100, 4)
    assert (finish.usage.transferred_tokens, finish.usage.transferred_bytes) == (99, 1234)
    assert finish.usage.computed_tokens == 1
    assert await decode.state() is AttemptState.RETAINED
    await decode.tell(Acknowledge(context=context()))
    assert await decode.state() is None


@pytest.mark.parametrize(("cached", "queued"), [(0, 100), (64, 36), (100, 1), (9999, 1), (-5, 100)])
async def test_a_queue_grows_by_what_is_taken_to_be_computed(prefill: World, cached: int, queued: int) -> None:
    await prefill.ask(msgspec.structs.replace(prefill_task(), cached_tokens=cached))
    assert await prefill.state() is AttemptState.COMPUTING
    assert prefill.heartbeat().prefill_tokens_queued == queued


async def test_digests_tell_pulling_from_running(decode: World) -> None:
    await decode.ask(decode_task())
    assert await decode.state() is AttemptState.PULLING
    await decode.step(EngineDelta(tokens=[1]))
    assert await decode.state() is AttemptState.RUNNING


async def test_prefill_computes_tells_and_holds_until_its_lease_is_gone(prefill: World) -> None:
    await prefill.ask(prefill_task())
    assert await prefill.state() is AttemptState.COMPUTING
    assert prefill.heartbeat().prefill_tokens_queued == len(PROMPT)
    assert prefill.heartbeat().kv_identity == FACTS.kv_identity
    prefill.engine.load_now = EngineLoad(leased_blocks=4, leased=frozenset({("r", 0)}))
    await prefill.step(EngineDelta(cached_tokens=64, finish=FinishReason.LENGTH))
    [prefilled] = [message for message in prefill.received if isinstance(message, Prefilled)]
    assert prefilled.usage.cached_tokens == 64
    assert await prefill.state() is AttemptState.HELD
    assert prefill.heartbeat().kv_blocks_used == 4
    prefill.engine.load_now = EngineLoad(leased=frozenset())
    assert await prefill.state() is None
    assert prefill.heartbeat().kv_blocks_used == 0
    assert not prefill.frames()


async def test_a_lease_that_ended_makes_room_at_once(prefill: World) -> None:
    long = list(range(1100))
    task = msgspec.structs.replace(prefill_task("long"), tokens=pack_tokens(long), prompt_tokens=len(long))
    await prefill.ask(task)
    prefill.engine.load_now = EngineLoad(leased=frozenset({("long", 0)}))
    await prefill.step(EngineDelta(finish=FinishReason.LENGTH), ("long", 0))
    next_task = msgspec.structs.replace(task, context=context("next"), tokens=pack_tokens(long[::-1]))
    refusal = await prefill.ask(next_task)
    assert isinstance(refusal, Busy)
    assert refusal.reason == "leases"
    prefill.engine.load_now = EngineLoad()
    assert isinstance(await prefill.ask(next_task), Accepted)


async def test_prefills_failure_is_a_hint(prefill: World) -> None:
    await prefill.ask(prefill_task())
    prefill.engine.step(("r", 0), EngineFailed("no"))
    await prefill.clock.settle()
    [hint] = [message for message in prefill.received if isinstance(message, PrefillFailed)]
    assert (hint.worker, hint.error.code) == ("w0", "engine_failed")
    assert await prefill.state() is None


async def test_an_error_of_the_engine_reaches_the_gateway_typed(decode: World) -> None:
    await decode.ask(decode_task())
    decode.engine.step(("r", 0), TransferFailed("3 bytes are missing"))
    await decode.clock.settle()
    [frame] = decode.frames()
    assert frame.finish is not None
    assert frame.finish.error is not None
    assert isinstance(frame.finish.error.to_error(), TransferFailed)


async def test_a_bug_in_the_engine_ends_one_attempt_and_not_the_worker(decode: World) -> None:
    await decode.ask(decode_task())
    decode.engine.step(("r", 0), EngineDelta(tokens=[-1]))
    await decode.clock.settle()
    [frame] = decode.frames()
    assert frame.finish is not None
    assert frame.finish.error is not None
    assert frame.finish.error.code == "engine_failed"
    assert isinstance(await decode.ask(decode_task("r2")), Accepted)


async def test_a_cancel_aborts_the_engine_and_nothing_more_is_sent(decode: World) -> None:
    await decode.ask(decode_task())
    await decode.step(EngineDelta(tokens=[1]))
    decode.received.clear()
    await decode.tell(Cancel(context=context()))
    assert decode.engine.aborted == [("r", 0)]
    assert not decode.engine.running
    assert await decode.state() is None
    assert not decode.frames()
    refusal = await decode.ask(decode_task())
    assert isinstance(refusal, Busy)
    assert refusal.reason == "tombstone"


async def test_a_cancel_that_overtakes_its_task(decode: World) -> None:
    await decode.tell(Cancel(context=context()))
    refusal = await decode.ask(decode_task())
    assert isinstance(refusal, Busy)
    assert refusal.reason == "tombstone"
    assert ("r", 0) not in decode.engine.requests


async def test_a_task_that_comes_twice_runs_once(decode: World) -> None:
    assert isinstance(await decode.ask(decode_task()), Accepted)
    assert isinstance(await decode.ask(decode_task()), Accepted)
    assert decode.engine.running == {("r", 0)}
    assert decode.heartbeat().running_max == 2


async def test_resend_brings_everything_from_an_index_and_the_end(decode: World) -> None:
    await decode.ask(decode_task(pulls=False))
    decode.network.reachable = False
    await decode.step(EngineDelta(tokens=[1, 2]))
    await decode.step(EngineDelta(tokens=[3], finish=FinishReason.STOP))
    decode.network.reachable = True
    assert decode.frames() == []
    await decode.tell(Resend(context=context(), index=1))
    [frame] = decode.frames()
    assert (frame.index, unpack_tokens(frame.tokens)) == (1, [2, 3])
    assert frame.finish is not None
    await decode.tell(Resend(context=context("unknown"), index=0))
    assert len(decode.frames()) == 1


@pytest.mark.parametrize(("ranks", "answer"), [(0, Accepted), (2, Accepted), (-1, Busy), (10**6, Busy)])
async def test_prefill_leases_to_as_many_ranks_as_the_task_says(prefill: World, ranks: int, answer: type) -> None:
    assert isinstance(await prefill.ask(msgspec.structs.replace(prefill_task(), sink_ranks=ranks)), answer)
    if answer is Accepted:
        assert prefill.engine.requests["r", 0].sink_ranks == ranks


async def test_a_source_of_another_number_of_ranks_is_taken(decode: World) -> None:
    two = WorkerAddress(worker="p0", generation=3, agents=("a", "b"))
    task = msgspec.structs.replace(decode_task(), source=two)
    assert isinstance(await decode.ask(task), Accepted)


async def test_a_prompt_in_chunks(decode: World) -> None:
    task = msgspec.structs.replace(decode_task(), tokens=pack_tokens(PROMPT[60:]))
    await decode.tell(TokenChunk(context=context(), offset=0, tokens=pack_tokens(PROMPT[:40])))
    await decode.tell(TokenChunk(context=context(), offset=40, tokens=pack_tokens(PROMPT[40:60])))
    assert isinstance(await decode.ask(task), Accepted)
    assert list(decode.engine.requests["r", 0].tokens) == PROMPT


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (msgspec.structs.replace(decode_task(), generation=6), "generation"),
        (prefill_task(), "role"),
        (msgspec.structs.replace(decode_task(), prompt_tokens=101), "incomplete"),
        (msgspec.structs.replace(decode_task(), tokens=b"abc"), "malformed"),
        (msgspec.structs.replace(decode_task(), prompt_tokens=0), "malformed"),
        (msgspec.structs.replace(decode_task(), prompt_tokens=10**9), "malformed"),
        (msgspec.structs.replace(decode_task(), gateway="a.*"), "malformed"),
        (msgspec.structs.replace(decode_task(), sampling=Sampling(max_tokens=0)), "malformed"),
        (decode_task(request=""), "malformed"),
        (msgspec.structs.replace(decode_task(), source=NO_AGENTS), "malformed"),
        (decode_task(budget_s=0.0), "expired"),
    ],
)
async def test_what_cannot_run_is_refused_with_a_reason(
    decode: World, task: DecodeTask | PrefillTask, reason: str
) -> None:
    refusal = await decode.ask(task)
    assert isinstance(refusal, Busy)
    assert (refusal.reason, refusal.worker) == (reason, "w0")
    assert refusal.detail
    assert isinstance(await decode.ask(decode_task("good")), Accepted)


async def test_a_third_attempt_finds_the_worker_full(decode: World) -> None:
    for name in "ab":
        await decode.ask(decode_task(name))
    refusal = await decode.ask(decode_task("c"))
    assert isinstance(refusal, Busy)
    assert refusal.reason == "full"
    await decode.tell(Cancel(context=context("a")))
    assert isinstance(await decode.ask(decode_task("c", 1)), Accepted)


async def fill(world: World, make: Callable[[str], DecodeTask | PrefillTask]) -> None:
    for request in ("a", "b"):
        assert isinstance(await world.ask(make(request)), Accepted)


async def test_an_attempt_that_may_wait_starts_once_there_is_room(decode: World) -> None:
    await fill(decode, decode_task)
    waiting = msgspec.structs.replace(decode_task(pulls=False), wait_s=1.0)
    assert isinstance(await decode.ask(waiting), Accepted)
    assert await decode.ask(waiting) == Accepted(worker="w0", generation=GENERATION), "sent twice, it waits once"
    await decode.clock.advance(0.5)
    assert ("r", 0) not in decode.engine.requests
    beat = decode.heartbeat()
    assert (beat.running, beat.overbooked, beat.overbooked_kv_tokens) == (2, 1, 128)
    await decode.step(EngineDelta(tokens=[4], finish=FinishReason.LENGTH), ("a", 0))
    await decode.clock.advance(0.01)
    assert decode.engine.requests["r", 0].budget_s == pytest.approx(59.49, abs=0.01)


async def test_an_attempt_that_waited_too_long_ends_as_overloaded(decode: World) -> None:
    await fill(decode, decode_task)
    await decode.ask(msgspec.structs.replace(decode_task(pulls=False), wait_s=0.5))
    await decode.clock.advance(0.8)
    (frame,) = decode.frames()
    assert frame.finish is not None
    assert frame.finish.error is not None
    assert frame.finish.error.code == "overloaded"
    assert ("r", 0) not in decode.engine.requests


async def partner(world: World, name: str, *answers: AnyMessage) -> list[AnyMessage]:
    """Play the worker of the other leg; return what it receives."""
    received: list[AnyMessage] = []

    async def answer(delivery: Delivery) -> None:
        received.append(delivery.message)
        await delivery.respond(answers[min(len(received), len(answers)) - 1])

    await world.gateway_bus.subscribe(subjects.task(name), answer)
    return received


async def test_a_pair_starts_once_the_partner_has_joined(decode: World) -> None:
    joins = await partner(decode, "p0", Busy(worker="p0", reason="full"), Accepted(worker="p0", generation=3))
    await decode.ask(msgspec.structs.replace(decode_task(), wait_s=1.0))
    await decode.clock.settle()
    assert len(joins) == 1
    assert ("r", 0) not in decode.engine.requests, "the partner has no room"
    await decode.clock.advance(0.1)
    assert [join.context.request for join in joins if isinstance(join, Join)] == ["r", "r"]
    assert ("r", 0) in decode.engine.requests


async def test_a_partner_that_does_not_answer_costs_others_nothing(decode: World) -> None:
    await decode.ask(msgspec.structs.replace(decode_task(), wait_s=5.0))
    await decode.ask(msgspec.structs.replace(decode_task("a", pulls=False), wait_s=5.0))
    await decode.clock.advance(0.01)
    assert ("a", 0) in decode.engine.requests
    assert ("r", 0) not in decode.engine.requests


async def test_prefill_joins_a_decode_worker_that_has_room(prefill: World) -> None:
    await partner(prefill, "d0", Busy(worker="d0", reason="full"))
    join = Join(context=context())
    assert isinstance(await prefill.ask(join), Busy), "its own task has not come"
    await prefill.ask(msgspec.structs.replace(prefill_task(), wait_s=1.0, sink="d0"))
    await prefill.clock.advance(0.01)
    assert ("r", 0) not in prefill.engine.requests
    assert isinstance(await prefill.ask(join), Accepted)
    await prefill.clock.settle()
    assert ("r", 0) in prefill.engine.requests
    assert isinstance(await prefill.ask(join), Accepted), "the first answer was lost"


async def test_a_leg_that_may_wait_must_know_its_partner(prefill: World) -> None:
    answer = await prefill.ask(msgspec.structs.replace(prefill_task(), wait_s=1.0))
    assert isinstance(answer, Busy)
    assert answer.reason == "malformed"


async def test_a_foreign_message_is_refused(decode: World) -> None:
    answer = await decode.ask(Match(context=context(), model_digest="", blocks=b""))
    assert isinstance(answer, Refused)
    assert answer.error.code == "malformed_message"


async def test_a_silent_gateway_loses_its_attempts(decode: World) -> None:
    await decode.ask(decode_task())
    for _ in range(3):
        await decode.gateway_bus.publish(subjects.GATEWAY_BEAT, GatewayBeat(gateway="g"))
        await decode.clock.advance(4.9)
    assert decode.engine.running == {("r", 0)}
    await decode.clock.advance(0.5)
    assert decode.engine.aborted == [("r", 0)]
    assert not decode.engine.running
    await decode.clock.advance(0.3)
    assert decode.heartbeat().attempts == ()


async def test_a_deadline_ends_the_attempt_with_an_error(decode: World) -> None:
    await decode.ask(decode_task(budget_s=2.0))
    await decode.clock.advance(2.3)
    [frame] = decode.frames()
    assert frame.finish is not None
    assert frame.finish.error is not None
    assert frame.finish.error.code == "deadline_exceeded"


class Unabortable(ScriptedEngine):
    async def abort(self, request: str, attempt: int) -> None:
        raise ZeroDivisionError("a bug")


async def test_a_bug_in_an_abort_ends_no_worker() -> None:
    world = World(Role.DECODE, Unabortable())
    await world.start()
    await world.ask(decode_task())
    await world.tell(Cancel(context=context()))
    await world.clock.advance(11.0)
    assert not world.running.done()
    assert await world.state() is None, "overruled"
    await world.close()


async def test_a_loan_whose_answer_is_lost_ends_no_worker() -> None:
    class Lender(ScriptedEngine):
        async def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
            world.network.reachable = False
            return 32

    world = World(Role.DECODE, Lender(replace(FACTS, pool_agents=("scripted",))))
    await world.start()
    lend = Lend(context=context(), key=bytes(16), blocks=b"", sink_ranks=1)
    asked = asyncio.create_task(world.gateway_bus.request(subjects.task("w0"), lend, timeout_s=1.0))
    await world.clock.settle()
    world.network.reachable = True
    await world.clock.advance(1.0)
    with pytest.raises(DeadlineExceeded):
        await asked
    assert isinstance(await world.ask(decode_task()), Accepted)
    await world.close()


async def test_an_engine_that_ignores_aborts_is_overruled(decode: World) -> None:
    decode.engine.takes_aborts = False
    await decode.ask(decode_task(budget_s=2.0))
    for _ in range(13):
        await decode.gateway_bus.publish(subjects.GATEWAY_BEAT, GatewayBeat(gateway="g"))
        await decode.clock.advance(1.0)
    [frame] = decode.frames()
    assert frame.finish is not None
    assert not decode.engine.running
    assert decode.heartbeat().kv_blocks_used == 0


async def test_a_worker_whose_canary_fails_does_not_start() -> None:
    world = World(Role.DECODE)
    world.engine = ScriptedEngine(stores_prompts=False)
    world.service = WorkerService(
        identity=Identity(
            address=WorkerAddress(worker="w0", generation=1),
            model_name="tiny",
            model_path="tiny",
            block_tokens=32,
        ),
        role=WorkerRole(Role.DECODE),
        facts=FACTS,
        engine=world.engine,
        node=world.node,
        limits=Limits(slots=2, kv_blocks=10, engine_block_tokens=32),
        timers=Timers(canary_timeout_s=3.0),
    )
    running = asyncio.create_task(serve(world.service, world.stop))
    await world.clock.advance(4.0)
    with pytest.raises(ConfigurationError, match="canary prompt must show as 2 blocks of 32 tokens"):
        await running
    assert not world.stop.serving
    await world.bus.close()
    await world.gateway_bus.close()
