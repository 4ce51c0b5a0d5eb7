"""A tiny OpenTelemetry collector for tests: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.traces import TracedSpan


@dataclass
class Collector:
    url: str = ""
    payloads: list[bytes] = field(default_factory=list[bytes])
    arrived: threading.Condition = field(default_factory=threading.Condition)
    delay_s: float = 0.0
    """Before each answer."""

    def take(self, payload: bytes) -> None:
        with self.arrived:
            self.payloads.append(payload)
            self.arrived.notify_all()

    @property
    def spans(self) -> list[TracedSpan]:
        """Everything that has arrived; read only now, since a collector should cost its senders nothing."""
        return [
            TracedSpan(
                trace=span.trace_id.hex(),
                span=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                name=span.name,
                service=str(_attributes(resource.resource.attributes).get("service.name", "")),
                start_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano,
                error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
                attributes=_attributes(span.attributes),
                links=tuple(link.span_id.hex() for link in span.links),
                kind=span.kind,
            )
            for payload in self.payloads
            for resource in ExportTraceServiceRequest.FromString(payload).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, condition: Callable[[list[TracedSpan]], object], *, timeout_s: float = 10.0) -> list[TracedSpan]:
        """Wait until what has arrived fulfils `condition`, and return it."""
        give_up_at_s = time.monotonic() + timeout_s
        with self.arrived:
            while not condition(spans := self.spans):
                left_s = give_up_at_s - time.monotonic()
                assert left_s > 0, f"only these spans arrived: {[(span.service, span.name) for span in spans]}"
                self.arrived.wait(left_s)
            return spans


def _attributes(attributes: Iterable[KeyValue]) -> dict[str, object]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


@contextmanager
def running_collector(port: int = 0) -> Generator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            payload = self.rfile.read(int(self.headers["content-length"]))
            time.sleep(collector.delay_s)
            collector.take(payload)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name.
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
