"""Search for workers that take an answer, over all its attempts: whom to leave out, when to ask again, when to stop.

The attempt machine asks a scheduler for each `SendPlace`, and tells the search what the scheduler answered and how the
attempt ended. A scheduler may hold the request until a worker has room; it then repeats the request's position, and
is asked again if it falls silent. No clock, no I/O.
"""

from __future__ import annotations

from math import inf

from baton.errors import BatonError, InvalidRequest, ModelNotFound, NoWorkers, Overloaded, Unavailable
from baton_gateway import attempt_events as ev
from baton_gateway.attempt_events import AttemptTimers

HELD_SILENCE_S = 1.0
"""Silence about a held request after which another scheduler is asked: four messages about positions."""
PAUSE_DOUBLINGS_MAX = 3
"""Bound on the back-off before failed workers are tried again."""
RESEND_DOUBLINGS_MAX = 2
"""Bound on the back-off between two questions to schedulers while none can place the request."""


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
        """Time of the next step, if no scheduler says anything."""
        self.asked = 0
        """Questions about the present attempt; each may be held by another scheduler."""
        self._tries = 0
        self._pauses = 0
        self._reason: BatonError | None = None
        """Latest reason for having no placement."""
        self._failed: dict[str, None] = {}
        self._unavailable: dict[str, None] = {}
        """Workers that were busy or not reached in the present search."""
        self._cut_pairs: dict[tuple[str, str], None] = {}

    # ------------------------------------------------------------ asking

    def limit(self, now_s: float, patience_s: float) -> None:
        """Bound the search; one that goes on keeps its earlier end."""
        self.ends_at_s = min(self.ends_at_s, now_s + patience_s)

    def ask(self, now_s: float, attempt: int) -> ev.SendPlace:
        """Ask for a placement of a new attempt, as the first of several tries."""
        self.asked = self._tries = 0
        self._reason = None
        return self._try(now_s, attempt)

    def _try(self, now_s: float, attempt: int) -> ev.SendPlace:
        self.asked += 1
        self._tries += 1
        # The first tries look for another scheduler. Later ones wait, with many other requests, for a scheduler or for
        # workers to return, so they back off.
        doublings = max(0, self._tries - self._timers.place_resends_max)
        self.until_s = now_s + self._timers.place_resend_s * 2 ** min(doublings, RESEND_DOUBLINGS_MAX)
        return self.request(attempt)

    def request(self, attempt: int, *leaving: str) -> ev.SendPlace:
        """Return a question that leaves out `leaving` and all workers that failed."""
        return ev.SendPlace(
            attempt,
            exclude=(*self._failed, *leaving),
            exclude_pairs=tuple(self._cut_pairs),
            refused=tuple(self.refusals),
            unavailable=tuple(self._unavailable),
        )

    def ask_again(self, now_s: float, attempt: int) -> ev.SendPlace | ev.Fail:
        """Ask again after `until_s`, or give up."""
        is_held = isinstance(self._reason, Overloaded)
        if now_s >= self.ends_at_s and (is_held or self._tries > self._timers.place_resends_max):
            return ev.Fail(self._reason or Unavailable("no scheduler answered", retry_after_s=1.0))
        return self._try(now_s, attempt)

    def note_held(self, now_s: float, position: int | None) -> None:
        """Wait: a scheduler holds the request until a worker has room."""
        self._tries = 0
        self._unavailable.clear()
        before = "" if position is None else f"; {position} requests were before this one"
        self._reason = Overloaded(f"no worker became free in time{before}", retry_after_s=1.0)
        self.until_s = min(now_s + HELD_SILENCE_S, self.ends_at_s)

    def note_refusal(self, now_s: float, error: BatonError, *, begun: bool) -> ev.Fail | None:
        """Return the next step after a scheduler or the bus gave `error`; None: wait until `until_s`.

        `begun`: the client has a part of the answer, so the queue of a scheduler that is full does not end it.
        """
        if isinstance(error, NoWorkers) and (self._failed or self._cut_pairs):
            self._pause(now_s)
        elif isinstance(error, Unavailable | ModelNotFound) or (isinstance(error, Overloaded) and begun):
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
        self._failed.clear()
        self._cut_pairs.clear()
        self._tries = 0
        self._reason = None
        doublings = min(self.failures + self._pauses, PAUSE_DOUBLINGS_MAX)
        self.until_s = now_s + self._timers.retry_pause_s * 2**doublings
        self._pauses += 1

    # ------------------------------------------------------------ how attempts ended

    def note_accepted(self) -> None:
        """End the present search; if the attempt fails, a new one begins."""
        self.ends_at_s = inf
        self._unavailable.clear()
        self._pauses = 0

    def note_unavailable(self, worker: str) -> None:
        """Note that a worker has no room, or does not listen. It has not failed: it may be full, or restarting."""
        self._unavailable[worker] = None

    def note_failed(self, error: BatonError, workers: tuple[str, ...]) -> None:
        """Note a failed attempt, or that a worker's engine does not take the request."""
        if isinstance(error, InvalidRequest):
            self.refusals.update(dict.fromkeys(workers, error))
        else:
            self.failures += 1
            self._failed.update(dict.fromkeys(workers))

    def cut_pair(self, prefill: str, decode: str) -> None:
        """Exclude a pair of which neither worker is at fault: each may serve with another peer."""
        self._cut_pairs[prefill, decode] = None
