"""The scheduler as a service: receives heartbeats, answers `Place` with a placement, or holds the request."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from math import inf, isfinite
from typing import Final

from opentelemetry.trace import SpanKind

from baton import subjects
from baton.bus import Delivery, Subscription
from baton.errors import (
    BatonError,
    BusUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    MalformedMessage,
    Overloaded,
    Unavailable,
)
from baton.messages.attempts import Fault
from baton.messages.base import ErrorReport, Refused
from baton.messages.decisions import Verdict
from baton.messages.placement import (
    PRIORITIES,
    WEIGHT_MAX,
    WEIGHT_MIN,
    Held,
    Place,
    Placed,
    Placement,
    Withdraw,
)
from baton.messages.workers import GatewayBeat, Goodbye, Heartbeat, Role
from baton.node.failure_detector import PauseDetector
from baton.node.service import Node, subscribed
from baton.telemetry import Reading, catalogue
from baton_scheduler.breakers import Breakers
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.holding import Holding, key_of
from baton_scheduler.loads import Loads, LoadsOptions, incompatible_pairs
from baton_scheduler.placer import Choice, Committed, Placer
from baton_scheduler.supervision import Supervision

logger = logging.getLogger(__name__)

ID_BYTES: Final = 16
TICK_S: Final = 0.1


class SchedulerService:
    def __init__(self, settings: SchedulerSettings, node: Node) -> None:
        self._bus = node.ports.bus
        self._clock = node.ports.clock
        self._tracing = node.tracing
        self._metrics = node.metrics
        self._settings = settings
        self._loads = Loads(
            LoadsOptions(lost_after_s=settings.lost_after_s, leased_share_max=settings.leased_share_max)
        )
        self._name = node.ports.new_id()
        self._breakers = Breakers(node.ports.random)
        self._placer = Placer(settings, node, self._loads, self._breakers, self._name)
        self._holding = Holding(settings, node, self._placer, self._name)
        self._supervision = Supervision(settings, node, self._loads, self._holding.counts)
        self._places: Subscription | None = None
        """Subscription to placements; None before this scheduler answers, and once it drains."""
        self._tasks: asyncio.TaskGroup
        self._placing = 0
        node.metrics.read(self._readings)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Answer inside this context. At its end, all requests received so far are answered."""
        handlers = {
            subjects.HEARTBEAT: self._on_heartbeat,
            subjects.PLACED: self._on_placed,
            subjects.FAULTS: self._on_fault,
            subjects.WITHDRAWALS: self._on_withdraw,
            subjects.GATEWAY_BEAT: self._on_gateway_beat,
        }
        async with subscribed(self._bus, handlers):
            # Before the first heartbeats, every request would be refused for lack of workers.
            await self._clock.sleep(self._settings.learn_s)
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    holding, recorder, supervision = self._holding, self._placer.recorder, self._supervision
                    loops = (self._watch_workers(), holding.judge(), holding.report(), recorder.run())
                    supervising = (supervision.keep_lease(), supervision.observe())
                    tasks = [self._tasks.create_task(loop) for loop in (*loops, *supervising)]
                    self._places = await self._bus.subscribe(subjects.PLACE, self._on_place, group=subjects.SCHEDULERS)
                    logger.info("the scheduler answers")
                    yield
                    for task in tasks:
                        task.cancel()
            finally:
                await self.drain()
                await self._placer.recorder.publish_noted()

    async def drain(self) -> None:
        """Leave the queue group, and hand back what is held."""
        places, self._places = self._places, None
        if places is not None:
            await places.unsubscribe()
            logger.info("draining: %d placements, %d requests handed back", self._placing, len(self._holding))
        await self._holding.hand_back()

    async def check_ready(self) -> None:
        """Raise Unavailable unless a `Place` that comes now is handled."""
        if self._places is None:
            raise Unavailable("the scheduler does not answer yet: it is waiting for the heartbeats of the workers")
        if not self._bus.connected:
            raise BusUnavailable("the message bus cannot be reached")

    def _readings(self) -> Iterator[Reading]:
        yield Reading(catalogue.PLACING, self._placing)
        for result, count in self._placer.results.items():
            yield Reading(catalogue.PLACEMENTS, count, (result,))
        yield Reading(catalogue.WITHOUT_INDEX, self._placer.without_index)
        yield Reading(catalogue.ASKED_AGAIN, self._placer.asked_again)
        recorder = self._placer.recorder
        yield Reading(catalogue.DECISIONS_RECORDED, recorder.published, ("published",))
        yield Reading(catalogue.DECISIONS_RECORDED, recorder.dropped, ("dropped",))
        for labels, count in self._breakers.counts(self._clock.now_s()).items():
            yield Reading(catalogue.BREAKERS, count, labels)
        for cause, count in self._breakers.opened.items():
            yield Reading(catalogue.BREAKERS_OPENED, count, (cause,))
        live = self._loads.live(self._clock.now_s())
        held = {load.heartbeat.model: 0 for load in live} | self._holding.counts()
        for model, count in held.items():
            yield Reading(catalogue.HELD_REQUESTS, count, (model,))
        for (role, model), count in Counter((load.role, load.heartbeat.model) for load in live).items():
            yield Reading(catalogue.WORKERS, count, (role, model))
        for model, pairs in incompatible_pairs(live).items():
            yield Reading(catalogue.INCOMPATIBLE_PAIRS, pairs, (model,))
        for role in Role:
            soft = sum(len(load.soft) for load in live if load.role is role)
            yield Reading(catalogue.SOFT_PLACEMENTS, soft, (role,))

    async def _watch_workers(self) -> None:
        pauses = PauseDetector(interval_s=TICK_S)
        while True:
            now_s = self._clock.now_s()
            self._loads.tick(now_s, pauses.local_pause_s(now_s, connected=self._bus.connected))
            self._breakers.tick(now_s)
            await self._clock.sleep(TICK_S)

    async def _on_heartbeat(self, delivery: Delivery) -> None:
        match delivery.message:
            case Heartbeat() | Goodbye() as message:
                try:
                    if self._loads.take(message, self._clock.now_s()) and isinstance(message, Heartbeat):
                        self._breakers.hear(message, self._clock.now_s())
                    self._holding.note_loads()
                except MalformedMessage as error:
                    logger.warning("%s", error)
            case other:
                logger.warning("%s on %s is not for the scheduler", type(other).__name__, delivery.subject)

    async def _on_place(self, delivery: Delivery) -> None:
        # Deliveries come one at a time, and placing waits for the index, so each gets a task.
        place, is_full = delivery.message, self._placing >= self._settings.placements_max
        if isinstance(place, Place) and place.hold_s > 0 and (is_full or self._is_next(place)):
            await self._hold_unjudged(delivery, place)
        elif is_full:
            model = place.model if isinstance(place, Place) else ""
            await self._refuse(delivery, self._holding.overloaded("the scheduler is full", model))
        else:
            self._placing += 1
            self._tasks.create_task(self._answer(delivery))

    def _is_next(self, place: Place) -> bool:
        """Return whether held requests come before this one, or it is one of them."""
        return self._holding.comes_first(place) or key_of(place) in self._holding

    async def _hold_unjudged(self, delivery: Delivery, place: Place) -> None:
        try:
            _check(place)
            await self._holding.hold(place)
        except BatonError as error:
            await self._refuse(delivery, error)
        else:
            await self._respond(delivery, Held(scheduler=self._name))

    async def _on_placed(self, delivery: Delivery) -> None:
        """Count another scheduler's placement: else all would choose the same worker until the next heartbeats."""
        placed = delivery.message
        if isinstance(placed, Placed) and placed.scheduler != self._name and WEIGHT_MIN <= placed.weight <= WEIGHT_MAX:
            self._placer.count(placed)
            self._holding.note_placed(placed)

    async def _on_fault(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, Fault):
            self._breakers.note_fault(delivery.message, self._clock.now_s())

    async def _on_withdraw(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, Withdraw):
            self._holding.withdraw((delivery.message.request, delivery.message.attempt))

    async def _on_gateway_beat(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, GatewayBeat):
            self._holding.note_gateway(delivery.message.gateway)

    async def _answer(self, delivery: Delivery) -> None:
        message, started_s = delivery.message, self._clock.now_s()
        try:
            if not isinstance(message, Place):
                raise MalformedMessage(f"the scheduler answers Place, not {type(message).__name__}")
            with self._tracing.span("place", parent=message.context.trace, kind=SpanKind.SERVER) as span:
                outcome = await self._place_or_hold(message, span.trace)
                answer = outcome.choice.placement if isinstance(outcome, Committed) else outcome
                if isinstance(answer, Placement):
                    facts = {"baton.placement.reason": answer.reason, "baton.candidates": len(answer.candidates)}
                    span.set(facts)
                self._metrics.observe(catalogue.PLACE_DURATION, self._clock.now_s() - started_s, trace=span.trace)
            await self._respond(delivery, answer)
            if isinstance(outcome, Committed):
                await self._placer.announce(outcome)
        except BatonError as error:
            await self._refuse(delivery, error)
        except Exception as error:
            # The boundary of one request: the others are not affected.
            logger.exception("a placement failed")
            await self._refuse(delivery, BatonError(f"{type(error).__name__} in the scheduler, see its log"))
        finally:
            self._placing -= 1

    async def _place_or_hold(self, place: Place, trace: str) -> Committed | Placement | Held:
        """Return a placement that can begin soon, or hold the request until there is one, if it may be held."""
        _check(place)
        started_s = self._clock.now_s()
        match = await self._placer.look_up(place, trace)
        budget_s = place.context.budget_s - (self._clock.now_s() - started_s)
        if budget_s <= 0:
            raise DeadlineExceeded("the request's deadline passed while it was being placed")
        choice: Choice | None = None
        try:
            choice = self._placer.choose(place, match, without=place.unavailable)
            if self._holding.begins_soon(place, choice):
                if place.probe:
                    return choice.placement
                self._holding.note_placed(place)
                return self._placer.commit(place, choice, match, budget_s)
        except Overloaded as error:
            logger.debug("%s: %s", place.context.request, error)
        if not place.hold_s > 0:
            raise self._holding.overloaded("the workers that suit this request best are full", place.model, choice)
        await self._holding.hold(place, match, choice)
        return Held(scheduler=self._name)

    async def _refuse(self, delivery: Delivery, error: BatonError) -> None:
        self._placer.results[error.code] += 1
        if isinstance(delivery.message, Place):
            self._placer.recorder.note(delivery.message, Verdict.REFUSED, error=error)
        await self._respond(delivery, Refused(error=ErrorReport.of(error)))

    async def _respond(self, delivery: Delivery, answer: Placement | Held | Refused) -> None:
        try:
            await delivery.respond(answer)
        except BatonError as lost:
            logger.warning("an answer was lost, the gateway will ask again: %s", lost)


def _check(place: Place) -> None:
    if place.context.budget_s <= 0:
        raise DeadlineExceeded("the request's deadline has passed")
    if place.prompt_tokens <= 0 or place.output_tokens_max <= 0:
        raise InvalidRequest(
            f"a request needs tokens in and out, not {place.prompt_tokens} and {place.output_tokens_max}"
        )
    if not 0 <= place.priority < PRIORITIES or not WEIGHT_MIN <= place.weight <= WEIGHT_MAX:
        raise MalformedMessage(f"there is no class {place.priority}, or no weight of {place.weight}")
    if not (isfinite(place.due_in_s) and 0 <= place.ttft_s < inf and 0 <= place.tpot_s < inf):
        raise MalformedMessage("objectives are finite times of 0 or more")
    if len(place.blocks) % ID_BYTES:
        raise MalformedMessage(f"{len(place.blocks)} bytes are no whole number of block ids")
