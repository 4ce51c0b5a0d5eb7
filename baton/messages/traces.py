"""Traces: queries for spans over the bus, and their answers."""

from __future__ import annotations

import msgspec

from baton.messages.base import Message, Part

AttributeValue = str | bool | int | float | tuple[str, ...]


class SpanRecord(Part, frozen=True, kw_only=True):
    """A span, as kept by the service that recorded it. Ids are hexadecimal."""

    trace: str
    span: str
    parent: str = ""
    name: str
    kind: int = 0
    """Number of OpenTelemetry's `SpanKind`."""
    start_ns: int
    """Wall-clock time of the service's host."""
    end_ns: int = 0
    """End of the span, same clock; 0: it has not ended."""
    error: str = ""
    attributes: dict[str, AttributeValue] = msgspec.field(default_factory=dict[str, AttributeValue])
    links: tuple[str, ...] = ()
    """Spans of the same trace: the attempts that this one retries."""


class TraceQuery(Message, tag="trace_query", frozen=True, kw_only=True):
    """Any client to every service, on `subjects.TRACES`: send the spans of this trace. Answered by `TracePage`s."""

    id: str
    """Id of a trace, or of the request that began one."""
    asker: str
    """Answers go to `subjects.trace_answers(asker)`."""


class TracePage(Message, tag="trace_page", frozen=True, kw_only=True):
    """Part of one service's answer to a `TraceQuery`. A page without spans: the service has none."""

    service: str
    instance: str
    host: str
    spans: tuple[SpanRecord, ...] = ()
    left_out: int = 0
    """Number of spans of these traces that were dropped for lack of room."""


class TraceWanted(Message, tag="trace_wanted", frozen=True, kw_only=True):
    """Gateway to every service, on `subjects.TRACES`: a request met a failure; export its whole trace."""

    trace: str
