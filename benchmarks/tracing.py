"""What does tracing cost? `make bench-tracing`.

Output tokens per second of the whole of Baton, the real gateway in front and simulated engines behind, once
with every request sampled and exported to a collector that takes all, once with tracing switched off.
Both deployments stand side by side; rounds of the same load alternate between them. First with engines whose
steps take as long as those of an 8 billion parameter model on a small GPU, then with engines that take almost no
time, so that what limits the rate is Baton's own work on this machine's cores: the worst case.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from baton.cli.tiny_model import make_tiny_model
from baton.messages import Role
from benchmarks.report import Row, report
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.telemetry import SERVICES, Collector, running_collector

OUTPUT_TOKENS = 200
CONCURRENCY = 16
PROMPT = "the quick brown fox jumps over the lazy dog " * 40
OPTIONS: Mapping[str, object] = {"eos_probability": 0.0, "running_max": CONCURRENCY, "blocks": 4096}
SPEEDS = {"engines as in life": 1.0, "engines that take no time": 100.0}
ROUND_REQUESTS = {1.0: 16, 100.0: 64}
"""By speed, so that a round takes seconds."""


@dataclass(frozen=True)
class Load:
    cluster: Cluster
    client: httpx.AsyncClient

    async def round_tokens_per_s(self, number: int, requests: int) -> float:
        """Return the rate of one round, whose prompts nobody has cached."""
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
        """Return the processor time that all services together have used."""
        times = [psutil.Process(one.process.pid).cpu_times() for one in self.cluster.services.values() if one.process]
        return sum(one.user + one.system for one in times)


@contextmanager
def variables(settings: Mapping[str, str]) -> Generator[None]:
    """Set variables that services started inside inherit."""
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


async def start(stack: AsyncExitStack, folder: Path, model: Path, speed: float, settings: Mapping[str, str]) -> Load:
    cluster = await stack.enter_async_context(running_cluster(folder, model=model))
    with variables(settings):
        # A machine that is busy with the load itself must not look like a lost worker.
        await cluster.start_control_plane(gateway_flags=("--accept-s", "5"))
        for role in Role:
            await cluster.start_worker(role, f"{role}-0", options={**OPTIONS, "speed": speed})
        await cluster.wait_ready()
    client = httpx.AsyncClient(base_url=cluster.url, timeout=60.0)
    return Load(cluster, await stack.enter_async_context(client))


@dataclass(frozen=True)
class Measured:
    tokens_per_s: list[float]
    cpu_s: float
    """Over all rounds."""


async def measure(folder: Path, collector: Collector, speed: float, rounds: int) -> tuple[Measured, Measured]:
    """Return what came of it with tracing, and without."""
    model, *folders = (folder / name for name in ("model", "traced", "plain"))
    make_tiny_model(model)
    for one in folders:
        one.mkdir()
    export = {f"BATON_{service.upper()}_OTLP_ENDPOINT": collector.url for service in SERVICES}
    off = {f"BATON_{service.upper()}_TRACING": "false" for service in SERVICES}
    async with AsyncExitStack() as stack:
        traced = await start(stack, folders[0], model, speed, export)
        plain = await start(stack, folders[1], model, speed, off)
        rates: dict[Load, list[float]] = {traced: [], plain: []}
        for load in rates:
            await load.round_tokens_per_s(0, CONCURRENCY)  # Warms everything up.
        cpu_s = {load: load.cpu_s() for load in rates}
        for number in range(1, rounds + 1):
            # Each goes first in half of the rounds.
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
            spans = collector.spans
        rates = [statistics.median(one.tokens_per_s) for one in (traced, plain)]
        ratios = [one / other for one, other in zip(traced.tokens_per_s, plain.tokens_per_s, strict=True)]
        cpu_ms = [
            one.cpu_s * 1e6 / (arguments.rounds * ROUND_REQUESTS[speed] * OUTPUT_TOKENS) for one in (traced, plain)
        ]
        requests = sum("baton.request_id" in span.attributes for span in spans)
        rows += [
            Row.against(f"{name}: output tokens", "tokens/s", rates[0], off=rates[1]),
            Row(name=f"{name}: traced against off, by round", unit="ratio", ours=statistics.median(ratios)),
            Row.against(f"{name}: processor time of all services", "ms/1,000 tokens", cpu_ms[0], off=cpu_ms[1]),
            Row(name=f"{name}: spans received per request", unit="spans", ours=len(spans) / requests),
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
