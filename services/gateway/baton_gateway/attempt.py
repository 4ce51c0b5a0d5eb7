"""The attempts of one answer as a state machine: events in, actions out, no clock, no I/O.

    PLACING ◀──Held, silence──▶ QUEUED
      │ Placement                 │ Placement
      └──────▶ DISPATCHED ◀───────┘
                   │ both Accepted
                   ▼
                WAITING ──tokens──▶ STREAMING ──finish──▶ DONE         else FAILED, CANCELLED

    DISPATCHED, WAITING, STREAMING ──Busy, silence, lost, error──▶ cancel both, attempt + 1, PLACING

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
    DeadlineExceeded,
    EngineFailed,
    MalformedMessage,
    NoResponders,
    Overloaded,
    WorkerLost,
)
from baton.messages.attempts import Finish, FinishReason, Frame, Sampling
from baton.messages.base import TOKEN_BYTES, unpack_tokens
from baton.messages.placement import REFUSALS_MAX, Placement
from baton_gateway import attempt_events as ev
from baton_gateway.attempt_events import AttemptTimers
from baton_gateway.failures import Ending, ending
from baton_gateway.resumption import Moved, Output
from baton_gateway.search import Retries, Search
from baton_gateway.suspects import JUST_BEGUN_TOKENS

ACCEPT_GROWTH = 3
"""Growth of `accept_s` per failure: the last of four attempts gives a slow worker on a busy machine 2.7 s."""
ACCEPT_BURST = 16
"""Unanswered attempts that double the time to accept another one."""
MOVE_S = 1.0
"""Margin before a worker leaves: an answer that would end later than this is moved."""


class Phase(StrEnum):
    QUEUED = "queued"
    """A scheduler holds the request until a worker has room."""
    PLACING = "placing"
    DISPATCHED = "dispatched"
    WAITING = "waiting"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({Phase.DONE, Phase.FAILED, Phase.CANCELLED})


class AttemptMachine:
    """State machine of one answer (see the module docstring)."""

    def __init__(
        self,
        sampling: Sampling,
        timers: AttemptTimers,
        *,
        client_request: str,
        retries: Retries,
        deadline_at_s: float,
        eos_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.phase = Phase.PLACING
        self.attempt = 0
        self.output = Output(sampling, eos_tokens)
        self.placement: Placement | None = None
        self.setback: BatonError | None = None
        """Error that ended the previous attempt."""
        self.cached_tokens = 0
        """Prompt tokens that the present attempt's workers had cached, as far as reported."""
        self.promoted_tokens = 0
        """Part of them that was promoted from a pool."""
        self.accept_s = timers.accept_s
        """Time for this attempt's workers to accept it; grows with each failure, and in a burst."""
        self._timers = timers
        self._search = Search(client_request, timers, retries)
        self._deadline_at_s = deadline_at_s
        """Deadline of the first token; infinite once that token has arrived."""
        self._phase_until_s = inf
        self._patient_until_s = inf
        """End of the time in which an accepted attempt is not given up for a worker that makes no progress."""
        self._resend_at_s = inf
        self._move_again_at_s = -inf
        self._awaited: set[str] = set()
        self._absences = 0
        self._actions: list[ev.Action] = []

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def wake_at_s(self) -> float:
        """Time at which the driver must call `step` with a Tick if no event comes earlier."""
        return min(self._deadline_at_s, self._until_s, self._resend_at_s)

    @property
    def _until_s(self) -> float:
        return self._search.until_s if self.placement is None else self._phase_until_s

    def budget_s(self, now_s: float) -> float:
        """Return the time that workers have for the first token; once it has come, for the next one."""
        return self._token_s if self._deadline_at_s == inf else max(0.0, self._deadline_at_s - now_s)

    def hold_s(self, attempt: int, now_s: float) -> float:
        """Return how long a scheduler may hold this attempt; a move is not held, since the answer runs meanwhile."""
        return max(0.0, self._search.ends_at_s - now_s) if self.seeks(attempt) else 0.0

    @property
    def _token_s(self) -> float:
        """Time for the first token of an accepted attempt; the progress limit if it continues an answer."""
        return self._timers.progress_s if self.output.has_begun else self._timers.first_token_s

    @property
    def has_failed(self) -> bool:
        """Whether an attempt has failed; one that found its workers busy has not."""
        return self._search.failures > 0

    def seeks(self, attempt: int) -> bool:
        """Return whether this attempt is the present one and has no workers yet."""
        return attempt == self.attempt and self.phase in (Phase.PLACING, Phase.QUEUED)

    def takes(self, attempt: int) -> bool:
        """Return whether a placement of this attempt is of use: it has no workers yet, or the answer may move to it."""
        return self.seeks(attempt) or (attempt == self.attempt + 1 and self._may_move())

    def runs_on(self, worker: str) -> bool:
        """Return whether the present attempt was given to `worker`."""
        addresses = () if self.placement is None else self.placement.addresses
        return worker in {address.worker for address in addresses}

    def start(self, now_s: float) -> list[ev.Action]:
        """Return the first actions."""
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
            case ev.PromptComputed(attempt, cached_tokens, promoted_tokens):
                if attempt == self.attempt:
                    self._note_cached(cached_tokens, promoted_tokens)
            case ev.WorkerGone():
                self._on_worker_gone(now_s, event)
            case ev.WorkerLeaving():
                self._on_worker_leaving(now_s, event)
            case ev.WorkerStuck():
                self._on_worker_stuck(now_s, event)
            case ev.Shown():
                self.output.shown = True
            case ev.TextStopped():
                self._cancel_both("stop string")
                self._complete(FinishReason.STOP)
            case ev.Aborted(error):
                self._cancel_both(error.code)
                self._end(Phase.CANCELLED, ev.Fail(error))
            case ev.PlaceGranted(attempt, placement, unanswered):
                if self.seeks(attempt):
                    # The first placement wins; other schedulers may hold the request, too.
                    if self._search.asked > 1:
                        self._actions.append(ev.SendWithdraw(attempt))
                    self._dispatch(now_s, placement, unanswered)
                elif attempt == self.attempt + 1:
                    self._move(now_s, placement, unanswered)
            case ev.PlaceRefused() | ev.PlaceHeld() | ev.PlaceHandedBack():
                if self.seeks(event.attempt):
                    self._on_place_answer(now_s, event)
            case ev.TaskAccepted() | ev.TaskBusy() | ev.TaskFailed():
                if event.attempt == self.attempt and event.worker in self._awaited:
                    self._on_task_answer(now_s, event)
            case _:
                assert_never(event)
        return self._take_actions()

    def extend(self, now_s: float, worker: str, generation: int, frame: Frame) -> list[int] | None:
        """Take a frame that only continues the stream, as nearly all do, at a fraction of the cost of `step`.

        Returns its tokens, to be delivered. None: the frame needs `step`, and nothing has changed.
        """
        output, packed = self.output, frame.tokens
        # Written out: properties and methods would be calls for each token.
        is_next = frame.attempt == self.attempt and frame.index == len(output.tokens) - output.starts_at
        is_plain = frame.finish is None and frame.usage is None and packed and not len(packed) % TOKEN_BYTES
        if not (is_next and is_plain and self.phase is Phase.STREAMING and (placement := self.placement)):
            return None
        decode = placement.decode
        if decode.worker != worker or decode.generation != generation:
            return None
        tokens = unpack_tokens(packed)
        self._accept_tokens(now_s, tokens)
        return tokens

    def _take_actions(self) -> list[ev.Action]:
        actions, self._actions = self._actions, []
        return actions

    # ------------------------------------------------------------ placing

    def _place(self, now_s: float) -> None:
        """Search for a placement. An answer that has begun gets a longer search than a new request."""
        self._limit_search(now_s)
        self._seek(self._search.ask(now_s, self.attempt))

    def _limit_search(self, now_s: float) -> None:
        self._search.limit(now_s, self._timers.progress_s if self.output.has_begun else self._timers.admission_wait_s)

    def _on_place_answer(self, now_s: float, event: ev.PlaceRefused | ev.PlaceHeld | ev.PlaceHandedBack) -> None:
        match event:
            case ev.PlaceRefused(_, error):
                self.phase = Phase.PLACING
                self._seek(self._search.note_refusal(now_s, error, begun=self.output.has_begun))
            case ev.PlaceHeld(_, position, turn_s):
                self.phase = Phase.QUEUED
                self._search.note_held(now_s, position, turn_s)
            case ev.PlaceHandedBack():
                self._seek(self._search.ask_again(now_s, self.attempt))

    def _seek(self, step: ev.SendPlace | ev.Fail | None) -> None:
        """Take the search's next step."""
        match step:
            case ev.SendPlace():
                self.phase = Phase.PLACING
                self._actions.append(step)
            case ev.Fail(error):
                self._fail(error)
            case None:
                pass

    # ------------------------------------------------------------ dispatched

    def _dispatch(self, now_s: float, placement: Placement, unanswered: int) -> None:
        self.phase = Phase.DISPATCHED
        self.placement = placement
        self.output.begin_attempt()
        self._absences = 0
        self.cached_tokens = self.promoted_tokens = 0
        self._awaited = {address.worker for address in placement.addresses}
        self.accept_s = self._timers.accept_s * ACCEPT_GROWTH**self._search.failures * (1 + unanswered / ACCEPT_BURST)
        self._phase_until_s = now_s + self.accept_s
        self._actions.append(ev.SendTasks(self.attempt, placement))

    def _on_task_answer(self, now_s: float, event: ev.TaskAccepted | ev.TaskBusy | ev.TaskFailed) -> None:
        match event:
            case ev.TaskAccepted(_, worker):
                self._awaited.discard(worker)
                if not self._awaited:
                    self._wait_for_tokens(now_s)
            case ev.TaskBusy(_, worker, detail):
                self._try_elsewhere(now_s, Overloaded(f"worker {worker} is busy: {detail}"), worker)
            case ev.TaskFailed(_, worker, error):
                self._on_failure(now_s, error, worker)

    def _try_elsewhere(self, now_s: float, error: BatonError, *workers: str) -> None:
        """Begin the next attempt; the worker has not failed, and the search goes on until its end."""
        if now_s >= self._search.ends_at_s:
            self._cancel_both("busy")
            self._fail(self._search.overloaded(f"no worker became free in time: {error}"))
            return
        self._give_up_attempt(error, "busy" if isinstance(error, Overloaded) else "")
        self._search.note_unavailable(workers)
        self._place(now_s)

    def _wait_for_tokens(self, now_s: float) -> None:
        assert self.placement is not None
        self.phase = Phase.WAITING
        self._phase_until_s = now_s + self._token_s
        self._patient_until_s = now_s + self._timers.progress_s
        if not self.placement.wait_s:
            # Where the attempt may wait for room, the search ends with its first token.
            self._search.note_accepted()

    # ------------------------------------------------------------ waiting, streaming

    def _on_frame(self, now_s: float, event: ev.FrameArrived) -> None:
        frame = event.frame
        if frame.attempt != self.attempt or not self._is_decode(event.worker, event.generation):
            return
        if self.phase is Phase.DISPATCHED:
            # Frames use another subject than the acceptance, so they may come first; they imply it.
            self._awaited.clear()
            self._wait_for_tokens(now_s)
        if frame.index > self.output.emitted:
            self._ask_again(now_s)
            return
        try:
            tokens = unpack_tokens(frame.tokens)
        except MalformedMessage as error:
            self._on_failure(now_s, error, event.worker)
            return
        known = self.output.emitted - frame.index
        if known > len(tokens):
            return
        if frame.usage is not None:
            self._note_cached(frame.usage.cached_tokens, frame.usage.promoted_tokens)
        if fresh := tokens[known:]:
            if self.phase is not Phase.STREAMING:
                self._search.note_accepted()
                self.phase = Phase.STREAMING
                self._deadline_at_s = inf
            self._accept_tokens(now_s, fresh)
            ends = frame.finish is not None and frame.finish.reason is FinishReason.STOP
            self._actions.append(ev.Deliver(fresh, frame.logprobs[known:], ends or self.output.is_ended))
        if frame.finish is not None:
            self._on_finish(now_s, frame.finish)

    def _accept_tokens(self, now_s: float, tokens: list[int]) -> None:
        """Take tokens that were not delivered before."""
        self._phase_until_s = now_s + self._timers.progress_s
        self._resend_at_s = inf
        output = self.output
        output.tokens += tokens
        if self._search.is_suspected and output.emitted >= JUST_BEGUN_TOKENS:
            self._search.clear()

    def _note_cached(self, cached_tokens: int, promoted_tokens: int) -> None:
        self.cached_tokens = max(self.cached_tokens, cached_tokens)
        self.promoted_tokens = max(self.promoted_tokens, promoted_tokens)

    def _on_finish(self, now_s: float, finish: Finish) -> None:
        assert self.placement is not None
        self._note_cached(finish.usage.cached_tokens, finish.usage.promoted_tokens)
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            acknowledged = [address.worker for address in self.placement.addresses]
            self._actions += [ev.SendAcknowledge(worker, self.attempt) for worker in acknowledged]
            self._complete(finish.reason)
            return
        error = finish.error.to_error() if finish.error else WorkerLost("the worker gave up the request")
        self._on_failure(now_s, error, self.placement.decode.worker)

    def _on_digest(self, now_s: float, event: ev.DigestArrived) -> None:
        if self.phase not in (Phase.WAITING, Phase.STREAMING) or not self._is_decode(event.worker, event.generation):
            return
        if event.entry is None:
            self._absences += 1
            if self._absences >= 2:
                error = WorkerLost(f"worker {event.worker} does not know the request")
                self._on_failure(now_s, error, event.worker)
            return
        self._absences = 0
        if event.entry.emitted > self.output.emitted or event.entry.state == "retained":
            self._ask_again(now_s)

    def _on_worker_gone(self, now_s: float, event: ev.WorkerGone) -> None:
        if self.placement is None:
            return
        # Once tokens arrive, decode holds the whole KV, so the loss of the prefill worker does not matter.
        needed = self.placement.addresses[: 1 if self.output.emitted else 2]
        if (event.worker, event.generation) in {(address.worker, address.generation) for address in needed}:
            self._on_failure(now_s, WorkerLost(f"worker {event.worker} {event.detail}"), event.worker)

    def _on_worker_stuck(self, now_s: float, event: ev.WorkerStuck) -> None:
        """Give up an attempt that has waited for its first token for as long as others wait for a further one."""
        if self.placement is None or self.phase is not Phase.WAITING or now_s < self._patient_until_s:
            return
        if (event.worker, event.generation) in {(each.worker, each.generation) for each in self.placement.addresses}:
            self._on_failure(now_s, WorkerLost(f"worker {event.worker} makes no progress"), event.worker)

    def _on_worker_leaving(self, now_s: float, event: ev.WorkerLeaving) -> None:
        """Ask for another placement while the attempt runs on. Heartbeats repeat the event until there is one."""
        if not self._may_move() or not self._is_decode(event.worker, event.generation) or now_s < self._move_again_at_s:
            return
        left_s = self.output.tokens_left * event.token_interval_s
        if left_s + MOVE_S > event.leaves_in_s:
            self._move_again_at_s = now_s + self._timers.place_resend_s
            self._actions.append(self._search.request(self.attempt + 1, event.worker))

    def _move(self, now_s: float, placement: Placement, unanswered: int) -> None:
        """Continue on the new placement from the tokens delivered so far."""
        if not self._may_move():
            return
        self._give_up_attempt(Moved("its worker is leaving"))
        self._dispatch(now_s, placement, unanswered)

    def _may_move(self) -> bool:
        accepted = self.phase in (Phase.WAITING, Phase.STREAMING)
        return accepted and self.output.rest(WorkerLost("")) is None

    def _is_decode(self, worker: str, generation: int) -> bool:
        decode = self.placement and self.placement.decode
        return decode is not None and (decode.worker, decode.generation) == (worker, generation)

    def _ask_again(self, now_s: float) -> None:
        """Ask for the missing tokens, at most once per `resend_s`."""
        assert self.placement is not None
        if now_s < self._resend_at_s < inf:
            return
        self._resend_at_s = now_s + self._timers.resend_s
        self._actions.append(ev.SendResend(self.placement.decode.worker, self.attempt, self.output.emitted))

    # ------------------------------------------------------------ time

    def _on_time(self, now_s: float) -> None:
        if now_s >= self._deadline_at_s:
            self._cancel_both("deadline")
            self._fail(DeadlineExceeded(f"no token came before the deadline; the request was {self.phase} then"))
            return
        if now_s >= self._resend_at_s:
            self._ask_again(now_s)
        if now_s < self._until_s:
            return
        if self.seeks(self.attempt):
            self._seek(self._search.ask_again(now_s, self.attempt))
        else:
            self._on_silence(now_s)

    def _on_silence(self, now_s: float) -> None:
        assert self.placement is not None
        decode = self.placement.decode.worker
        if self.phase is Phase.DISPATCHED:
            silent = ", ".join(sorted(self._awaited))
            error = WorkerLost(f"worker {silent} did not answer within {self.accept_s:g} s")
            self._on_failure(now_s, error, *self._awaited)
        elif self.phase is Phase.WAITING:
            self._on_failure(now_s, WorkerLost(f"no token within {self._token_s:g} s"), decode)
        else:
            error = WorkerLost(f"no further token within {self._timers.progress_s:g} s")
            self._on_failure(now_s, error, decode)

    # ------------------------------------------------------------ ends

    def _on_failure(self, now_s: float, error: BatonError, *workers: str) -> None:
        """Take the response that the table of failures gives; `workers` reported the error, or fell silent."""
        assert self.placement is not None
        response = ending(
            error,
            begun=self._deadline_at_s == inf,
            attempt_begun=self.output.emitted > 0,
            searching=now_s < self._search.ends_at_s,
        )
        prefill, pair = self.placement.prefill, None
        match response:
            case Ending.ROOM:
                self._try_elsewhere(now_s, error, *workers)
                return
            case Ending.FAIL:
                self._cancel_both(error.code)
                self._fail(error)
                return
            case Ending.PREFILL if prefill is not None:
                # The decode worker has just reported this, so it is alive: most likely the prefill worker failed.
                workers = (prefill.worker,)
            case Ending.PAIR if prefill is not None:
                pair, workers = (prefill.worker, self.placement.decode.worker), ()
                self._search.cut_pair(pair)
            case _:
                pass
        if self.phase is not Phase.DISPATCHED:
            # It was accepted and did not end for lack of room: the next attempt has a search of its own.
            self._search.note_accepted()
        if response is Ending.KIND:
            self._search.note_refused(error, workers)
        else:
            self._search.note_failed(workers)
            self._report(now_s, error, workers, pair)
        self._retry(now_s, error, is_failure=response is not Ending.KIND)

    def _report(self, now_s: float, error: BatonError, workers: tuple[str, ...], pair: tuple[str, str] | None) -> None:
        """Tell schedulers who is at fault, and suspect the request where it had just begun."""
        assert self.placement is not None
        if self.phase is Phase.DISPATCHED:
            return  # A busy worker is late to accept; taking it out would make the others busier.
        failed = tuple((each.worker, each.generation) for each in self.placement.addresses if each.worker in workers)
        self._actions.append(ev.ReportFault(self.attempt, failed, pair, error))
        if self.output.emitted < JUST_BEGUN_TOKENS:
            for each in failed:
                self._search.note_suspect(each, now_s)

    def _retry(self, now_s: float, error: BatonError, *, is_failure: bool) -> None:
        """Give up this attempt and begin the next one, if that is allowed and exact."""
        rest, failures = self.output.rest(error), self._search.failures
        if len(self._search.refusals) > REFUSALS_MAX:
            end: FinishReason | BatonError | None = error
        elif rest is None and is_failure and failures >= self._timers.attempts_max:
            detail = f"{failures} attempts failed, the last one because {error}"
            end = type(error)(detail) if isinstance(error, WorkerLost | EngineFailed | NoResponders) else error
        else:
            end = rest
        if end is None:
            self._give_up_attempt(error)
            self._limit_search(now_s)
            self.phase = Phase.PLACING
            if is_failure:
                self._seek(self._search.retry(now_s, self.attempt, begun=self.output.has_begun))
            else:
                self._seek(self._search.ask(now_s, self.attempt))
            return
        self._cancel_both(error.code)
        if isinstance(end, FinishReason):
            self._complete(end)
        else:
            self._fail(end)

    def _give_up_attempt(self, setback: BatonError, reason: str = "") -> None:
        """End the present attempt; the next one continues exactly or starts over."""
        self._cancel_both(reason or setback.code)
        if self.output.must_start_over:
            self.output.tokens.clear()
            self._actions.append(ev.StartOver())
        self.setback = setback
        self.attempt += 1
        self.placement = None
        self._awaited.clear()
        self._resend_at_s = inf

    def _cancel_both(self, reason: str) -> None:
        addresses = () if self.placement is None else self.placement.addresses
        self._actions += [ev.SendCancel(address.worker, self.attempt, reason) for address in addresses]

    def _complete(self, reason: FinishReason) -> None:
        self._end(Phase.DONE, ev.Complete(reason, self.cached_tokens))

    def _fail(self, error: BatonError) -> None:
        self._end(Phase.FAILED, ev.Fail(error))

    def _end(self, phase: Phase, last: ev.Complete | ev.Fail) -> None:
        if self.seeks(self.attempt):
            self._actions.append(ev.SendWithdraw(self.attempt))
        self._search.clear()
        self.phase = phase
        self._actions.append(last)
