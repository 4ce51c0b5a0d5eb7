"""Spans, and the trace context that messages carry."""

from __future__ import annotations

import re

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span

from baton.telemetry import Tracing

TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]")
SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = SAMPLED[:-1] + "0"


def _traced() -> tuple[Tracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return Tracing("gateway", processors=[SimpleSpanProcessor(exporter)]), exporter


def test_a_span_without_parent_starts_a_trace() -> None:
    tracing, _ = _traced()
    with tracing.span("one") as one, tracing.span("two") as two:
        assert TRACEPARENT.fullmatch(one.trace)
        assert one.trace.endswith("-01")
        # Two roots, though one span is inside the other: parents are passed, not taken from the task.
        assert one.trace.split("-")[1] != two.trace.split("-")[1]
        assert not get_current_span().get_span_context().is_valid


def test_a_parent_from_another_service_is_continued() -> None:
    tracing, exporter = _traced()
    with tracing.span("here", parent=SAMPLED) as span:
        _, trace_id, span_id, flags = span.trace.split("-")
    assert trace_id == SAMPLED.split("-")[1]
    assert span_id != SAMPLED.split("-")[2]
    assert flags == "01"
    (finished,) = exporter.get_finished_spans()
    assert finished.parent is not None
    assert f"{finished.parent.span_id:016x}" == SAMPLED.split("-")[2]
    assert finished.resource.attributes["service.name"] == "baton-gateway"


def test_the_senders_decision_not_to_sample_holds() -> None:
    tracing, exporter = _traced()
    with tracing.span("here", parent=NOT_SAMPLED) as span, tracing.span("below", parent=span.trace) as below:
        assert span.trace.startswith(NOT_SAMPLED[:36])
        assert span.trace.endswith("-00")
        assert below.trace.endswith("-00")
    assert exporter.get_finished_spans() == ()


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


def test_attributes_events_and_errors_are_recorded() -> None:
    tracing, exporter = _traced()
    with pytest.raises(KeyError), tracing.span("here", worker="d0") as span:
        span.set("tokens", 5)
        span.add_event("accepted", worker="d0")
        raise KeyError("a bug")
    (finished,) = exporter.get_finished_spans()
    assert finished.attributes == {"worker": "d0", "tokens": 5}
    assert [event.name for event in finished.events] == ["accepted", "exception"]
    assert finished.status.status_code is StatusCode.ERROR
    tracing.close()
