"""Exports spans to an OpenTelemetry collector: in batches, from a thread, and without delaying the service."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from baton.messages.traces import SpanRecord
from baton.telemetry.settings import traces_url

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S: Final = 10.0
"""Time to export one batch, in a thread of its own, so that a slow collector loses nothing."""
CLOSE_TIMEOUT_S: Final = 1.0
"""Longest time that a hanging collector delays a service's end."""
PAUSE_S: Final = 5.0
QUEUE_SPANS_MAX: Final = 4096
BATCH_SPANS_MAX: Final = 512
BATCH_INTERVAL_MS: Final = 2000.0

_SCOPE: Final = InstrumentationScope("baton")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


class Collector:
    """Sends spans to a collector. Spans that its queue cannot take are dropped."""

    def __init__(self, endpoint: str, resource: Mapping[str, str]) -> None:
        url = traces_url(endpoint)
        # OpenTelemetry logs every batch and every retry; `BackingOffExporter` says it once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._resource = Resource(dict(resource))
        self._processor = BatchSpanProcessor(
            BackingOffExporter(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S), url),
            max_queue_size=QUEUE_SPANS_MAX,
            max_export_batch_size=BATCH_SPANS_MAX,
            schedule_delay_millis=BATCH_INTERVAL_MS,
        )

    def export(self, record: SpanRecord) -> None:
        self._processor.on_end(_readable(record, self._resource))

    def close(self) -> None:
        """Send the remaining spans, for at most `CLOSE_TIMEOUT_S`."""
        last = Thread(target=self._processor.shutdown, name="last traces", daemon=True)
        last.start()
        last.join(CLOSE_TIMEOUT_S)


class BackingOffExporter(SpanExporter):
    """An exporter that backs off from a collector that is down: one try in `PAUSE_S`, one line in the log."""

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        self._exporter = exporter
        self._url = url
        self._again_at_s = 0.0
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if time.monotonic() < self._again_at_s:
            return SpanExportResult.FAILURE
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed:
            self._again_at_s = time.monotonic() + PAUSE_S
        if failed and not self._failing:
            log.warning("%s takes no traces: they are dropped until it does, nothing else is affected", self._url)
        elif self._failing and not failed:
            log.info("%s takes traces again", self._url)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _readable(record: SpanRecord, resource: Resource) -> ReadableSpan:
    """Return a span in the form that OpenTelemetry's exporters take."""
    trace = int(record.trace, 16)

    def context(span: str) -> SpanContext:
        return SpanContext(trace, int(span, 16), is_remote=False, trace_flags=_SAMPLED)

    return ReadableSpan(
        name=record.name,
        context=context(record.span),
        parent=context(record.parent) if record.parent else None,
        resource=resource,
        attributes=record.attributes,
        links=[Link(context(span)) for span in record.links],
        kind=SpanKind(record.kind),
        status=Status(StatusCode.ERROR, record.error) if record.error else Status(),
        start_time=record.start_ns,
        end_time=record.end_ns,
        instrumentation_scope=_SCOPE,
    )
