"""The radix tree compared with other indexes: `make bench-index` (`PEER_PYTHON=` an interpreter with `dynamo.llm`).

Baton's tree, a flat hash table built of its parts, dictionaries, and Dynamo's `RadixTree`, each through its Python
calls in a process of its own, in interleaved rounds over the same events (see `index_events.py`). Figures are medians
over rounds; bytes are the growth of the process in its first round, beside the bytes that Baton's index counts itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.index_events import BATCH_BLOCKS, CACHED_BLOCKS
from benchmarks.report import Row, report

ROOT = Path(__file__).parent.parent
WORKLOADS = ("trace-8", "trace-64", "trace-1000", "split-8", "split-64", "split-1000", "large-8")
LARGE_ROUNDS = 3
FIGURES = {
    "stored_per_s": "blocks/s",
    "stored_per_cpu_s": "blocks/s of processor time",
    "removed_per_s": "blocks/s",
    "removed_per_cpu_s": "blocks/s of processor time",
    "matched_per_s": "matches/s",
    "idle_p50_us": "µs",
    "idle_p99_us": "µs",
    "rested_p50_us": "µs",
    "rested_p99_us": "µs",
    "busy_p50_us": "µs",
    "busy_p99_us": "µs",
    "busy_written_per_s": "blocks/s",
    "bytes_per_holding": "bytes",
    "counted_bytes_per_holding": "bytes",
}

Figures = dict[str, float]


class Contender:
    """An index in a process of its own, which answers one round at a time."""

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.index_contenders", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )

    def run(self, workload: str) -> Figures:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(workload + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died under {workload}, status {self._process.wait(timeout=10)}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def run_workload(workload: str, contenders: list[Contender], rounds: int) -> list[Row]:
    samples: dict[str, list[Figures]] = {each.name: [] for each in contenders}
    for number in range(rounds):
        for each in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
            samples[each.name].append(each.run(workload))
    for figures in samples.values():
        for sample in figures:
            # Later rounds reuse memory that the process has already.
            sample["bytes_per_holding"] = figures[0]["resident_bytes"] / sample["holdings"]
            sample["counted_bytes_per_holding"] = sample["counted_bytes"] / sample["holdings"]
    rows: list[Row] = []
    for figure, unit in FIGURES.items():
        medians = {
            name: statistics.median(sample[figure] for sample in figures)
            for name, figures in samples.items()
            if all(sample.get(figure) for sample in figures)
        }
        if "tree" in medians:
            rows.append(Row.against(f"{workload} {figure}", unit, medians.pop("tree"), **medians))
    return rows


def measure(workload: str, pythons: dict[str, str], rounds: int) -> list[Row]:
    """Run a workload in fresh processes. The large one leaves dictionaries out."""
    large = workload.startswith("large")
    contenders = [Contender(name, python) for name, python in pythons.items() if not large or name != "dictionary"]
    try:
        return run_workload(workload, contenders, min(rounds, LARGE_ROUNDS) if large else rounds)
    finally:
        for each in contenders:
            each.close()


def notes(rounds: int, has_peer: bool, took_s: float) -> str:
    peer = "ratio: against Dynamo" if has_peer else "no PEER_PYTHON, so Dynamo was not measured"
    return (
        f"{peer}; runs of at most {BATCH_BLOCKS} blocks, caches of {CACHED_BLOCKS} blocks over all workers, medians of"
        f" {rounds} interleaved rounds (large: {LARGE_ROUNDS} at most) in {took_s / 60:.0f} minutes; load of the"
        f" machine {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of each workload (default 5)")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, help=f"of {' '.join(WORKLOADS)}, or other counts")
    parser.add_argument("--peer-python", default=os.environ.get("PEER_PYTHON", ""), help="an interpreter with Dynamo")
    arguments = parser.parse_args()
    if arguments.peer_python and shutil.which(str(arguments.peer_python)) is None:
        parser.error(f"there is no program {arguments.peer_python}; name a Python that has ai-dynamo, or none")
    pythons = {"dynamo": arguments.peer_python} if arguments.peer_python else {}
    pythons |= {"dictionary": sys.executable, "flat": sys.executable, "tree": sys.executable}
    rows: list[Row] = []
    began_s = time.monotonic()
    try:
        for workload in arguments.workloads:
            print(f"{workload} …", file=sys.stderr)
            rows += measure(workload, pythons, arguments.rounds)
    finally:
        # An interrupted run reports the rows it has.
        if rows:
            report(
                "index", rows, notes=notes(arguments.rounds, bool(arguments.peer_python), time.monotonic() - began_s)
            )


if __name__ == "__main__":
    main()
