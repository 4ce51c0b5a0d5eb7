"""Circuit breakers of workers and of pairs. Pure; time and random numbers are passed in.

               failures, no progress                  back-off is over
    closed ──────────────────────────▶ open ───────────────────────────▶ half-open ──one request at a time──┐
      ▲                                 ▲ the next failure, or no progress: twice the back-off              │
      └── tokens of a worker, ──────────┴───────────────────────────────────────────────────────────────────┘
          no failure of a pair

All schedulers hear the same heartbeats, `Fault`s and `Placed`, and so keep about the same breakers. A breaker takes its
worker out of placement as long as another worker can take the request.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from enum import StrEnum
from itertools import product
from math import inf
from typing import Final

from baton.messages.attempts import Fault
from baton.messages.placement import Placed
from baton.messages.workers import Heartbeat
from baton.node.membership import MEMBERS_MAX
from baton.node.ports import Randomness
from baton.node.progress import Progress

STUCK_S: Final = 5.0
"""Least time without progress after which a worker is taken out."""
WORKER_FAILURES: Final = 3
PAIR_FAILURES: Final = 2
WINDOW_S: Final = 30.0
"""Time within which so many failures open a breaker."""
RESTARTS: Final = 3
RESTARTS_WINDOW_S: Final = 600.0
"""Time within which so many restarts open a worker's breaker."""
OPEN_S: Final = 2.0
"""First back-off; each further one is twice as long."""
OPEN_S_MAX: Final = 60.0
JITTER: Final = 0.25
"""Share by which a back-off varies, so that schedulers do not all try a worker at the same moment."""
TRIAL_S: Final = 10.0
"""Time for the one request to show progress, or a pair's to fail."""
FORGET_S: Final = 120.0
"""Time since the last opening after which the back-off begins anew, and since its last heartbeat after which a worker
is forgotten."""
PAIRS_MAX: Final = 64
"""Pairs that are remembered, the newest: each one that is passed over makes decisions slower."""


class Cause(StrEnum):
    """Why a breaker is not closed."""

    FAILURES = "failures"
    NO_PROGRESS = "no_progress"
    RESTARTS = "restarts"

    @property
    def text(self) -> str:
        return self.replace("_", " ")


class Breaker:
    """Breaker of one worker or pair, closed at first."""

    def __init__(self, failures: int) -> None:
        self.cause: Cause | None = None
        """Why it is open; None: it is closed."""
        self._failures = deque[tuple[str, float, int]](maxlen=failures)
        """The newest failures: request, instant, and how many attempts had ended well by then."""
        self._level = 0
        self._opened_s = -inf
        self._open_until_s = -inf
        self._trial_until_s = inf

    @property
    def has_trial(self) -> bool:
        """Whether the one request that tries it is under way."""
        return self._trial_until_s < inf

    def is_half_open(self, now_s: float) -> bool:
        return self.cause is not None and now_s >= self._open_until_s

    def passes(self, now_s: float) -> bool:
        """Return whether a request may be placed now."""
        return not self.cause or (self.is_half_open(now_s) and not self.has_trial)

    def is_overdue(self, now_s: float) -> bool:
        """Return whether the time of the one request is over."""
        return now_s >= self._trial_until_s

    def fail(self, request: str, now_s: float, completed: int) -> bool:
        """Count a failure; return whether it is to be opened. `completed`: attempts that ended well so far."""
        if self.cause:
            # Requests that were placed before fail late; only the one that tries it counts.
            return self.has_trial
        if any(request == failed for failed, _, _ in self._failures):
            return False  # It may be the request's own fault.
        self._failures.append((request, now_s, completed))
        _, began_s, completed_before = self._failures[0]
        many = len(self._failures) == self._failures.maxlen and now_s - began_s <= WINDOW_S
        return many and completed - completed_before <= len(self._failures)

    def open(self, cause: Cause, now_s: float, random: Randomness) -> None:
        """Open for a back-off, twice as long as the last one if that was lately."""
        self._level = self._level + 1 if now_s - self._opened_s < FORGET_S else 0
        self.cause, self._opened_s = cause, now_s
        back_off_s = min(OPEN_S * 2.0 ** min(self._level, 16), OPEN_S_MAX)
        self._open_until_s = now_s + back_off_s * random.uniform(1 - JITTER, 1 + JITTER)
        self._trial_until_s = inf

    def place(self, now_s: float) -> None:
        """Count a placement: the first one after the back-off tries the worker or pair."""
        if self.cause and self.passes(now_s):
            self._trial_until_s = now_s + TRIAL_S

    def end_trial(self) -> None:
        """Let another request try it."""
        self._trial_until_s = inf

    def close(self) -> None:
        self.cause = None
        self._failures.clear()
        self._trial_until_s = inf


class _Worker:
    """What is known of one worker."""

    def __init__(self, beat: Heartbeat, now_s: float) -> None:
        self.breaker = Breaker(WORKER_FAILURES)
        self._restarts = deque[float](maxlen=RESTARTS)
        self.hear_first(beat, now_s)

    def hear_first(self, beat: Heartbeat, now_s: float) -> None:
        """Take the first heartbeat of a generation."""
        self.progress = Progress(beat, now_s, floor_s=STUCK_S)
        self.beat, self.heard_s = beat, now_s

    def note_restart(self, now_s: float) -> bool:
        """Count a restart of a worker that had not drained; return whether there are too many."""
        self._restarts.append(now_s)
        return len(self._restarts) == RESTARTS and now_s - self._restarts[0] <= RESTARTS_WINDOW_S


Pair = tuple[str, str]
"""Prefill and decode worker."""


class Breakers:
    """Breakers of all workers and pairs, as one scheduler sees them."""

    def __init__(self, random: Randomness) -> None:
        self._random = random
        self._workers: OrderedDict[str, _Worker] = OrderedDict()
        """Workers by name, those last heard from last."""
        self._pairs: OrderedDict[Pair, Breaker] = OrderedDict()
        self._open: dict[str | Pair, Breaker] = {}
        """Breakers that are not closed: few, and all that decisions look at."""
        self.opened = Counter[Cause]()
        """Number of times that breakers were opened, by cause."""

    # ------------------------------------------------------------ reading

    def avoided(self, now_s: float) -> dict[str | Pair, Cause]:
        """Return the workers and pairs that take no request now, and why."""
        return {key: each.cause for key, each in self._open.items() if each.cause and not each.passes(now_s)}

    def counts(self, now_s: float) -> dict[tuple[str, str], int]:
        """Return the number of breakers that are not closed, by kind and state."""
        counts: dict[tuple[str, str], int] = {}
        for kind, state in product(("worker", "pair"), ("open", "half_open")):
            counts[kind, state] = 0
        for key, breaker in self._open.items():
            kind = "worker" if isinstance(key, str) else "pair"
            counts[kind, "half_open" if breaker.is_half_open(now_s) else "open"] += 1
        return counts

    # ------------------------------------------------------------ changes

    def hear(self, beat: Heartbeat, now_s: float) -> None:
        """Take a heartbeat of a live generation."""
        name, worker = beat.address.worker, self._workers.get(beat.address.worker)
        if worker is None:
            self._workers[name] = _Worker(beat, now_s)
            if len(self._workers) > MEMBERS_MAX:
                gone, _ = self._workers.popitem(last=False)
                self._open.pop(gone, None)
            return
        self._workers.move_to_end(name)
        before = worker.beat
        if beat.address.generation != before.address.generation:
            worker.hear_first(beat, now_s)
            worker.breaker.close()
            self._note(name, worker.breaker)
            if not before.draining and worker.note_restart(now_s):
                self._trip(name, worker.breaker, Cause.RESTARTS, now_s)
            return
        worker.beat, worker.heard_s = beat, now_s
        breaker = worker.breaker
        if worker.progress.hear(beat, now_s):
            if breaker.cause is Cause.NO_PROGRESS or breaker.has_trial:
                breaker.close()
                self._note(name, breaker)
        elif worker.progress.is_stuck and not breaker.cause:
            self._trip(name, breaker, Cause.NO_PROGRESS, now_s)

    def note_fault(self, fault: Fault, now_s: float) -> None:
        """Count a failure of workers or of a pair; those that are not known are ignored."""
        for address in fault.workers:
            worker = self._workers.get(address.worker)
            if worker is not None and worker.progress.generation == address.generation:
                self._fail(address.worker, worker.breaker, fault.request, now_s, worker.beat.completed)
        if fault.pair is not None and all(name in self._workers for name in fault.pair):
            breaker = self._pairs.setdefault(fault.pair, Breaker(PAIR_FAILURES))
            self._fail(fault.pair, breaker, fault.request, now_s, 0)
            if len(self._pairs) > PAIRS_MAX:
                gone, _ = self._pairs.popitem(last=False)
                self._open.pop(gone, None)

    def note_placed(self, placed: Placed, now_s: float) -> None:
        """Take a placement, of this scheduler or another: it may be the one request that tries a worker or a pair."""
        if self._open and placed.predicted is not None:
            decode, prefill = placed.predicted.decode, placed.predicted.prefill
            for key in (decode, prefill, (prefill, decode)):
                if key in self._open:
                    self._open[key].place(now_s)

    def tick(self, now_s: float) -> None:
        """End what is overdue; call it several times a second."""
        for key, breaker in list(self._open.items()):
            if isinstance(key, str) and now_s - self._workers[key].heard_s > FORGET_S:
                del self._workers[key], self._open[key]
            elif breaker.is_overdue(now_s):
                if not isinstance(key, str):
                    breaker.close()
                    self._note(key, breaker)
                elif breaker.cause and self._workers[key].beat.computing:
                    self._trip(key, breaker, breaker.cause, now_s)
                else:
                    # The request never came to the worker, or was cancelled.
                    breaker.end_trial()

    def _fail(self, key: str | Pair, breaker: Breaker, request: str, now_s: float, completed: int) -> None:
        if breaker.fail(request, now_s, completed):
            self._trip(key, breaker, Cause.FAILURES, now_s)

    def _trip(self, key: str | Pair, breaker: Breaker, cause: Cause, now_s: float) -> None:
        breaker.open(cause, now_s, self._random)
        self.opened[cause] += 1
        self._note(key, breaker)

    def _note(self, key: str | Pair, breaker: Breaker) -> None:
        if breaker.cause:
            self._open[key] = breaker
        else:
            self._open.pop(key, None)
