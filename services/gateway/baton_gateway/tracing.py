"""The gateway's spans: one per request, within it one per attempt, and within that one per wait.

chat MODEL                    the request, from its first byte to its answer's last
  read, tokenise
  attempt                     one for each try; a later one is linked to the one that it makes up for
    queue                     for a worker to become free
    place                     for a scheduler (whose span is below it), pauses between tries included
    dispatch                  for one worker's acceptance; the worker's own span is below it
    first token
    stream                    until the attempt's last token, once
  send                        for the client to take the rest
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from opentelemetry.trace import SpanKind
from starlette.requests import Request

from baton import subjects
from baton.clock import Clock
from baton.errors import BatonError
from baton.messages.placement import Placement
from baton.messages.traces import AttributeValue, TraceWanted
from baton.telemetry import Span, Tracing
from baton_gateway.attempt import AttemptMachine, Phase
from baton_gateway.intake import Plan
from baton_gateway.publisher import Publisher
from baton_gateway.timeline import Change

FAILED_STATUS: Final = 500
"""Lowest status of a server error. Client errors, which are below it, are no reason to export a trace."""
PROVIDER: Final = "baton"

_WAITS: Final = {
    Phase.QUEUED: ("queue", SpanKind.INTERNAL),
    Phase.PLACING: ("place", SpanKind.CLIENT),
    Phase.WAITING: ("first token", SpanKind.INTERNAL),
    Phase.STREAMING: ("stream", SpanKind.INTERNAL),
}


class RequestTrace:
    """The span of one request. `trace` is the parent of all work for it."""

    def __init__(self, tracing: Tracing, clock: Clock, span: Span, operation: str) -> None:
        self._tracing = tracing
        self._clock = clock
        self._span = span
        self._produced_s: float | None = None
        self.failed = False
        self.began_at_s = clock.now_s()
        self.trace = span.trace
        self.operation = operation
        self.model = ""
        """Model name, as the workers give it; empty until the request is accepted."""
        self.error_type = ""

    def accept(self, model: str, plan: Plan, *, request: str, response: str, prompt_tokens: int) -> None:
        """Note the accepted request. `request` is the gateway's id for it, `response` the id that its client sees."""
        said: dict[str, AttributeValue] = {
            "baton.request": request,
            "gen_ai.request.model": model,
            "gen_ai.request.stream": plan.stream,
            "gen_ai.response.id": response,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": prompt_tokens,
        }
        self.model = model
        self._span.rename(f"{self.operation} {model}")
        self._span.set({**said, **{f"gen_ai.request.{name}": value for name, value in plan.asked.items()}})

    def note_produced(self) -> None:
        """Note that a choice has ended; once all have, only sending is left."""
        self._produced_s = self._clock.now_s()

    def finish(self, reasons: list[str], *, output_tokens: int, cached_tokens: int) -> None:
        """Note that the complete answer was sent."""
        self._span.set(
            {
                "gen_ai.usage.output_tokens": output_tokens,
                "gen_ai.usage.cache_read.input_tokens": cached_tokens,
                "gen_ai.response.finish_reasons": tuple(reasons),
            }
        )

    def fail(self, error: Exception) -> None:
        self.error_type = error.code if isinstance(error, BatonError) else BatonError.code
        self.failed = _note(self._span, error) or self.failed

    def end(self) -> None:
        if self._produced_s is not None:
            self._tracing.start("send", parent=self.trace, at_s=self._produced_s).end()
        self._span.end()


@contextmanager
def traced_request(
    tracing: Tracing,
    publisher: Publisher,
    clock: Clock,
    operation: str,
    request: Request,
    on_end: Callable[[RequestTrace], None],
) -> Generator[RequestTrace]:
    """Trace the body as one request, then call `on_end`. The trace of a failed request is exported, sampled or not."""
    span = tracing.start(
        operation,
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "http.request.method": request.method,
            "http.route": request.scope["path"],
            "baton.request_id": str(request.state.request_id),
        },
        # Clients may send a header of any length; a valid one has 55 characters.
        parent=request.state.headers.get("traceparent", "")[:256],
        kind=SpanKind.SERVER,
    )
    trace = RequestTrace(tracing, clock, span, operation)
    try:
        yield trace
    except Exception as error:
        trace.fail(error)
        raise
    finally:
        trace.end()
        if trace.failed:
            want(publisher, trace.trace)
        on_end(trace)


class AnswerTrace:
    """Spans of one answer."""

    def __init__(
        self, tracing: Tracing, publisher: Publisher, machine: AttemptMachine, *, request: str, root: str
    ) -> None:
        self._tracing = tracing
        self._publisher = publisher
        self._machine = machine
        self._request = request
        self._root = root
        self._attempt: Span | None = None
        self._wait: Span | None = None

    @property
    def attempt(self) -> str:
        """Trace context of the present attempt."""
        return self._attempt.trace if self._attempt is not None else self._root

    @property
    def place(self) -> str:
        """Trace context of the placement request. An answer that moves sends it while its attempt runs on."""
        if self._machine.phase is Phase.PLACING and self._wait is not None:
            return self._wait.trace
        return self.attempt

    def note(self, change: Change) -> None:
        machine = self._machine
        if change.new_attempt:
            self._begin_attempt()
        elif self._wait is not None:
            self._wait.end()
        assert self._attempt is not None
        if machine.phase is Phase.DISPATCHED and machine.placement is not None:
            self._attempt.set(_described(machine.placement))
        if change.ttft_s is not None:
            self._attempt.set({"baton.ttft_s": change.ttft_s})
        if machine.phase in _WAITS:
            name, kind = _WAITS[machine.phase]
            self._wait = self._tracing.start(name, parent=self._attempt.trace, kind=kind)

    def end(self, error: Exception | None) -> bool:
        """End the present attempt, by `error` or complete; return whether it failed."""
        if self._wait is not None:
            self._wait.end()
        if self._attempt is None:
            return False
        self._attempt.set({"baton.cached_tokens": self._machine.cached_tokens})
        if self._machine.promoted_tokens:
            self._attempt.set({"baton.promoted_tokens": self._machine.promoted_tokens})
        failed = error is not None and _note(self._attempt, error)
        self._attempt.end()
        return failed

    def _begin_attempt(self) -> None:
        machine = self._machine
        before = self._attempt.trace if self._attempt is not None else ""
        if self.end(machine.setback):
            want(self._publisher, self._root)
        # Not every back end shows links, so the span names the earlier one, too.
        retry_of = {"baton.retry_of": before.split("-")[2]} if before else {}
        self._attempt = self._tracing.start(
            "attempt",
            {"baton.request": self._request, "baton.attempt": machine.attempt, **retry_of},
            parent=self._root,
            links=[before] if before else [],
        )


def _note(span: Span, error: Exception) -> bool:
    """Note on a span the error that ended its work, and return whether it was a failure of the server.

    Errors of the client are no failures, nor are busy workers.
    """
    if isinstance(error, BatonError) and error.http_status < FAILED_STATUS:
        span.set({"error.type": error.code, "baton.end": str(error)})
        return False
    span.fail(error)
    return True


def want(publisher: Publisher, trace: str) -> None:
    """Ask every service to export a trace that was not sampled."""
    parts = trace.split("-")
    if parts[-1:] == ["00"]:
        publisher.post(subjects.TRACES, TraceWanted(trace=parts[1]))


def _described(placement: Placement) -> dict[str, AttributeValue]:
    predicted = placement.predicted
    return {
        "baton.placement.decode": placement.decode.worker,
        "baton.placement.prefill": placement.prefill.worker if placement.prefill is not None else "",
        "baton.placement.reason": placement.reason,
        "baton.predicted.ttft_s": predicted.predicted_ttft_s,
        "baton.predicted.token_interval_s": predicted.predicted_token_interval_s,
        "baton.predicted.cached_tokens": predicted.cached_tokens,
    }
