"""Tracing: spans by wrapper, carried between services as W3C `traceparent` strings.

A trace is sampled or not where it begins, at the gateway: by the client's own `traceparent`, else by
`trace_share` and the trace's id. Every service follows the flag in the messages. Spans of all traces are
made and kept for a while (`recorder.py`); those of sampled ones are exported (`export.py`).

Spans follow OpenTelemetry's model and are exported by its SDK, but made here: a span of the SDK costs as
much as all other work on it together (`docs/decisions/0006-spans-of-our-own.md`).
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from os import getpid
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import SpanKind

from baton import subjects
from baton.bus import Bus, Delivery
from baton.errors import BatonError
from baton.messages.traces import AttributeValue, SpanRecord, TracePage, TraceQuery, TraceWanted
from baton.telemetry.recorder import NAMES, Export, Recorder
from baton.telemetry.settings import TelemetrySettings

if TYPE_CHECKING:
    from baton.telemetry.export import Collector

TEXT_CHARACTERS_MAX: Final = 1024
"""Longest text of an attribute or an error."""
PAGE_SPANS: Final = 64
"""Spans per `TracePage`: a page stays far below the bus's payload limit even with the longest attributes."""

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_ID_BITS: Final = 64
"""Bits of a trace id that decide whether it is sampled, as in OpenTelemetry's ratio sampler."""


class Span:
    """A piece of work in a trace. `trace` goes into the messages that this work sends.

    As a context, it ends with its body.
    """

    __slots__ = (
        "_attributes",
        "_end_ns",
        "_error",
        "_kind",
        "_links",
        "_name",
        "_parent",
        "_recorder",
        "_start_ns",
        "trace",
    )

    def __init__(
        self,
        recorder: Recorder | None,
        name: str,
        attributes: Mapping[str, AttributeValue] | None,
        *,
        trace: str,
        parent: str,
        kind: SpanKind,
        links: Sequence[str],
        start_ns: int,
    ) -> None:
        self.trace = trace
        """W3C `traceparent`."""
        self._recorder = recorder
        """None once the span has ended, and where nothing is recorded."""
        self._name = name
        self._attributes: dict[str, AttributeValue] = {**attributes} if attributes else {}
        self._parent = parent
        self._kind = kind
        self._links = links
        self._start_ns = start_ns
        self._end_ns = 0
        self._error = ""
        if recorder is not None:
            recorder.begin(self)

    def rename(self, name: str) -> None:
        if self._recorder is not None:
            self._name = name

    def set(self, attributes: Mapping[str, AttributeValue]) -> None:
        if self._recorder is not None:
            self._attributes.update(attributes)

    def fail(self, error: BaseException) -> None:
        """Note the error that this work failed with."""
        if self._recorder is not None:
            self._error = str(error) or type(error).__name__
            self._attributes["error.type"] = error.code if isinstance(error, BatonError) else type(error).__name__

    def end(self, at_s: float | None = None) -> None:
        """End the span, now or at an instant of the monotonic clock. Once it has ended, nothing changes it."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._end_ns = time.time_ns() if at_s is None else _wall_ns(at_s)
            recorder.end(self)

    def __enter__(self) -> Span:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.set({"baton.cancelled": True})
        elif isinstance(error, Exception):
            self.fail(error)
        self.end()

    def is_called(self, name: str) -> bool:
        return any(self._attributes.get(key) == name for key in NAMES)

    def record(self) -> SpanRecord:
        return SpanRecord(
            trace=self.trace[3:35],
            span=self.trace[36:52],
            parent=self._parent,
            name=self._name,
            kind=self._kind.value,
            start_ns=self._start_ns,
            end_ns=self._end_ns,
            error=self._error[:TEXT_CHARACTERS_MAX],
            attributes={
                name: value[:TEXT_CHARACTERS_MAX] if isinstance(value, str) else value
                for name, value in self._attributes.items()
            },
            links=tuple(link[36:52] for link in self._links),
        )


class Tracing:
    """The spans of one service. Parents are passed, never taken from the running task: spans of one attempt come from
    many tasks."""

    def __init__(
        self,
        service: str,
        settings: TelemetrySettings | None = None,
        *,
        instance: str = "",
        export: Export | None = None,
    ) -> None:
        """Set up from `settings`. `instance` tells apart the processes of one service; `export` overrides the exporter.

        Raises ConfigurationError if the collector's address is malformed.
        """
        settings = settings or TelemetrySettings()
        self._host = socket.gethostname()
        self._service = service
        self._instance = instance or f"{service}-{self._host}-{getpid()}"
        self._collector: Collector | None = None
        if export is None and settings.tracing and settings.otlp_endpoint:
            # Imported here: the exporter is a fifth of a service's imports, and most have no collector.
            from baton.telemetry.export import Collector

            resource = {
                "service.name": f"baton-{service}",
                "service.namespace": "baton",
                "service.instance.id": self._instance,
                "host.name": self._host,
            }
            self._collector = Collector(settings.otlp_endpoint, resource)
            export = self._collector.export
        self._recorder = Recorder(export) if settings.tracing else None
        self._sampled_below = round(settings.trace_share * 2**_ID_BITS)

    def span(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        parent: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Return a span as a context, which traces its body; an error is noted and raised. See `start`."""
        return self.start(name, attributes, parent=parent, kind=kind)

    def start(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        parent: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[str] = (),
        at_s: float | None = None,
    ) -> Span:
        """Begin a span, now or at an instant of the monotonic clock; the caller ends it.

        A `parent` that is empty or malformed begins a new trace. `links` are the `trace` of spans of the same trace.
        """
        known = _parse(parent)
        if self._recorder is None:
            # A sender's trace is passed on, for services behind us that trace.
            trace, above = parent if known else "", ""
        elif known is not None:
            before, above, after = known
            trace = f"{before}{_random_hex(64)}{after}"
        else:
            begun = _random_hex(128)
            sampled = int(begun[-_ID_BITS // 4 :], 16) < self._sampled_below
            trace, above = f"00-{begun}-{_random_hex(64)}-{sampled:02x}", ""
        start_ns = time.time_ns() if at_s is None else _wall_ns(at_s)
        return Span(
            self._recorder, name, attributes, trace=trace, parent=above, kind=kind, links=links, start_ns=start_ns
        )

    async def answer(self, bus: Bus) -> None:
        """Answer queries for traces over the bus, and export traces that turn out to be wanted."""
        if self._recorder is not None:
            await bus.subscribe(subjects.TRACES, partial(self._on_message, bus, self._recorder))

    async def _on_message(self, bus: Bus, recorder: Recorder, delivery: Delivery) -> None:
        match delivery.message:
            case TraceWanted(trace=wanted):
                recorder.want(wanted)
            case TraceQuery(id=name, asker=asker):
                spans, left_out = recorder.find(name)
                for first in range(0, max(1, len(spans)), PAGE_SPANS):
                    page = TracePage(
                        service=self._service,
                        instance=self._instance,
                        host=self._host,
                        spans=tuple(spans[first : first + PAGE_SPANS]),
                        left_out=0 if first else left_out,
                    )
                    await bus.publish(subjects.trace_answers(asker), page)
            case _:
                pass  # Meant for others.

    def close(self) -> None:
        """Export the remaining spans and stop; a collector that does not answer gets about a second."""
        if self._collector is not None:
            self._collector.close()


@lru_cache(maxsize=1024)  # A span is the parent of several.
def _parse(parent: str) -> tuple[str, str, str] | None:
    """Return what a child's `traceparent` has before its id, the parent's id, and what it has after its own."""
    known = _TRACEPARENT.fullmatch(parent)
    return known and (f"00-{known[1]}-", known[2], f"-{int(known[3], 16) & 1:02x}")


def _random_hex(bits: int) -> str:
    # Ids need to be unique, not secret. Zero is no id.
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"


def _wall_ns(at_s: float) -> int:
    """Convert an instant of the monotonic clock to the wall clock, by their present difference."""
    return time.time_ns() - round((time.monotonic() - at_s) * 1e9)
