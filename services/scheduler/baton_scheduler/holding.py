"""Holds requests until a worker has room: judges them anew as loads change, and keeps their gateways informed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Final

from opentelemetry.trace import SpanKind

from baton import subjects
from baton.errors import BatonError, DeadlineExceeded, MalformedMessage, Overloaded, Unavailable
from baton.messages.base import ErrorReport
from baton.messages.decisions import Verdict
from baton.messages.placement import POSITIONS_MAX, Place, Placed, Placement, QueuePositions, Released
from baton.node.failure_detector import PauseDetector
from baton.node.membership import Membership
from baton.node.service import Node
from baton_scheduler.admission import DrainRate, Objectives, Outlook, look_ahead, retry_after_s
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.placer import Choice, Placer
from baton_scheduler.prediction import PrefixMatch
from baton_scheduler.queue import Entry, Key, Queue

logger = logging.getLogger(__name__)

GATEWAY: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
GATEWAY_LOST_AFTER_S: Final = 5.0
POSITIONS_S: Final = 0.25
"""Interval of the messages about positions."""
JUDGE_S: Final = 0.03
"""Longest time between two sweeps while requests are held."""
SWEEP_PAUSE_S: Final = 0.01
"""Least time between two sweeps."""
SWEEP_REST: Final = 2.0
"""Pause after a sweep that placed nothing, in durations of the sweep: a third of a core is spent in vain at most."""
FRONT: Final = 128
"""Requests that each sweep judges from the front of the queue."""
BEHIND: Final = 64
"""Requests behind these that each sweep judges, in turn: the front may want what is taken, and they something else."""
BATCH: Final = 32
"""Requests for which the index is asked at the same time."""
MATCH_AGE_S_MAX: Final = 1.0
"""Age at which an answer of the index is out of date."""
UNAVAILABLE_S: Final = 0.25
"""Time for which a worker that was busy or not reached counts as full: the interval of heartbeats."""


@dataclass(slots=True)
class Request:
    """A held request."""

    place: Place
    since_s: float
    held_at_s: float
    """Instant of `place`: the last one, where a gateway has asked more than once."""
    match: PrefixMatch | None
    matched_at_s: float


FULL: Final = "too many requests wait for a worker"


def key_of(place: Place) -> Key:
    return place.context.request, place.context.attempt


def _objectives_of(place: Place) -> Objectives:
    return Objectives(ttft_s=place.ttft_s, tpot_s=place.tpot_s)


class Holding:
    """Requests that this scheduler holds. `judge` and `report` are its tasks."""

    def __init__(self, settings: SchedulerSettings, node: Node, placer: Placer, name: str) -> None:
        self._settings = settings
        self._bus = node.ports.bus
        self._clock = node.ports.clock
        self._tracing = node.tracing
        self._placer = placer
        self._name = name
        self._queue = Queue(entries_max=settings.held_max, age_s=settings.age_s)
        self._requests: dict[Key, Request] = {}
        self._rates: dict[str, DrainRate] = {}
        """Rates of the models of which requests are or were held."""
        self._outlook = Outlook({}, {})
        """Outlook at the last message about positions."""
        self._gateways = Membership[None](lost_after_s=GATEWAY_LOST_AFTER_S)
        self._held_some = asyncio.Event()
        self._changed = asyncio.Event()
        """Set when requests may have room that had none."""
        self._sweeping = False
        self._behind = 0
        """Where the next sweep goes on behind the front."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: Key) -> bool:
        return key in self._requests

    @property
    def is_judging(self) -> bool:
        """Whether held requests are being judged; a new one that is placed meanwhile would be out of order."""
        return bool(self._requests) and (self._sweeping or self._changed.is_set())

    def comes_first(self, place: Place) -> bool:
        """Return whether held requests come before a new one: it is judged after them, lest it takes their room."""
        return self.is_judging or self._queue.is_behind_others(place.tenant, place.priority)

    def begins_soon(self, place: Place, choice: Choice) -> bool:
        """Return whether a request may be placed now and wait at its workers."""
        room = self._queue.room_to_leave(place.tenant)
        predicted, longest_s = choice.placement.predicted, self._settings.place_wait_s_max
        free = choice.question.free_share(predicted) if room and choice.question else 1.0
        idle = bool(room and choice.question and choice.question.is_idle(predicted))
        return _objectives_of(place).begins_soon(predicted, longest_s, room=room, free=free, idle=idle)

    def counts(self) -> Counter[str]:
        """Return the number of held requests by model."""
        return Counter(request.place.model for request in self._requests.values())

    async def hold(self, place: Place, match: PrefixMatch | None = None, choice: Choice | None = None) -> None:
        """Hold a request. `choice` is the best placement, if it would have to wait for too long.

        Without a `match` it has not been judged yet. Raises Overloaded if the queue is full or the request has waited
        for too long, Unavailable if this scheduler leaves.
        """
        if not GATEWAY.fullmatch(place.gateway):
            raise MalformedMessage("a gateway's name has letters, digits, - and _ only")
        if self._closed:
            raise Unavailable("this scheduler is leaving")
        now_s, key = self._clock.now_s(), key_of(place)
        self._gateways.hear(place.gateway, 0, None, now_s)
        if match is None:
            self._changed.set()
        if (known := self._requests.get(key)) is not None:
            known.place, known.held_at_s = place, now_s
            return
        predicted = choice.placement.predicted if choice else None
        computing_s = predicted.predicted_ttft_s - predicted.waiting_s if predicted else 0.0
        hold_s = _objectives_of(place).hold_s_max(place.hold_s, place.due_in_s)
        if hold_s <= 0:
            raise self.overloaded("no worker is free in time for the request's objective", place.model, choice)
        entry = Entry(
            key=key,
            tenant=place.tenant,
            model=place.model,
            priority=place.priority,
            due_s=now_s + place.due_in_s - computing_s,
            tokens=self._placer.tokens(place),
            weight=place.weight,
            since_s=now_s,
            until_s=now_s + hold_s,
        )
        displaced = self._queue.add(entry)
        if displaced is entry:
            raise self.overloaded(FULL, place.model, choice)
        self._held_some.set()
        self._requests[key] = Request(place, now_s, now_s, match, now_s if match else -inf)
        self._rates.setdefault(place.model, DrainRate())
        self._placer.results["held"] += 1
        self._placer.recorder.note(
            place,
            Verdict.HELD,
            placement=choice and choice.placement,
            question=choice and choice.question,
            without_index=choice is not None and match is None,
        )
        if displaced is not None:
            await self._release(displaced.key, error=self._give_up(FULL, displaced))

    def overloaded(self, detail: str, model: str, choice: Choice | None = None) -> Overloaded:
        """Return a refusal that says when the turn of a request after all others would come.

        `choice` is the best placement, if one is known.
        """
        predicted = choice.placement.predicted if choice else None
        waiting_s = predicted.waiting_s + predicted.queue_s if predicted else 0.0
        return Overloaded(detail, retry_after_s=retry_after_s(self._outlook.last_s.get(model, 0.0) + waiting_s))

    def _give_up(self, detail: str, entry: Entry) -> Overloaded:
        """Return the refusal of a held request."""
        turn_s = self._outlook.turns_s.get(entry.key, self._outlook.last_s.get(entry.model, 0.0))
        return Overloaded(detail, retry_after_s=retry_after_s(turn_s))

    def withdraw(self, key: Key) -> None:
        """Drop a request that its gateway does not need any more."""
        self._queue.remove(key)
        self._requests.pop(key, None)

    def note_loads(self) -> None:
        """Judge again: workers may have room."""
        if self._requests:
            self._changed.set()

    def note_gateway(self, gateway: str) -> None:
        self._gateways.hear(gateway, 0, None, self._clock.now_s())

    def note_placed(self, placed: Place | Placed) -> None:
        """Charge a tenant for a placement that was not held here."""
        self._queue.charge(placed.tenant, self._placer.tokens(placed), placed.weight)

    async def hand_back(self) -> None:
        """Release all requests, and hold no more: another scheduler must be asked."""
        self._closed = True
        for key in list(self._requests):
            self._queue.remove(key)
            await self._release(key)

    # ------------------------------------------------------------ judging

    async def judge(self) -> None:
        """Place held requests in order, as loads change, for ever."""
        while True:
            if not self._requests:
                self._held_some.clear()
            await self._held_some.wait()
            with suppress(TimeoutError):
                # Room that is predicted appears with time alone; the first of the queue are enough to notice it.
                async with self._clock.timeout(JUDGE_S):
                    await self._changed.wait()
            for entry in self._queue.tick(self._clock.now_s()):
                await self._release(entry.key, error=self._give_up("no worker became free in time", entry))
                # Thousands may be given up at once, more than the recorder notes without a turn of its own.
                await self._clock.sleep(0)
            sample = self._sample() if self._changed.is_set() else self._first(BATCH)
            self._changed.clear()
            began_s = self._clock.now_s()
            self._sweeping = True
            placed = await self._sweep(sample)
            self._sweeping = False
            if placed and self._requests:
                self._changed.set()
            rest_s = 0.0 if placed else SWEEP_REST * (self._clock.now_s() - began_s)
            await self._clock.sleep(max(SWEEP_PAUSE_S, rest_s))

    async def _sweep(self, sample: list[Key]) -> bool:
        """Judge these requests in order; return whether any was placed."""
        placed = False
        for start in range(0, len(sample), BATCH):
            batch = sample[start : start + BATCH]
            await self._look_up(batch)
            for key in batch:
                placed |= await self._judge(key)
                # Requests that arrive, and heartbeats, need not wait for the whole sweep.
                await self._clock.sleep(0)
        return placed

    def _first(self, count: int) -> list[Key]:
        return [entry.key for entry in islice(self._queue.order(), count)]

    def _sample(self) -> list[Key]:
        """Return the requests that a sweep judges, in order: the front of the queue, and a part of the rest."""
        order = self._first(len(self._queue))
        behind = order[FRONT:]
        if self._behind >= len(behind):
            self._behind = 0
        part = behind[self._behind : self._behind + BEHIND]
        self._behind += BEHIND
        return order[:FRONT] + part

    async def _look_up(self, keys: list[Key]) -> None:
        """Ask the index again for those that asked a while ago or never."""
        now_s = self._clock.now_s()
        requests = (self._requests.get(key) for key in keys)
        async with asyncio.TaskGroup() as group:
            for request in requests:
                if request is not None and now_s - request.matched_at_s > MATCH_AGE_S_MAX:
                    group.create_task(self._look_up_one(request))

    async def _look_up_one(self, request: Request) -> None:
        try:
            request.match = await self._placer.look_up(request.place, request.place.context.trace)
        except BatonError as error:
            logger.debug("%s: %s", request.place.context.request, error)  # `choose` says the same.
        request.matched_at_s = self._clock.now_s()

    async def _judge(self, key: Key) -> bool:
        """Place a request if a worker has room for it; return whether one has."""
        request = self._requests.get(key)
        if request is None:
            return False  # It was withdrawn meanwhile.
        place, waited_s = request.place, self._clock.now_s() - request.held_at_s
        budget_s = place.context.budget_s - waited_s
        try:
            if budget_s <= 0:
                raise DeadlineExceeded("the request's deadline passed while it was held")
            without = place.unavailable if waited_s < UNAVAILABLE_S else ()
            choice = self._placer.choose(place, request.match, without=without)
            if not self.begins_soon(place, choice):
                return False
            with self._tracing.span("place", parent=place.context.trace, kind=SpanKind.SERVER) as span:
                span.set({"baton.placement.reason": choice.placement.reason, "baton.held_s": waited_s})
                entry = self._queue.take(key)
                self._rates[entry.model].note_placed(entry.tokens)
                held_s = self._clock.now_s() - request.since_s
                committed = self._placer.commit(place, choice, request.match, budget_s, held_s=held_s)
            await self._release(key, placement=choice.placement)
            await self._placer.announce(committed)
            return True
        except Overloaded:
            return False
        except BatonError as error:
            self._queue.remove(key)
            await self._release(key, error=error)
        except Exception as error:
            # The boundary of one request: the others are not affected.
            logger.exception("a placement failed")
            self._queue.remove(key)
            await self._release(key, error=BatonError(f"{type(error).__name__} in the scheduler, see its log"))
        return False

    # ------------------------------------------------------------ informing gateways

    async def report(self) -> None:
        """Tell gateways the positions of their requests, and let shares fade while none is held, for ever."""
        pauses, before_s = PauseDetector(interval_s=POSITIONS_S), self._clock.now_s()
        while True:
            now_s = self._clock.now_s()
            if not self._requests:
                # `judge` waits meanwhile, and shares fade.
                self._queue.tick(now_s)
            self._gateways.extend_deadlines(pauses.local_pause_s(now_s, connected=self._bus.connected), now_s)
            self._gateways.expire(now_s)
            for key in [key for key, each in self._requests.items() if each.place.gateway not in self._gateways]:
                self.withdraw(key)
            self._update_outlook(now_s, now_s - before_s)
            before_s = now_s
            await self._send_positions()
            await self._clock.sleep(POSITIONS_S)

    def _update_outlook(self, now_s: float, passed_s: float) -> None:
        held = {entry.model for entry in self._queue}
        # Models that no worker serves are held for a moment, too, and never placed.
        self._rates = {model: rate for model, rate in self._rates.items() if model in held or rate.is_known}
        for model in held:
            self._rates[model].note_held(passed_s)
        self._outlook = look_ahead(self._queue.order(), self._rates)

    async def _send_positions(self) -> None:
        positions = defaultdict[str, list[tuple[str, int, int, float]]](list)
        for number, (key, turn_s) in enumerate(self._outlook.turns_s.items()):
            if (request := self._requests.get(key)) is not None:
                positions[request.place.gateway].append((*key, number, turn_s))
        for gateway, held in positions.items():
            for start in range(0, len(held), POSITIONS_MAX):
                part = tuple(held[start : start + POSITIONS_MAX])
                await self._tell(gateway, QueuePositions(scheduler=self._name, positions=part))

    async def _release(self, key: Key, *, placement: Placement | None = None, error: BatonError | None = None) -> None:
        """Tell the gateway what became of a request that is no longer in the queue."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        if error is not None:
            self._placer.results[error.code] += 1
            held_s = self._clock.now_s() - request.since_s
            self._placer.recorder.note(request.place, Verdict.REFUSED, error=error, held_s=held_s)
        report = ErrorReport.of(error) if error else None
        released = Released(request=key[0], attempt=key[1], placement=placement, error=report)
        await self._tell(request.place.gateway, released)

    async def _tell(self, gateway: str, message: QueuePositions | Released) -> None:
        try:
            await self._bus.publish(subjects.gateway(gateway), message)
        except BatonError as error:
            logger.warning("gateway %s could not be told, it will ask again: %s", gateway, error)
