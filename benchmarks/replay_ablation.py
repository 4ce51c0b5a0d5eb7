"""Each term of the placement cost taken out alone: goodput of the default policy in replay at 90 % of capacity.

Replayed is the half of each trace on which policies are tuned. Writes `benchmarks/results/ablation.json` and the
table in `docs/replay.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from baton_scheduler import loads, prediction, worker_load
from baton_scheduler.policies import predicted
from baton_simulator.policies import on_fleet
from baton_simulator.replay import Replay
from baton_simulator.report import Summary, summarise
from baton_simulator.traffic.overlay import tuning_part

from baton.messages.workers import StepFit
from baton.worker.kv_book import Holding, KvBook
from benchmarks.replay import MODES, SEED, Point, scaled
from benchmarks.replay_page import write_ablation
from benchmarks.report import RESULTS, commit, machine

LOAD: Final = 0.9
WORKERS: Final = 8


def _none_held(book: KvBook, holding: Holding) -> int:
    return 0


def _unpooled(own: StepFit, kind: StepFit | None) -> StepFit:
    return own


TERMS: Final[Mapping[str, Sequence[tuple[object, str, object]]]] = {
    "nothing": (),
    "own prompt once more, for those that come next": ((worker_load, "COMPUTE_WEIGHT", 0.0),),
    "own prompt for each sequence that runs": ((worker_load, "COMPUTE_WEIGHT_PER_SEQUENCE", 0.0),),
    "KV in use on the decode worker": ((prediction, "PRESSURE_S", 0.0),),
    "KV that the attempt takes": ((prediction, "MEMORY_S", 0.0),),
    "wait for room": ((prediction, "WAIT_S", 0.0),),
    "share of cached prefixes that take no room": ((KvBook, "shared_share", 0.0),),
    "shared prefixes counted once in ledgers": ((KvBook, "_held", _none_held),),
    "only the tail of a pull": ((prediction, "PULL_OVERLAP", 0.0), (predicted, "PULL_OVERLAP", 0.0)),
    "near-ties by cached tokens": ((predicted, "TIE_SHARE", 0.0), (predicted, "TIE_S", 0.0)),
    "rates pooled by kind": ((loads, "pooled", _unpooled),),
    "prompts in the predicted token interval": ((worker_load, "PROMPTS_SHARE_MAX", 0.0),),
}
"""Term → what stands for it when it is taken out: attributes and their values."""


@contextmanager
def without(changes: Sequence[tuple[object, str, object]]) -> Generator[None]:
    before = [vars(owner)[name] for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default="conversation,agents,skewed", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=5.0, help="least simulated time; default: %(default)s")
    parsed = parser.parse_args()
    columns = [(trace, mode) for trace in parsed.traces.split(",") for mode in MODES]
    rows: list[dict[str, Any]] = [{"without": term} for term in TERMS]
    # Column by column: a trace is scaled once.
    for trace, mode in columns:
        for row, changes in zip(rows, TERMS.values(), strict=True):
            with without(changes):
                summary = _replay(Point(trace, WORKERS, mode, LOAD, "baton", parsed.minutes))
            row[f"{trace}, {mode}"] = {"goodput": summary.goodput, "ttft_p99_s": summary.ttft_p99_s}
            print(f"{trace}, {mode}, without {row['without']}: {summary.goodput:.1%}", file=sys.stderr, flush=True)
    facts = {"machine": machine(), "commit": commit(), "seed": SEED, "minutes": parsed.minutes, "rows": rows}
    (RESULTS / "ablation.json").write_text(json.dumps(facts, indent=1) + "\n")
    write_ablation(rows)


def _replay(point: Point) -> Summary:
    trace, _ = scaled(point.trace, point.fleet, point.load, point.minutes, tuning_part)
    fleet, new_router = on_fleet(point.policy, point.fleet)
    return summarise(Replay(trace, fleet, new_router, seed=SEED).run(), fleet)


if __name__ == "__main__":
    main()
