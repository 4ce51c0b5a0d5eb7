"""Tracing: spans by wrapper, carried between services as W3C `traceparent` strings."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

AttributeValue = str | bool | int | float

_propagator = TraceContextTextMapPropagator()


class Span:
    """A piece of work in a trace. `trace` goes into the messages that this work sends."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        # Empty where the SDK is disabled and the parent was none: then there is nothing to carry on.
        self.trace = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"
            if context.is_valid
            else ""
        )

    def set(self, name: str, value: AttributeValue) -> None:
        self._span.set_attribute(name, value)

    def add_event(self, name: str, **attributes: AttributeValue) -> None:
        self._span.add_event(name, attributes)


class Tracing:
    """Spans of one service. The sender's decision whether a trace is sampled holds for everyone behind it."""

    def __init__(self, service: str, *, processors: Sequence[SpanProcessor] = ()) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource({"service.name": f"baton-{service}", "service.namespace": "baton"}),
            shutdown_on_exit=False,
        )
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton")

    @contextmanager
    def span(self, name: str, *, parent: str = "", **attributes: AttributeValue) -> Generator[Span]:
        """Trace the body. A `parent` that is empty or malformed starts a new trace; an error is recorded and raised.

        Parents are passed, never taken from the running task: spans of one attempt live in many tasks.
        """
        context = _propagator.extract({"traceparent": parent}, context=Context())
        started = self._tracer.start_span(name, context=context, attributes=attributes)
        with started:
            yield Span(started)

    def close(self) -> None:
        """Hand what is left to the processors and stop."""
        self._provider.shutdown()
