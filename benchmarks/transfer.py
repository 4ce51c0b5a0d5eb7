"""How fast KV moves between two processes of this host, beside the machine's limits and NIXL: `make bench-transfer`.

The measurements are those of `python -m baton_native.bench`. `BATON_PEER_PYTHON` names the interpreter of an
environment with NIXL (`pip install --no-deps nixl nixl-cu12 numpy`); without it NIXL is left out. All take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from baton_native.bench import LIMIT, PATHS, REPEATS, REQUEST, SHAPES, Peer, Samples, Shape, measure

from benchmarks.report import Row, report

PEER_PYTHON = "BATON_PEER_PYTHON"
MEMCPY = LIMIT + "memcpy"
NIXL_SETTINGS: Mapping[str, Mapping[str, str]] = {"NIXL": {}, "NIXL over TCP": {"UCX_TLS": "tcp"}}


@contextmanager
def nixl_peers(
    python: str, shape: Shape, order: Sequence[int], source_order: Sequence[int]
) -> Generator[dict[str, Peer]]:
    """Start NIXL's two processes for each of its settings; each peer reads everything once per call."""
    cores = sorted(os.sched_getaffinity(os.getppid()))
    described = {
        "layers": shape.layers,
        "blocks": shape.blocks,
        "block_bytes": shape.block_bytes,
        "order": list(order),
        "source_order": list(source_order),
        "layerwise": shape is REQUEST,
    }
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, settings in NIXL_SETTINGS.items():
            processes[name] = subprocess.Popen(
                [python, str(Path(__file__).with_name("nixl_blocks.py")), str(cores[-1]), str(cores[0])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **settings, "PYTHONPATH": ""},
            )
            _ask(processes[name], described)
        yield {name: _peer(process) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _ask(process: subprocess.Popen[str], message: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _peer(process: subprocess.Popen[str]) -> Peer:
    def run() -> tuple[float, float]:
        _ask(process, "run")
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError("NIXL's process ended")
        wall_s, cpu_s = json.loads(answer)
        return wall_s, cpu_s

    return run


def rows_of(results: Mapping[str, Mapping[str, Samples]]) -> list[Row]:
    """One row per shape and way of ours; beside it every limit and peer, memcpy the first of them."""
    rows: list[Row] = []
    figures: dict[str, Callable[[Samples], float]] = {
        "GB/s": lambda samples: samples.gb_per_s,
        "CPU s/GB": lambda samples: samples.cpu_s_per_gb,
    }
    for shape, ways in results.items():
        ours = [f"{backend}, {'checksum' if checksum else 'no checksum'}" for backend, checksum in PATHS]
        for unit, figure in figures.items():
            others = {name: figure(samples) for name, samples in ways.items() if name not in ours}
            others = {MEMCPY: others[MEMCPY], **others}
            rows += [Row.against(f"{shape}: {name}", unit, figure(ways[name]), **others) for name in ours]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--peer-python", default=os.environ.get(PEER_PYTHON, ""), help=f"default: ${PEER_PYTHON}")
    arguments = parser.parse_args()
    python: str = arguments.peer_python
    notes = "Medians; both processes of each way on a core of their own. "
    notes += f"Load of the machine at the start: {os.getloadavg()[0]:.1f}."
    if not python:
        notes += f" NIXL was not measured: {PEER_PYTHON} names no interpreter that has it."
    peers = partial(nixl_peers, python) if python else None
    report("transfer", rows_of(measure(SHAPES, PATHS, arguments.repeats, peers)), notes=notes)


if __name__ == "__main__":
    main()
