"""Keeps a service's recent spans, exported or not: for `baton trace`, and for requests that fail.

Whether a trace is exported is decided at its beginning, whether it should have been is known at its end.
So every service keeps its spans for a while, within bounds. Those of a sampled trace are exported as they
end, those of another one once it is asked for (`want`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from baton.messages.traces import SpanRecord

SPANS_MAX: Final = 8192
AGE_S_MAX: Final = 600.0
TRACE_SPANS_MAX: Final = 2048
"""Spans kept per trace: a request may ask for a hundred choices of a dozen spans and must not push out the others."""
NAMES: Final = ("baton.request_id", "baton.request", "gen_ai.response.id")
"""Attributes by which a trace can be queried, beside its id."""

Export = Callable[[SpanRecord], None]


class Recorded(Protocol):
    """A span, running or ended. Its record is made when it is exported or asked for: most never are."""

    trace: str
    """W3C `traceparent`."""

    def is_called(self, name: str) -> bool:
        """Return whether one of the attributes `NAMES` is `name`."""
        ...

    def record(self) -> SpanRecord: ...


@dataclass(slots=True)
class _TracePart:
    """This service's part of one trace."""

    sampled: bool = False
    wanted: bool = False
    touched_s: float = 0.0
    spans: list[Recorded] = field(default_factory=list[Recorded])
    left_out: int = 0


class Recorder:
    """Keeps spans; belongs to the event loop's thread. `export` gets spans of sampled or wanted traces."""

    def __init__(
        self,
        export: Export | None,
        *,
        now_s: Callable[[], float] = time.monotonic,
        spans_max: int = SPANS_MAX,
        age_s_max: float = AGE_S_MAX,
    ) -> None:
        self._export = export
        self._now_s = now_s
        self._spans_max = spans_max
        self._age_s_max = age_s_max
        self._open: OrderedDict[str, Recorded] = OrderedDict()
        """Running spans by span id."""
        self._traces: OrderedDict[str, _TracePart] = OrderedDict()
        """Traces by id; the one touched last is last."""
        self._spans = 0

    def begin(self, span: Recorded) -> None:
        self._open[span.trace[36:52]] = span
        if len(self._open) > self._spans_max:
            self._open.popitem(last=False)

    def end(self, span: Recorded) -> None:
        """Keep a span that has ended, and export it if its trace is sampled or was wanted before."""
        trace = span.trace
        self._open.pop(trace[36:52], None)
        part = self._touch(trace[3:35])
        part.sampled = part.sampled or trace[-1] == "1"
        if len(part.spans) < TRACE_SPANS_MAX:
            part.spans.append(span)
            self._spans += 1
        else:
            part.left_out += 1
        if self._export is not None and (part.sampled or part.wanted):
            self._export(span.record())
        if self._spans > self._spans_max or len(self._traces) > self._spans_max:
            self._trim()

    def want(self, trace: str) -> None:
        """Export this trace: the spans that have ended, and those that will end from now on."""
        part = self._touch(trace)
        if self._export is not None and not (part.wanted or part.sampled):
            for span in part.spans:
                self._export(span.record())
        part.wanted = True
        self._trim()

    def find(self, name: str) -> tuple[list[SpanRecord], int]:
        """Return all spans of the traces called `name`, running ones included, and how many are missing."""
        self._trim()
        kept = [*(span for part in self._traces.values() for span in part.spans), *self._open.values()]
        found = {trace_id(span) for span in kept if trace_id(span) == name or span.is_called(name)}
        spans = [span.record() for span in kept if trace_id(span) in found]
        return spans, sum(part.left_out for trace, part in self._traces.items() if trace in found)

    def _touch(self, trace: str) -> _TracePart:
        part = self._traces.get(trace)
        if part is None:
            part = self._traces[trace] = _TracePart()
        else:
            self._traces.move_to_end(trace)
        part.touched_s = self._now_s()
        return part

    def _trim(self) -> None:
        """Forget the traces that have been inactive for the longest time."""
        too_old_s = self._now_s() - self._age_s_max
        while self._traces:
            trace, part = next(iter(self._traces.items()))
            if part.touched_s > too_old_s and self._spans <= self._spans_max and len(self._traces) <= self._spans_max:
                return
            del self._traces[trace]
            self._spans -= len(part.spans)


def trace_id(span: Recorded) -> str:
    return span.trace[3:35]
