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
    """A running span."""

    def record(self) -> SpanRecord: ...


@dataclass(slots=True)
class _Kept:
    """This service's part of one trace."""

    sampled: bool = False
    wanted: bool = False
    touched_s: float = 0.0
    spans: list[SpanRecord] = field(default_factory=list[SpanRecord])
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
        self._traces: OrderedDict[str, _Kept] = OrderedDict()
        """Traces by id; the one touched last is last."""
        self._spans = 0

    def begin(self, span: str, recorded: Recorded) -> None:
        self._open[span] = recorded
        if len(self._open) > self._spans_max:
            self._open.popitem(last=False)

    def end(self, record: SpanRecord, *, sampled: bool) -> None:
        """Keep a span that has ended, and export it if its trace is sampled or was wanted before."""
        self._open.pop(record.span, None)
        kept = self._touch(record.trace)
        kept.sampled = kept.sampled or sampled
        if len(kept.spans) < TRACE_SPANS_MAX:
            kept.spans.append(record)
            self._spans += 1
        else:
            kept.left_out += 1
        if self._export is not None and (kept.sampled or kept.wanted):
            self._export(record)
        self._trim()

    def want(self, trace: str) -> None:
        """Export this trace: the spans that have ended, and those that will end from now on."""
        kept = self._touch(trace)
        if self._export is not None and not (kept.wanted or kept.sampled):
            for record in kept.spans:
                self._export(record)
        kept.wanted = True
        self._trim()

    def find(self, name: str) -> tuple[list[SpanRecord], int]:
        """Return all spans of the traces called `name`, running ones included, and how many are missing."""
        self._trim()
        running = [span.record() for span in self._open.values()]
        ended = [record for kept in self._traces.values() for record in kept.spans]
        found = {
            record.trace
            for record in (*running, *ended)
            if record.trace == name or any(record.attributes.get(key) == name for key in NAMES)
        }
        spans = [record for record in (*ended, *running) if record.trace in found]
        return spans, sum(kept.left_out for trace, kept in self._traces.items() if trace in found)

    def _touch(self, trace: str) -> _Kept:
        kept = self._traces.get(trace)
        if kept is None:
            kept = self._traces[trace] = _Kept()
        else:
            self._traces.move_to_end(trace)
        kept.touched_s = self._now_s()
        return kept

    def _trim(self) -> None:
        """Forget the traces that have been inactive for the longest time."""
        too_old_s = self._now_s() - self._age_s_max
        while self._traces:
            trace, kept = next(iter(self._traces.items()))
            if kept.touched_s > too_old_s and self._spans <= self._spans_max and len(self._traces) <= self._spans_max:
                return
            del self._traces[trace]
            self._spans -= len(kept.spans)
