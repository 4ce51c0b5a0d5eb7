"""Search for workers that take an answer, over all its attempts: whom to leave out, when to ask again, when to stop.

The attempt machine asks a scheduler for each `SendPlace`, and tells the search what the scheduler answered and how the
attempt ended. A scheduler may hold the request until a worker has room; it then repeats the request's position, and
is asked again if it falls silent. No clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from baton.errors import (
    BatonError,
    InvalidRequest,
    ModelNotFound,
    NoWorkers,
    Overloaded,
    RequestStopped,
    RetriesLimited,
    Unavailable,
)
from baton_gateway import attempt_events as ev
from baton_gateway.attempt_events import AttemptTimers
from baton_gateway.failures import Asking, asking
from baton_gateway.retry_budget import RetryBudget
from baton_gateway.suspects import Suspects, Verdict, Worker

HELD_SILENCE_S = 1.0
"""Silence about a held request after which another scheduler is asked: four messages about positions."""
PAUSE_DOUBLINGS_MAX = 3
"""Bound on the back-off before failed workers are tried again."""
RETRY_AFTER_S_MIN = 1.0
RESEND_DOUBLINGS_MAX = 2
"""Bound on the back-off between two questions to schedulers while none can place the request."""
RETRY_WAIT_S = 0.1
"""Time after which a retry that was not allowed is considered again."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Limits of retries that all answers of a gateway share."""

    budget: RetryBudget = field(default_factory=RetryBudget)
    suspects: Suspects = field(default_factory=Suspects)


class Search:
    """Search of one answer (see the module docstring)."""

    def __init__(self, request: str, timers: AttemptTimers, retries: Retries) -> None:
        self._request = request
        self._timers = timers
        self._retries = retries
        self.failures = 0
        """Failed attempts so far."""
        self.refusals: dict[str, BatonError] = {}
        """Refusals by worker. One becomes the answer once all kinds of engines have refused."""
        self.ends_at_s = inf
        """End of the present search, including waits for the bus, schedulers and free workers."""
        self.until_s = inf
        """Time of the next step, if no scheduler says anything."""
        self.asked = 0
        """Questions about the present attempt; each may be held by another scheduler."""
        self._tries = 0
        self._pauses = 0
        self._turn_s = 0.0
        self._reason: BatonError | None = None
        """Latest reason for having no placement."""
        self._retry_begun: bool | None = None
        """Set while a retry is not allowed yet: whether the answer has begun."""
        self.is_suspected = False
        """Whether the request may have ended a worker."""
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

    def retry(self, now_s: float, attempt: int, *, begun: bool) -> ev.SendPlace | ev.Fail | None:
        """Ask for a placement after a failed attempt, as soon as that is allowed; None: wait until `until_s`.

        `begun`: a part of the answer has been delivered.
        """
        self._retry_begun = begun
        verdict = Verdict.FREE
        if self.is_suspected:
            verdict, workers = self._retries.suspects.judge(self._request, now_s)
            if verdict is Verdict.STOP:
                lost = ", ".join(workers)
                return ev.Fail(RequestStopped(f"workers were lost just after they began this request: {lost}"))
        if verdict is Verdict.FREE and self._retries.budget.take(now_s, begun=begun):
            self._retry_begun = None
            return self.ask(now_s, attempt)
        if now_s >= self.ends_at_s:
            return ev.Fail(RetriesLimited("an attempt failed, and too many others do", retry_after_s=1.0))
        self.until_s = min(now_s + RETRY_WAIT_S, self.ends_at_s)
        return None

    def ask_again(self, now_s: float, attempt: int) -> ev.SendPlace | ev.Fail | None:
        """Ask again after `until_s`, or give up; None: wait on."""
        if self._retry_begun is not None:
            return self.retry(now_s, attempt, begun=self._retry_begun)
        is_held = isinstance(self._reason, Overloaded)
        if now_s >= self.ends_at_s and (is_held or self._tries > self._timers.place_resends_max):
            return ev.Fail(self._reason or Unavailable("no scheduler answered", retry_after_s=1.0))
        return self._try(now_s, attempt)

    def overloaded(self, detail: str) -> Overloaded:
        """Return a refusal that says when the request's turn would come, as a scheduler predicts."""
        return Overloaded(detail, retry_after_s=max(RETRY_AFTER_S_MIN, self._turn_s))

    def note_held(self, now_s: float, position: int | None, turn_s: float) -> None:
        """Wait: a scheduler holds the request until a worker has room."""
        self._tries = 0
        self._unavailable.clear()
        before = "" if position is None else f"; {position} requests were before this one"
        self._turn_s = turn_s
        self._reason = self.overloaded(f"no worker became free in time{before}")
        self.until_s = min(now_s + HELD_SILENCE_S, self.ends_at_s)

    def note_refusal(self, now_s: float, error: BatonError, *, begun: bool) -> ev.Fail | None:
        """Return the next step after a scheduler or the bus gave `error`; None: wait until `until_s`.

        `begun`: the client has a part of the answer, so the queue of a scheduler that is full does not end it.
        """
        match asking(error, begun=begun, excludes=bool(self._failed or self._cut_pairs)):
            case Asking.LIFT:
                self._pause(now_s)
            case Asking.WAIT:
                # The gateway knows the model, so its workers, the bus or the scheduler have just restarted. The request
                # waits for them: a restart should cost no request.
                unknown = isinstance(error, ModelNotFound)
                self._reason = NoWorkers(error.detail, retry_after_s=1.0) if unknown else error
            case _:
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

    def note_unavailable(self, workers: tuple[str, ...]) -> None:
        """Note that workers have no room, or do not listen. They have not failed: they may be full, or restarting."""
        self._unavailable.update(dict.fromkeys(workers))

    def note_refused(self, error: BatonError, workers: tuple[str, ...]) -> None:
        """Note that a worker's engine does not take the request."""
        self.refusals.update(dict.fromkeys(workers, error))

    def note_failed(self, workers: tuple[str, ...]) -> None:
        """Note a failed attempt."""
        self.failures += 1
        self._failed.update(dict.fromkeys(workers))

    def cut_pair(self, pair: tuple[str, str]) -> None:
        """Exclude a prefill and a decode worker of which neither is at fault: each may serve with another peer."""
        self._cut_pairs[pair] = None

    # ------------------------------------------------------------ suspicion

    def note_suspect(self, worker: Worker, now_s: float) -> None:
        """Note that an attempt that had just begun on this worker failed: see `Suspects`."""
        self.is_suspected = True
        self._retries.suspects.note_failed(self._request, worker, now_s)

    def clear(self) -> None:
        """Drop all suspicion: an attempt gives tokens, or the answer ends."""
        if self.is_suspected:
            self.is_suspected = False
            self._retries.suspects.clear(self._request)
