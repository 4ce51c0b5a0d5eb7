"""The time from KV that is posted ready to the sink that has it: `make bench-transfer-wake`.

Two processes, KV of a few kilobytes, and both sides idle: the sink has asked and waits. Then the source posts, and the
sink's owner waits for its agent's descriptor, as engines do. The instants are of one monotonic clock. Each backend
takes its turn in every round, so that the machine's other work falls on all of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import select
import statistics
import time
from multiprocessing.connection import Connection
from typing import Final, cast

from baton_native import Agent
from baton_native.bench_source import Memory, Path, Shape, Source, make_agent

from benchmarks.report import Row, report

BACKENDS: Final = ("direct", "shm", "cma", "tcp")
SHAPE: Final = Shape("tiny", layers=1, blocks=1, block_bytes=4096)
PAUSE_S: Final = (0.002, 0.006)
"""Pause before each post, within which both sides come to rest."""
WAIT_S: Final = 30.0
IDLE_S: Final = 3.0


def run_source(pipe: Connection) -> None:
    """Serve in the source's process: lease and post as the pipe asks."""
    source = Source()
    paths = [[backend, True, 1] for backend in BACKENDS]
    shape = [SHAPE.name, SHAPE.layers, SHAPE.blocks, SHAPE.block_bytes]
    pipe.send(source.prepare(shape, [0], paths)["endpoints"])
    while (asked := pipe.recv()) is not None:
        path, key = asked
        source.open(path, key, ready=False)
        pipe.send(time.process_time())
        pipe.recv()
        posted_s = time.monotonic()
        source.post(path, key)
        pipe.send(posted_s)


def seen_s(agent: Agent) -> float:
    """Return the instant at which the pull is known to be done."""
    while True:
        select.select([agent.fileno()], [], [], WAIT_S)
        for event in agent.poll():
            if event.kind == "pull_done":
                return time.monotonic()
            if event.kind == "pull_failed":
                raise RuntimeError(f"the pull failed: {event.detail}")


class Sink:
    """Pulls, one after another, over every backend."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._random = random.Random(1)
        self._memory = Memory(SHAPE)
        self._agents: list[Agent] = []
        for backend in BACKENDS:
            self._agents.append(make_agent(Path(backend, True)))
            self._memory.lend_to(self._agents[-1])
        self._endpoints: list[str] = pipe.recv()

    def wait_s(self, path: int) -> float:
        """Return the time from a post to the end of its pull."""
        key, agent = os.urandom(16), self._agents[path]
        self._pipe.send((path, key.hex()))
        self._pipe.recv()
        agent.pull(key, self._endpoints[path], 0, SHAPE.tokens, [0], WAIT_S)
        time.sleep(self._random.uniform(*PAUSE_S))
        self._pipe.send("post")
        done_s = seen_s(agent)
        return done_s - self._pipe.recv()

    def idle_share(self, path: int) -> float:
        """Return the share of a core that both sides use while a pull waits."""
        key, agent = os.urandom(16), self._agents[path]
        self._pipe.send((path, key.hex()))
        theirs_s, ours_s = self._pipe.recv(), time.process_time()
        agent.pull(key, self._endpoints[path], 0, SHAPE.tokens, [0], WAIT_S)
        time.sleep(IDLE_S)
        ours_s = time.process_time() - ours_s
        self._pipe.send("post")
        seen_s(agent)
        self._pipe.recv()
        # The next opening tells how much the source has used by then.
        self._pipe.send((path, os.urandom(16).hex()))
        theirs_s = self._pipe.recv() - theirs_s
        self._pipe.send("post")
        self._pipe.recv()
        return (ours_s + theirs_s) / IDLE_S

    def close(self) -> None:
        self._pipe.send(None)
        for agent in self._agents:
            agent.close()


def rows_of(waits_s: dict[str, list[float]], idle: dict[str, float]) -> list[Row]:
    rows: list[Row] = []
    for backend, samples in waits_s.items():
        cuts_us = [cut * 1e6 for cut in statistics.quantiles(samples, n=100, method="inclusive")]
        for name, percent in (("p10", 10), ("p50", 50), ("p90", 90), ("p99", 99)):
            rows.append(Row(name=f"{backend}: posted to seen, {name}", unit="µs", ours=cuts_us[percent - 1]))
        rows.append(Row(name=f"{backend}: both sides while a pull waits", unit="% of a core", ours=idle[backend] * 100))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer_wake", description=__doc__)
    parser.add_argument("--pulls", type=int, default=2000, help="pulls over each backend")
    arguments = parser.parse_args()
    # The types know another class for Windows.
    ours, theirs = cast("tuple[Connection, Connection]", multiprocessing.Pipe())
    process = multiprocessing.get_context("spawn").Process(target=run_source, args=(theirs,), daemon=True)
    process.start()
    sink = Sink(ours)
    waits_s = {backend: list[float]() for backend in BACKENDS}
    for number in range(arguments.pulls + 1):
        for path, backend in enumerate(BACKENDS):
            wait_s = sink.wait_s(path)
            if number:  # The first one connects.
                waits_s[backend].append(wait_s)
    idle = {backend: sink.idle_share(path) for path, backend in enumerate(BACKENDS)}
    sink.close()
    process.join(WAIT_S)
    notes = f"{arguments.pulls} pulls of {SHAPE.bytes} bytes over each backend, in turn; checksums on. "
    notes += f"Load of the machine at the end: {os.getloadavg()[0]:.1f}."
    report("transfer_wake", rows_of(waits_s, idle), notes=notes)


if __name__ == "__main__":
    main()
