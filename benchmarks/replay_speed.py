"""Speed of replays with the default policy: `make bench-replay-speed`. Processor time of one core, without loading.

Rates are of requests at 90 % of capacity. The hour is a recorded half hour twice, one after the other, with ids of
their own, at its recorded times.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import product
from random import Random
from typing import Final

from baton_simulator.capacity import at_load
from baton_simulator.policies import on_fleet
from baton_simulator.replay import Fleet, Replay
from baton_simulator.traffic import library
from baton_simulator.traffic.overlay import held_out_part, overlay
from baton_simulator.traffic.trace import Trace

from benchmarks.replay import MODES, SEED, Point
from benchmarks.report import Row, report

LOAD: Final = 0.9
REQUESTS: Final = 4000
HALF_HOUR_S: Final = 1800.0
POLICY: Final = {"aggregated": "baton", "separated": "baton-auto"}
"""What `baton up` runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--many-workers", type=int, default=1000, help="default: %(default)s")
    parsed = parser.parse_args()
    rows: list[Row] = []
    for workers, names in ((parsed.workers, library.NAMES), (parsed.many_workers, library.NAMES[:1])):
        for name, mode in product(names, MODES):
            point = Point(name, workers, mode, LOAD, POLICY[mode], 0.0)
            spent_s = replay_s(at_capacity(name, point.fleet), point.fleet, point.policy)
            rows.append(Row(name=f"{name}, {workers} {mode}", unit="requests/s", ours=REQUESTS / spent_s))
    for name in library.NAMES:
        fleet = Fleet(aggregated=parsed.workers)
        spent_s = replay_s(twice(library.load(name, SEED)), fleet, POLICY[MODES[0]])
        rows.append(Row(name=f"{name}, an hour over {parsed.workers} aggregated", unit="s", ours=spent_s))
    report("replay_speed", rows, notes=f"processor time of one core; rates of {REQUESTS} requests at {LOAD:.0%}")


def at_capacity(name: str, fleet: Fleet) -> Trace:
    """Return the first requests of a held-out part, in as many copies as there are eights of workers."""
    copies = max(1, fleet.workers // 8)
    part = held_out_part(library.load(name, SEED))
    trace = at_load(overlay(part, copies, Random(f"{SEED} copies")), fleet, LOAD, copies=copies)
    return replace(trace, requests=trace.requests[:REQUESTS])


def twice(trace: Trace) -> Trace:
    """Return a trace of half an hour followed by itself, with block ids and sessions of its own."""
    first = trace.requests
    stride = 1 + max(max(request.blocks, default=0) for request in first)
    second = [
        replace(
            request,
            at_s=request.at_s + HALF_HOUR_S,
            blocks=tuple(stride + block for block in request.blocks),
            session=f"{request.session}/2" if request.session else "",
            after=None if request.after is None else request.after + len(first),
        )
        for request in first
    ]
    return replace(trace, requests=[*first, *second])


def replay_s(trace: Trace, fleet: Fleet, policy: str) -> float:
    fleet, new_router = on_fleet(policy, fleet)
    replay = Replay(trace, fleet, new_router, seed=SEED)
    began_s = time.process_time()
    replay.run()
    return time.process_time() - began_s


if __name__ == "__main__":
    main()
