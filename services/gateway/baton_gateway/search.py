"""Search for workers that take an answer, over all its attempts: whom to leave out, when to ask again, when to stop.

The attempt machine asks a scheduler for each `SendPlace`, waits its turn for `JoinQueue`, and tells the search how its
tries ended. No clock, no I/O.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from baton.errors import BatonError, InvalidRequest, ModelNotFound, NoWorkers, Overloaded, Unavailable
from baton_gateway import attempt_events as ev
from baton_gateway.attempt_events import AttemptTimers

BUSY_ROUNDS_MAX = 3
"""Consecutive placements on a busy worker before the request waits in the queue."""
PAUSE_DOUBLINGS_MAX = 3
"""Bound on the back-off before failed workers are tried again."""
RESEND_DOUBLINGS_MAX = 2
"""Bound on the back-off between two questions to schedulers while none can place the request."""


Exclusion = Literal["failed", "busy", "unreached"]
"""Why a worker is not asked for; `unreached`: it had no responder on the bus."""


class Search:
    """Search of one answer (see the module docstring)."""

    def __init__(self, timers: AttemptTimers) -> None:
        self._timers = timers
        self.failures = 0
        """Failed attempts so far."""
        self.refusals: dict[str, InvalidRequest] = {}
        """Refusals by worker. One becomes the answer once all kinds of engines have refused."""
        self.ends_at_s = inf
        """End of the present search, including waits for the bus, schedulers and free workers."""
        self.until_s = inf
        """Time of the next step, while neither a placement nor a turn comes."""
        self._tries = 0
        self._pauses = 0
        self._busy_rounds = 0
        self._reason: BatonError | None = None
        """Latest reason for having no placement."""
        self._excluded: dict[str, Exclusion] = {}
        self._cut_pairs: dict[tuple[str, str], None] = {}

    # ------------------------------------------------------------ asking

    def limit(self, now_s: float, patience_s: float) -> None:
        """Bound the search; one that goes on keeps its earlier end."""
        self.ends_at_s = min(self.ends_at_s, now_s + patience_s)

    def ask(self, now_s: float, attempt: int) -> ev.SendPlace:
        """Ask for a placement, as the first of several tries."""
        self._tries = 0
        self._reason = None
        return self._try(now_s, attempt)

    def _try(self, now_s: float, attempt: int) -> ev.SendPlace:
        self._tries += 1
        # The first tries look for another scheduler. Later ones wait, with many other requests, for a scheduler or for
        # workers to return, so they back off.
        doublings = max(0, self._tries - self._timers.place_resends_max)
        self.until_s = now_s + self._timers.place_resend_s * 2 ** min(doublings, RESEND_DOUBLINGS_MAX)
        return self.request(attempt)

    def request(self, attempt: int, *leaving: str) -> ev.SendPlace:
        """Return a question that leaves out `leaving` and all workers that are excluded now."""
        return ev.SendPlace(attempt, (*self._excluded, *leaving), tuple(self._cut_pairs), tuple(self.refusals))

    def ask_again(self, now_s: float, attempt: int) -> ev.SendPlace | ev.Fail:
        """Ask again after `until_s`, or give up."""
        if self._tries > self._timers.place_resends_max and now_s >= self.ends_at_s:
            return ev.Fail(self._reason or Unavailable("no scheduler answered", retry_after_s=1.0))
        return self._try(now_s, attempt)

    def note_refusal(self, now_s: float, error: BatonError) -> ev.JoinQueue | ev.Fail | None:
        """Return the next step after a scheduler or the bus gave `error`; None: wait until `until_s`."""
        reasons = set(self._excluded.values())
        if isinstance(error, Overloaded) or (isinstance(error, NoWorkers) and "busy" in reasons):
            return self.join_queue(now_s, error)
        if isinstance(error, NoWorkers) and (reasons or self._cut_pairs):
            self._pause(now_s)
        elif isinstance(error, Unavailable | ModelNotFound):
            # The gateway knows the model, so its workers, the bus or the scheduler have just restarted. The request
            # waits for them: a restart should cost no request.
            self._reason = NoWorkers(error.detail, retry_after_s=1.0) if isinstance(error, ModelNotFound) else error
        else:
            # All have refused: a worker's error says more than the scheduler's.
            first = next(iter(self.refusals.values()), error)
            return ev.Fail(first if isinstance(error, InvalidRequest) else error)
        return None

    def _pause(self, now_s: float) -> None:
        """Back off before the next try: all remaining workers have just failed.

        Exclusions are preferences: a worker that failed once is better than no answer.
        """
        self._excluded.clear()
        self._cut_pairs.clear()
        self._tries = 0
        self._reason = None
        doublings = min(self.failures + self._pauses, PAUSE_DOUBLINGS_MAX)
        self.until_s = now_s + self._timers.retry_pause_s * 2**doublings
        self._pauses += 1

    # ------------------------------------------------------------ the queue

    def join_queue(self, now_s: float, error: BatonError) -> ev.JoinQueue | ev.Fail:
        """Wait for a turn until the end of the search, because of `error`."""
        self._reason = error
        self._drop("busy", "unreached")
        self._busy_rounds = 0
        if now_s >= self.ends_at_s:
            return self.no_turn()
        self.until_s = self.ends_at_s
        return ev.JoinQueue()

    def no_turn(self) -> ev.Fail:
        """Give up in the queue."""
        retry_after_s = (self._reason and self._reason.retry_after_s) or 1.0
        return ev.Fail(Overloaded(f"no worker became free in time: {self._reason}", retry_after_s=retry_after_s))

    # ------------------------------------------------------------ how attempts ended

    def note_accepted(self) -> None:
        """End the present search; if the attempt fails, a new one begins."""
        self.ends_at_s = inf
        self._busy_rounds = 0
        self._drop("unreached")
        self._pauses = 0

    def note_busy(self, worker: str) -> bool:
        """Exclude a busy worker; return whether it is time to wait in the queue."""
        self._excluded[worker] = "busy"
        self._busy_rounds += 1
        return self._busy_rounds >= BUSY_ROUNDS_MAX

    def note_unreached(self, worker: str) -> None:
        """Exclude a worker that does not listen. This is no failure of the worker: it may be restarting."""
        self._excluded[worker] = "unreached"

    def note_failed(self, error: BatonError, workers: tuple[str, ...]) -> None:
        """Note a failed attempt, or that a worker's engine does not take the request."""
        if isinstance(error, InvalidRequest):
            self.refusals.update(dict.fromkeys(workers, error))
        else:
            self.failures += 1
            self._excluded.update(dict.fromkeys(workers, "failed"))

    def cut_pair(self, prefill: str, decode: str) -> None:
        """Exclude a pair of which neither worker is at fault: each may serve with another peer."""
        self._cut_pairs[prefill, decode] = None

    def _drop(self, *reasons: Exclusion) -> None:
        self._excluded = {worker: why for worker, why in self._excluded.items() if why not in reasons}
