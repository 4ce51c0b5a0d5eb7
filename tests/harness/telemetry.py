"""An OTLP collector over HTTP, queries on a trace, and a cluster that exports its traces."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from baton.messages.attempts import AttemptState
from baton.messages.workers import Role
from tests.harness.cluster import Cluster
from tests.harness.limits import HANG_S


@dataclass(frozen=True, kw_only=True)
class TracedSpan:
    trace: str
    span: str
    parent: str
    name: str
    service: str = ""
    start_ns: int
    end_ns: int
    error: str = ""
    attributes: Mapping[str, object] = field(default_factory=dict[str, object])
    links: tuple[str, ...] = ()
    kind: int = 0


class Trace:
    """All spans of one trace, which must be one tree."""

    def __init__(self, spans: Iterable[TracedSpan], *, after_kill: bool = False) -> None:
        """`after_kill`: leave out spans whose parents were lost because a killed process could not export them."""
        self.spans = {span.span: span for span in spans}
        while after_kill and (lost := [span for span in self.spans.values() if span.parent not in {"", *self.spans}]):
            for span in lost:
                del self.spans[span.span]
        assert len({span.trace for span in self.spans.values()}) == 1
        roots = [span for span in self.spans.values() if span.parent not in self.spans]
        assert len(roots) == 1, f"not one tree: {[(root.service, root.name) for root in roots]}"
        self.root = roots[0]

    def below(self, span: TracedSpan) -> list[TracedSpan]:
        return sorted((one for one in self.spans.values() if one.parent == span.span), key=lambda one: one.start_ns)

    def path(self, span: TracedSpan) -> list[str]:
        """Return the names from the root down to `span`."""
        names = [span.name]
        while span.span != self.root.span:
            span = self.spans[span.parent]
            names.append(span.name)
        return names[::-1]

    def paths(self) -> set[str]:
        return {" / ".join(self.path(span)) for span in self.spans.values()}

    def named(self, name: str) -> list[TracedSpan]:
        return sorted((one for one in self.spans.values() if one.name == name), key=lambda one: one.start_ns)

    def is_accounted_for(self) -> bool:
        """Return whether a span without children runs in at least 95 % of the root's time."""
        parents = {span.parent for span in self.spans.values()}
        leaves = [span for span in self.spans.values() if span.span not in parents]
        covered_ns = _union_ns(leaves, self.root.start_ns, self.root.end_ns)
        return covered_ns >= 0.95 * (self.root.end_ns - self.root.start_ns)


def _union_ns(spans: Sequence[TracedSpan], start_ns: int, end_ns: int) -> int:
    covered_ns, until_ns = 0, start_ns
    for span in sorted(spans, key=lambda one: one.start_ns):
        begins_ns, ends_ns = max(span.start_ns, until_ns), min(span.end_ns, end_ns)
        if ends_ns > begins_ns:
            covered_ns += ends_ns - begins_ns
            until_ns = ends_ns
    return covered_ns


@dataclass
class Collector:
    url: str = ""
    payloads: list[bytes] = field(default_factory=list[bytes])
    arrived: threading.Condition = field(default_factory=threading.Condition)
    delay_s: float = 0.0
    """Delay before each answer."""

    def take(self, payload: bytes) -> None:
        with self.arrived:
            self.payloads.append(payload)
            self.arrived.notify_all()

    @property
    def spans(self) -> list[TracedSpan]:
        """All spans received. They are decoded only here, so that the collector costs its senders nothing."""
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

    def wait_for(
        self, condition: Callable[[list[TracedSpan]], object], *, timeout_s: float = HANG_S
    ) -> list[TracedSpan]:
        """Wait until the received spans satisfy `condition`, and return them."""
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
        protocol_version = "HTTP/1.1"  # Connections stay open, as at any collector.
        timeout = 5.0

        def do_POST(self) -> None:
            payload = self.rfile.read(int(self.headers["content-length"]))
            time.sleep(collector.delay_s)
            collector.take(payload)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name.
            """Suppress the access log."""

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


SERVICES = ("gateway", "scheduler", "kvindex", "prefill", "decode")
OUTPUT_TOKENS = 240
STORY = " ".join(f"line {number}: the quick brown fox" for number in range(60))
OPTIONS: Mapping[str, object] = {"eos_probability": 0.0, "speed": 2.0, "layers": 4, "seed": 1}
"""Makes an answer take some seconds, so that message latency is small against it even on a busy machine."""
PATIENT = ("--accept-s", "5", "--place-resend-s", "5", "--lost-after-s", "4")
"""Limits that keep slow workers from counting as lost, so that traces have the expected attempts."""

PATHS = {
    "chat tiny",
    "chat tiny / read",
    "chat tiny / tokenise",
    "chat tiny / attempt",
    "chat tiny / attempt / place",
    "chat tiny / attempt / place / place",
    "chat tiny / attempt / place / place / match",
    "chat tiny / attempt / dispatch",
    "chat tiny / attempt / dispatch / prefill",
    "chat tiny / attempt / dispatch / prefill / queue",
    "chat tiny / attempt / dispatch / prefill / compute",
    "chat tiny / attempt / dispatch / decode",
    "chat tiny / attempt / dispatch / decode / queue",
    "chat tiny / attempt / dispatch / decode / transfer",
    "chat tiny / attempt / dispatch / decode / transfer / layers",
    "chat tiny / attempt / dispatch / decode / first token",
    "chat tiny / attempt / dispatch / decode / generate",
    "chat tiny / attempt / first token",
    "chat tiny / attempt / stream",
    "chat tiny / send",
}
"""Stages of a streamed, disaggregated chat, each below its parent."""


@dataclass(frozen=True)
class Answer:
    request_id: str
    status: int
    text: str


def export_traces(monkeypatch: pytest.MonkeyPatch, endpoint: str, *, share: float = 1.0) -> None:
    """Have every service that is started from now on export to `endpoint`."""
    for service in SERVICES:
        monkeypatch.setenv(f"BATON_{service.upper()}_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv(f"BATON_{service.upper()}_TRACE_SHARE", str(share))


async def start_all(cluster: Cluster, *, prefill: int, decode: int) -> None:
    """Start one of each service and the given numbers of workers."""
    await cluster.start_control_plane(gateway_flags=PATIENT)
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for number in range(count):
            await cluster.start_worker(role, f"{role}-{number}", "--digest-s", "0.1", options=OPTIONS)
    await cluster.wait_ready()


async def ask(cluster: Cluster, *, prompt: str = STORY, headers: Mapping[str, str] | None = None) -> Answer:
    """Stream one answer as a client would."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "temperature": 0,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
    }
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as client:
        response = await client.post("/v1/chat/completions", json=body, headers=dict(headers or {}))
    return Answer(response.headers["x-request-id"], response.status_code, response.text)


async def ask_while_decode_is_killed(cluster: Cluster, *, prompt: str) -> Answer:
    """Kill the decode worker that streams the answer; another one continues it."""
    _, answer, worker = await cluster.observer.caught_in(
        Role.DECODE, AttemptState.RUNNING, ask=lambda number: ask(cluster, prompt=f"{number} {prompt}")
    )
    cluster.services[worker].signal(signal.SIGKILL)
    return await answer


def check_whole(trace: Trace) -> None:
    """Check that the trace is one tree with every stage."""
    assert trace.paths() == PATHS
    prefill, decode = trace.named("prefill")[0], trace.named("decode")[0]
    dispatched = {span.span: span.attributes["baton.worker"] for span in trace.named("dispatch")}
    for leg in (prefill, decode):
        assert leg.attributes["baton.worker"] == dispatched[leg.parent]
    (transfer,) = trace.named("transfer")
    layers = trace.named("layers")
    assert sum(int(str(span.attributes["baton.transfer.layers"])) for span in layers) == OPTIONS["layers"]
    moved_bytes = [int(str(span.attributes["baton.transfer.bytes"])) for span in layers]
    assert 0 < sum(moved_bytes) == transfer.attributes["baton.transfer.bytes"]
    assert {span.attributes["baton.transfer.backend"] for span in layers} <= {"shm", "tcp"}
    assert all(
        "baton.transfer.waiting_s" in span.attributes and span.attributes["baton.transfer.rail"] for span in layers
    )
    assert trace.root.attributes["gen_ai.usage.output_tokens"] == OUTPUT_TOKENS


def check_retried(trace: Trace) -> None:
    """Check that the trace is one tree with two attempts side by side, the second replacing the first."""
    failed, again = trace.named("attempt")
    assert failed.parent == again.parent == trace.root.span
    assert failed.attributes["error.type"] == "worker_lost"
    assert failed.error
    assert again.attributes["baton.retry_of"] == failed.span
    assert failed.attributes["baton.placement.decode"] != again.attributes["baton.placement.decode"]
    (decode,) = trace.named("decode")
    assert decode.attributes["baton.worker"] == again.attributes["baton.placement.decode"]
    assert [span.name for span in (trace.spans[decode.parent], trace.spans[trace.spans[decode.parent].parent])] == [
        "dispatch",
        "attempt",
    ]
    assert trace.spans[trace.spans[decode.parent].parent].span == again.span
    assert not trace.root.error
