"""Loads of the live workers: their newest heartbeats, and what was placed on them since. Pure.

A placement counts as a soft placement until a heartbeat accounts for it: one that lists the attempt, or one
that comes late enough to list it and does not, because the attempt was refused or is over already. It also ends when
the request must have ended by its own prediction, and after `soft_s` at the latest. The worker's own ledger
decides in any case; soft placements only keep a burst between two heartbeats from piling up on one worker.

All that a decision reads of a worker is kept here and changed by heartbeats and placements, so that a decision computes
nothing that does not depend on its request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import median
from typing import Final

from baton.errors import MalformedMessage
from baton.messages.workers import Goodbye, Heartbeat, Role, StepFit
from baton.node.membership import LOST_AFTER_S, Event, Leaving, Workers
from baton_scheduler.pooling import pooled, typical
from baton_scheduler.team import Serving, Team, prefill_s
from baton_scheduler.worker_load import BANDWIDTH_GUESS, SoftPlacement, WorkerLoad

RATE_MIN: Final = 1e-30
RATE_MAX: Final = 1e30
"""Rates beyond these would make predictions infinite or no numbers."""


@dataclass(frozen=True, slots=True)
class LoadsOptions:
    lost_after_s: float = LOST_AFTER_S
    soft_s: float = 2.0
    listed_after_s: float = 0.25
    """Age of a placement from which on a heartbeat lists its attempt, if the worker has it."""
    leased_share_max: float = 0.4
    """Prefill workers lease out at most this share of their KV."""
    pool_s: float = 1.0
    """Interval at which what is typical of a kind is renewed."""


@dataclass(slots=True)
class _Kind:
    """Workers of one model, role and kind, and what is typical of them."""

    loads: dict[str, WorkerLoad] = field(default_factory=dict[str, WorkerLoad])
    due_s: float = -math.inf
    """Instant at which it is renewed."""
    steps: StepFit | None = None
    bandwidth: float = BANDWIDTH_GUESS
    promotion_bytes_per_s: float = 0.0
    """0: no worker has measured it."""


class Loads:
    def __init__(self, options: LoadsOptions) -> None:
        self._options = options
        self._workers = Workers(lost_after_s=options.lost_after_s)
        self._loads: dict[str, WorkerLoad] = {}
        self._serving: dict[str, Serving] = {}
        """Model → its live workers."""
        self._kinds: dict[tuple[str, Role, str], _Kind] = {}
        self._soft_ends: list[tuple[float, str, str, float]] = []
        """Heap of (end, worker, request, instant) of soft placements, those included that are gone."""
        self._placed: dict[str, tuple[str, ...]] = {}
        """Request → the workers with a soft placement of it."""

    # ------------------------------------------------------------ changes

    def take(self, message: Heartbeat | Goodbye, now_s: float) -> bool:
        """Take a worker's message; return whether its generation is live, otherwise it is ignored.

        Raises MalformedMessage for impossible figures.
        """
        load = self._loads.get(message.address.worker)
        # Idle workers say the same again and again.
        is_repeated = load is not None and message == load.heartbeat
        if isinstance(message, Heartbeat) and not is_repeated:
            _check(message)
        self._drop_ended(self._workers.take(message, now_s))
        is_live = self._workers.is_live(message.address.worker, message.address.generation)
        if isinstance(message, Heartbeat) and is_live:
            self._hear(message, now_s, is_repeated=is_repeated)
        return is_live

    def tick(self, now_s: float, pause_s: float = 0.0) -> None:
        """Drop lost workers; `pause_s` is how long this process could not receive."""
        self._workers.extend_deadlines(pause_s, now_s)
        self._drop_ended(self._workers.expire(now_s))
        self._end_due(now_s)

    def place(self, request: str, placed: Mapping[str, SoftPlacement]) -> None:
        """Count an attempt on the workers it was placed on, in place of the request's earlier attempts."""
        for worker in self._placed.get(request, ()):
            self._end_soft(worker, request)
        workers = tuple(worker for worker in placed if worker in self._loads)
        if workers:
            self._placed[request] = workers
        for worker in workers:
            load, each = self._loads[worker], placed[worker]
            load.place(request, each)
            self._team(load).place(load)
            heappush(self._soft_ends, (self._soft_end_s(each), worker, request, each.placed_s))

    # ------------------------------------------------------------ reading

    def prefill_s(self, worker: str, uncached_tokens: int, prompt_tokens: int) -> tuple[float, float]:
        """Return `team.prefill_s` of a worker; 0 for an unknown one."""
        load = self._loads.get(worker)
        return prefill_s(load, uncached_tokens, prompt_tokens) if load and uncached_tokens else (0.0, 0.0)

    def kv_tokens(self, worker: str, need_tokens: int, cached_tokens: int) -> int:
        """Return the tokens for which an attempt takes room on a worker: without those that it shares, as expected."""
        load = self._loads.get(worker)
        return need_tokens - int(cached_tokens * load.shared_share) if load else need_tokens

    def serving(self, model: str, now_s: float) -> Serving:
        """Return the live workers of a model, with their loads at `now_s`."""
        self._end_due(now_s)
        return self._serving.get(model, _NONE)

    def live(self, now_s: float) -> list[WorkerLoad]:
        """Return the loads of all live workers."""
        return [load for model in list(self._serving) for load in self.serving(model, now_s)]

    def served_lately(self, model: str) -> bool:
        """Return whether any worker, live or departed, served this model lately: it may come back."""
        return self._workers.newest(model) is not None

    # ------------------------------------------------------------ bookkeeping

    def _hear(self, beat: Heartbeat, now_s: float, *, is_repeated: bool) -> None:
        worker, group = beat.address.worker, _group(beat)
        load = self._loads.get(worker)
        if load is not None and _group(load.heartbeat) != group:
            self._drop(worker)
            load = None
        if load is None:
            load = self._loads[worker] = WorkerLoad(beat, now_s, leased_share_max=self._options.leased_share_max)
            self._serving.setdefault(beat.model, Serving()).teams[load.role].add(load)
            self._kinds.setdefault(group, _Kind()).loads[worker] = load
        if load.soft:
            listed = set(beat.attempts)
            for request, each in list(load.soft.items()):
                late = now_s >= min(each.until_s, each.placed_s + self._options.listed_after_s)
                if late or (request, each.attempt) in listed:
                    self._forget_soft(load, request)
        kind = self._kinds[group]
        self._pool(kind, now_s)
        if is_repeated and load.pooled_until_s == kind.due_s:
            load.hear_again(now_s)
        else:
            load.pooled_until_s = kind.due_s
            load.promotion_bytes_per_s = 0.0
            if (promotion := beat.promotion) is not None:
                own = promotion.bytes_per_s
                load.promotion_bytes_per_s = own if promotion.samples else kind.promotion_bytes_per_s or own
            load.steps = pooled(beat.steps, kind.steps)
            load.hear(beat, now_s, self._options.leased_share_max)
            load.bandwidth = load.own_bandwidth or kind.bandwidth
        self._team(load).update(load)

    def _pool(self, kind: _Kind, now_s: float) -> None:
        """Renew what is typical of a kind, now and then; workers take it over with their heartbeats."""
        if now_s < kind.due_s:
            return
        kind.due_s = now_s + self._options.pool_s
        kind.steps = typical([load.heartbeat.steps for load in kind.loads.values()])
        bandwidths = [each for load in kind.loads.values() for each in load.bandwidths.values()]
        kind.bandwidth = median(bandwidths) if bandwidths else BANDWIDTH_GUESS
        promotions = [load.heartbeat.promotion for load in kind.loads.values()]
        measured = [each.bytes_per_s for each in promotions if each is not None and each.samples]
        kind.promotion_bytes_per_s = median(measured) if measured else 0.0

    def _drop_ended(self, events: Sequence[Event]) -> None:
        for event in events:
            if not isinstance(event, Leaving):
                self._drop(event.member)

    def _drop(self, worker: str) -> None:
        load = self._loads.pop(worker, None)
        if load is None:
            return
        for request in list(load.soft):
            self._forget_soft(load, request)
        model, group = load.heartbeat.model, _group(load.heartbeat)
        self._team(load).remove(load)
        if not self._serving[model]:
            del self._serving[model]
        del self._kinds[group].loads[worker]
        if not self._kinds[group].loads:
            del self._kinds[group]

    def _end_due(self, now_s: float) -> None:
        """End the soft placements whose time is up."""
        while self._soft_ends and self._soft_ends[0][0] <= now_s:
            _, worker, request, placed_s = heappop(self._soft_ends)
            load = self._loads.get(worker)
            if load is not None and request in load.soft and load.soft[request].placed_s == placed_s:
                self._end_soft(worker, request)

    def _end_soft(self, worker: str, request: str) -> None:
        load = self._loads[worker]
        self._forget_soft(load, request)
        self._refresh(load)

    def _forget_soft(self, load: WorkerLoad, request: str) -> None:
        del load.soft[request]
        workers = tuple(each for each in self._placed[request] if each != load.worker)
        if workers:
            self._placed[request] = workers
        else:
            del self._placed[request]

    def _refresh(self, load: WorkerLoad) -> None:
        load.refresh()
        self._team(load).place(load)

    def _team(self, load: WorkerLoad) -> Team:
        return self._serving[load.heartbeat.model].teams[load.role]

    def _soft_end_s(self, each: SoftPlacement) -> float:
        return min(each.until_s, each.placed_s + self._options.soft_s)


_NONE: Final = Serving()


def _group(beat: Heartbeat) -> tuple[str, Role, str]:
    """Return model, role and kind. A worker without a kind is of its own."""
    return beat.model, beat.role, beat.engine_kind or beat.address.worker


def incompatible_pairs(loads: Sequence[WorkerLoad]) -> Counter[str]:
    """Return, by model, the pairs of a prefill and a decode worker that cannot hand over to each other."""
    prefills, decodes = (
        Counter((load.heartbeat.model, load.identity) for load in loads if load.role is role)
        for role in (Role.PREFILL, Role.DECODE)
    )
    pairs = Counter[str]()
    for (model, identity), count in prefills.items():
        unlike = (decodes[kind] for kind in decodes if kind[0] == model and kind[1] != identity)
        pairs[model] += count * sum(unlike)
    return pairs


def _check(heartbeat: Heartbeat) -> None:
    """Raise MalformedMessage for figures that no worker can have and predictions cannot use."""
    sizes = (
        heartbeat.block_tokens,
        heartbeat.engine_block_tokens,
        heartbeat.context_tokens_max,
        heartbeat.step_tokens_max,
    )
    counts = (
        heartbeat.running,
        heartbeat.waiting,
        heartbeat.overbooked,
        heartbeat.overbooked_kv_tokens,
        heartbeat.pulling,
        heartbeat.pulling_kv_blocks,
        heartbeat.kv_blocks_used,
        heartbeat.kv_blocks_total,
        heartbeat.kv_shared_share,
        1 - heartbeat.kv_shared_share,
        heartbeat.pool_tokens_free,
        heartbeat.prefill_tokens_queued,
        heartbeat.prefill_pairs_queued,
        heartbeat.prefill_elapsed_s,
        heartbeat.kv_bytes_per_token,
        heartbeat.computing,
        heartbeat.progress_tokens,
        heartbeat.completed,
        heartbeat.steps.samples,
        heartbeat.steps.spread,
        *[each.spread for each in heartbeat.transfers],
    )
    steps = heartbeat.steps
    rates = (
        steps.prompt_step_s,
        steps.prompt_token_s,
        steps.prompt_pair_s,
        steps.decode_step_s,
        steps.sequence_s,
        steps.kv_s,
        *[each.bytes_per_s for each in heartbeat.transfers],
        heartbeat.promotion.bytes_per_s if heartbeat.promotion else 1.0,
        heartbeat.loading.bytes_per_s if heartbeat.loading else 1.0,
    )
    # Whatever is no number must be found first: it is neither the least nor the most. It makes the sum none, too.
    possible = math.isfinite(sum(counts) + sum(rates)) and min(sizes) > 0 and min(counts) >= 0
    if not (possible and min(rates) > RATE_MIN and max(rates) < RATE_MAX):
        raise MalformedMessage(f"the heartbeat of {heartbeat.address.worker} has impossible figures")
