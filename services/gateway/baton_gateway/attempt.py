"""The attempts of one answer as a state machine: events in, actions out, no clock, no I/O.

    QUEUED ◀──── Overloaded, all busy ────┐
      │ turn                              │
      ▼                                   │
    PLACING ──Placement──▶ DISPATCHED ──both Accepted──▶ WAITING ──tokens──▶ STREAMING ──finish──▶ DONE
      ▲                        │ Busy, silence              │ lost, error       │
      └──── cancel both, attempt + 1, exclude ──────────────┴───────────────────┘   else FAILED, CANCELLED

An answer that would outlast its draining decode worker is moved: the machine asks for a placement while the attempt
runs on, and enters DISPATCHED once it has one. Without one, or if the answer cannot continue exactly, it stays.

One machine owns one answer over all its attempts. Frames are fenced by (worker, generation, attempt). The machine
requests missing frames again and drops duplicates, so every token is delivered once. An answer that cannot continue
exactly on another worker starts over, as long as its client has received no part of it.
The request's deadline limits the time to the first token; after that, the progress limit bounds each next token.
The driver calls `step` with each event, and with `Tick` at `wake_at_s`; every state has a deadline.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import assert_never

from baton.errors import (
    BatonError,
    BusUnavailable,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    LayoutMismatch,
    MalformedMessage,
    ModelMismatch,
    ModelNotFound,
    NoResponders,
    NotResumable,
    NoWorkers,
    Overloaded,
    PayloadTooLarge,
    PeerUnreachable,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from baton.messages.attempts import Finish, FinishReason, Frame, Sampling
from baton.messages.base import unpack_tokens
from baton.messages.placement import REFUSALS_MAX, Placement
from baton_gateway import attempt_events as ev
from baton_gateway.attempt_events import AttemptTimers
from baton_gateway.resumption import Moved, is_ended, obstacle, rest_of

ACCEPT_GROWTH = 3
"""Growth of `accept_s` per failure: the last of four attempts gives a slow worker on a busy machine 2.7 s."""
BUSY_ROUNDS_MAX = 3
"""Consecutive placements on a busy worker before the request waits in the queue."""
PAUSE_DOUBLINGS_MAX = 3
"""Bound on the back-off before failed workers are tried again."""
RESEND_DOUBLINGS_MAX = 2
"""Bound on the back-off between two questions to schedulers while none can place the request."""
MOVE_S = 1.0
"""Margin before a worker leaves: an answer that would end later than this is moved."""
TOKENS_PER_S_MIN = 0.1
"""Decode rate assumed for a worker that has not measured its own yet."""


class Phase(StrEnum):
    QUEUED = "queued"
    PLACING = "placing"
    DISPATCHED = "dispatched"
    WAITING = "waiting"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({Phase.DONE, Phase.FAILED, Phase.CANCELLED})
ON_WORKERS = frozenset({Phase.DISPATCHED, Phase.WAITING, Phase.STREAMING})


class AttemptMachine:
    """State machine of one answer (see the module docstring).

    `delivered` holds the output so far, over all attempts since the answer last started over.
    """

    def __init__(
        self,
        sampling: Sampling,
        timers: AttemptTimers,
        *,
        deadline_at_s: float,
        eos_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.phase = Phase.PLACING
        self.attempt = 0
        self.delivered: list[int] = []
        self.placement: Placement | None = None
        self.setback: BatonError | None = None
        """Error that ended the previous attempt."""
        self._shown = False
        self._sampling = sampling
        self._timers = timers
        self._eos_tokens = eos_tokens
        self._deadline_at_s = deadline_at_s
        """Deadline of the first token; infinite once that token has arrived."""
        self._phase_until_s = inf
        self._resend_at_s = inf
        self._move_again_at_s = -inf
        self._worker_by_s = inf
        """End of the present search for workers, including waits for the bus, schedulers and free workers."""
        self._attempt_start = 0
        self._awaited: set[str] = set()
        self._absences = 0
        self._places_sent = 0
        self._refusal: BatonError | None = None
        self._failures = 0
        self._busy_rounds = 0
        self._has_turn = True
        """Whether the admission queue lets this request try."""
        self._busy: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self._unreached: dict[str, None] = {}
        """Workers without a responder on the bus, in the present search."""
        self._pauses = 0
        self._cut_pairs: dict[tuple[str, str], None] = {}
        self._refused: dict[str, InvalidRequest] = {}
        """Refusals by worker. One becomes the answer once all kinds of engines have refused."""
        self._cached_tokens = 0
        self._actions: list[ev.Action] = []

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the present attempt's workers had cached, as far as reported."""
        return self._cached_tokens

    @property
    def accept_s(self) -> float:
        """Time for this attempt's workers to accept it; grows with each failure."""
        return self._timers.accept_s * ACCEPT_GROWTH**self._failures

    @property
    def wake_at_s(self) -> float:
        """Time at which the driver must call `step` with a Tick if no event comes earlier."""
        return min(self._deadline_at_s, self._phase_until_s, self._resend_at_s)

    def budget_s(self, now_s: float) -> float:
        """Return the time that workers have for the first token; once it has come, for the next one."""
        return self._token_s if self._deadline_at_s == inf else max(0.0, self._deadline_at_s - now_s)

    @property
    def _token_s(self) -> float:
        """Time for the first token of an accepted attempt; the progress limit if it continues an answer."""
        return self._timers.progress_s if self.delivered else self._timers.first_token_s

    def runs_on(self, worker: str) -> bool:
        """Return whether the present attempt was given to `worker`."""
        if self.phase not in ON_WORKERS or self.placement is None:
            return False
        prefill = self.placement.prefill
        return worker == self.placement.decode.worker or (prefill is not None and worker == prefill.worker)

    def start(self, now_s: float, *, queued: bool) -> list[ev.Action]:
        """Return the first actions. `queued`: enough other requests look for a worker, so join the queue."""
        if queued:
            self._join_queue(now_s, Overloaded("other requests are waiting for a worker"))
        else:
            self._place(now_s)
        return self._take_actions()

    def step(self, now_s: float, event: ev.Event) -> list[ev.Action]:
        """Return the actions for `event`. Events that are late or belong to another attempt change nothing."""
        if self.ended:
            return []
        match event:
            case ev.FrameArrived():
                self._on_frame(now_s, event)
            case ev.Tick():
                self._on_time(now_s)
            case ev.DigestArrived():
                self._on_digest(now_s, event)
            case ev.PromptComputed(attempt, cached_tokens):
                if attempt == self.attempt:
                    self._cached_tokens = max(self._cached_tokens, cached_tokens)
            case ev.WorkerGone():
                self._on_worker_gone(now_s, event)
            case ev.WorkerLeaving():
                self._on_worker_leaving(now_s, event)
            case ev.Shown():
                self._shown = True
            case ev.TextStopped():
                self._cancel_both("stop string")
                self._complete(FinishReason.STOP)
            case ev.Aborted(error):
                self._cancel_both(error.code)
                self._end(Phase.CANCELLED, ev.Fail(error))
            case ev.TurnCame():
                if self.phase is Phase.QUEUED:
                    self._has_turn = True
                    self._place(now_s)
            case ev.QueueFull():
                self._fail(Overloaded("too many requests are waiting for a worker", retry_after_s=1.0))
            case ev.PlaceGranted() | ev.PlaceRefused():
                if event.attempt == self.attempt and self.phase is Phase.PLACING:
                    self._on_place_answer(now_s, event)
                elif event.attempt == self.attempt + 1 and isinstance(event, ev.PlaceGranted):
                    self._move(now_s, event.placement)
            case ev.TaskAccepted() | ev.TaskBusy() | ev.TaskFailed():
                if event.attempt == self.attempt and event.worker in self._awaited:
                    self._on_task_answer(now_s, event)
            case _:
                assert_never(event)
        return self._take_actions()

    def _take_actions(self) -> list[ev.Action]:
        actions, self._actions = self._actions, []
        return actions

    # ------------------------------------------------------------ placing

    def _place(self, now_s: float) -> None:
        """Start a search for a placement, with the first of several tries."""
        self.phase = Phase.PLACING
        self.placement = None
        self._limit_search(now_s)
        self._places_sent = 0
        self._refusal = None
        self._resend_at_s = inf
        self._send_place(now_s)

    def _limit_search(self, now_s: float) -> None:
        """Bound the search for workers. An answer that has begun gets a longer search than a new request."""
        patience_s = self._timers.progress_s if self.delivered else self._timers.admission_wait_s
        self._worker_by_s = min(self._worker_by_s, now_s + patience_s)

    def _send_place(self, now_s: float) -> None:
        self._places_sent += 1
        # The first tries look for another scheduler. Later ones wait, with many other requests, for a scheduler or for
        # workers to return, so they back off.
        doublings = max(0, self._places_sent - self._timers.place_resends_max)
        self._phase_until_s = now_s + self._timers.place_resend_s * 2 ** min(doublings, RESEND_DOUBLINGS_MAX)
        self._actions.append(self._place_request(self.attempt))

    def _place_request(self, attempt: int, *leaving: str) -> ev.SendPlace:
        exclude = (*{**self._failed, **self._busy, **self._unreached}, *leaving)
        return ev.SendPlace(attempt, exclude, tuple(self._cut_pairs), tuple(self._refused))

    def _place_after_pause(self, now_s: float) -> None:
        """Place again after a back-off: all remaining workers have just failed.

        Exclusions are preferences: a worker that failed once is better than no answer.
        """
        self._failed.clear()
        self._unreached.clear()
        self._cut_pairs.clear()
        self._places_sent = 0
        self._refusal = None
        doublings = min(self._failures + self._pauses, PAUSE_DOUBLINGS_MAX)
        self._phase_until_s = now_s + self._timers.retry_pause_s * 2**doublings
        self._pauses += 1

    def _on_place_answer(self, now_s: float, event: ev.PlaceGranted | ev.PlaceRefused) -> None:
        if isinstance(event, ev.PlaceGranted):
            self._dispatch(now_s, event.placement)
            return
        error = event.error
        if isinstance(error, Overloaded) or (isinstance(error, NoWorkers) and self._busy):
            self._join_queue(now_s, error)
        elif isinstance(error, NoWorkers) and (self._failed or self._unreached or self._cut_pairs):
            self._place_after_pause(now_s)
        elif isinstance(error, Unavailable | ModelNotFound):
            # The gateway knows the model, so its workers, the bus or the scheduler have just restarted. The request
            # waits for them: a restart should cost no request.
            self._refusal = NoWorkers(error.detail, retry_after_s=1.0) if isinstance(error, ModelNotFound) else error
        else:
            # All have refused: a worker's error says more than the scheduler's.
            self._fail(next(iter(self._refused.values()), error) if isinstance(error, InvalidRequest) else error)

    def _join_queue(self, now_s: float, error: BatonError) -> None:
        self._limit_search(now_s)
        self._refusal = error
        self._busy.clear()
        self._unreached.clear()
        self._busy_rounds = 0
        if now_s >= self._worker_by_s:
            self._fail_overloaded()
            return
        self._has_turn = False
        self.phase = Phase.QUEUED
        self._phase_until_s = self._worker_by_s
        self._actions.append(ev.JoinQueue())

    def _fail_overloaded(self) -> None:
        refusal = self._refusal
        retry_after_s = refusal.retry_after_s if refusal and refusal.retry_after_s else 1.0
        detail = "no worker became free in time"
        self._fail(Overloaded(f"{detail}: {refusal}" if refusal else detail, retry_after_s=retry_after_s))

    # ------------------------------------------------------------ dispatched

    def _dispatch(self, now_s: float, placement: Placement) -> None:
        self.phase = Phase.DISPATCHED
        self.placement = placement
        self._attempt_start = len(self.delivered)
        self._absences = 0
        self._cached_tokens = 0
        self._awaited = {placement.decode.worker}
        if placement.prefill is not None:
            self._awaited.add(placement.prefill.worker)
        self._phase_until_s = now_s + self.accept_s
        self._actions.append(ev.SendTasks(self.attempt, placement))

    def _on_task_answer(self, now_s: float, event: ev.TaskAccepted | ev.TaskBusy | ev.TaskFailed) -> None:
        match event:
            case ev.TaskAccepted(_, worker):
                self._awaited.discard(worker)
                if not self._awaited:
                    self._wait_for_tokens(now_s)
            case ev.TaskBusy(_, worker, detail):
                busy = Overloaded(f"worker {worker} is busy: {detail}")
                self._give_up_attempt(busy, "busy")
                self._busy[worker] = None
                self._busy_rounds += 1
                if self._busy_rounds >= BUSY_ROUNDS_MAX:
                    self._join_queue(now_s, busy)
                else:
                    self._place(now_s)
            case ev.TaskFailed(_, worker, (NoResponders() | BusUnavailable()) as error) if now_s < self._worker_by_s:
                # No failure of the worker: it may be restarting.
                self._give_up_attempt(error)
                self._unreached[worker] = None
                self._place(now_s)
            case ev.TaskFailed(_, worker, error):
                self._retry(now_s, error, worker)

    def _wait_for_tokens(self, now_s: float) -> None:
        self.phase = Phase.WAITING
        self._phase_until_s = now_s + self._token_s
        self._busy_rounds = 0
        # If this attempt fails, a new search for workers begins.
        self._worker_by_s = inf
        self._has_turn = False
        self._unreached.clear()
        self._pauses = 0
        self._actions.append(ev.LeaveQueue(accepted=True))

    # ------------------------------------------------------------ waiting, streaming

    def _on_frame(self, now_s: float, event: ev.FrameArrived) -> None:
        frame = event.frame
        if frame.attempt != self.attempt or not self._is_decode(event.worker, event.generation):
            return
        if self.phase is Phase.DISPATCHED:
            # Frames use another subject than the acceptance, so they may come first; they imply it.
            self._awaited.clear()
            self._wait_for_tokens(now_s)
        expected = len(self.delivered) - self._attempt_start
        if frame.index > expected:
            self._ask_again(now_s)
            return
        try:
            tokens = unpack_tokens(frame.tokens)
        except MalformedMessage as error:
            self._retry(now_s, error, event.worker)
            return
        known = expected - frame.index
        if known > len(tokens):
            return
        if frame.usage is not None:
            self._cached_tokens = max(self._cached_tokens, frame.usage.cached_tokens)
        self._accept_tokens(now_s, frame, tokens[known:], known)
        if frame.finish is not None:
            self._on_finish(now_s, frame.finish)

    def _accept_tokens(self, now_s: float, frame: Frame, tokens: list[int], known: int) -> None:
        if not tokens:
            return
        self.phase = Phase.STREAMING
        self._phase_until_s = now_s + self._timers.progress_s
        self._deadline_at_s = inf
        self._resend_at_s = inf
        self.delivered += tokens
        ends = frame.finish is not None and frame.finish.reason is FinishReason.STOP
        ends = ends or is_ended(self._sampling, self.delivered, self._eos_tokens)
        self._actions.append(ev.Deliver(tokens, frame.logprobs[known:], ends))

    def _on_finish(self, now_s: float, finish: Finish) -> None:
        assert self.placement is not None
        self._cached_tokens = max(self._cached_tokens, finish.usage.cached_tokens)
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._acknowledge_both()
            self._complete(finish.reason)
            return
        error = finish.error.to_error() if finish.error else WorkerLost("the worker gave up the request")
        decode, prefill = self.placement.decode.worker, self.placement.prefill
        if isinstance(error, PeerUnreachable | LayoutMismatch | ModelMismatch) and prefill is not None:
            # Neither worker is at fault: each may serve with another peer.
            self._cut_pairs[prefill.worker, decode] = None
            self._retry(now_s, error, "")
        elif isinstance(error, TransferFailed) and prefill is not None:
            # The decode worker has just reported this, so it is alive: most likely the prefill worker failed.
            self._retry(now_s, error, prefill.worker)
        else:
            self._retry(now_s, error, decode)

    def _on_digest(self, now_s: float, event: ev.DigestArrived) -> None:
        if self.phase not in (Phase.WAITING, Phase.STREAMING) or not self._is_decode(event.worker, event.generation):
            return
        if event.entry is None:
            self._absences += 1
            if self._absences >= 2:
                self._retry(now_s, WorkerLost(f"worker {event.worker} does not know the request"), event.worker)
            return
        self._absences = 0
        if event.entry.emitted > len(self.delivered) - self._attempt_start or event.entry.state == "retained":
            self._ask_again(now_s)

    def _on_worker_gone(self, now_s: float, event: ev.WorkerGone) -> None:
        if self.phase not in ON_WORKERS or self.placement is None:
            return
        prefill = self.placement.prefill
        # Once tokens arrive, decode holds the whole KV, so the loss of the prefill worker does not matter.
        prefill_needed = len(self.delivered) == self._attempt_start
        prefill_gone = prefill is not None and (prefill.worker, prefill.generation) == (event.worker, event.generation)
        if self._is_decode(event.worker, event.generation) or (prefill_gone and prefill_needed):
            self._retry(now_s, WorkerLost(f"worker {event.worker} {event.detail}"), event.worker)

    def _on_worker_leaving(self, now_s: float, event: ev.WorkerLeaving) -> None:
        """Ask for another placement while the attempt runs on. Heartbeats repeat the event until there is one."""
        if not self._may_move() or not self._is_decode(event.worker, event.generation) or now_s < self._move_again_at_s:
            return
        left_s = (self._sampling.max_tokens - len(self.delivered)) / max(event.tokens_per_s, TOKENS_PER_S_MIN)
        if left_s + MOVE_S > event.leaves_in_s:
            self._move_again_at_s = now_s + self._timers.place_resend_s
            self._actions.append(self._place_request(self.attempt + 1, event.worker))

    def _move(self, now_s: float, placement: Placement) -> None:
        """Continue on the new placement from the tokens delivered so far."""
        if not self._may_move():
            return
        self._give_up_attempt(Moved("its worker is leaving"))
        self._resend_at_s = inf
        self._dispatch(now_s, placement)

    def _may_move(self) -> bool:
        accepted = self.phase in (Phase.WAITING, Phase.STREAMING)
        return accepted and self._rest(WorkerLost("")) is None

    def _is_decode(self, worker: str, generation: int) -> bool:
        if self.phase not in ON_WORKERS or self.placement is None:
            return False
        decode = self.placement.decode
        return decode.worker == worker and decode.generation == generation

    def _ask_again(self, now_s: float) -> None:
        """Ask for the missing tokens, at most once per `resend_s`."""
        assert self.placement is not None
        if self._resend_at_s != inf and now_s < self._resend_at_s:
            return
        self._resend_at_s = now_s + self._timers.resend_s
        index = len(self.delivered) - self._attempt_start
        self._actions.append(ev.SendResend(self.placement.decode.worker, self.attempt, index))

    # ------------------------------------------------------------ time

    def _on_time(self, now_s: float) -> None:
        if now_s >= self._deadline_at_s:
            self._cancel_both("deadline")
            self._fail(DeadlineExceeded(f"no token came before the deadline; the request was {self.phase} then"))
            return
        if now_s >= self._resend_at_s:
            self._ask_again(now_s)
        if now_s < self._phase_until_s:
            return
        if self._has_turn:
            # The bus, the scheduler or the workers are away or slow. Other requests in the queue may need others.
            self._has_turn = False
            self._actions.append(ev.LeaveQueue(accepted=False))
        if self.phase is Phase.QUEUED:
            self._fail_overloaded()
        elif self.phase is Phase.PLACING:
            if self._places_sent > self._timers.place_resends_max and now_s >= self._worker_by_s:
                self._fail(self._refusal or Unavailable("no scheduler answered", retry_after_s=1.0))
            else:
                self._send_place(now_s)
        else:
            self._on_silence(now_s)

    def _on_silence(self, now_s: float) -> None:
        assert self.placement is not None
        decode = self.placement.decode.worker
        if self.phase is Phase.DISPATCHED:
            silent = ", ".join(sorted(self._awaited))
            error = WorkerLost(f"worker {silent} did not answer within {self.accept_s:g} s")
            self._retry(now_s, error, *self._awaited)
        elif self.phase is Phase.WAITING:
            self._retry(now_s, WorkerLost(f"no token within {self._token_s:g} s"), decode)
        else:
            self._retry(now_s, WorkerLost(f"no further token within {self._timers.progress_s:g} s"), decode)

    # ------------------------------------------------------------ ends

    def _retry(self, now_s: float, error: BatonError, *failed: str) -> None:
        """Give up this attempt and begin the next one, if that is allowed and exact."""
        is_refusal = isinstance(error, InvalidRequest)
        if is_refusal:
            self._refused.update(dict.fromkeys(failed, error))
        else:
            self._failures += 1
        rest = self._rest(error)
        is_late = isinstance(error, DeadlineExceeded) and self._deadline_at_s < inf
        if is_late or isinstance(error, PayloadTooLarge) or len(self._refused) > REFUSALS_MAX:
            end: FinishReason | BatonError | None = error
        elif rest is None and not is_refusal and self._failures >= self._timers.attempts_max:
            detail = f"{self._failures} attempts failed, the last one because {error}"
            end = type(error)(detail) if isinstance(error, WorkerLost | EngineFailed | NoResponders) else error
        else:
            end = rest
        if end is None:
            self._give_up_attempt(error)
            if not is_refusal:
                self._failed.update(dict.fromkeys(worker for worker in failed if worker))
            self._place(now_s)
            return
        self._cancel_both(error.code)
        if isinstance(end, FinishReason):
            self._complete(end)
        else:
            self._fail(end)

    def _rest(self, cause: BatonError) -> FinishReason | NotResumable | None:
        """Return how the answer ends if its attempt ends here, or None if the next attempt continues it."""
        rest = rest_of(self._sampling, self.delivered, self._eos_tokens, cause)
        return rest if self._shown or not isinstance(rest, NotResumable) else None

    def _give_up_attempt(self, setback: BatonError, reason: str = "") -> None:
        """End the present attempt; the next one continues exactly or starts over."""
        self._cancel_both(reason or setback.code)
        if self.delivered and obstacle(self._sampling):
            self.delivered.clear()
            self._actions.append(ev.StartOver())
        self.setback = setback
        self.attempt += 1
        self._awaited.clear()

    def _cancel_both(self, reason: str) -> None:
        if self.phase in ON_WORKERS and self.placement is not None:
            self._actions.append(ev.SendCancel(self.placement.decode.worker, self.attempt, reason))
            if self.placement.prefill is not None:
                self._actions.append(ev.SendCancel(self.placement.prefill.worker, self.attempt, reason))

    def _acknowledge_both(self) -> None:
        assert self.placement is not None
        self._actions.append(ev.SendAcknowledge(self.placement.decode.worker, self.attempt))
        if self.placement.prefill is not None:
            self._actions.append(ev.SendAcknowledge(self.placement.prefill.worker, self.attempt))

    def _complete(self, reason: FinishReason) -> None:
        self._end(Phase.DONE, ev.Complete(reason, self._cached_tokens))

    def _fail(self, error: BatonError) -> None:
        self._end(Phase.FAILED, ev.Fail(error))

    def _end(self, phase: Phase, last: ev.Complete | ev.Fail) -> None:
        self.phase = phase
        self._actions.append(last)
