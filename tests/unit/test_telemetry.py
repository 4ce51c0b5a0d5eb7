"""Spans, and the trace context that messages carry."""

from __future__ import annotations

import re
import time

import pytest

from baton.messages.traces import SpanRecord
from baton.telemetry import TelemetrySettings, Tracing

TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]")
SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = SAMPLED[:-1] + "0"


def _traced() -> tuple[Tracing, list[SpanRecord]]:
    exported: list[SpanRecord] = []
    return Tracing("gateway", export=exported.append), exported


def test_a_span_without_parent_starts_a_trace() -> None:
    tracing, _ = _traced()
    with tracing.span("one") as one, tracing.span("two") as two:
        assert TRACEPARENT.fullmatch(one.trace)
        assert one.trace.endswith("-01")
        # Two roots, though one span is inside the other: parents are passed, not taken from the task.
        assert one.trace.split("-")[1] != two.trace.split("-")[1]


def test_a_parent_from_another_service_is_continued() -> None:
    tracing, exported = _traced()
    with tracing.span("here", parent=SAMPLED) as span:
        _, trace_id, span_id, flags = span.trace.split("-")
    assert trace_id == SAMPLED.split("-")[1]
    assert span_id != SAMPLED.split("-")[2]
    assert flags == "01"
    (finished,) = exported
    assert (finished.trace, finished.span, finished.parent) == (trace_id, span_id, SAMPLED.split("-")[2])
    assert finished.end_ns >= finished.start_ns > 0


def test_the_senders_decision_not_to_sample_holds() -> None:
    tracing, exported = _traced()
    with tracing.span("here", parent=NOT_SAMPLED) as span, tracing.span("below", parent=span.trace) as below:
        assert span.trace.startswith(NOT_SAMPLED[:36])
        assert span.trace.endswith("-00")
        assert below.trace.endswith("-00")
    assert exported == []


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nonsense",
        SAMPLED[:-3],
        SAMPLED.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        SAMPLED.replace("b7ad6b7169203331", "0" * 16),
        SAMPLED.replace("00-", "ff-", 1),
        SAMPLED + "-extra",
        "\r\n" + "x" * 100_000,
    ],
)
def test_a_malformed_parent_starts_a_new_trace(parent: str) -> None:
    tracing, _ = _traced()
    with tracing.span("here", parent=parent) as span:
        assert TRACEPARENT.fullmatch(span.trace)
        assert span.trace.split("-")[1] != SAMPLED.split("-")[1]
        assert span.trace.endswith("-01")


def test_attributes_and_errors_are_recorded() -> None:
    tracing, exported = _traced()
    with pytest.raises(KeyError), tracing.span("here", {"worker": "d0"}) as span:
        span.set({"tokens": 5})
        raise KeyError("a bug")
    (finished,) = exported
    assert finished.attributes == {"worker": "d0", "tokens": 5, "error.type": "KeyError"}
    assert finished.error == "'a bug'"
    tracing.close()


def test_spans_of_instants_that_have_passed_lie_where_they_were() -> None:
    tracing, exported = _traced()
    now_s, now_ns = time.monotonic(), time.time_ns()
    tracing.start("before", at_s=now_s - 3.0).end(now_s - 1.0)
    (finished,) = exported
    assert finished.end_ns - finished.start_ns == pytest.approx(2e9, abs=1e6)
    assert now_ns - finished.start_ns == pytest.approx(3e9, abs=50e6)


def test_a_span_ends_once_and_long_texts_are_cut() -> None:
    tracing, exported = _traced()
    span = tracing.start("here", {"reason": "x" * 5000})
    span.fail(ValueError("y" * 5000))
    span.end()
    span.set({"late": 1})
    span.end()
    (finished,) = exported
    assert finished.attributes == {"reason": "x" * 1024, "error.type": "ValueError"}
    assert finished.error == "y" * 1024


def test_without_tracing_nothing_is_made_and_a_senders_context_is_carried_on() -> None:
    tracing = Tracing("gateway", TelemetrySettings(tracing=False))
    with tracing.span("here", parent=SAMPLED) as span, tracing.span("nowhere") as other:
        assert (span.trace, other.trace) == (SAMPLED, "")
    tracing.close()
