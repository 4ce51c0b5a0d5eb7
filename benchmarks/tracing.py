"""The cost of tracing: `make bench-tracing`.

Output tokens per second of a complete Baton deployment, with the real gateway and simulated engines: once with
every request sampled and exported to a collector that takes all, once with tracing switched off.
Both deployments run side by side, and rounds of the same load alternate between them. The first engines take as
long per step as an 8 billion parameter model on a small GPU. The second take almost no time, so that Baton's own
work on this machine's cores limits the rate: the worst case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from baton.cli.servers import free_port
from benchmarks.report import Row, report

SERVICES = ("gateway", "scheduler", "kvindex", "prefill", "decode")
START_TIMEOUT_S = 120.0

OUTPUT_TOKENS = 200
CONCURRENCY = 16
PROMPT = "the quick brown fox jumps over the lazy dog " * 40
OPTIONS: Mapping[str, object] = {"eos_probability": 0.0, "running_max": CONCURRENCY, "blocks": 4096}
SPEEDS = {"engines at a realistic speed": 1.0, "engines that take no time": 100.0}
ROUND_REQUESTS = {1.0: 16, 100.0: 64}
"""Requests per round by engine speed, so that a round takes seconds."""


@dataclass(frozen=True)
class Load:
    launcher: psutil.Process
    client: httpx.AsyncClient

    async def round_tokens_per_s(self, number: int, requests: int) -> float:
        """Return the rate of one round, whose prompts no worker has cached."""
        waiting = iter(range(requests))
        began_s = time.monotonic()

        async def ask() -> None:
            for request in waiting:
                body = {
                    "model": "tiny",
                    "prompt": f"{number} {request} {PROMPT}",
                    "stream": True,
                    "max_tokens": OUTPUT_TOKENS,
                    "ignore_eos": True,
                }
                answer = await self.client.post("/v1/completions", json=body)
                assert answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]"), answer.text[-500:]

        await asyncio.gather(*(ask() for _ in range(CONCURRENCY)))
        return requests * OUTPUT_TOKENS / (time.monotonic() - began_s)

    def cpu_s(self) -> float:
        """Return the processor time that all services together have used, without NATS and Redis."""
        processes = self.launcher.children(recursive=True)
        times = [one.cpu_times() for one in processes if any("baton_" in word for word in one.cmdline())]
        return sum(one.user + one.system for one in times)


@asynccontextmanager
async def deployed(folder: Path, speed: float, settings: Mapping[str, str]) -> AsyncGenerator[Load]:
    """Run `baton up` with the simulated engine until the block ends."""
    port = free_port()
    options = json.dumps({**OPTIONS, "speed": speed})
    command = [sys.executable, "-m", "baton.cli", "up", "--engine", "simulated", "--engine-options", options]
    command += ["--kv-pool-bytes", "0"]
    # On a machine that is busy with the load, late heartbeats must not make a worker look lost.
    environ = {**os.environ, **settings, "BATON_GATEWAY_ACCEPT_S": "5"}
    process = await asyncio.create_subprocess_exec(
        *command, *("--port", str(port), "--folder", str(folder), "--die-with-parent"), env=environ, stdout=sys.stderr
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            await _until_ready(process, client)
            yield Load(psutil.Process(process.pid), client)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_ready(process: asyncio.subprocess.Process, client: httpx.AsyncClient) -> None:
    give_up_at_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with suppress(httpx.TransportError):
            if (await client.get("/ready")).is_success:
                return
        if process.returncode is not None or time.monotonic() > give_up_at_s:
            raise SystemExit("baton up did not start")
        await asyncio.sleep(0.1)


class Collector(ThreadingHTTPServer):
    """An OTLP collector over HTTP. It decodes only on request, so that it costs its senders nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.payloads: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def counts(self) -> tuple[int, int]:
        """Return the numbers of spans and of requests."""
        spans = [
            span
            for payload in self.payloads
            for resource in ExportTraceServiceRequest.FromString(payload).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return len(spans), sum(any(one.key == "baton.request_id" for one in span.attributes) for span in spans)


class Taking(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # Connections stay open, as at any collector.

    def do_POST(self) -> None:
        payload = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Collector)
        self.server.payloads.append(payload)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name.
        """Suppress the access log."""


@contextmanager
def running_collector() -> Generator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


@dataclass(frozen=True)
class Measured:
    tokens_per_s: list[float]
    cpu_s: float
    """Figures over all rounds."""


async def measure(folder: Path, collector: Collector, speed: float, rounds: int) -> tuple[Measured, Measured]:
    """Return the figures with tracing and without."""
    export = {f"BATON_{service.upper()}_OTLP_ENDPOINT": collector.url for service in SERVICES}
    off = {f"BATON_{service.upper()}_TRACING": "false" for service in SERVICES}
    async with AsyncExitStack() as stack:
        traced = await stack.enter_async_context(deployed(folder, speed, export))
        plain = await stack.enter_async_context(deployed(folder, speed, off))
        rates: dict[Load, list[float]] = {traced: [], plain: []}
        for load in rates:
            await load.round_tokens_per_s(0, CONCURRENCY)  # Warms everything up.
        cpu_s = {load: load.cpu_s() for load in rates}
        for number in range(1, rounds + 1):
            # Each deployment goes first in half of the rounds.
            for load in (traced, plain) if number % 2 else (plain, traced):
                rates[load].append(await load.round_tokens_per_s(number, ROUND_REQUESTS[speed]))
        one, other = (Measured(rates[load], load.cpu_s() - cpu_s[load]) for load in (traced, plain))
        return one, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds of each kind (default 9)")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    rows: list[Row] = []
    for name, speed in SPEEDS.items():
        with tempfile.TemporaryDirectory() as folder, running_collector() as collector:
            traced, plain = asyncio.run(measure(Path(folder), collector, speed, arguments.rounds))
            spans, requests = collector.counts()
        rates = [statistics.median(one.tokens_per_s) for one in (traced, plain)]
        ratios = [one / other for one, other in zip(traced.tokens_per_s, plain.tokens_per_s, strict=True)]
        cpu_ms = [
            one.cpu_s * 1e6 / (arguments.rounds * ROUND_REQUESTS[speed] * OUTPUT_TOKENS) for one in (traced, plain)
        ]
        rows += [
            Row.against(f"{name}: output tokens", "tokens/s", rates[0], off=rates[1]),
            Row(name=f"{name}: traced against off, by round", unit="ratio", ours=statistics.median(ratios)),
            Row.against(f"{name}: processor time of all services", "ms/1,000 tokens", cpu_ms[0], off=cpu_ms[1]),
            Row(name=f"{name}: spans received per request", unit="spans", ours=spans / requests),
        ]
    notes = (
        f"medians of {arguments.rounds} interleaved rounds of {' or '.join(map(str, ROUND_REQUESTS.values()))} answers "
        f"of {OUTPUT_TOKENS} tokens, "
        f"{CONCURRENCY} at a time; the load and the collector run on the same cores; the machine's load was "
        f"{load_before:.1f} before"
    )
    report("tracing", rows, notes=notes)


if __name__ == "__main__":
    main()
