"""Spans of one attempt on its worker: the leg it runs, and the engine's stages within it.

    prefill                  queue, compute
    decode                   queue, transfer (with one span for each group of layers), first token, generate
    whole                    queue, compute, generate

There is no work per token: the spans below the leg are made afterwards, from a few instants.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from opentelemetry.trace import SpanKind

from baton.engines.engine import EngineDelta, EngineRequest, Leg, Stage
from baton.telemetry import Span, Tracing
from baton.worker.attempt import Attempt


class LegTrace:
    """Trace of one leg. `note` is called with each delta and inspects only the first."""

    def __init__(self, tracing: Tracing, span: Span, leg: Leg) -> None:
        self._tracing = tracing
        self._span = span
        self._leg = leg
        self._generating_s: float | None = None
        self.trace = span.trace

    def note(self, delta: EngineDelta, now_s: float) -> None:
        if self._generating_s is None:
            self._generating_s = now_s
            self._record(delta.stages, self.trace)

    def finish(self, attempt: Attempt, reason: str) -> None:
        usage = attempt.usage()
        self._span.set(
            {
                "baton.finish": reason,
                "baton.prompt_tokens": usage.prompt_tokens,
                "baton.cached_tokens": usage.cached_tokens,
                "baton.promoted_tokens": usage.promoted_tokens,
                "baton.loaded_tokens": usage.loaded_tokens,
                "baton.transferred_tokens": usage.transferred_tokens,
                "baton.output_tokens": usage.completion_tokens,
            }
        )

    def close(self) -> None:
        if self._generating_s is not None and self._leg is not Leg.PREFILL:
            self._tracing.start("generate", parent=self.trace, at_s=self._generating_s).end()

    def _record(self, stages: Sequence[Stage], parent: str) -> None:
        for stage in stages:
            span = self._tracing.start(stage.name, stage.facts, parent=parent, at_s=stage.began_s)
            self._record(stage.parts, span.trace)
            span.end(stage.ended_s)


@contextmanager
def traced_leg(tracing: Tracing, worker: str, request: EngineRequest, parent: str) -> Generator[LegTrace]:
    facts = {"baton.request": request.request, "baton.attempt": request.attempt, "baton.worker": worker}
    with tracing.span(request.leg, facts, parent=parent, kind=SpanKind.SERVER) as span:
        leg = LegTrace(tracing, span, request.leg)
        try:
            yield leg
        finally:
            leg.close()
