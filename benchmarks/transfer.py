"""The speed of KV between two processes of this host, beside the machine's limits and peers: `make bench-transfer`.

The measurements are those of `python -m baton_native.bench`; all take turns. Peers are measured if installed:
- NIXL and Mooncake with the interpreters that `BATON_NIXL_PYTHON` and `BATON_MOONCAKE_PYTHON` name
  (`pip install --no-deps nixl nixl-cu12 numpy`, `pip install --no-deps mooncake-transfer-engine-non-cuda numpy`);
- UCX, alone by its own tool and through Baton's `ucx` backend, after `make environment-ucx`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_native.bench import LIMIT, PATHS, REPEATS, REQUEST, SHAPES, Peer, Samples, Shape, measure
from baton_native.bench_source import UCX_LIBRARY
from baton_native.bench_source import Path as Way

from benchmarks.report import Row, report

TCP = {"UCX_TLS": "tcp"}
TUNED = {"UCX_TLS": "posix,cma", "UCX_RNDV_SCHEME": "get_zcopy"}
TUNED_TCP = TCP | {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
PEERS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("NIXL", "nixl", {}),
    ("NIXL over TCP", "nixl", TCP),
    ("NIXL over tuned TCP", "nixl", TUNED_TCP),
    ("Mooncake over TCP", "mooncake", {}),
)
UCX_ALONE: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("default", {}),
    ("tuned", TUNED),
    ("over TCP", TCP),
    ("over tuned TCP", TUNED_TCP),
)
MANY = Shape("15,000 x 16 KiB", 1, 15_000, 16 << 10)
UCX = Path(__file__).parent.parent / ".venv-ucx"
START_S = 10.0


@dataclass(frozen=True)
class Peers:
    """Peers to compare with, for `measure`."""

    pythons: Mapping[str, str]
    """Interpreter by library; empty if it is not installed."""
    perftest: Path | None

    @contextmanager
    def start(self, shape: Shape, order: Sequence[int], source_order: Sequence[int]) -> Generator[dict[str, Peer]]:
        """Start the peers' processes. Each peer reads everything once per call and is stopped between calls."""
        print(f"{shape.name} …", flush=True)
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
            for name, library, settings in PEERS:
                if not self.pythons[library]:
                    continue
                script = str(Path(__file__).with_name("peer_blocks.py"))
                processes[name] = subprocess.Popen(
                    [self.pythons[library], script, library, str(cores[-1]), str(cores[0])],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, **settings, "PYTHONPATH": ""},
                    start_new_session=True,
                )
                _ask(processes[name], described)
                _answer(name, processes[name])
            peers = {name: _peer(name, process) for name, process in processes.items()}
            if self.perftest is not None:
                for name, settings in UCX_ALONE:
                    peers[f"UCX alone, {name}"] = _ucx_alone(self.perftest, settings, shape, cores)
            yield peers
        finally:
            for process in processes.values():
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _ask(process: subprocess.Popen[str], message: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _answer(name: str, process: subprocess.Popen[str]) -> Any:
    """Return a peer's next answer, and stop it: idle, some peers spin and would disturb the others' turns."""
    assert process.stdout is not None
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"the process of {name} ended")
    os.killpg(process.pid, signal.SIGSTOP)
    return json.loads(answer)


def _peer(name: str, process: subprocess.Popen[str]) -> Peer:
    def run() -> tuple[float, float, float]:
        os.killpg(process.pid, signal.SIGCONT)
        _ask(process, "run")
        asked_s, wall_s, cpu_s = _answer(name, process)
        return asked_s, wall_s, cpu_s

    return run


def _ucx_alone(perftest: Path, settings: Mapping[str, str], shape: Shape, cores: Sequence[int]) -> Peer:
    """Measure UCX's own tool, which moves the same block repeatedly: unlike KV, it stays in the CPU's cache."""

    environment = {**os.environ, **settings, "LD_LIBRARY_PATH": str(perftest.parent.parent / "lib")}
    count = shape.bytes // shape.block_bytes
    asks = ("-c", str(cores[-1]), "-t", "ucp_get", "-s", str(shape.block_bytes), "-n", str(count), "-w", "8")

    @contextmanager
    def serving() -> Generator[list[str]]:
        """Serve on a free port, which another process may take first; yield the client's command."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            command = [str(perftest), "-p", str(free.getsockname()[1])]
        serve = [*command, "-c", str(cores[0])]
        with subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as server:
            try:
                yield [*command, *asks, "127.0.0.1"]
            finally:
                server.kill()

    def run() -> tuple[float, float, float]:
        final, patience_s = None, 0.02
        while final is None:
            with serving() as call:
                time.sleep(patience_s)
                client = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
            final = re.search(r"^Final:\s+(?:\S+\s+){5}(\S+)", client.stdout, re.MULTILINE)
            patience_s *= 2
            if final is None and patience_s > START_S:
                raise RuntimeError(f"ucx_perftest fails: {client.stdout} {client.stderr}")
        return 0.0, shape.bytes / (float(final[1]) * (1 << 20)), 0.0

    return run


def limit_of(way: Way, shown: Mapping[str, float]) -> str:
    """Return the name of the limit that bounds this way: the ratio is to that limit."""
    plain_tcp = max((name for name in shown if name.startswith(LIMIT + "plain TCP")), key=lambda name: shown[name])
    peer = next((name for name in shown if name == "NIXL"), LIMIT + "process_vm_readv")
    return {"direct": LIMIT + "memcpy", "tcp": plain_tcp, "ucx": peer}.get(way.backend, LIMIT + "process_vm_readv")


def rows_of(results: Mapping[str, Mapping[str, Samples]], paths: Sequence[Way]) -> list[Row]:
    """Return one row per shape and way of Baton's, beside limits and peers of its kind, its own limit first."""
    rows: list[Row] = []
    figures: dict[str, Callable[[Samples], list[float]]] = {
        "GB/s": lambda samples: [samples.bytes / wall_s / 1e9 for wall_s in samples.wall_s],
        "CPU s/GB": lambda samples: [cpu_s / samples.bytes * 1e9 for cpu_s in samples.cpu_s],
        "ms to ask": lambda samples: [asked_s * 1e3 for asked_s in samples.asked_s],
    }
    ours = [str(path) for path in paths]
    for shape, ways in results.items():
        speeds = {name: samples.gb_per_s for name, samples in ways.items()}
        for unit, figure in figures.items():
            if (unit == "ms to ask") != (shape == MANY.name):
                continue
            others = {
                name: values for name, samples in ways.items() if name not in ours and any(values := figure(samples))
            }
            for path in paths:
                first = limit_of(path, speeds)
                alike = {name: values for name, values in others.items() if ("TCP" in name) == (path.backend == "tcp")}
                beside = {first: others[first], **alike} if first in others else alike
                rows.append(_row(f"{shape}: {path}", unit, figure(ways[str(path)]), beside))
        if shape != MANY.name:
            for path in paths:
                if path.checksum:
                    without = ways[str(path._replace(checksum=False))]
                    kept = _median_ratio(without.wall_s, ways[str(path)].wall_s)
                    rows.append(Row.against(f"{shape}: {path}: speed that the checksum costs", "%", 100 * (1 - kept)))
    return rows


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of each round's ratio, since the machine's speed changes from round to round."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def _row(name: str, unit: str, ours: Sequence[float], others: Mapping[str, Sequence[float]]) -> Row:
    ratio = _median_ratio(ours, next(iter(others.values()))) if others else None
    medians = {other: statistics.median(values) for other, values in others.items()}
    return Row(name=name, unit=unit, ours=statistics.median(ours), peers=medians, ratio=ratio)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    libraries = dict.fromkeys(library for _, library, _ in PEERS)
    for library in libraries:
        variable = f"BATON_{library.upper()}_PYTHON"
        parser.add_argument(f"--{library}-python", default=os.environ.get(variable, ""), help=f"default: ${variable}")
    arguments = parser.parse_args()
    pythons = {library: getattr(arguments, f"{library}_python") for library in libraries}
    ucx = next(UCX.glob("lib/python*/site-packages/libucx"), None)
    paths = list(PATHS)
    notes = f"Medians of {arguments.repeats} interleaved rounds, ratios by round; "
    notes += "both processes of each way on a core of their own. "
    notes += f"Load of the machine at the start: {os.getloadavg()[0]:.1f}."
    if ucx is not None:
        os.environ[UCX_LIBRARY] = str(ucx / "lib/libucp.so.0")
        paths += [Way("ucx", checksum=False), Way("ucx", checksum=True)]
        notes += " UCX alone reads the same block again and again, which stays in the cache."
    absent = [library for library, python in pythons.items() if not python] + ["ucx"] * (ucx is None)
    if absent:
        notes += f" Not here, so not measured: {', '.join(absent)}."
    peers = Peers(pythons, ucx and ucx / "bin/ucx_perftest")
    report("transfer", rows_of(measure((*SHAPES, MANY), paths, arguments.repeats, peers.start), paths), notes=notes)


if __name__ == "__main__":
    main()
