"""The scheduler as a service: receives heartbeats, asks the index, answers placements."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
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
    ModelNotFound,
    NoWorkers,
    Overloaded,
    Unavailable,
)
from baton.messages.base import Context, ErrorReport, Refused, WorkerAddress
from baton.messages.codec import AnyMessage
from baton.messages.index import Match, Matched
from baton.messages.placement import Place, Placed, Placement
from baton.messages.workers import Goodbye, Heartbeat, Role
from baton.node.failure_detector import PauseDetector
from baton.node.service import Node
from baton.telemetry import Reading, catalogue
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.loads import Loads, LoadsOptions, WorkerLoad, incompatible_pairs
from baton_scheduler.placement import Demand, PlacementOptions, PrefixMatch, choose, soft_placements

logger = logging.getLogger(__name__)

ID_BYTES: Final = 16
TICK_S: Final = 0.1
FIRST_ASK_SHARE: Final = 0.3
"""Share of the index timeout after which all indexes are asked. One index mostly answers within a tenth of it."""


class SchedulerService:
    def __init__(self, settings: SchedulerSettings, node: Node) -> None:
        self._bus = node.ports.bus
        self._clock = node.ports.clock
        self._random = node.ports.random
        self._tracing = node.tracing
        self._metrics = node.metrics
        self._settings = settings
        self._loads = Loads(LoadsOptions(lost_after_s=settings.lost_after_s))
        self._options = PlacementOptions(
            token_interval_s_max=settings.token_interval_s_max,
            tie_share=settings.tie_share,
            chunk_tokens=settings.chunk_tokens,
            output_headroom_tokens=settings.output_headroom_tokens,
            leased_share_max=settings.leased_share_max,
            retry_after_s=settings.retry_after_s,
        )
        self._name = node.ports.new_id()
        self._places: Subscription | None = None
        """Subscription to placements; None before this scheduler answers, and once it drains."""
        self._tasks: asyncio.TaskGroup
        self._placing = 0
        self._results = Counter[str]()
        self._without_index = 0
        self._asked_again = 0
        node.metrics.read(self._readings)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Answer inside this context. At its end, all requests received so far are answered."""
        async with AsyncExitStack() as stack:
            for subject, handler in ((subjects.HEARTBEAT, self._on_heartbeat), (subjects.PLACED, self._on_placed)):
                subscription = await self._bus.subscribe(subject, handler)
                stack.push_async_callback(subscription.unsubscribe)
            # Before the first heartbeats, every request would be refused for lack of workers.
            await self._clock.sleep(self._settings.learn_s)
            stack.push_async_callback(self.drain)
            async with asyncio.TaskGroup() as self._tasks:
                watching = self._tasks.create_task(self._watch_workers())
                self._places = await self._bus.subscribe(subjects.PLACE, self._on_place, group=subjects.SCHEDULERS)
                logger.info("the scheduler answers")
                yield
                watching.cancel()

    async def drain(self) -> None:
        """Leave the queue group."""
        places, self._places = self._places, None
        if places is not None:
            await places.unsubscribe()
            logger.info("draining: %d placements", self._placing)

    async def check_ready(self) -> None:
        """Raise Unavailable unless a `Place` that comes now is handled."""
        if self._places is None:
            raise Unavailable("the scheduler does not answer yet: it is waiting for the heartbeats of the workers")
        if not self._bus.connected:
            raise BusUnavailable("the message bus cannot be reached")

    def _readings(self) -> Iterator[Reading]:
        yield Reading(catalogue.PLACING, self._placing)
        for result, count in self._results.items():
            yield Reading(catalogue.PLACEMENTS, count, (result,))
        yield Reading(catalogue.WITHOUT_INDEX, self._without_index)
        yield Reading(catalogue.ASKED_AGAIN, self._asked_again)
        live = self._loads.live(self._clock.now_s())
        for (role, model), count in Counter((load.role, load.heartbeat.model) for load in live).items():
            yield Reading(catalogue.WORKERS, count, (role, model))
        for model, pairs in incompatible_pairs(live).items():
            yield Reading(catalogue.INCOMPATIBLE_PAIRS, pairs, (model,))
        for role in Role:
            soft = sum(load.soft_slots for load in live if load.role is role)
            yield Reading(catalogue.SOFT_PLACEMENTS, soft, (role,))

    async def _watch_workers(self) -> None:
        pauses = PauseDetector(interval_s=TICK_S)
        while True:
            now_s = self._clock.now_s()
            self._loads.tick(now_s, pauses.local_pause_s(now_s, connected=self._bus.connected))
            await self._clock.sleep(TICK_S)

    async def _on_heartbeat(self, delivery: Delivery) -> None:
        match delivery.message:
            case Heartbeat() | Goodbye() as message:
                try:
                    self._loads.take(message, self._clock.now_s())
                except MalformedMessage as error:
                    logger.warning("%s", error)
            case other:
                logger.warning("%s on %s is not for the scheduler", type(other).__name__, delivery.subject)

    async def _on_place(self, delivery: Delivery) -> None:
        # Deliveries come one at a time, and placing waits for the index, so each gets a task.
        if self._placing >= self._settings.placements_max:
            await self._refuse(
                delivery, Overloaded("the scheduler is full", retry_after_s=self._settings.retry_after_s)
            )
            return
        self._placing += 1
        self._tasks.create_task(self._answer(delivery)).add_done_callback(self._on_answered)

    def _on_answered(self, _task: asyncio.Task[None]) -> None:
        self._placing -= 1

    async def _on_placed(self, delivery: Delivery) -> None:
        """Count another scheduler's placement: else all would choose the same worker until the next heartbeats."""
        placed = delivery.message
        if isinstance(placed, Placed) and placed.scheduler != self._name:
            self._count(placed)

    def _count(self, placed: Placed) -> None:
        soft = soft_placements(placed, now_s=self._clock.now_s(), options=self._options)
        self._loads.place(placed.context.request, soft)

    async def _answer(self, delivery: Delivery) -> None:
        message, started_s = delivery.message, self._clock.now_s()
        try:
            if not isinstance(message, Place):
                raise MalformedMessage(f"the scheduler answers Place, not {type(message).__name__}")
            with self._tracing.span("place", parent=message.context.trace, kind=SpanKind.SERVER) as span:
                placement = await self._place(message, span.trace)
                span.set({"baton.placement.reason": placement.reason, "baton.candidates": len(placement.candidates)})
                self._metrics.observe(catalogue.PLACE_DURATION, self._clock.now_s() - started_s, trace=span.trace)
            self._results["aggregated" if placement.prefill is None else "disaggregated"] += 1
            await delivery.respond(placement)
        except BatonError as error:
            await self._refuse(delivery, error)
        except Exception as error:
            # The boundary of one request: the others are not affected.
            logger.exception("a placement failed")
            await self._refuse(delivery, BatonError(f"{type(error).__name__} in the scheduler, see its log"))

    async def _refuse(self, delivery: Delivery, error: BatonError) -> None:
        self._results[error.code] += 1
        try:
            await delivery.respond(Refused(error=ErrorReport.of(error)))
        except BatonError as lost:
            logger.warning("an answer was lost, the gateway will ask again: %s", lost)

    async def _place(self, place: Place, trace: str) -> Placement:
        started_s = self._clock.now_s()
        _check(place)
        match = await self._ask_index(place, trace, self._serving(place.model, started_s))
        now_s = self._clock.now_s()
        if now_s - started_s >= place.context.budget_s:
            raise DeadlineExceeded("the request's deadline passed while it was being placed")
        demand = Demand(
            model=place.model,
            prompt_tokens=place.prompt_tokens,
            output_tokens_max=place.output_tokens_max,
            disaggregation=place.disaggregation or self._settings.disaggregation,
            exclude=frozenset(place.exclude),
            exclude_pairs=frozenset(place.exclude_pairs),
            parameters=frozenset(place.parameters),
            refused=frozenset(place.refused),
        )
        # Read again, since workers may have been lost while the index was asked.
        serving = self._serving(place.model, now_s)
        placement = choose(demand, serving, match or PrefixMatch(), self._options, self._random)
        placed = self._placed(place, placement, serving, now_s - started_s)
        self._count(placed)
        try:
            # Published before the answer, so that the next match sees it.
            await self._bus.publish(subjects.PLACED, placed)
        except BatonError as error:
            logger.debug("the placement of %s was not published: %s", place.context.request, error)
        if match is None:
            self._without_index += 1
            placement = _without_hints(placement)
        logger.debug("%s/%d: %s", place.context.request, place.context.attempt, placement.reason)
        return placement

    def _serving(self, model: str, now_s: float) -> list[WorkerLoad]:
        """Return the live workers of a model. Raises ModelNotFound, or NoWorkers if all departed lately."""
        serving = [load for load in self._loads.live(now_s) if load.heartbeat.model == model]
        if not serving and self._loads.served_lately(model):
            raise NoWorkers(f"every worker that served the model {model} has left or is lost")
        if not serving:
            raise ModelNotFound(f"no worker serves the model {model}")
        return serving

    async def _ask_index(self, place: Place, trace: str, serving: list[WorkerLoad]) -> PrefixMatch | None:
        """Return how many leading blocks each worker holds; None where the index does not answer in time."""
        if not place.blocks:
            return PrefixMatch()
        timeout_s = min(self._settings.index_timeout_s, place.context.budget_s)
        context = Context(request=place.context.request, attempt=place.context.attempt, budget_s=timeout_s, trace=trace)
        held: dict[str, int] = {}
        speculative: dict[str, int] = {}
        try:
            async with self._clock.timeout(timeout_s):
                # One digest, except while a model is being replaced by a new version of the same name.
                for model_digest in sorted({load.heartbeat.model_digest for load in serving}):
                    match = Match(context=context, model_digest=model_digest, blocks=place.blocks)
                    answer = await self._match(match, timeout_s)
                    if isinstance(answer, Refused):
                        raise answer.error.to_error()
                    if not isinstance(answer, Matched):
                        raise MalformedMessage(f"the index answered a Match with {type(answer).__name__}")
                    held |= answer.held
                    speculative |= answer.speculative
        except (BatonError, TimeoutError) as error:
            logger.warning("placing %s without the index: %s", place.context.request, str(error) or "no answer in time")
            return None
        return PrefixMatch(held, speculative)

    async def _match(self, match: Match, timeout_s: float) -> AnyMessage:
        """Ask one index, and all of them if that one is late.

        An index that hangs, or whose machine is gone, stays in the queue group for minutes and is handed its share of
        all matches.
        """
        try:
            return await self._bus.request(subjects.MATCH, match, timeout_s=timeout_s * FIRST_ASK_SHARE)
        except DeadlineExceeded:
            self._asked_again += 1
            return await self._bus.request(subjects.MATCH_ALL, match, timeout_s=timeout_s)

    def _placed(self, place: Place, placement: Placement, serving: list[WorkerLoad], spent_s: float) -> Placed:
        decode = next(load for load in serving if load.worker == placement.decode.worker)
        return Placed(
            context=Context(
                request=place.context.request,
                attempt=place.context.attempt,
                budget_s=place.context.budget_s - spent_s,
            ),
            scheduler=self._name,
            model_digest=decode.heartbeat.model_digest,
            blocks=place.blocks,
            workers=tuple(WorkerAddress(worker=one.worker, generation=one.generation) for one in placement.addresses),
            prompt_tokens=place.prompt_tokens,
            output_tokens_max=place.output_tokens_max,
            predicted=placement.predicted,
        )


def _check(place: Place) -> None:
    if place.context.budget_s <= 0:
        raise DeadlineExceeded("the request's deadline has passed")
    if place.prompt_tokens <= 0 or place.output_tokens_max <= 0:
        raise InvalidRequest(
            f"a request needs tokens in and out, not {place.prompt_tokens} and {place.output_tokens_max}"
        )
    if len(place.blocks) % ID_BYTES:
        raise MalformedMessage(f"{len(place.blocks)} bytes are no whole number of block ids")


def _without_hints(placement: Placement) -> Placement:
    reason = placement.reason.removesuffix(".") + "; the index did not answer, so what workers hold is unknown."
    return Placement(
        decode=placement.decode,
        prefill=placement.prefill,
        reason=reason,
        predicted=placement.predicted,
        candidates=placement.candidates,
    )
