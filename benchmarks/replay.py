"""Placement policies compared in replay: traces × fleets × loads × policies.

Every point is a replay of its own, in a process of its own. Points are kept in `.cache/replay` as they end, under a
digest of the code, so a run that was stopped goes on where it was. The rest of each trace is replayed that policies are
not tuned on, in as many copies as the time asks for. Writes `benchmarks/results/replay.json` and `docs/replay.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Final, NoReturn

from baton_simulator.capacity import at_load, ideal_cached_tokens, pooled_cached_share
from baton_simulator.policies import BOUND, NAMES, on_fleet
from baton_simulator.replay import Fleet, Replay
from baton_simulator.report import summarise
from baton_simulator.traffic import library
from baton_simulator.traffic.overlay import held_out_part, overlay
from baton_simulator.traffic.trace import Trace

from benchmarks.report import RESULTS, commit, machine

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "replay.md"
BEGIN: Final = "<!-- the tables: python -m benchmarks.replay -->\n"
END: Final = "<!-- end of the tables -->\n"
SOURCES: Final = ("simulator", "services/scheduler", "baton/worker", "benchmarks/replay.py")
SEED: Final = 1
MODES: Final = ("aggregated", "separated")


@dataclass(frozen=True, slots=True)
class Point:
    trace: str
    workers: int
    mode: str
    load: float
    policy: str
    minutes: float

    @property
    def fleet(self) -> Fleet:
        half = self.workers // 2
        return Fleet(aggregated=self.workers) if self.mode == MODES[0] else Fleet(prefill=half, decode=half)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", default=",".join(library.NAMES), help="default: %(default)s")
    add("--workers", default="8,64", help="sizes of the fleets; default: %(default)s")
    add("--loads", default="0.7,0.9,1.1", help="shares of capacity; default: %(default)s")
    add(
        "--policies", default=",".join((BOUND, *(name for name in NAMES if name != BOUND))), help="default: %(default)s"
    )
    add("--minutes", type=float, default=20.0, help="least simulated time; default: %(default)s")
    add("--processes", type=int, default=2)
    parsed = parser.parse_args()
    # Ends the processes of the pool, too.
    signal.signal(signal.SIGTERM, _end)
    points = [
        Point(trace, int(workers), mode, float(load), policy, parsed.minutes)
        for trace, workers, mode, load, policy in product(
            parsed.traces.split(","),
            parsed.workers.split(","),
            MODES,
            parsed.loads.split(","),
            parsed.policies.split(","),
        )
        # Without prefill workers it is the same policy.
        if (mode, policy) != (MODES[0], "baton-auto")
    ]
    rows = run(points, parsed.processes)
    write_results({"machine": machine(), "commit": commit(), "seed": SEED, "minutes": parsed.minutes}, rows)
    write_page(rows)


def run(points: Sequence[Point], processes: int) -> list[dict[str, Any]]:
    """Return one row per point, those of earlier runs included."""
    folder = ROOT / ".cache" / "replay" / code_digest()
    folder.mkdir(parents=True, exist_ok=True)
    paths = {point: folder / f"{hashlib.sha256(repr(point).encode()).hexdigest()[:16]}.json" for point in points}
    missing = [point for point in points if not paths[point].exists()]
    began_s = time.monotonic()
    with get_context("spawn").Pool(processes) as pool:
        for done, (point, row) in enumerate(pool.imap_unordered(replay, missing), 1):
            # In one step: a run that is stopped leaves no half of a row.
            partial = paths[point].with_suffix(".partial")
            partial.write_text(json.dumps(row))
            partial.rename(paths[point])
            spent_s = time.monotonic() - began_s
            label = f"{point.trace}, {point.fleet}, {point.load:g}, {point.policy}: {row['cpu_s']:.1f} s"
            print(f"{done} of {len(missing)} after {spent_s:.0f} s: {label}", file=sys.stderr, flush=True)
    return [json.loads(paths[point].read_text()) for point in points]


def replay(point: Point) -> tuple[Point, dict[str, Any]]:
    trace, pooled = _scaled(point.trace, point.fleet, point.load, point.minutes)
    fleet, new_router = on_fleet(point.policy, point.fleet)
    began_s = time.process_time()
    outcomes = Replay(trace, fleet, new_router, seed=SEED).run()
    cpu_s = time.process_time() - began_s
    tokens = sum(request.prompt_tokens for request in trace.requests)
    ideal = sum(ideal_cached_tokens(trace)) / tokens
    summary = asdict(summarise(outcomes, fleet))
    return point, {**asdict(point), **summary, "ideal_cached": ideal, "pooled_cached": pooled, "cpu_s": cpu_s}


@lru_cache(maxsize=1)
def _scaled(name: str, fleet: Fleet, load: float, minutes: float) -> tuple[Trace, float]:
    """Return the trace of a column, and the cached share of a pooled cache on it."""
    part = held_out_part(library.load(name, SEED))
    copies = 1
    while True:
        trace = at_load(overlay(part, copies, Random(f"{SEED} copies")), fleet, load, copies=copies)
        lasts_s = trace.requests[-1].at_s
        if lasts_s >= minutes * 60:
            break
        copies = max(copies + 1, round(copies * minutes * 60 / lasts_s))
    return trace, pooled_cached_share(trace, fleet)


def code_digest() -> str:
    digest = hashlib.sha256()
    for source in SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- results


def write_results(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows, one line each."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    (RESULTS / "replay.json").write_text(f'{json.dumps(facts)[:-1]}, "rows": [\n{lines}\n]}}\n')


def write_page(rows: Sequence[dict[str, Any]]) -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + "".join(f"{line}\n" for line in tables(rows)) + END + after)


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of goodput, then one per column of all figures."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    columns: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        columns.setdefault((row["trace"], row["workers"], row["mode"], row["load"]), {})[row["policy"]] = row
    yield "\n**Goodput, %**\n"
    yield f"| trace, workers, load | {' | '.join(policies)} |"
    yield "|---" * (len(policies) + 1) + "|"
    for (trace, workers, mode, load), column in columns.items():
        best = max(row["goodput"] for policy, row in column.items() if policy != BOUND)
        cells = [_goodput(column[each]["goodput"], best, each) if each in column else "" for each in policies]
        yield f"| {trace}, {workers} {mode}, {load:.0%} | {' | '.join(cells)} |"
    for (trace, workers, mode, load), column in columns.items():
        first = next(iter(column.values()))
        yield (
            f"\n**{trace}, {workers} {mode}, {load:.0%}**: {first['requests']} requests, {first['duration_s']:.0f} s. "
            f"Cached share with an infinite shared cache: {first['ideal_cached']:.3f}, "
            f"with one LRU as large as all workers': {first['pooled_cached']:.3f}\n"
        )
        yield "| policy | good/s | cached | TTFT p50 | p90 | p99, s | TPOT p50 | p99, ms | max/mean | refused |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        for policy, row in column.items():
            yield (
                f"| {policy} | {row['good_per_s']:.2f} | {row['cached_share']:.3f} | {row['ttft_p50_s']:.2f} | "
                f"{row['ttft_p90_s']:.2f} | {row['ttft_p99_s']:.2f} | {row['tpot_p50_ms']:.0f} | "
                f"{row['tpot_p99_ms']:.0f} | {row['imbalance']:.2f} | {row['refused'] / row['requests']:.1%} |"
            )


def _goodput(share: float, best: float, policy: str) -> str:
    text = f"{share * 100:.0f}"
    return f"**{text}**" if share == best and policy != BOUND else text


if __name__ == "__main__":
    main()
