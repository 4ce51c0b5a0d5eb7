"""Measures how fast the transfer agents move blocks on this machine: `python -m baton_native.bench`.

One pull moves 256 MiB, beyond every cache, of scattered blocks, between two processes on a core each: in blocks
of 64 KiB, 256 KiB and 1 MiB, and as a request of 2,048 tokens of an 8-billion-parameter Llama (32 layers,
64 KiB per 16 tokens), posted ready layer by layer. The machine's limits are measured in the same run, in turn with
ours: memcpy block by block on one core, `process_vm_readv`, and plain TCP. Printed are the median's GB/s and, since
that suffers from whatever else runs, the CPU time that both processes spent per GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from baton_native import Agent
from baton_native._core import copy_blocks, read_blocks
from baton_native.bench_source import Memory, Path, Shape, make_agent, pin

REQUEST = Shape("request", 32, 128, 64 << 10)
SHAPES = (
    Shape("64 KiB", 8, 512, 64 << 10),
    Shape("256 KiB", 8, 128, 256 << 10),
    Shape("1 MiB", 8, 32, 1 << 20),
    REQUEST,
)
STREAMS = (1, 4)
PATHS = tuple(
    Path(backend, checksum, streams)
    for backend in ("direct", "shm", "cma", "tcp")
    for streams in (STREAMS if backend == "tcp" else (1,))
    for checksum in (False, True)
)
REPEATS = 11
WAIT_S = 60.0
LIMIT = "limit: "


@dataclass
class Samples:
    """Results of the repeats of one measurement."""

    bytes: int
    asked_s: list[float] = field(default_factory=list[float])
    wall_s: list[float] = field(default_factory=list[float])
    cpu_s: list[float] = field(default_factory=list[float])

    def add(self, asked_s: float, wall_s: float, cpu_s: float) -> None:
        self.asked_s.append(asked_s)
        self.wall_s.append(wall_s)
        self.cpu_s.append(cpu_s)

    @property
    def asked_ms(self) -> float:
        return statistics.median(self.asked_s) * 1e3

    @property
    def gb_per_s(self) -> float:
        return self.bytes / statistics.median(self.wall_s) / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return statistics.median(self.cpu_s) / self.bytes * 1e9


Peer = Callable[[], tuple[float, float, float]]
"""Moves as much as one of our pulls; returns the seconds of the call, of the transfer, and of CPU time."""
StartPeers = Callable[[Shape, Sequence[int], Sequence[int]], AbstractContextManager[dict[str, Peer]]]
"""Starts peers for a shape and the order of the blocks at sink and source."""
Results = dict[str, dict[str, Samples]]
"""Samples by shape and path."""


class SourceProcess:
    """The child that is pulled from."""

    def __init__(self, core: int | None) -> None:
        """`core`: the only one that it uses; None: any."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton_native.bench_source", *([] if core is None else [str(core)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def begin(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def tell(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.begin(do, **arguments)
        return self.answer()

    def cpu_s(self) -> float:
        return self.tell("cpu")["cpu_s"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)


class RawStreams:
    """Plain TCP connections from the source, as a limit."""

    def __init__(self, source: SourceProcess, count: int) -> None:
        self._source = source
        port = source.tell("listen", streams=count)["port"]
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]

    def receive(self, memory: Memory, streams: int) -> None:
        share = memory.shape.bytes // streams

        def receive(number: int) -> None:
            at, end = number * share, (number + 1) * share
            while at < end:
                at += self._sockets[number].recv_into(memory.view[at:end])

        self._source.begin("send", streams=streams)
        threads = [threading.Thread(target=receive, args=(number,)) for number in range(1, streams)]
        for thread in threads:
            thread.start()
        receive(0)
        for thread in threads:
            thread.join()
        self._source.answer()


class Bench:
    """Measures every path of one shape in turn."""

    def __init__(self, source: SourceProcess, streams: RawStreams, shape: Shape, paths: Iterable[Path]):
        self.source = source
        self.shape = shape
        # A fixed order, so that runs can be compared; scattered, as blocks of a busy engine are.
        self.order = random.Random(1).sample(range(shape.blocks), shape.blocks)
        self.their_order = random.Random(2).sample(range(shape.blocks), shape.blocks)
        self.memory = Memory(shape)
        paths = list(paths)
        prepared = source.tell(
            "prepare",
            shape=[shape.name, shape.layers, shape.blocks, shape.block_bytes],
            order=self.their_order,
            paths=paths,
        )
        local = Memory(shape)
        every = [layer * shape.blocks + block for layer in range(shape.layers) for block in self.order]
        theirs = [layer * shape.blocks + block for layer in range(shape.layers) for block in self.their_order]
        to, size = self.memory.address, shape.block_bytes
        self.ways: dict[str, Callable[[], tuple[float, float]]] = {
            LIMIT + "memcpy": timed(lambda: copy_blocks(to, local.address, every, theirs, size)),
            LIMIT + "process_vm_readv": timed(
                lambda: read_blocks(source.pid, to, prepared["address"], every, theirs, size)
            ),
        }
        for count in STREAMS:
            name = f"{LIMIT}plain TCP, {count} stream" + ("s" if count > 1 else "")
            self.ways[name] = timed(lambda count=count: streams.receive(self.memory, count))
        self.agents: list[Agent] = []
        for number, path in enumerate(paths):
            agent = make_agent(path)
            self.memory.lend_to(agent)
            self.agents.append(agent)
            endpoint = prepared["endpoints"][number]
            self.ways[str(path)] = lambda number=number, endpoint=endpoint: self.pull(number, endpoint)

    def pull(self, number: int, endpoint: str) -> tuple[float, float]:
        """Return the seconds until it was asked for, and until it was there."""
        key, agent = os.urandom(16), self.agents[number]
        layerwise = self.shape is REQUEST
        self.source.tell("open", path=number, key=key.hex(), ready=not layerwise)
        began_s = time.perf_counter()
        if layerwise:
            self.source.begin("post", path=number, key=key.hex())
        agent.pull(key, endpoint, 0, self.shape.tokens, self.order, WAIT_S)
        asked_s = time.perf_counter() - began_s
        wait_done(agent)
        took_s = time.perf_counter() - began_s
        if layerwise:
            self.source.answer()
        return asked_s, took_s

    def run(self, repeats: int, peers: dict[str, Peer]) -> dict[str, Samples]:
        samples = {name: Samples(self.shape.bytes) for name in [*self.ways, *peers]}
        for repeat in range(repeats + 1):
            for name, way in self.ways.items():
                began_s = time.process_time() + self.source.cpu_s()
                took_s = way()
                cpu_s = time.process_time() + self.source.cpu_s() - began_s
                if not name.startswith(LIMIT):
                    self.memory.check(self.order)
                if repeat > 0:  # The first touches memory and opens connections.
                    samples[name].add(*took_s, cpu_s)
            for name, peer in peers.items():
                took = peer()
                if repeat > 0:
                    samples[name].add(*took)
        return samples

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


def timed(action: Callable[[], None]) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        began_s = time.perf_counter()
        action()
        return 0.0, time.perf_counter() - began_s

    return run


def wait_done(agent: Agent) -> None:
    while True:
        select.select([agent.fileno()], [], [], WAIT_S)
        for report in agent.poll():
            if report.kind == "pull_done":
                return
            if report.kind == "pull_failed":
                raise RuntimeError(f"the pull failed: {report.detail}")


def measure(
    shapes: Iterable[Shape] = SHAPES,
    paths: Iterable[Path] = PATHS,
    repeats: int = REPEATS,
    start_peers: StartPeers | None = None,
) -> Results:
    """Measure everything in turn; both processes keep to a core of their own where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    source = SourceProcess(cores[0])
    pin(cores[-1])
    results: Results = {}
    try:
        streams = RawStreams(source, max(STREAMS))
        for shape in shapes:
            bench = Bench(source, streams, shape, paths)
            no_peers = nullcontext(dict[str, Peer]())
            with start_peers(shape, bench.order, bench.their_order) if start_peers else no_peers as peers:
                results[shape.name] = bench.run(repeats, peers)
            bench.close()
    finally:
        source.close()
        os.sched_setaffinity(0, set(cores))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m baton_native.bench", description="Transfer speed on this machine")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--shape", action="append", choices=[shape.name for shape in SHAPES], help="all by default")
    parser.add_argument("--backend", action="append", choices=sorted({path.backend for path in PATHS}))
    arguments = parser.parse_args()
    shapes = [shape for shape in SHAPES if shape.name in (arguments.shape or [shape.name])]
    paths = [path for path in PATHS if path.backend in (arguments.backend or [path.backend])]
    for name, ways in measure(shapes, paths, arguments.repeats).items():
        sys.stdout.write(f"{name:<28}{'GB/s':>8}{'CPU s/GB':>11}\n")
        for way, samples in ways.items():
            sys.stdout.write(f"  {way:<26}{samples.gb_per_s:>8.2f}{samples.cpu_s_per_gb:>11.3f}\n")


if __name__ == "__main__":
    main()
