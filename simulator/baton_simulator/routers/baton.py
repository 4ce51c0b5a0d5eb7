"""Baton's own placement as a router: `choose`, `Loads`, the policies, the queue and the workers' rates, unchanged.

What is modelled here is the rest of Baton: one scheduler, which judges held requests at fixed times, and the index with
its lag; the workers' ledgers are in `ledgers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from random import Random
from typing import Final

from baton_scheduler.admission import Objectives
from baton_scheduler.loads import Loads, LoadsOptions
from baton_scheduler.placement import PlacementOptions, choose, soft_placements
from baton_scheduler.policies import POLICIES, PolicyName
from baton_scheduler.prediction import Demand, PrefixMatch
from baton_scheduler.queue import Entry, Queue
from baton_scheduler.recorder import ObservedPolicy

from baton.errors import BatonError, Overloaded
from baton.messages.base import Context
from baton.messages.index import Tier
from baton.messages.placement import PRIORITY_NEW, Candidate, Disaggregation, Placed, Placement
from baton_simulator.goals import GOAL_TTFT_S
from baton_simulator.routers.ledgers import LEASED_SHARE_MAX, MODEL, Attempt, Ledgers
from baton_simulator.routers.prefix_index import PrefixIndex
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec, WorkerState

JUDGE_S: Final = 0.1
"""Interval at which held requests are judged. Schedulers judge more often, as far as their time allows."""
JUDGED: Final = 16
"""Requests judged each time, in the queue's order."""
SESSION_BLOCKS: Final = 2
"""Blocks at its beginning that tell a conversation from others, where the trace has no sessions."""


@dataclass(frozen=True, slots=True)
class BatonOptions:
    """Settings of the scheduler and the gateway, with their defaults."""

    disaggregation: Disaggregation
    policy: PolicyName = PolicyName.PREDICTED
    index_lag_s: float = 0.05
    place_wait_s_max: float = 0.5
    """What can begin within this predicted time waits at its worker."""
    worker_wait_s_max: float = 2.0
    """Longest wait there."""
    hold_s: float = 10.0
    """Longest time in the scheduler's queue."""
    objectives: Objectives = field(default_factory=Objectives)
    """Objectives by which requests are admitted."""
    held_max: int = 4096
    age_s: float = 5.0
    output_headroom_tokens: int = PlacementOptions().output_headroom_tokens


class BatonRouter:
    def __init__(self, workers: Sequence[WorkerSpec], options: BatonOptions, random: Random) -> None:
        self._options = options
        self._placement = PlacementOptions(
            output_headroom_tokens=options.output_headroom_tokens, loans=any(spec.lends for spec in workers)
        )
        self._random = random
        self._policy = ObservedPolicy(POLICIES[options.policy]())
        self._loads = Loads(LoadsOptions(leased_share_max=LEASED_SHARE_MAX))
        self._index = PrefixIndex([spec.name for spec in workers], options.index_lag_s)
        self._ledgers = Ledgers(workers)
        self._placed: dict[str, tuple[Arrival, Candidate, float]] = {}
        """Request → what was predicted and when."""
        self._queue = Queue(entries_max=options.held_max, age_s=options.age_s)
        self._held: dict[str, Arrival] = {}
        self._displaced: list[Arrival] = []
        """Requests that had to leave a full queue."""
        self._started: list[Attempt] = []
        """Attempts that waited at their workers and start now."""
        self._judge_at_s = inf
        for spec in workers:
            self.beat(WorkerState(spec.name, spec.role, 0, 0, 0, 0, spec.kv_blocks_total, 0), 0.0)

    # ------------------------------------------------------------ routing

    @property
    def wake_at_s(self) -> float:
        return -inf if self._started else self._judge_at_s

    def route(self, arrival: Arrival, now_s: float) -> Route | None:
        if not self._held:
            self._queue.tick(now_s)
        placement = self._choose(arrival, now_s)
        if self._begins_soon(arrival, placement) and not self._queue.is_behind_others(arrival.tenant, PRIORITY_NEW):
            self._queue.charge(arrival.tenant, _tokens(arrival, self._options), arrival.weight)
            return self._commit(arrival, placement, now_s)
        self._hold(arrival, placement.predicted, now_s)
        return None

    def wake(self, now_s: float) -> list[tuple[Arrival, Route | BatonError]]:
        answers: list[tuple[Arrival, Route | BatonError]] = []
        if now_s >= self._judge_at_s:
            answers += self._judge(now_s)
        started, self._started = self._started, []
        for attempt in started:
            arrival, predicted, placed_s = self._placed[attempt.request]
            answers.append((arrival, self._route(predicted, placed_s)))
        return answers

    def _begins_soon(self, arrival: Arrival, placement: Placement) -> bool:
        """Return what `Holding` does for this placement, the last one that was chosen."""
        options, predicted, question = self._options, placement.predicted, self._policy.question
        room = self._queue.room_to_leave(arrival.tenant)
        free = question.free_share(predicted) if room and question else 1.0
        idle = bool(room and question and question.is_idle(predicted))
        return options.objectives.begins_soon(predicted, options.place_wait_s_max, room=room, free=free, idle=idle)

    def _choose(self, arrival: Arrival, now_s: float) -> Placement:
        options = self._options
        demand = Demand(
            model=MODEL,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens_max=arrival.output_tokens_max,
            disaggregation=options.disaggregation,
            session=arrival.session or str(arrival.blocks[:SESSION_BLOCKS][-1:]),
        )
        match: PrefixMatch = self._index.match(arrival.blocks, now_s)
        serving = self._loads.serving(MODEL, now_s)
        return choose(demand, serving, match, self._policy, self._placement, self._random, now_s)

    def _commit(self, arrival: Arrival, placement: Placement, now_s: float) -> Route | None:
        """Count a placement where schedulers, indexes and ledgers do; return None if it waits at its workers."""
        options, predicted = self._options, placement.predicted
        placed = Placed(
            context=Context(request=arrival.id, budget_s=options.hold_s),
            model_digest=MODEL,
            blocks=b"",
            workers=tuple(placement.addresses),
            prompt_tokens=arrival.prompt_tokens,
            output_tokens_max=arrival.output_tokens_max,
            predicted=predicted,
        )
        soft = soft_placements(placed, self._loads, now_s=now_s, options=self._placement)
        self._loads.place(arrival.id, soft)
        self._placed[arrival.id] = arrival, predicted, now_s
        for address in placement.addresses:
            self._index.speculate(address.worker, arrival.blocks)
        attempt = Attempt(
            request=arrival.id,
            blocks=arrival.blocks,
            decode=predicted.decode,
            prefill=predicted.prefill,
            prompt_tokens=arrival.prompt_tokens,
            uncached_tokens=arrival.prompt_tokens - predicted.cached_tokens,
            output_tokens=min(arrival.output_tokens_max, options.output_headroom_tokens),
            until_s=now_s + options.worker_wait_s_max,
        )
        if self._ledgers.place(attempt):
            return self._route(predicted, now_s)
        self._judge_at_s = min(self._judge_at_s, now_s + JUDGE_S)
        return None

    def _route(self, predicted: Candidate, placed_s: float) -> Route:
        loan_s = 0.0
        if predicted.lender:
            reach = predicted.cached_tokens + predicted.borrowed_tokens
            loan_s = self._ledgers.prefill_s(predicted.prefill or predicted.decode, predicted.borrowed_tokens, reach)
        return Route(
            predicted.decode,
            predicted.prefill or None,
            predicted.predicted_ttft_s,
            placed_s,
            lender=predicted.lender,
            loan_s=loan_s,
        )

    def _hold(self, arrival: Arrival, predicted: Candidate, now_s: float) -> None:
        """Queue a request. Raises Overloaded if the queue is full."""
        options = self._options
        entry = Entry(
            key=(arrival.id, 0),
            tenant=arrival.tenant,
            weight=arrival.weight,
            model=MODEL,
            priority=PRIORITY_NEW,
            due_s=now_s + GOAL_TTFT_S - (predicted.predicted_ttft_s - predicted.waiting_s),
            tokens=_tokens(arrival, options),
            since_s=now_s,
            until_s=now_s + options.objectives.hold_s_max(options.hold_s, options.objectives.ttft_s),
        )
        displaced = self._queue.add(entry)
        if displaced is entry:
            raise Overloaded("too many requests wait for a worker")
        if displaced is not None:
            self._displaced.append(self._held.pop(displaced.key[0]))
        self._held[arrival.id] = arrival
        self._judge_at_s = min(self._judge_at_s, now_s + JUDGE_S)

    def _judge(self, now_s: float) -> list[tuple[Arrival, Route | BatonError]]:
        late = [entry.key for entry in self._queue.tick(now_s)]
        refused = [*self._displaced, *(self._held.pop(request) for request, _ in late)]
        self._displaced.clear()
        error = Overloaded("no worker became free in time")
        answers: list[tuple[Arrival, Route | BatonError]] = [(arrival, error) for arrival in refused]
        given_up, started = self._ledgers.end_late(now_s)
        self._started += started
        again = [self._forget(attempt, now_s) for attempt in given_up]
        waiting = [self._held[entry.key[0]] for entry in islice(self._queue.order(), JUDGED)]
        for arrival in (*again, *waiting):
            placement = self._choose(arrival, now_s)
            is_held = arrival.id in self._held
            if self._begins_soon(arrival, placement):
                if is_held:
                    self._queue.take((arrival.id, 0))
                    del self._held[arrival.id]
                if (route := self._commit(arrival, placement, now_s)) is not None:
                    answers.append((arrival, route))
            elif not is_held:
                self._hold(arrival, placement.predicted, now_s)
        self._judge_at_s = now_s + JUDGE_S if self._held or self._ledgers.is_any_waiting() else inf
        return answers

    def _forget(self, attempt: Attempt, now_s: float) -> Arrival:
        """Take back a placement that has waited at its workers for too long."""
        arrival, _, _ = self._placed.pop(attempt.request)
        self._loads.place(arrival.id, {})
        for worker in attempt.workers:
            self._index.settle(worker, arrival.blocks, now_s)
        return arrival

    # ------------------------------------------------------------ what happens on the workers

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        _, predicted, _ = self._placed[arrival.id]
        for worker in filter(None, (predicted.decode, predicted.prefill)):
            self._index.settle(worker, arrival.blocks, now_s)
        self._started += self._ledgers.prefilled(arrival.id)

    def ended(self, arrival: Arrival, now_s: float) -> None:
        del self._placed[arrival.id]
        self._started += self._ledgers.end(arrival.id)

    def cached(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        self._index.change(worker, stored, evicted, now_s)

    def pooled(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        self._index.change(worker, stored, evicted, now_s, Tier.POOL)

    def beat(self, state: WorkerState, now_s: float) -> None:
        self._loads.take(self._ledgers.beat(state, now_s), now_s)


def _tokens(arrival: Arrival, options: BatonOptions) -> int:
    """Return what a placement costs its tenant."""
    return arrival.prompt_tokens + min(arrival.output_tokens_max, options.output_headroom_tokens)
