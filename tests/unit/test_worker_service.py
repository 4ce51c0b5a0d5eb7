"""The worker's shell with a scripted engine, an in-memory bus and a clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import msgspec
import pytest

from baton import subjects
from baton.bus import Delivery, MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.connectors.pool_report import PoolReport
from baton.engines.engine import EngineDelta, EngineLoad, Leg
from baton.engines.scripted import FACTS, ScriptedEngine
from baton.engines.stages import prompt_stages
from baton.errors import ConfigurationError, EngineFailed, InvalidRequest, TransferFailed
from baton.messages.attempts import (
    Accepted,
    Acknowledge,
    AttemptState,
    Busy,
    Cancel,
    DecodeTask,
    Digest,
    FinishReason,
    Frame,
    Frames,
    Join,
    Prefilled,
    PrefillFailed,
    PrefillTask,
    Resend,
    Sampling,
    TokenChunk,
)
from baton.messages.base import Context, Refused, WorkerAddress, pack_tokens, unpack_tokens
from baton.messages.codec import AnyMessage
from baton.messages.index import Match
from baton.messages.workers import ChangeRole, GatewayBeat, Goodbye, Heartbeat, Role, RoleChange
from baton.node.ports import deterministic_ports
from baton.node.service import Node, serve
from baton.stop import Stop
from baton.telemetry import Metrics, Tracing
from baton.transfer import LayerGroup
from baton.worker.admission import Identity
from baton.worker.attempt import Limits
from baton.worker.role import WorkerRole
from baton.worker.service import Timers, WorkerService

GENERATION = 7
PROMPT = list(range(1, 101))
PREFILL_ADDRESS = WorkerAddress(worker="p0", generation=3, agents=("scripted",))
NO_AGENTS = WorkerAddress(worker="p1", generation=3)


class World:
    """One worker, and the messages that one gateway receives."""

    def __init__(self, role: Role, engine: ScriptedEngine | None = None) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(clock=self.clock)
        self.bus = MemoryBus(self.network)
        self.gateway_bus = MemoryBus(self.network)
        self.engine = engine or ScriptedEngine()
        self.received: list[AnyMessage] = []
        self.stop = Stop()
        self.metrics = Metrics(role)
        ports = deterministic_ports(self.bus, self.clock, seed=0)
        self.node = Node(ports=ports, tracing=Tracing(role), metrics=self.metrics)
        self.service = WorkerService(
            identity=Identity(
                address=WorkerAddress(worker="w0", generation=GENERATION, agents=FACTS.agents),
                model_name="tiny",
                model_path="models/tiny",
                block_tokens=32,
                engine_kind="kind",
            ),
            role=WorkerRole(role),
            facts=self.engine.facts,
            engine=self.engine,
            node=self.node,
            limits=Limits(slots=2, kv_blocks=FACTS.kv_blocks, engine_block_tokens=FACTS.block_tokens),
            timers=Timers(),
        )
        self.running: asyncio.Task[None]

    async def start(self) -> None:
        async def hear(delivery: Delivery) -> None:
            self.received.append(delivery.message)

        for subject in (subjects.gateway("g"), subjects.HEARTBEAT):
            await self.gateway_bus.subscribe(subject, hear)
        self.running = asyncio.create_task(serve(self.service, self.stop))
        for _ in range(50):
            await self.clock.advance(0.02)
            if self.stop.serving:
                return
        raise AssertionError("the worker did not get ready")

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.bus.close()
        await self.gateway_bus.close()
        await self.network.close()

    async def ask(self, message: AnyMessage) -> AnyMessage:
        answer = asyncio.create_task(self.gateway_bus.request(subjects.task("w0"), message, timeout_s=1.0))
        await self.clock.settle()
        return await answer

    async def tell(self, message: AnyMessage) -> None:
        await self.gateway_bus.publish(subjects.task("w0"), message)
        await self.clock.settle()

    async def step(self, result: EngineDelta, key: tuple[str, int] = ("r", 0)) -> None:
        self.engine.step(key, result)
        await self.clock.settle()

    def frames(self) -> list[Frame]:
        return [frame for message in self.received if isinstance(message, Frames) for frame in message.frames]

    async def state(self, key: tuple[str, int] = ("r", 0)) -> AttemptState | None:
        """Return an attempt's state in the next digest."""
        self.received.clear()
        await self.gateway_bus.publish(subjects.GATEWAY_BEAT, GatewayBeat(gateway="g"))
        await self.clock.advance(1.0)
        [digest] = [message for message in self.received if isinstance(message, Digest)]
        return next((e.state for e in digest.entries if (e.request, e.attempt) == key), None)

    def shown(self, series: str) -> float:
        """Return a figure as a scrape shows it."""
        lines = self.metrics.render("")[1].decode().splitlines()
        (line,) = (line for line in lines if line.startswith(series + " "))
        return float(line.rpartition(" ")[2])

    def heartbeat(self) -> Heartbeat:
        return [message for message in self.received if isinstance(message, Heartbeat)][-1]


@pytest.fixture
async def decode() -> AsyncGenerator[World]:
    world = World(Role.DECODE)
    await world.start()
    yield world
    await world.close()


@pytest.fixture
async def prefill() -> AsyncGenerator[World]:
    world = World(Role.PREFILL)
    await world.start()
    yield world
    await world.close()


def context(request: str = "r", attempt: int = 0, budget_s: float = 60.0) -> Context:
    return Context(request=request, attempt=attempt, budget_s=budget_s)


def decode_task(request: str = "r", attempt: int = 0, *, pulls: bool = True, budget_s: float = 60.0) -> DecodeTask:
    return DecodeTask(
        context=context(request, attempt, budget_s),
        gateway="g",
        generation=GENERATION,
        tokens=pack_tokens(PROMPT),
        prompt_tokens=len(PROMPT),
        sampling=Sampling(max_tokens=10),
        source=PREFILL_ADDRESS if pulls else None,
    )


def prefill_task(request: str = "r", attempt: int = 0) -> PrefillTask:
    return PrefillTask(
        context=context(request, attempt),
        gateway="g",
        generation=GENERATION,
        tokens=pack_tokens(PROMPT),
        prompt_tokens=len(PROMPT),
        sampling=Sampling(max_tokens=10),
    )


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


async def test_heartbeats_declare_what_the_engine_takes(decode: World) -> None:
    assert decode.heartbeat().parameters == FACTS.parameters == ("mode",)
    assert decode.heartbeat().engine_kind == "kind"


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


async def test_heartbeats_say_what_the_worker_is_and_holds(decode: World) -> None:
    await decode.ask(decode_task())
    pulled = LayerGroup(
        first_layer=0, layers=1, began_s=0.0, ended_s=0.5, moved_bytes=1 << 20, backend="shm", rail="", waiting_s=0.0
    )
    stages = prompt_stages(entered_s=0.0, begun_s=0.0, ended_s=0.5, pulled=(pulled,))
    await decode.step(EngineDelta(tokens=[1], transferred_bytes=1 << 20, transfer_s=0.5, stages=stages))
    for _ in range(40):
        await decode.clock.advance(0.1)
        await decode.step(EngineDelta(tokens=[1]))
    await decode.clock.advance(0.5)
    beat = decode.heartbeat()
    assert (beat.role, beat.model, beat.engine) == (Role.DECODE, "tiny", "scripted 1")
    assert (beat.running, beat.waiting, beat.running_max) == (1, 0, 2)
    assert beat.attempts == (("r", 0),)
    assert (beat.kv_blocks_used, beat.kv_blocks_total) == (4, 100)
    fit, (transfer,) = beat.steps, beat.transfers
    assert fit.decode_step_s + fit.sequence_s + fit.kv_s * 0.04 == pytest.approx(0.1, rel=0.1)
    assert fit.samples > 0
    assert (transfer.peer, transfer.backend, transfer.samples) == ("p0", "shm", 1)
    assert transfer.bytes_per_s == pytest.approx(2 << 20, rel=0.1)
    assert beat.step_tokens_max == FACTS.step_tokens_max
    assert beat.events_sequence == beat.held_sequence > 0


async def test_heartbeats_say_whether_the_engine_has_work_and_does_it(decode: World) -> None:
    async def said() -> tuple[int, int, int]:
        await decode.clock.advance(0.5)
        beat = decode.heartbeat()
        return beat.computing, beat.progress_tokens, beat.completed

    assert await said() == (0, 0, 0), "nothing before the first request"
    await decode.ask(decode_task("pulling"))
    assert await said() == (0, 0, 0), "the engine has nothing to do yet"
    await decode.ask(decode_task(pulls=False))
    assert await said() == (1, 0, 0)
    decode.engine.load_now = EngineLoad(prompt_tokens_computed=100)
    assert await said() == (1, 100, 0), "a part of the prompt"
    await decode.step(EngineDelta(tokens=[1, 2]))
    assert await said() == (1, 102, 0)
    await decode.step(EngineDelta(tokens=[3], finish=FinishReason.LENGTH))
    assert await said() == (0, 103, 1)


async def test_heartbeats_say_how_much_the_pool_takes_before_it_evicts() -> None:
    world = World(Role.DECODE, ScriptedEngine(replace(FACTS, pool_blocks=10)))
    await world.start()
    assert world.heartbeat().pool_tokens_free == 10 * FACTS.block_tokens
    world.engine.load_now = EngineLoad(pool=PoolReport(slots=10, ready=7))
    await world.clock.advance(0.5)
    assert world.heartbeat().pool_tokens_free == 3 * FACTS.block_tokens
    await world.close()


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


async def test_a_scrape_shows_what_the_worker_keeps(decode: World) -> None:
    busy_before_s = decode.shown("baton_engine_busy_seconds_total")
    await decode.ask(decode_task())
    decode.engine.load_now = EngineLoad(running=1, kv_usage=0.5, leased_blocks=3, prompt_tokens_pulled=99)
    assert decode.shown('baton_worker_attempts{state="pulling"}') == 1
    await decode.clock.advance(1.0)
    assert decode.shown("baton_engine_busy_seconds_total") == busy_before_s, "a pull computes nothing"
    await decode.step(EngineDelta(tokens=[1, 2]))
    await decode.clock.advance(0.5)
    await decode.step(EngineDelta(tokens=[3], finish=FinishReason.LENGTH))
    busy_s = decode.shown("baton_engine_busy_seconds_total")
    assert busy_s == pytest.approx(busy_before_s + 0.5, abs=0.1)
    await decode.clock.advance(5.0)
    assert decode.shown("baton_engine_busy_seconds_total") == busy_s
    assert decode.shown("baton_engine_output_tokens_total") == 3
    assert decode.shown('baton_worker_attempts_ended_total{end="length"}') == 1
    assert decode.shown('baton_first_output_seconds_count{leg="decode"}') == 1
    blocks = [decode.shown(f'baton_kv_blocks{{state="{state}"}}') for state in ("used", "leased", "free")]
    assert blocks[1] == 3
    assert sum(blocks) == FACTS.kv_blocks
    await decode.ask(prefill_task("other"))
    assert decode.shown('baton_worker_refusals_total{reason="role"}') == 1


async def test_a_scrape_of_a_worker_whose_engine_died_shows_the_rest(decode: World) -> None:
    decode.engine.die("as if it had crashed")
    assert decode.shown('baton_worker_slots{state="free"}') == 2
    assert "baton_kv_blocks{" not in decode.metrics.render("")[1].decode()
    with pytest.raises(EngineFailed):
        await decode.running
