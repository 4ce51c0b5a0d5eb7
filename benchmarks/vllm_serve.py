"""Baton beside vLLM's own server over the same engine: `make bench-vllm-serve`.

All serve the tiny model in float32 with the same options of vLLM: `vllm serve`, which computes in a process beside the
one that schedules, on a core of its own; the same with both in one process and its threads not bound, as Baton has them
on a CPU (docs/engines.md); and `baton up` with one worker that takes whole requests, all else as by default (KV pool,
tracing). The engine computes the same, so differences are what stands between it and the client: vLLM's server on one
side; gateway, scheduler, index, NATS and worker on the other. All run all the time and are measured in turn; each round
begins with another one. A figure is the median of the rounds. Processor time is that of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from baton.cli.engine_defaults import worker_threads
from baton.cli.servers import free_port
from baton.cli.tiny_model import make_tiny_model
from benchmarks.deployment import START_TIMEOUT_S, deployment, is_ready
from benchmarks.gateway import Load, load_process
from benchmarks.gateway_load import Job
from benchmarks.processes import family, threads, used_s
from benchmarks.report import Row, report

OPTIONS: Final[Mapping[str, object]] = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 1024,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 30,
}
ROUNDS: Final = 5
WARM_UP: Final = 8
MODEL: Final = "tiny"
BATON: Final = "baton"
STOCK: Final = "vllm serve"
ONE_PROCESS: Final = "in one process"
ENVIRONS: Final[Mapping[str, Mapping[str, str]]] = {
    STOCK: {},
    ONE_PROCESS: {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **worker_threads("cpu", cores=os.cpu_count() or 1, workers=1),
    },
}
FLAGS: Final[Mapping[str, Sequence[str]]] = {
    STOCK: (),
    ONE_PROCESS: ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
}


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    concurrency: int
    requests: int
    words: int
    tokens: int


MEASURES: Final = (
    Measure("1 client, 100 words, 64 tokens", 1, 8, 100, 64),
    Measure("8 clients, 100 words, 64 tokens", 8, 32, 100, 64),
    Measure("32 clients, 100 words, 64 tokens", 32, 96, 100, 64),
    Measure("4 clients, 1,000 words, 16 tokens", 4, 16, 1000, 16),
)


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    root: int
    """Process that all others of the server are children of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p99_ms: float
    tokens_per_s: float
    cpu_ms: float
    """Processor time of all processes per request."""


UNITS: Final = {
    "ttft_p50_ms": ("TTFT p50", "ms"),
    "ttft_p99_ms": ("TTFT p99", "ms"),
    "gap_p99_ms": ("p99 of the time between tokens", "ms"),
    "tokens_per_s": ("tokens per second", "1/s"),
    "cpu_ms": ("processor time per request", "ms"),
}


@contextmanager
def stock(model: Path, folder: Path, name: str) -> Generator[Server]:
    """Run vLLM's own server until it is ready, and end it afterwards."""
    port, log = free_port(), folder / f"{name}.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += [part for key, value in OPTIONS.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *FLAGS[name]], stdout=output, stderr=output, env={**os.environ, **ENVIRONS[name]}
        )
    try:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not is_ready(port, "/health"):
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise SystemExit(f"vLLM's server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait()


@contextmanager
def baton(model: Path, folder: Path) -> Generator[Server]:
    flags = ["--engine", "vllm", "--vllm-python", sys.executable, "--model", str(model), "--prefill", "0"]
    flags += ["--decode", "1", "--disaggregation", "never", "--engine-options", json.dumps(OPTIONS)]
    with deployment(folder, [*flags, "--kv-pool-bytes", "auto"]) as ports:
        yield Server(ports.http, ports.launcher_pid)


def run(load: Load, server: Server, measure: Measure, seed: int) -> Figures:
    job = Job(
        port=server.port,
        model=MODEL,
        concurrency=measure.concurrency,
        requests_max=measure.requests,
        words=measure.words,
        tokens=measure.tokens,
        seconds=300.0,
        seed=seed,
    )
    pids = family([server.root])
    before = threads(pids)
    outcome = load.run(job)
    return Figures(
        ttft_p50_ms=outcome.ttft_p50_s * 1e3,
        ttft_p99_ms=outcome.ttft_p99_s * 1e3,
        gap_p99_ms=outcome.gap_p99_s * 1e3,
        tokens_per_s=outcome.answers * measure.tokens / outcome.wall_s,
        cpu_ms=used_s(before, threads(pids)) * 1e3 / outcome.answers,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Baton beside vLLM's own server over the same engine")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds: int = parser.parse_args().rounds
    samples: dict[tuple[str, str], list[Figures]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        load = stack.enter_context(load_process(range(os.cpu_count() or 1)))
        make_tiny_model(model := folder / MODEL, dtype="float32")
        servers = [(BATON, stack.enter_context(baton(model, folder)))]
        servers += [(name, stack.enter_context(stock(model, folder, name))) for name in ENVIRONS]
        for _, server in servers:
            run(load, server, replace(MEASURES[1], requests=WARM_UP), -1)
        for number in range(rounds):
            for measure in MEASURES:
                for name, server in servers:
                    samples.setdefault((measure.name, name), []).append(run(load, server, measure, number))
            servers.append(servers.pop(0))
            print(f"round {number + 1} of {rounds}", flush=True)

    def median(measure: Measure, name: str, figure: str) -> float:
        return statistics.median(getattr(each, figure) for each in samples[measure.name, name])

    rows = [
        Row.against(
            f"{measure.name}: {label}",
            unit,
            median(measure, BATON, figure),
            **{name: median(measure, name, figure) for name in ENVIRONS},
        )
        for measure in MEASURES
        for figure, (label, unit) in UNITS.items()
    ]
    report("vllm_serve", rows, notes=f"Medians of {rounds} interleaved rounds; `ratio` is to `vllm serve`.")


if __name__ == "__main__":
    main()
