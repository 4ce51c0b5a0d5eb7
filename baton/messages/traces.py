"""Traces: spans asked for over the bus."""

from __future__ import annotations

import msgspec

from baton.messages.base import Message, Part

AttributeValue = str | bool | int | float | tuple[str, ...]


class SpanRecord(Part, frozen=True, kw_only=True):
    """A piece of work in a trace, as the service that did it remembers it. Ids are hexadecimal."""

    trace: str
    span: str
    parent: str = ""
    name: str
    kind: int = 0
    """Number of OpenTelemetry's `SpanKind`."""
    start_ns: int
    """By the wall clock of the service's host."""
    end_ns: int = 0
    """0: it has not ended."""
    error: str = ""
    attributes: dict[str, AttributeValue] = msgspec.field(default_factory=dict[str, AttributeValue])
    links: tuple[str, ...] = ()
    """Spans of the same trace: the attempts that this one makes up for."""


class TraceQuery(Message, tag="trace_query", frozen=True, kw_only=True):
    """Anyone to every service, on `subjects.TRACES`: what do you remember of this? Answered by `TracePage`s."""

    id: str
    """Of a trace, or of the request that began one."""
    asker: str
    """Answers go to `subjects.trace_answers(asker)`."""


class TracePage(Message, tag="trace_page", frozen=True, kw_only=True):
    """Part of one service's answer to a `TraceQuery`; one without spans says that the service knows nothing."""

    service: str
    instance: str
    host: str
    spans: tuple[SpanRecord, ...] = ()
    left_out: int = 0
    """Spans of these traces that were not remembered, for want of room."""


class TraceWanted(Message, tag="trace_wanted", frozen=True, kw_only=True):
    """Gateway to every service, on `subjects.TRACES`: a request met a failure, so export all of its trace."""

    trace: str
