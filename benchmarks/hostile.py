"""What clients notice of others' hostile bodies: `make bench-hostile`.

A deployment as `baton up` starts it, with simulated engines, serves short streams all the time. In every other window
another client sends one hostile body after another (`benchmarks.intake`): up to 16 MiB, made to cost as much as
possible. Compared are the times to the first token and between two tokens of neighbouring windows, so that whatever
else the machine does falls on both. Prompts of 100 words are read by the gateway itself, those of 600 by the intake
processes, which read the hostile bodies, too. The gateway's memory is taken after each window with hostile bodies.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Final

import psutil

from benchmarks.deployment import deployment
from benchmarks.gateway import load_process
from benchmarks.gateway_load import HOST, Job, Outcome
from benchmarks.intake import ENGINE_OPTIONS, MIB, MODEL, bodies
from benchmarks.processes import family, memory_bytes
from benchmarks.report import Row, report

WORDS: Final = (100, 600)
TOKENS: Final = 16
CONCURRENCY: Final = 8
RESAMPLED: Final = 2000
FIGURES: Final[Mapping[str, Callable[[Outcome], float]]] = {
    "p99 TTFT": lambda outcome: outcome.ttft_p99_s,
    "p99 time between tokens": lambda outcome: outcome.gap_p99_s,
}


class HostileClient:
    """Sends one hostile body after another while it is allowed to, on a thread of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._allowed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run)
        self.sent = 0
        self.failure = ""

    @contextmanager
    def running(self) -> Generator[HostileClient]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended = True
            self._allowed.set()
            self._thread.join()

    @contextmanager
    def sending(self) -> Generator[None]:
        self._allowed.set()
        try:
            yield
        finally:
            self._allowed.clear()
            if self.failure:
                raise SystemExit(self.failure)

    def _run(self) -> None:
        for name, (path, body, status) in cycle(bodies().items()):
            self._allowed.wait()
            if self._ended:
                return
            connection = http.client.HTTPConnection(HOST, self._port, timeout=300)
            try:
                connection.request("POST", path, body, {"content-type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                if answer.status != status:
                    self.failure = f"{name} was answered {answer.status}, not {status}"
            except BrokenPipeError:
                pass  # A body that is too long is answered before it has arrived.
            finally:
                connection.close()
            self.sent += 1


def ratio_of(pairs: Sequence[tuple[float, float]], random: Random) -> tuple[float, float, float]:
    """Return the median of the pairs' ratios, and the ends of its 95 % interval by resampling."""
    ratios = [beside / alone for beside, alone in pairs]
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return statistics.median(ratios), medians[RESAMPLED // 40], medians[-RESAMPLED // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of windows for each length (default 12)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window (default 5)")
    arguments = parser.parse_args()
    flags = ("--engine", "simulated", "--prefill", "0", "--disaggregation", "never")
    options = ("--engine-options", json.dumps(ENGINE_OPTIONS))
    found: dict[int, list[tuple[Outcome, Outcome]]] = {words: [] for words in WORDS}
    held_bytes: list[int] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder), [*flags, *options]) as ports,
        load_process(sorted(os.sched_getaffinity(0))) as load,
        HostileClient(ports.http).running() as hostile,
    ):
        gateway = gateway_family(ports.launcher_pid)

        def window(words: int, seed: int) -> Outcome:
            job = Job(
                port=ports.http, model=MODEL, concurrency=CONCURRENCY, tokens=TOKENS, words=words,
                seconds=arguments.seconds, seed=seed,
            )  # fmt: skip
            return load.run(job)

        def beside_hostile(words: int, seed: int) -> Outcome:
            with hostile.sending():
                return window(words, seed)

        for words in WORDS:  # Starts both intake processes.
            window(words, -1 - words)
        start_bytes = memory_bytes(family([gateway]))
        for number in range(arguments.pairs):
            for words, pairs in found.items():
                seed = 2 * number
                if number % 2:
                    alone, beside = window(words, seed), beside_hostile(words, seed + 1)
                else:
                    beside, alone = beside_hostile(words, seed + 1), window(words, seed)
                pairs.append((beside, alone))
            held_bytes.append(memory_bytes(family([gateway])))
            print(f"pair {number + 1} of {arguments.pairs}, {hostile.sent} hostile bodies", flush=True)
    random, rows, intervals = Random(1), list[Row](), list[str]()
    for words, pairs in found.items():
        for name, figure in FIGURES.items():
            sides = [(figure(beside), figure(alone)) for beside, alone in pairs]
            ratio, low, high = ratio_of(sides, random)
            beside_ms, alone_ms = (statistics.median(each) * 1e3 for each in zip(*sides, strict=True))
            title = f"{name}, {words} words, beside hostile bodies"
            rows.append(Row(name=title, unit="ms", ours=beside_ms, peers={"alone": alone_ms}, ratio=ratio))
            intervals.append(f"{name}, {words} words: {low:.2f} to {high:.2f}")
    half = len(held_bytes) // 2
    first, last = statistics.median(held_bytes[:half]), statistics.median(held_bytes[half:])
    rows.append(Row.against("memory of the gateway, second half", "MiB", last / MIB, first_half=first / MIB))
    rows.append(Row(name="memory of the gateway before", unit="MiB", ours=start_bytes / MIB))
    notes = (
        f"{arguments.pairs} pairs of windows of {arguments.seconds:g} s for each length; {CONCURRENCY} clients of "
        f"{TOKENS} tokens each; {hostile.sent} hostile bodies; ratios are medians over pairs, with 95 % intervals of "
        + "; ".join(intervals)
    )
    report("hostile", rows, notes=notes)


def gateway_family(launcher_pid: int) -> int:
    """Return the gateway's process, of which the intake processes are children."""
    for pid in family([launcher_pid]):
        line = psutil.Process(pid).cmdline()
        if "baton_gateway" in line:
            return pid
    raise SystemExit("the deployment has no gateway")


if __name__ == "__main__":
    main()
