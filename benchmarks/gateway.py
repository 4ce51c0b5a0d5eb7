"""The cost of the request path beside its peers': `make bench-gateway`.

Every contender runs at the same time, over engines that take no time. In each round, each of them gets each measure's
load in turn, so that whatever else the machine does falls on all alike; the result is the median of the rounds.
Where there are two cores, a path's own processes share one; load and engines share the other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from tokenizers import Tokenizer

from baton.cli.tiny_model import make_tiny_model
from benchmarks.gateway_contenders import CONTENDERS, STREAMS, WORKERS, Contender, Running, Setup, engines
from benchmarks.gateway_load import Job, Outcome, conversation
from benchmarks.gateway_page import BATON, FLOOR, SHORT, Figures, path_s, tables, write_page
from benchmarks.processes import family, memory_bytes, pin, threads, used_s
from benchmarks.report import Row, report


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    job: Callable[..., Job]
    continues: str = ""
    """The measure whose conversations this one goes on with."""
    half_of: str = ""
    """The measure of whose rate this one has half, in an open loop."""


def measure(name: str, *, continues: str = "", half_of: str = "", **fields: float | bool) -> Measure:
    def job(port: int, model: str, seed: int, **limits: float) -> Job:
        return msgspec.structs.replace(Job(port=port, model=model, seed=seed), **(limits | fields))

    return Measure(name, job, continues, half_of)


TOKENS: Final = 256
MEASURES: Final[Sequence[Measure]] = (
    measure(SHORT),
    measure("1 client, delayed acknowledgements", quick_ack=False),
    measure("8 clients", concurrency=8),
    measure("32 clients", concurrency=32),
    measure("half the rate of 32 clients, open loop", half_of="32 clients"),
    measure("100 requests/s", rate_per_s=100),
    measure("100 words, second turn", turn=2, continues=SHORT),
    measure("3,000 words", words=3000),
    measure("3,000 words, second turn", words=3000, turn=2, continues="3,000 words"),
    measure("8,000 words", words=8000),
    measure("8,000 words, second turn", words=8000, turn=2, continues="8,000 words"),
    measure("64 streams", concurrency=STREAMS, requests_max=STREAMS, tokens=TOKENS, seconds=60),
    measure("64 paced streams", concurrency=STREAMS, requests_max=STREAMS, tokens=TOKENS, seconds=60, paced=True),
)
WARM_UP: Final = 64
TOKENIZED: Final = 15
"""Prompts of which the tokenizer's time is the median."""
CONTEXT_TOKENS_MAX: Final = 1 << 16
WHY_CHARS: Final = 120
SEED_STRIDE: Final = 1000


class Load:
    """The process that sends requests."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def run(self, job: Job) -> Outcome:
        """Raises ChildProcessError if a request was not answered as it should."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        outcome = msgspec.json.decode(self._process.stdout.readline(), type=Outcome)
        if outcome.failure or not outcome.answers:
            raise ChildProcessError(f"a request was not served: {outcome.failure[-500:]}")
        return outcome


@contextmanager
def load_process(cores: Sequence[int]) -> Generator[Load]:
    command = (sys.executable, "-m", "benchmarks.gateway_load")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        pin([process.pid], cores)
        yield Load(process)
    finally:
        process.kill()
        process.wait()


class Bench:
    """All contenders under way, and what was measured of each."""

    def __init__(self, load: Load, seconds: float) -> None:
        self._load = load
        self._seconds = seconds
        self.running: dict[str, Running] = {}
        self.samples: dict[str, dict[str, list[Figures]]] = {}
        """By contender and measure, one for each round."""
        self.notes: list[str] = []

    def add(self, name: str, running: Running, path: Sequence[int], other: Sequence[int]) -> None:
        for role, roots in running.roots.items():
            pin(family(roots), other if role == WORKERS else path)
        self.running[name] = running
        self.samples[name] = {}
        job = Job(port=running.port, model=running.model, requests_max=WARM_UP, concurrency=8, seed=-1)
        self._load.run(job)

    def round(self, number: int) -> None:
        """Measure everything once; each round begins with another contender."""
        done: dict[tuple[str, str], Figures] = {}
        seeds = {each.name: number * SEED_STRIDE + index for index, each in enumerate(MEASURES)}
        for each in MEASURES:
            names = list(self.running)
            start = number % len(names)
            for name in names[start:] + names[:start]:
                running = self.running[name]
                limits = {"seconds": self._seconds}
                if each.continues:
                    limits["requests_max"] = int(done[name, each.continues]["answers"])
                if each.half_of:
                    limits["rate_per_s"] = done[name, each.half_of]["requests_per_s"] / 2
                job = each.job(running.port, running.model, seeds[each.continues or each.name], **limits)
                try:
                    figures = self._measure(running, job)
                except (ChildProcessError, ProcessLookupError) as error:
                    self.drop(name, f"{each.name}: {error}")
                    continue
                done[name, each.name] = figures
                self.samples[name].setdefault(each.name, []).append(figures)

    def drop(self, name: str, why: str) -> None:
        if name.startswith(BATON):
            raise SystemExit(f"{name}: {why}")
        self.notes.append(f"{name} was left out: {why[:WHY_CHARS]}")
        print(f"{name} is left out: {why}", file=sys.stderr)
        self.running.pop(name, None)
        self.samples.pop(name, None)

    def _measure(self, running: Running, job: Job) -> Figures:
        pids = {role: family(roots) for role, roots in running.roots.items()}
        before = {role: threads(each) for role, each in pids.items()}
        outcome = self._load.run(job)
        used = {role: used_s(before[role], threads(each)) for role, each in pids.items()}
        path = [pid for role, each in pids.items() if role != WORKERS for pid in each]
        return {
            "answers": outcome.answers,
            "requests_per_s": outcome.answers / outcome.wall_s,
            "tokens_per_s": outcome.answers * job.tokens / outcome.wall_s,
            "ttft_p50_s": outcome.ttft_p50_s,
            "ttft_p99_s": outcome.ttft_p99_s,
            "gap_p99_s": outcome.gap_p99_s,
            "reads_per_token": outcome.reads / (outcome.answers * job.tokens),
            "events_per_token": outcome.events / (outcome.answers * job.tokens),
            "memory_bytes": memory_bytes(path),
            **{f"cpu_s {role}": seconds / outcome.answers for role, seconds in used.items()},
        }

    def medians(self) -> dict[str, dict[str, Figures]]:
        """Return each figure's median over the rounds, by contender and measure."""
        return {
            name: {each: median_figures(rounds) for each, rounds in measures.items()}
            for name, measures in self.samples.items()
        }


def median_figures(rounds: Sequence[Figures]) -> Figures:
    return {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}


def rows_of(medians: Mapping[str, Mapping[str, Figures]]) -> list[Row]:
    """Return a row for each measure and figure, with the ratio of Baton's to the floor's."""
    units = {"cpu_s": ("ms", 1e3), "ttft_p50_s": ("ms", 1e3), "ttft_p99_s": ("ms", 1e3), "gap_p99_s": ("ms", 1e3)}
    units |= {"memory_bytes": ("MB", 1e-6)}
    rows: list[Row] = []
    for name in medians[BATON]:
        of_measure = {contender: dict(each[name]) for contender, each in medians.items()}
        for figures in of_measure.values():
            figures["cpu_s all but the engines"] = path_s(figures)
        for figure in of_measure[BATON]:
            unit, factor = units.get(figure.split()[0], ("", 1.0))
            values = {each: figures[figure] * factor for each, figures in of_measure.items() if figure in figures}
            ours, floor = values.pop(BATON), values.get(FLOOR)
            ratio = ours / floor if floor else None
            rows.append(Row(name=f"{name}: {figure}", unit=unit, ours=ours, peers=values, ratio=ratio))
    return rows


def make_model(folder: Path) -> Path:
    """Return the folder of a tiny model whose context takes the longest prompts."""
    made = folder / "tiny"
    make_tiny_model(made)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        content = json.loads((made / name).read_text())
        (made / name).write_text(json.dumps(content | {key: CONTEXT_TOKENS_MAX}))
    return made


def tokenizer_s(model_folder: Path, words: int) -> float:
    """Return the processor time that the tokenizer alone takes for a prompt, as a median."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    times: list[float] = []
    for number in range(TOKENIZED):
        (message,) = conversation(-1, number, words, 1)
        began_s = time.thread_time()
        tokenizer.encode_batch_fast([message["content"]])
        times.append(time.thread_time() - began_s)
    return statistics.median(times)


def cores() -> tuple[list[int], list[int]]:
    """Return the cores of the paths, and those of load and engines."""
    available = sorted(os.sched_getaffinity(0))
    return available[:1], available[1:2] or available


def start(bench: Bench, stack: ExitStack, setup: Setup, contenders: Sequence[Contender]) -> None:
    path, other = cores()
    pin(setup.engine_pids, other)
    for each in contenders:
        version = each.version() if each.package else ""
        if each.package and not version:
            bench.notes.append(f"{each.name} is not installed")
            continue
        began_s = time.monotonic()
        try:
            running = stack.enter_context(contextmanager(each.start)(setup))
            bench.add(each.name, running, path, other)
        except ChildProcessError as error:
            bench.drop(each.name, str(error))
            continue
        if version:
            bench.notes.append(f"{each.name} {version}")
        print(f"{each.name} {version} runs after {time.monotonic() - began_s:.0f} s", file=sys.stderr)


def stop(_number: int, _frame: object) -> None:
    """End what was started, too."""
    sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [each.name for each in CONTENDERS]
    parser.add_argument("--only", nargs="+", choices=names, help="contenders to run; writes no results")
    parser.add_argument("--quick", action="store_true", help="one short round; writes no results")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of each load (default 1)")
    parser.add_argument("--minutes", type=float, default=15.0, help="no round begins that would end later (default 15)")
    arguments = parser.parse_args()
    rounds, seconds = (1, 0.3) if arguments.quick else (arguments.rounds, arguments.seconds)
    # Baton comes first: all others are compared with it.
    contenders = [each for each in CONTENDERS if each.name == BATON or each.name in (arguments.only or names)]
    machine_load = os.getloadavg()[0]
    end_s = time.monotonic() + arguments.minutes * 60
    signal.signal(signal.SIGTERM, stop)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model_folder = make_model(folder)
        setup = Setup(folder, model_folder, *stack.enter_context(engines(folder)))
        bench = Bench(stack.enter_context(load_process(cores()[1])), seconds)
        start(bench, stack, setup, contenders)
        for number in range(rounds):
            began_s = time.monotonic()
            bench.round(number)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            if (now_s := time.monotonic()) + (now_s - began_s) > end_s:
                rounds = number + 1
                break
        alone_s = {words: tokenizer_s(model_folder, words) for words in (100, 3000, 8000)}
    medians = bench.medians()
    alone = ", ".join(f"{seconds * 1e3:.2g} ms for {words:,} words" for words, seconds in alone_s.items())
    bench.notes.append(f"the tokenizer alone takes {alone}")
    bench.notes.append(f"medians of {rounds} interleaved rounds; the machine's load was {machine_load:.1f} before")
    notes = "; ".join(bench.notes)
    print("\n".join(tables(medians, TOKENS)))
    print(notes)
    if not (arguments.quick or arguments.only):
        report("gateway", rows_of(medians), notes=notes)
        write_page(medians, TOKENS, notes)


if __name__ == "__main__":
    main()
