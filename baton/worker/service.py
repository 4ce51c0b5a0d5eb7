"""The worker: tasks in, frames out. A thin shell around the ledger, the engine and the bus."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from baton import subjects
from baton.bus import Delivery
from baton.engines.engine import Engine, EngineFacts
from baton.errors import (
    BatonError,
    BusUnavailable,
    Conflict,
    EngineFailed,
    InvalidRequest,
    MalformedMessage,
    Unavailable,
    WorkerLost,
)
from baton.messages.attempts import (
    Accepted,
    Acknowledge,
    AttemptState,
    Busy,
    Cancel,
    DecodeTask,
    Digest,
    FinishReason,
    Join,
    Lend,
    PrefillTask,
    Resend,
    TokenChunk,
)
from baton.messages.base import ErrorReport, Refused
from baton.messages.codec import AnyMessage
from baton.messages.workers import ChangeRole, GatewayBeat, Goodbye, Heartbeat
from baton.node.failure_detector import PauseDetector
from baton.node.service import Node, subscribed
from baton.worker.admission import Identity, assemble, check_task, engine_request, key_of
from baton.worker.assembly import Assembly
from baton.worker.attempt import Attempt, Key, Limits, Refusal
from baton.worker.canary import prove_block_identity
from baton.worker.events import EventPublisher
from baton.worker.frames import FrameSender
from baton.worker.heartbeat import WorkerState, heartbeat_of
from baton.worker.kv_book import prefix_ids
from baton.worker.ledger import Ledger
from baton.worker.loans import Loans
from baton.worker.metrics import WorkerReadings
from baton.worker.rates import Rates
from baton.worker.role import WorkerRole
from baton.worker.runner import Runner
from baton.worker.shadow import ShadowMap
from baton.worker.waiting import WaitingAttempts

_log = logging.getLogger("baton.worker")

HEALTH_TIMEOUT_S: Final = 10.0
DRAIN_POLL_S: Final = 0.05
LAST_WORDS_S: Final = 2.0
"""Time for attempts to end after the drain budget is spent."""
LISTENS_ON_S: Final = 1.0
"""Minimum time for which a draining worker answers tasks placed before its heartbeat was heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timers:
    heartbeat_s: float = 0.25
    digest_s: float = 1.0
    health_s: float = 1.0
    canary_timeout_s: float = 60.0
    drain_s: float = 30.0


class WorkerService:
    """One generation of one worker, around an engine that has started: a `baton.node.service.Service`."""

    def __init__(
        self,
        *,
        identity: Identity,
        role: WorkerRole,
        facts: EngineFacts,
        engine: Engine,
        node: Node,
        limits: Limits,
        timers: Timers,
    ) -> None:
        self._identity = identity
        self._role = role
        self._facts = facts
        self._engine = engine
        self._bus = node.ports.bus
        self._clock = node.ports.clock
        self._timers = timers
        self._pauses = PauseDetector(interval_s=timers.heartbeat_s)
        self._ledger = Ledger(limits)
        self._assembly = Assembly()
        self._rates = Rates(facts.step_tokens_max)
        self._frames = FrameSender(self._bus, identity.address)
        self._engine_failed = asyncio.Event()
        self._loans = Loans(
            bus=self._bus,
            clock=self._clock,
            engine=engine,
            facts=facts,
            rates=self._rates,
            worker=identity.address.worker,
        )
        self._runner = Runner(
            bus=self._bus,
            clock=self._clock,
            tracing=node.tracing,
            metrics=node.metrics,
            engine=engine,
            ledger=self._ledger,
            rates=self._rates,
            loans=self._loans,
            frames=self._frames,
            address=identity.address,
            on_engine_failed=self._engine_failed.set,
        )
        self._waiting = WaitingAttempts(
            bus=self._bus, clock=self._clock, engine=engine, ledger=self._ledger, address=identity.address
        )
        shadow = ShadowMap(
            model_digest=facts.model_digest,
            engine_block_tokens=facts.block_tokens,
            block_tokens=identity.block_tokens,
        )
        self._publisher = EventPublisher(node.ports, identity.address, facts.model_digest, shadow)
        self._refusals = Counter[str]()
        readings = WorkerReadings(
            identity=identity,
            role=role,
            facts=facts,
            engine=engine,
            clock=self._clock,
            ledger=self._ledger,
            refusals=self._refusals,
            rates=self._rates,
            frames=self._frames,
            publisher=self._publisher,
            shadow=shadow,
        )
        node.metrics.read(readings)
        self._tasks: asyncio.TaskGroup
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._bus_down = False
        self._leaves_at_s = inf
        self._replaced_by: int | None = None
        """A later generation of this worker, in another process: no others listen to this one any more."""

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Serve inside this context; at its end say goodbye.

        Raises ConfigurationError when the canary fails, EngineFailed when the engine dies.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                loops = [
                    tasks.create_task(self._publisher.follow(self._engine.events()), name="events"),
                    tasks.create_task(self._publisher.publish(), name="kv-stream"),
                    tasks.create_task(self._frames.run(), name="frames"),
                    tasks.create_task(self._waiting.run(), name="waiting"),
                ]
                await prove_block_identity(
                    self._engine,
                    self._facts,
                    self._publisher,
                    self._clock,
                    block_tokens=self._identity.block_tokens,
                    timeout_s=self._timers.canary_timeout_s,
                )
                worker = self._identity.address.worker
                handlers = {
                    subjects.shadow(worker): self._publisher.answer,
                    subjects.GATEWAY_BEAT: self._on_gateway_beat,
                    subjects.role(worker): self._on_role,
                    subjects.generation(worker): self._on_namesake,
                    subjects.task(worker): self._on_task,
                }
                # Tasks that came after its end could not be run any more.
                async with subscribed(self._bus, handlers):
                    # A gateway may send a task as soon as it hears the first heartbeat.
                    loops += [
                        tasks.create_task(self._every(self._timers.heartbeat_s, self._beat), name="heartbeat"),
                        tasks.create_task(self._every(self._timers.digest_s, self._send_digests), name="digests"),
                        tasks.create_task(self._watch_engine(), name="health"),
                    ]
                    yield
                for loop in loops:
                    loop.cancel()
        except BaseExceptionGroup as group:
            if (expected := _first_expected(group)) is None:
                raise
            raise expected from group
        finally:
            await self._say_goodbye()

    async def check_ready(self) -> None:
        """Raise Unavailable unless the worker can take tasks now."""
        if self._ledger.draining:
            raise Unavailable("the worker is draining")
        if self._replaced_by is not None:
            raise Unavailable(
                f"a later process has the name {self._identity.address.worker}, so this one gets no tasks any more: "
                "end it, or start it again with a name of its own"
            )
        if not self._bus.connected:
            raise BusUnavailable("the message bus cannot be reached")
        await self._engine.check_health()

    # ------------------------------------------------------------ the task subject

    async def _on_task(self, delivery: Delivery) -> None:
        now_s = self._clock.now_s()
        match delivery.message:
            case TokenChunk() as chunk:
                self._assembly.add(chunk, now_s)
            case PrefillTask() | DecodeTask() as task:
                try:
                    answer = self._admit(task, now_s)
                    if isinstance(answer, Busy):
                        self._refusals[answer.reason] += 1
                except InvalidRequest as error:
                    self._refusals["parameters"] += 1
                    answer = Refused(error=ErrorReport.of(error))
                if not isinstance(answer, Accepted):
                    self._assembly.drop(key_of(task))
                await delivery.respond(answer)
            case Cancel(context=context) | Acknowledge(context=context) as ending:
                key = (context.request, context.attempt)
                attempt = self._ledger.get(key)
                if isinstance(ending, Cancel):
                    self._assembly.drop(key)
                    tell_engine = self._ledger.cancel(key, context.budget_s, now_s)
                else:
                    tell_engine = self._ledger.acknowledge(key, now_s)
                if attempt is not None and tell_engine:
                    self._tasks.create_task(self._runner.abort(attempt))
            case Join() as join:
                await delivery.respond(self._waiting.answer(join))
            case Lend() as lend:
                # The engine answers between two steps; tasks do not wait for that.
                self._tasks.create_task(self._lend(delivery, lend))
            case Resend(context=context, index=index):
                attempt = self._ledger.get((context.request, context.attempt))
                # No answer for an unknown attempt: the next digest shows that it is gone.
                if attempt is not None and (attempt.finish is not None or len(attempt.tokens) > index):
                    self._frames.add_whole(attempt.gateway, attempt.frame(index, attempt.finish))
            case other:
                wrong = MalformedMessage(f"{type(other).__name__} is no message for a worker's task subject")
                await delivery.respond(Refused(error=ErrorReport.of(wrong)))

    async def _lend(self, delivery: Delivery, lend: Lend) -> None:
        answer: AnyMessage
        try:
            if self._ledger.draining:
                raise Unavailable("the worker is draining")
            answer = await self._loans.answer(lend)
        except BatonError as error:
            answer = Refused(error=ErrorReport.of(error))
        try:
            await delivery.respond(answer)
        except BatonError as error:
            # This is a task of the worker's, and nothing of a loan may end it: the borrower computes the prefix.
            _log.warning("the answer to a loan was lost: %s", error)

    def _admit(self, task: PrefillTask | DecodeTask, now_s: float) -> Accepted | Busy:
        """Start an attempt or let it wait, or say why not. Raises InvalidRequest for unsupported parameters."""
        address = self._identity.address
        accepted = Accepted(worker=address.worker, generation=address.generation)
        known = self._ledger.get(key_of(task))
        if known is not None and known.stopping:
            return Busy(worker=address.worker, reason="tombstone", detail="this attempt is being ended here")
        if known is not None and task.generation == address.generation:
            return accepted
        started = self._start(task, now_s)
        if isinstance(started, Refusal):
            return Busy(worker=address.worker, reason=started.reason, detail=started.detail)
        return accepted

    def _start(self, task: PrefillTask | DecodeTask, now_s: float) -> Attempt | Refusal:
        ask = check_task(task, self._identity, self._role, self._facts)
        if isinstance(ask, Refusal):
            return ask
        if isinstance(task, DecodeTask):
            # Decode only: sampling parameters do not matter to prefill.
            self._engine.check_sampling(task.sampling)
        tokens = assemble(task, self._assembly)
        if isinstance(tokens, Refusal):
            return tokens
        self._ledger.settle(self._engine.load().leased)
        prefix = prefix_ids(self._facts.model_digest, task.cache_salt, tokens, self._facts.block_tokens)
        attempt = self._ledger.reserve(replace(ask, prefix=prefix), now_s)
        if isinstance(attempt, Refusal):
            return attempt

        def start() -> None:
            request = engine_request(task, ask, tokens, attempt.deadline_s - self._clock.now_s())
            run = self._tasks.create_task(self._runner.run(attempt, request, task.context.trace, task.lender))
            self._running[attempt.key] = run
            run.add_done_callback(lambda _: self._ended(attempt.key))

        if attempt.state is AttemptState.WAITING:
            self._waiting.add(attempt, start)
        else:
            start()
        return attempt

    def _ended(self, key: Key) -> None:
        self._running.pop(key, None)
        self._waiting.look()

    async def _on_gateway_beat(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, GatewayBeat):
            self._ledger.hear_gateway(delivery.message.gateway, self._clock.now_s())

    async def _on_role(self, delivery: Delivery) -> None:
        order, address, answer = delivery.message, self._identity.address, None
        try:
            if not isinstance(order, ChangeRole):
                raise MalformedMessage(f"{type(order).__name__} is no order to change the role")
            if order.generation != address.generation:
                raise Conflict(f"the order is for generation {order.generation}, this is {address.generation}")
            if self._leaves_at_s < inf:
                raise Unavailable("the worker is leaving")
            answer = self._role.take(order, self._clock.now_s())
            self._ledger.draining = self._role.next_role is not None
        except BatonError as error:
            answer = Refused(error=ErrorReport.of(error))
        await delivery.respond(answer)
        # Placements that are made from now on go elsewhere.
        await self._publish(subjects.HEARTBEAT, self._heartbeat())

    async def _on_namesake(self, delivery: Delivery) -> None:
        """Note that a process that began later has this worker's name: only its heartbeats count from then on."""
        beat, address = delivery.message, self._identity.address
        if isinstance(beat, Heartbeat) and self._replaced_by is None and beat.address.generation > address.generation:
            self._replaced_by = beat.address.generation
            _log.error(
                "a later process has the name %s (generation %d, this one is %d): this one gets no tasks any more",
                address.worker,
                self._replaced_by,
                address.generation,
            )

    # ------------------------------------------------------------ periodic work

    async def _every(self, interval_s: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await act()
            await self._clock.sleep(interval_s)

    async def _beat(self) -> None:
        now_s = self._clock.now_s()
        self._ledger.settle(self._engine.load().leased)
        self._assembly.purge(now_s)
        self._ledger.extend_deadlines(self._pauses.local_pause_s(now_s, connected=self._bus.connected), now_s)
        for stopped in self._ledger.sweep(now_s):
            attempt = stopped.attempt
            if stopped.overdue:
                _log.error("attempt %s/%d is still in the engine after its abort", *attempt.key)
                if run := self._running.get(attempt.key):
                    run.cancel()
            if stopped.tell_engine:
                self._tasks.create_task(self._runner.abort(attempt))
            await self._runner.conclude(attempt)
        if self._role.step(now_s, is_idle=all(attempt.state is AttemptState.RETAINED for attempt in self._ledger)):
            self._ledger.draining = False
            _log.info("the role is %s now; %d attempts go on", self._role.role, len(self._ledger))
        self._rates.tick(self._engine.load().kv_usage, now_s)
        await self._publish(subjects.HEARTBEAT, self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        state = WorkerState(
            identity=self._identity,
            role=self._role,
            facts=self._facts,
            load=self._engine.load(),
            ledger=self._ledger,
            rates=self._rates,
            publisher=self._publisher,
            leaves_at_s=self._leaves_at_s,
        )
        return heartbeat_of(state, self._clock.now_s())

    async def _send_digests(self) -> None:
        address = self._identity.address
        await self._publish(subjects.generation(address.worker), self._heartbeat())
        for gateway, entries in self._ledger.digests().items():
            digest = Digest(worker=address.worker, generation=address.generation, entries=entries)
            await self._publish(subjects.gateway(gateway), digest)

    async def _publish(self, subject: str, message: AnyMessage) -> None:
        """Publish a message that is repeated anyway: it may be lost, and an outage is logged once."""
        try:
            await self._bus.publish(subject, message)
            self._bus_down = False
        except BatonError as error:
            if not self._bus_down:
                _log.warning("the bus accepts no messages: %s", error)
            self._bus_down = True

    async def _watch_engine(self) -> None:
        """Raise EngineFailed once the engine cannot serve any more. A failed attempt triggers a check at once."""
        while True:
            try:
                async with self._clock.timeout(HEALTH_TIMEOUT_S):
                    await self._engine.check_health()
            except TimeoutError as error:
                raise EngineFailed(f"the engine did not answer within {HEALTH_TIMEOUT_S:g} s") from error
            try:
                async with self._clock.timeout(self._timers.health_s):
                    await self._engine_failed.wait()
            except TimeoutError:
                continue
            self._engine_failed.clear()

    # ------------------------------------------------------------ leaving

    async def drain(self) -> None:
        """Refuse new tasks and let attempts finish or be moved by their gateways; after the budget, end them as
        lost."""
        began_s = self._clock.now_s()
        self._leaves_at_s = began_s + self._timers.drain_s
        self._role.stay()
        self._ledger.draining = True
        await self._publish(subjects.HEARTBEAT, self._heartbeat())
        _log.info("draining: %d attempts, %g s at most", len(self._ledger), self._timers.drain_s)
        await self._wait_empty(self._timers.drain_s)
        lost = WorkerLost(f"worker {self._identity.address.worker} is leaving")
        for attempt in list(self._ledger):
            if attempt.state is AttemptState.RETAINED:
                continue
            if self._ledger.stop(attempt, lost, self._clock.now_s()):
                self._tasks.create_task(self._runner.abort(attempt))
            await self._runner.conclude(attempt)
        await self._wait_empty(LAST_WORDS_S)
        # A task already on its way gets a `Busy`, so that its request does not fail.
        listens_until_s = began_s + min(LISTENS_ON_S, self._timers.drain_s)
        await self._clock.sleep(max(0.0, listens_until_s - self._clock.now_s()))
        for run in list(self._running.values()):
            run.cancel()

    async def _wait_empty(self, budget_s: float) -> None:
        give_up_at_s = self._clock.now_s() + budget_s
        while len(self._ledger) and self._clock.now_s() < give_up_at_s:
            await self._clock.sleep(DRAIN_POLL_S)

    async def _say_goodbye(self) -> None:
        """Report the attempts that end with this worker, so that gateways need not wait for a timer."""
        lost = WorkerLost(f"worker {self._identity.address.worker} has ended")
        for attempt in list(self._ledger):
            if attempt.finish is None:
                self._ledger.stop(attempt, lost, self._clock.now_s())
                self._ledger.end(attempt.key, FinishReason.ERROR, lost, self._clock.now_s())
                await self._runner.conclude(attempt)
        await self._frames.flush()
        await self._publish(subjects.HEARTBEAT, Goodbye(address=self._identity.address))


def _first_expected(group: BaseExceptionGroup[BaseException]) -> BatonError | None:
    """Return the first expected failure among those that ended the worker's tasks, if there is one."""
    known = group.subgroup(BatonError)
    while known is not None:
        error = known.exceptions[0]
        if not isinstance(error, BaseExceptionGroup):
            return error
        known = error
    return None
