"""Driver of one attempt machine: performs its actions and feeds it events and ticks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol, assert_never

import msgspec
from msgspec.structs import replace
from opentelemetry.trace import SpanKind

from baton import subjects
from baton.bus import Bus
from baton.clock import LATE_S, Clock, Timer
from baton.errors import (
    AttemptFailed,
    BatonError,
    ClientGone,
    DeadlineExceeded,
    NoResponders,
    PayloadTooLarge,
)
from baton.messages.attempts import (
    Accepted,
    Acknowledge,
    Busy,
    Cancel,
    DecodeTask,
    Fault,
    FinishReason,
    Frame,
    PrefillTask,
    Resend,
    TokenChunk,
    TokenLogprob,
)
from baton.messages.base import TOKEN_BYTES, Context, Refused, WorkerAddress
from baton.messages.codec import encode
from baton.messages.placement import Audited, Held, Placement, Withdraw
from baton.telemetry import Tracing
from baton_gateway import attempt_events as ev
from baton_gateway.attempt import AttemptMachine, Phase
from baton_gateway.attempt_events import AttemptTimers
from baton_gateway.attempt_messages import Prompt, cut, no_scheduler, question_of, tasks_of
from baton_gateway.choice import ChoiceText, Piece
from baton_gateway.metrics import AnswerMetrics, GatewayMetrics
from baton_gateway.order import Order, Outcome
from baton_gateway.outlet import TextWriter
from baton_gateway.publisher import Publisher
from baton_gateway.report import AnswerReport
from baton_gateway.routes import Routes
from baton_gateway.search import Retries
from baton_gateway.timeline import Timeline
from baton_gateway.tracing import AnswerTrace

ALIVE_BUT_UNWILLING: Final = frozenset({"full", "leases", "draining", "generation", "role"})
"""Reasons of `Busy` that are no failure of the worker: try another one, or the same one later."""
HEADROOM_BYTES: Final = 64
"""Bytes by which the length fields of a message may grow once it holds tokens."""
TOKENS_SHARE_MIN: Final = 0.25
"""Minimum share of a message for tokens: with less, a long prompt would take thousands of messages."""


class Sink(Protocol):
    """Destination of one answer's pieces."""

    by_token: bool
    """Whether each token is to be a piece of its own."""
    write_texts: TextWriter | None
    """Short way to the client of an answer that has begun; None: it has none."""

    def put(self, piece: Piece, /) -> bool:
        """Take a piece. Return False if the client reads too slowly; no further piece is needed then."""
        ...

    def complete(self, outcome: Outcome, /) -> None:
        """Take the outcome, after the last piece and before the driver's task has ended."""
        ...

    def take_back(self) -> None:
        """Drop all pieces: the answer starts over, and its client has received none of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Dependencies that all drivers of a gateway share."""

    gateway: str
    bus: Bus
    clock: Clock
    tracing: Tracing
    figures: GatewayMetrics
    publisher: Publisher
    timers: AttemptTimers
    unanswered: set[str]
    """Requests whose workers have not answered yet."""
    retries: Retries
    questions: asyncio.Semaphore
    """Limit on unanswered questions to schedulers: on a busy machine, repeated ones would make it busier."""
    routes: Routes[AnswerDriver]


class AnswerDriver:
    """Produces one answer. `post` steps the machine at once, without a task switch, and a timer posts its ticks."""

    def __init__(self, order: Order, new_text: Callable[[], ChoiceText], sink: Sink, links: Links) -> None:
        self._order = order
        self._new_text = new_text
        self._text = new_text()
        self._sink = sink
        self._links = links
        self.machine = AttemptMachine(
            order.sampling,
            links.timers,
            client_request=order.client_request,
            retries=links.retries,
            deadline_at_s=order.deadline_at_s,
            eos_tokens=order.eos_tokens,
        )
        self._spans = AnswerTrace(links.tracing, links.publisher, self.machine, request=order.request, root=order.trace)
        self._timeline = Timeline(self.machine, links.clock)
        self._figures = AnswerMetrics(links.figures, self.machine, self._timeline, order)
        self._report = AnswerReport(links.publisher.post, self.machine, order, links.clock, gateway=links.gateway)
        self._events: deque[ev.Event] = deque()
        self._stepping = False
        self._over = asyncio.Event()
        self._timer: Timer | None = None
        self._ticks_at_s = inf
        """Time for which the timer is set."""
        self._reads_until_s = -inf
        """End of the time after a pause of this process in which no tick is posted."""
        self._outcome: Outcome | None = None
        self._error: Exception | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._children: set[asyncio.Task[None]] = set()
        self._question: ev.SendPlace | None = None
        """Question to schedulers that waits for its turn."""
        self._turn: object | None = None
        """Turn of the question that was asked last; None once it has ended."""

    @property
    def attempt(self) -> int:
        return self.machine.attempt

    @property
    def model(self) -> str:
        return self._order.model.name

    def post(self, event: ev.Event) -> None:
        """Step the machine with an event and perform its actions. Never waits, never raises."""
        self._events.append(event)
        self._pump()

    def take_frame(self, now_s: float, worker: str, generation: int, frame: Frame) -> None:
        """Take a worker's frame, as `post` would; most frames only add tokens and need no more than their text."""
        tokens = None
        if not self._events and self._error is None:
            tokens = self.machine.extend(now_s, worker, generation, frame)
        if tokens is None:
            self._events.append(ev.FrameArrived(worker, generation, frame))
        else:
            try:
                self._deliver(tokens, frame.logprobs, ends=self.machine.output.is_ended)
            except Exception as error:  # noqa: BLE001  As in `_pump`.
                self._error = error
        if self._events or self._error is not None:
            self._pump()

    def grant(self, attempt: int, placement: Placement) -> None:
        self.post(ev.PlaceGranted(attempt, placement, len(self._links.unanswered)))

    def hold(self, held: ev.PlaceHeld) -> None:
        """Take the attempt's position in a scheduler's queue."""
        if held.position is not None:
            self._report.note_position(held.position)
        self.post(held)

    def _pump(self) -> None:
        if self._stepping or self._tasks is None:
            return
        self._stepping = True
        try:
            while self._events and self._error is None:
                self._perform(self.machine.step(self._links.clock.now_s(), self._events.popleft()))
        except Exception as error:  # noqa: BLE001  This is the request's boundary: it is raised again by `run`.
            self._error = error
        finally:
            self._stepping = False
        self._await_next()

    async def run(self, tasks: asyncio.TaskGroup) -> Outcome:
        """Produce the answer. Raises the error that ended it; both workers are told in any case.

        `tasks` gets questions to schedulers and workers; those that are left at the end are cancelled.
        """
        links, order = self._links, self._order
        links.routes.enter(order.request, self)
        links.retries.budget.begin()
        try:
            self._tasks = tasks
            self._perform(self.machine.start(links.clock.now_s()))
            self._pump()
            await self._over.wait()
        finally:
            for child in self._children:
                child.cancel()
            self._set_timer(inf)
            links.routes.leave(order.request)
            links.retries.budget.end(links.clock.now_s())
            # After a cancellation or a bug, the workers must not go on with an answer that has no reader.
            self._perform(self.machine.step(links.clock.now_s(), ev.Aborted(ClientGone("the gateway gave up"))))
            self._spans.end(self._error)
            self._figures.end(self._outcome, self._error)
            self._report.end(self._outcome, self._error)
        if self._outcome is None:
            raise self._error or AssertionError("an answer ended without an outcome")
        return self._outcome

    def _is_over(self) -> bool:
        return self.machine.ended or self._error is not None

    def _await_next(self) -> None:
        """End the answer if it is over, else make sure that a tick comes at the machine's next deadline."""
        if self._is_over():
            self._over.set()
        elif (at_s := max(self.machine.wake_at_s, self._reads_until_s)) < self._ticks_at_s:
            self._set_timer(at_s)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ticks_at_s = at_s
        if at_s < inf:
            clock = self._links.clock
            self._timer = clock.call_later(max(0.0, at_s - clock.now_s()), self._tick)

    def _tick(self) -> None:
        """Post a tick if it is due. Deadlines that move back move no timer, so it may be too early."""
        due_s, now_s = self._ticks_at_s, self._links.clock.now_s()
        self._timer, self._ticks_at_s = None, inf
        if now_s - due_s > LATE_S and due_s > self._reads_until_s:
            self._reads_until_s = now_s + LATE_S
        if now_s >= max(self.machine.wake_at_s, self._reads_until_s):
            self.post(ev.Tick())
        else:
            self._await_next()

    # ------------------------------------------------------------ actions

    def _perform(self, actions: list[ev.Action]) -> None:
        if (change := self._timeline.observe()) is not None:
            is_unanswered = self.machine.phase is Phase.DISPATCHED
            (self._links.unanswered.add if is_unanswered else self._links.unanswered.discard)(self._order.request)
            if self.machine.phase is not Phase.PLACING:
                self._end_turn()
            self._spans.note(change)
            self._figures.note(change)
            self._report.note(change)
        for action in actions:
            match action:
                case ev.Deliver(tokens, logprobs, ends):
                    self._deliver(tokens, logprobs, ends=ends)
                case ev.StartOver():
                    self._text = self._new_text()
                    self._sink.take_back()
                case ev.SendPlace():
                    self._end_turn()
                    if self._question is None:
                        self._spawn(self._ask_in_turn())
                    self._question = action
                case ev.SendTasks(attempt, placement):
                    self._dispatch(attempt, placement)
                case ev.SendCancel(worker, attempt, reason):
                    self._tell(worker, Cancel(context=self._context(attempt), reason=reason))
                case ev.SendAcknowledge(worker, attempt):
                    self._tell(worker, Acknowledge(context=self._context(attempt)))
                case ev.SendResend(worker, attempt, index):
                    self._tell(worker, Resend(context=self._context(attempt), index=index))
                case ev.SendWithdraw(attempt):
                    withdraw = Withdraw(request=self._order.request, attempt=attempt)
                    self._links.publisher.post(subjects.WITHDRAWALS, withdraw)
                case ev.ReportFault(attempt, workers, pair, error):
                    addresses = tuple(WorkerAddress(worker=worker, generation=number) for worker, number in workers)
                    fault = Fault(
                        request=self._order.request, attempt=attempt, workers=addresses, pair=pair, code=error.code
                    )
                    self._links.publisher.post(subjects.FAULTS, fault)
                case ev.Complete(reason, cached_tokens):
                    self._complete(reason, cached_tokens)
                case ev.Fail(error):
                    self._error = self._error or error
                case _:
                    assert_never(action)

    def _deliver(self, tokens: list[int], logprobs: Sequence[TokenLogprob], *, ends: bool) -> None:
        """Give the sink the tokens' pieces; a client that reads gets an event for each token."""
        sink, text = self._sink, self._text
        if (write := sink.write_texts) is not None and text.is_plain and not ends:
            texts = text.feed_plain(tokens)
            if not write(texts):
                for each in texts:
                    if not self._put(Piece(msgspec.json.decode(each, type=str), 1)):
                        break
        elif len(tokens) == 1 or not sink.by_token:
            self._put(text.feed(tokens, logprobs, ends=ends))
        else:
            last = len(tokens) - 1
            for at, token in enumerate(tokens):
                if not self._put(text.feed((token,), logprobs[at : at + 1], ends=ends and at == last)):
                    break

    def _put(self, piece: Piece) -> bool:
        """Give the sink a piece. Return False if no further one is needed."""
        if not self._sink.put(piece):
            self._events.append(ev.Aborted(ClientGone("the client stopped reading")))
            return False
        if piece.stopped:
            self._events.append(ev.TextStopped())
        return not piece.stopped

    def _complete(self, reason: FinishReason, cached_tokens: int) -> None:
        placement = self.machine.placement
        if placement is not None and placement.prefill is None:
            self.audit(self.machine.attempt, placement.decode.worker, cached_tokens)
        rest = self._text.finish()
        if rest.is_shown:
            self._sink.put(rest)
        if rest.stopped:
            reason = FinishReason.STOP
        cached_tokens = min(cached_tokens, self._order.prompt_tokens)
        text = self._text
        self._outcome = Outcome(reason, text.tokens, cached_tokens, text.calls, text.stop, text.reasoning_tokens)
        self._sink.complete(self._outcome)

    def audit(self, attempt: int, worker: str, cached_tokens: int) -> None:
        """Publish predicted and actual cached tokens of the worker that computed the prompt, for the indexes."""
        placement = self.machine.placement
        if placement is None or attempt != self.machine.attempt:
            return
        address, predicted = placement.prefill or placement.decode, placement.predicted
        predicted_tokens = predicted.cached_tokens - predicted.speculative_tokens
        if address.worker != worker or predicted_tokens <= 0:
            return
        audited = Audited(
            context=self._context(attempt),
            address=WorkerAddress(worker=worker, generation=address.generation),
            predicted_tokens=predicted_tokens,
            cached_tokens=cached_tokens,
        )
        self._links.publisher.post(subjects.AUDITS, audited)

    def _tell(self, worker: str, message: Cancel | Acknowledge | Resend) -> None:
        self._links.publisher.post(subjects.task(worker), message)

    def _context(self, attempt: int, trace: str | None = None) -> Context:
        return Context(
            request=self._order.request,
            attempt=attempt,
            budget_s=self.machine.budget_s(self._links.clock.now_s()),
            trace=self._order.trace if trace is None else trace,
        )

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        assert self._tasks is not None
        child = self._tasks.create_task(work)
        self._children.add(child)
        child.add_done_callback(self._children.discard)
        return child

    # ------------------------------------------------------------ placing and dispatching

    def _prompt(self) -> Prompt:
        return Prompt(self._order, self.machine.output.tokens)

    async def _ask_in_turn(self) -> None:
        """Ask the newest question in turn. Its turn ends with an answer, or when the machine asks again or goes on."""
        await self._links.questions.acquire()
        turn = self._turn = object()
        question, self._question = self._question, None
        assert question is not None, "one task waits per question, and a newer question replaces it"
        try:
            # The answer to an earlier question may have come while this one waited for its turn.
            if self.machine.takes(question.attempt):
                await self._ask(question)
        finally:
            if self._turn is turn:
                self._end_turn()

    def _end_turn(self) -> None:
        """Let another question take the turn of the one that was asked last, if its turn has not ended."""
        if self._turn is not None:
            self._turn = None
            self._links.questions.release()

    async def _ask(self, action: ev.SendPlace) -> None:
        links, timers, now_s = self._links, self._links.timers, self._links.clock.now_s()
        message = question_of(
            self._prompt(),
            action,
            self._context(action.attempt, self._spans.place),
            gateway=links.gateway,
            hold_s=self.machine.hold_s(action.attempt, now_s),
            is_retry=self.machine.has_failed,
            now_s=now_s,
        )
        try:
            # A late answer is as good as one to a resend, so wait until the resends are over.
            timeout_s = timers.place_resend_s * (timers.place_resends_max + 1)
            answer = await links.bus.request(subjects.PLACE, message, timeout_s=timeout_s)
        except DeadlineExceeded:
            return  # The machine asks again by its own timer.
        except NoResponders:
            self.post(ev.PlaceRefused(action.attempt, no_scheduler()))
            return
        except BatonError as error:
            self.post(ev.PlaceRefused(action.attempt, error))
            return
        match answer:
            case Placement():
                self.grant(action.attempt, answer)
            case Held():
                self.post(ev.PlaceHeld(action.attempt))
            case Refused(error=report):
                self.post(ev.PlaceRefused(action.attempt, report.to_error()))
            case _:
                return  # This is no answer to `Place`, so the machine asks again.

    def _dispatch(self, attempt: int, placement: Placement) -> None:
        prompt, links = self._prompt(), self._links
        tokens = prompt.packed
        for address in placement.addresses:
            links.routes.give(self._order.request, address.worker)
        for worker, task in tasks_of(prompt, placement, self._context(attempt), gateway=links.gateway):
            self._spawn(self._send_task(attempt, worker, tokens, task))

    async def _send_task(self, attempt: int, worker: str, tokens: bytes, task: PrefillTask | DecodeTask) -> None:
        """Send `task` with `tokens`, in several messages where one cannot hold them, and post the worker's answer."""
        bus, subject = self._links.bus, subjects.task(worker)
        asked = {"baton.worker": worker}
        with self._links.tracing.span("dispatch", asked, parent=self._spans.attempt, kind=SpanKind.CLIENT) as span:
            task = replace(task, context=self._context(attempt, span.trace), tokens=tokens)
            try:
                try:
                    answer = await bus.request(subject, task, timeout_s=self.machine.accept_s)
                except PayloadTooLarge:
                    tail = await self._send_chunks(subject, task)
                    answer = await bus.request(subject, replace(task, tokens=tail), timeout_s=self.machine.accept_s)
            except asyncio.CancelledError:
                # The machine's own timer may be the first to ring; the answer may end on other workers before this one
                # does.
                if attempt != self.machine.attempt:
                    span.fail(DeadlineExceeded(f"worker {worker} has not answered the task"))
                raise
            except BatonError as error:
                span.fail(error)
                if isinstance(error, NoResponders):
                    error = NoResponders(f"worker {worker} does not listen")
                if not isinstance(error, DeadlineExceeded):  # The machine's own timer handles silence.
                    self.post(ev.TaskFailed(attempt, worker, error))
                return
        match answer:
            case Accepted():
                self.post(ev.TaskAccepted(attempt, worker))
            case Busy(reason=reason, detail=detail) if reason in ALIVE_BUT_UNWILLING:
                self.post(ev.TaskBusy(attempt, worker, f"{reason} {detail}".strip()))
            case Refused(error=report):
                self.post(ev.TaskFailed(attempt, worker, report.to_error()))
            case _:
                reason = f"{answer.reason} {answer.detail}" if isinstance(answer, Busy) else type(answer).__name__
                said = AttemptFailed(f"worker {worker} refused the task: {reason.strip()}")
                self.post(ev.TaskFailed(attempt, worker, said))

    async def _send_chunks(self, subject: str, task: PrefillTask | DecodeTask) -> bytes:
        """Send the tokens of a task that one message cannot hold, but for the last part, which is returned.

        Raises PayloadTooLarge if the rest of the task leaves too little room.
        """
        bus = self._links.bus
        room = bus.payload_bytes_max - len(encode(replace(task, tokens=b""))) - HEADROOM_BYTES
        if room < bus.payload_bytes_max * TOKENS_SHARE_MIN:
            raise PayloadTooLarge("the request's parameters are too long for the message bus")
        *chunks, tail = cut(task.tokens, room)
        for index, chunk in enumerate(chunks):
            offset = index * len(chunks[0]) // TOKEN_BYTES
            await bus.publish(subject, TokenChunk(context=task.context, offset=offset, tokens=chunk))
        return tail
