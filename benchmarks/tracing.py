"""What does tracing cost? `make bench-tracing`.

Output tokens per second of the whole of Baton, the real gateway in front and simulated engines behind, once
with every request sampled and exported to a collector that takes all, once with tracing switched off.
Both deployments stand side by side; rounds of the same load alternate between them. The engines' steps take
almost no time, so that what limits the rate is Baton's own work on this machine's cores.
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
from tests.cluster import Cluster, running_cluster
from tests.otlp import Collector, running_collector
from tests.traced_cluster import SERVICES

OUTPUT_TOKENS = 200
CONCURRENCY = 16
ROUND_REQUESTS = 64
PROMPT = "the quick brown fox jumps over the lazy dog " * 40
FAST: Mapping[str, object] = {"eos_probability": 0.0, "speed": 100.0, "running_max": CONCURRENCY, "blocks": 4096}


@dataclass(frozen=True)
class Load:
    cluster: Cluster
    client: httpx.AsyncClient

    async def round_tokens_per_s(self, number: int) -> float:
        """Return the rate of one round, whose prompts nobody has cached."""
        waiting = iter(range(ROUND_REQUESTS))
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
        return ROUND_REQUESTS * OUTPUT_TOKENS / (time.monotonic() - began_s)

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


async def start(stack: AsyncExitStack, folder: Path, model: Path, settings: Mapping[str, str]) -> Load:
    cluster = await stack.enter_async_context(running_cluster(folder, model=model))
    with variables(settings):
        # A machine that is busy with the load itself must not look like a lost worker.
        await cluster.start_control_plane(gateway_flags=("--accept-s", "5"))
        for role in Role:
            await cluster.start_worker(role, f"{role}-0", options=FAST)
        await cluster.wait_ready()
    client = httpx.AsyncClient(base_url=cluster.url, timeout=60.0)
    return Load(cluster, await stack.enter_async_context(client))


@dataclass(frozen=True)
class Measured:
    tokens_per_s: list[float]
    cpu_s: float
    """Over all rounds."""


async def measure(folder: Path, collector: Collector, rounds: int) -> tuple[Measured, Measured]:
    """Return what came of it with tracing, and without."""
    model, *folders = (folder / name for name in ("model", "traced", "plain"))
    make_tiny_model(model)
    for one in folders:
        one.mkdir()
    export = {f"BATON_{service.upper()}_OTLP_ENDPOINT": collector.url for service in SERVICES}
    off = {f"BATON_{service.upper()}_TRACING": "false" for service in SERVICES}
    async with AsyncExitStack() as stack:
        traced = await start(stack, folders[0], model, export)
        plain = await start(stack, folders[1], model, off)
        rates: dict[Load, list[float]] = {traced: [], plain: []}
        for load in rates:
            await load.round_tokens_per_s(0)  # Warms everything up.
        cpu_s = {load: load.cpu_s() for load in rates}
        for number in range(1, rounds + 1):
            # Each goes first in half of the rounds.
            for load in (traced, plain) if number % 2 else (plain, traced):
                rates[load].append(await load.round_tokens_per_s(number))
        one, other = (Measured(rates[load], load.cpu_s() - cpu_s[load]) for load in (traced, plain))
        return one, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=11, help="counted rounds of each kind (default 11)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_collector() as collector:
        traced, plain = asyncio.run(measure(Path(folder), collector, arguments.rounds))
        spans = collector.spans
        requests = sum("baton.request_id" in span.attributes for span in spans)
    ratios = [one / other for one, other in zip(traced.tokens_per_s, plain.tokens_per_s, strict=True)]
    kilotokens = arguments.rounds * ROUND_REQUESTS * OUTPUT_TOKENS / 1000
    rates = [statistics.median(one.tokens_per_s) for one in (traced, plain)]
    rows = [
        Row.against("output tokens", "tokens/s", rates[0], off=rates[1]),
        Row.against(
            "processor time, all services",
            "ms per 1,000 tokens",
            traced.cpu_s / kilotokens * 1e3,
            off=plain.cpu_s / kilotokens * 1e3,
        ),
        Row(name="traced against off, by round", unit="ratio", ours=statistics.median(ratios)),
        Row(name="spans received per request", unit="spans", ours=len(spans) / requests),
    ]
    notes = (
        f"medians of {arguments.rounds} interleaved rounds of {ROUND_REQUESTS} answers of {OUTPUT_TOKENS} tokens, "
        f"{CONCURRENCY} at a time; rounds from {min(ratios):.3f} to {max(ratios):.3f}; the load and the collector run "
        "on the same cores"
    )
    report("tracing", rows, notes=notes)


if __name__ == "__main__":
    main()
