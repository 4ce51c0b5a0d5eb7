"""What clients notice of others' hostile bodies: `make bench-hostile`.

A deployment as `baton up` starts it, with simulated engines, serves short streams. Another client sends hostile bodies
(`benchmarks.intake`): up to 16 MiB, made to cost as much as possible. Each round has three windows: no hostile bodies;
all of them, one after the other, to a second deployment, which cost the same processor time and nothing else; all of
them to the deployment that serves the streams. Compared are the times to the first token and between two tokens within
a round, so that whatever else the machine does falls on all three. A window begins when the last body is answered.
Engines prefill in no time: of two of the bodies the prompts are served, and they would hold up others' tokens there.
Prompts of 100 words are read by the gateway itself, those of 600 by the intake processes, which read the hostile
bodies, too. The gateway's memory is taken after each round, when it is at rest, and its highest value meanwhile.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
SAMPLE_S: Final = 0.1
NO_PREFILL: Final = {"prefill_token_s": 0.0, "attention_token_s": 0.0}
SIDES: Final = ("alone", "elsewhere", "beside")
"""Windows of a round: without hostile bodies, with those to another deployment, with those to the same one."""
FIGURES: Final[Mapping[str, Callable[[Outcome], float]]] = {
    "p50 TTFT": lambda outcome: outcome.ttft_p50_s,
    "p99 TTFT": lambda outcome: outcome.ttft_p99_s,
    "p99 time between tokens": lambda outcome: outcome.gap_p99_s,
}


class HostileClient:
    """Sends hostile bodies, from a thread of its own."""

    def __init__(self) -> None:
        self._hostile = bodies()
        self.sent = 0
        self.failure = ""
        self.late_s = 0.0
        """Longest time for which bodies were still sent after their window."""

    @contextmanager
    def sending(self, port: int) -> Generator[None]:
        """Send each body once to this port meanwhile, and wait for the last one's answer."""
        thread = threading.Thread(target=self._run, args=(port,))
        thread.start()
        try:
            yield
        finally:
            ended_s = time.perf_counter()
            thread.join()
            self.late_s = max(self.late_s, time.perf_counter() - ended_s)
            if self.failure:
                raise SystemExit(self.failure)

    def _run(self, port: int) -> None:
        for name, (path, body, status) in self._hostile.items():
            connection = http.client.HTTPConnection(HOST, port, timeout=300)
            try:
                connection.request("POST", path, body, {"content-type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                if answer.status != status:
                    self.failure = f"{name} was answered {answer.status}, not {status}"
            except BrokenPipeError:
                pass  # A body that is too long is answered before it has arrived.
            except OSError as error:
                self.failure = f"{name} was not answered: {error!r}"
            finally:
                connection.close()
            self.sent += 1


class PeakMemory:
    """Highest memory of a process and its children, as far as samples find it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.bytes_max = 0

    @contextmanager
    def sampling(self) -> Generator[PeakMemory]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            # Not `memory_bytes`: the share of each page takes long to find.
            held_bytes = sum(psutil.Process(pid).memory_info().rss for pid in family([self._pid]))
            self.bytes_max = max(self.bytes_max, held_bytes)


def ratio_of(pairs: Sequence[tuple[float, float]], random: Random) -> tuple[float, float, float]:
    """Return the median of the pairs' ratios, and the ends of its 95 % interval by resampling."""
    ratios = [beside / alone for beside, alone in pairs]
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return statistics.median(ratios), medians[RESAMPLED // 40], medians[-RESAMPLED // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of windows for each length (default 9)")
    parser.add_argument("--seconds", type=float, default=11.0, help="length of a window (default 11)")
    arguments = parser.parse_args()
    found: dict[int, list[dict[str, Outcome]]] = {words: [] for words in WORDS}
    held_bytes: list[int] = []
    peaks_bytes: list[int] = []
    with ExitStack() as stack:
        flags = ("--engine", "simulated", "--prefill", "0", "--disaggregation", "never")
        options = ("--engine-options", json.dumps(ENGINE_OPTIONS | NO_PREFILL))
        ports, other_ports = (
            stack.enter_context(
                deployment(Path(stack.enter_context(tempfile.TemporaryDirectory())), [*flags, *options])
            )
            for _ in range(2)
        )
        load = stack.enter_context(load_process(sorted(os.sched_getaffinity(0))))
        hostile = HostileClient()
        gateway = gateway_family(ports.launcher_pid)

        def window(words: int, seed: int, port: int = ports.http) -> Outcome:
            job = Job(
                port=port, model=MODEL, concurrency=CONCURRENCY, tokens=TOKENS, words=words,
                seconds=arguments.seconds, seed=seed,
            )  # fmt: skip
            return load.run(job)

        def run(side: str, words: int, seed: int) -> Outcome:
            if side == "alone":
                return window(words, seed)
            with hostile.sending(ports.http if side == "beside" else other_ports.http):
                return window(words, seed)

        for port in (ports.http, other_ports.http):  # Starts both intake processes.
            for words in WORDS:
                window(words, -1 - words, port)
        start_bytes = memory_bytes(family([gateway]))
        for number in range(arguments.rounds):
            first = number % len(SIDES)
            with PeakMemory(gateway).sampling() as peak:
                for words, rounds in found.items():
                    sides = SIDES[first:] + SIDES[:first]
                    seeds = range(len(SIDES) * number, len(SIDES) * (number + 1))
                    rounds.append({side: run(side, words, seed) for side, seed in zip(sides, seeds, strict=True)})
            peaks_bytes.append(peak.bytes_max)
            held_bytes.append(memory_bytes(family([gateway])))
            print(
                f"round {number + 1} of {arguments.rounds}, {hostile.sent} hostile bodies, "
                f"{held_bytes[-1] / MIB:.0f} MiB, {peaks_bytes[-1] / MIB:.0f} MiB at most",
                flush=True,
            )
    rows, intervals = latency_rows(found)
    half = arguments.rounds // 2
    for name, figures in (("at rest", held_bytes), ("at most", peaks_bytes)):
        early, late = statistics.median(figures[:half]), statistics.median(figures[half:])
        title = f"memory of the gateway {name}, second half"
        rows.append(Row.against(title, "MiB", late / MIB, first_half=early / MIB))
    rows.append(Row(name="memory of the gateway before", unit="MiB", ours=start_bytes / MIB))
    notes = (
        f"{arguments.rounds} rounds of three windows of {arguments.seconds:g} s for each length; {CONCURRENCY} clients "
        f"of {TOKENS} tokens each; {hostile.sent} hostile bodies, half of them to another deployment, the last one's "
        f"answer at most {hostile.late_s:.1f} s after its window; ratios are medians over rounds, with 95 % intervals "
        "of " + "; ".join(intervals)
    )
    report("hostile", rows, notes=notes)


def latency_rows(found: Mapping[int, Sequence[Mapping[str, Outcome]]]) -> tuple[list[Row], list[str]]:
    """Return each figure beside hostile bodies, against each of the other windows, and the ratios' intervals."""
    random, rows, intervals = Random(1), list[Row](), list[str]()
    for words, rounds in found.items():
        for name, figure in FIGURES.items():
            for peer, title in (("alone", "beside hostile bodies"), ("elsewhere", "against bodies sent elsewhere")):
                sides = [(figure(each["beside"]), figure(each[peer])) for each in rounds]
                ratio, low, high = ratio_of(sides, random)
                beside_ms, peer_ms = (statistics.median(each) * 1e3 for each in zip(*sides, strict=True))
                row = f"{name}, {words} words, {title}"
                rows.append(Row(name=row, unit="ms", ours=beside_ms, peers={peer: peer_ms}, ratio=ratio))
                intervals.append(f"{row}: {low:.2f} to {high:.2f}")
    return rows, intervals


def gateway_family(launcher_pid: int) -> int:
    """Return the gateway's process, of which the intake processes are children."""
    for pid in family([launcher_pid]):
        line = psutil.Process(pid).cmdline()
        if "baton_gateway" in line:
            return pid
    raise SystemExit("the deployment has no gateway")


if __name__ == "__main__":
    main()
