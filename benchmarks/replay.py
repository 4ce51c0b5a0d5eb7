"""Placement policies compared in replay: traces × fleets × loads × policies.

Every point is a replay of its own. Points are kept in `.cache/replay` as they end, under a digest of the code that they
depend on, so a run that was stopped goes on where it was, and a change of Baton's policy replays no peer. Replayed is
the part of each trace that policies are not tuned on, in as many copies as the time asks for. Writes
`benchmarks/results/replay.json` and `docs/replay.md`; their rows of points that are not asked for stay, and each row
names its code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Final, NoReturn

from baton_simulator.capacity import at_load, ideal_cached_tokens, pooled_cached_share
from baton_simulator.policies import BOUND, on_fleet
from baton_simulator.replay import Fleet, Replay
from baton_simulator.report import summarise
from baton_simulator.routers.peers import PEERS
from baton_simulator.steps import STEPS
from baton_simulator.traffic import library
from baton_simulator.traffic.overlay import held_out_part, overlay
from baton_simulator.traffic.trace import Trace

from benchmarks.replay_page import read_results, write_page, write_results
from benchmarks.report import machine

ROOT: Final = Path(__file__).parents[1]
SIMULATOR: Final = "simulator/baton_simulator"
SOURCES: Final = (SIMULATOR, "benchmarks/replay.py")
BATON_SOURCES: Final = (*SOURCES, "services/scheduler", "native/placement", "baton/worker", "baton/messages")
"""What a replay of Baton's policies depends on. Those of the peers and the bound have less."""
NOT_OF_PEERS: Final = frozenset(
    f"{SIMULATOR}/{file}"
    for file in ("routers/baton.py", "routers/ledgers.py", "policies.py", "command.py", "plots.py")
)
SEED: Final = 1
MODES: Final = ("aggregated", "separated")
DISAGGREGATIONS: Final = ("baton-auto", "baton-never")
"""Without prefill workers, these are the same policy as `baton`."""
POLICIES: Final = (BOUND, "baton", *DISAGGREGATIONS, "baton-without-objectives", *PEERS)


@dataclass(frozen=True, slots=True)
class Point:
    trace: str
    workers: int
    mode: str
    load: float
    policy: str
    minutes: float
    steps: str = "mocker"

    @property
    def fleet(self) -> Fleet:
        half = self.workers // 2
        return Fleet(aggregated=self.workers) if self.mode == MODES[0] else Fleet(prefill=half, decode=half)


KEYS: Final = tuple(each.name for each in fields(Point))


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", default=",".join(library.NAMES), help="default: %(default)s")
    add("--workers", default="8,64", help="sizes of the fleets; default: %(default)s")
    add("--loads", default="0.7,0.9,1.1", help="shares of capacity; default: %(default)s")
    add("--policies", default=",".join(POLICIES), help="default: %(default)s")
    add("--minutes", type=float, default=20.0, help="least simulated time; default: %(default)s")
    add("--steps", choices=STEPS, default="mocker", help="step times of the workers; default: %(default)s")
    add("--processes", type=int, default=2)
    parsed = parser.parse_args()
    # Ends the processes of the pool, too.
    signal.signal(signal.SIGTERM, _end)
    points = [
        Point(trace, int(workers), mode, float(load), policy, parsed.minutes, parsed.steps)
        for trace, workers, mode, load, policy in product(
            parsed.traces.split(","),
            parsed.workers.split(","),
            MODES,
            parsed.loads.split(","),
            parsed.policies.split(","),
        )
        if mode != MODES[0] or policy not in DISAGGREGATIONS
    ]
    rows = merged(read_results(), run(points, parsed.processes))
    write_results({"machine": machine(), "seed": SEED}, rows)
    write_page(rows, POLICIES)


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all rows in the order of the tables, the new ones in place of old ones of the same points."""
    rows = {tuple(row[key] for key in KEYS): row for row in (*old, *new)}
    return sorted(rows.values(), key=_place)


def _place(row: dict[str, Any]) -> tuple[float, ...]:
    names = library.NAMES.index(row["trace"]), MODES.index(row["mode"]), POLICIES.index(row["policy"])
    return list(STEPS).index(row["steps"]), row["workers"], names[0], names[1], row["load"], names[2]


def run(points: Sequence[Point], processes: int) -> list[dict[str, Any]]:
    """Return one row per point, those of earlier runs included."""
    paths = {point: path_of(point) for point in points}
    missing = [point for point in points if not paths[point].exists()]
    began_s = time.monotonic()
    with get_context("spawn").Pool(processes) as pool:
        for done, (point, row) in enumerate(pool.imap_unordered(replay, missing), 1):
            # In one step: a run that is stopped leaves no half of a row.
            partial = paths[point].with_suffix(".partial")
            partial.write_text(json.dumps(row))
            partial.rename(paths[point])
            spent_s = time.monotonic() - began_s
            label = f"{point.trace}, {point.fleet}, {point.load:g}, {point.policy}, {point.steps}: {row['cpu_s']:.1f} s"
            print(f"{done} of {len(missing)} after {spent_s:.0f} s: {label}", file=sys.stderr, flush=True)
    return [json.loads(paths[point].read_text()) for point in points]


def path_of(point: Point) -> Path:
    folder = ROOT / ".cache" / "replay" / code_of(point)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(repr(point).encode()).hexdigest()[:16]}.json"


def code_of(point: Point) -> str:
    return code_digest(point.policy.startswith("baton"))


def replay(point: Point) -> tuple[Point, dict[str, Any]]:
    trace, pooled = scaled(point.trace, point.fleet, point.load, point.minutes, held_out_part)
    fleet, new_router = on_fleet(point.policy, point.fleet)
    began_s = time.process_time()
    outcomes = Replay(trace, fleet, new_router, seed=SEED, steps_of=STEPS[point.steps]).run()
    cpu_s = time.process_time() - began_s
    tokens = sum(request.prompt_tokens for request in trace.requests)
    ideal = sum(ideal_cached_tokens(trace)) / tokens
    facts = {"ideal_cached": ideal, "pooled_cached": pooled, "cpu_s": cpu_s, "code": code_of(point)}
    return point, {**asdict(point), **asdict(summarise(outcomes, fleet)), **facts}


@lru_cache(maxsize=1)
def scaled(
    name: str, fleet: Fleet, load: float, minutes: float, part_of: Callable[[Trace], Trace]
) -> tuple[Trace, float]:
    """Return the trace of a column, and the cached share of a pooled cache on it."""
    part = part_of(library.load(name, SEED))
    copies = 1
    while True:
        trace = at_load(overlay(part, copies, Random(f"{SEED} copies")), fleet, load, copies=copies)
        lasts_s = trace.requests[-1].at_s
        if lasts_s >= minutes * 60:
            break
        copies = max(copies + 1, round(copies * minutes * 60 / lasts_s))
    return trace, pooled_cached_share(trace, fleet)


@cache
def code_digest(is_baton: bool) -> str:
    digest = hashlib.sha256()
    for source in BATON_SOURCES if is_baton else SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*.py")) + sorted(path.glob("*.[ch]*")) if path.is_dir() else [path]:
            name = str(file.relative_to(ROOT))
            if is_baton or name not in NOT_OF_PEERS:
                digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
