"""Aggregated against separated serving on equal resources, in replay: `make bench-separation`.

The same requests, at the same instants, on eight workers: all of them aggregated, or some prefill and the rest decode.
Baton's default policy places them. Loads are shares of what the aggregated workers could do at best
(`simulator/README.md`). Replayed is the part of each trace that policies are not tuned on. Writes
`benchmarks/results/separation.json`, `docs/images/separation.png` and the table in `docs/separation.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, Final, cast

from baton_simulator.capacity import at_load
from baton_simulator.goals import GOAL_TPOT_S, GOAL_TTFT_S
from baton_simulator.policies import on_fleet
from baton_simulator.replay import Fleet, Replay
from baton_simulator.report import summarise
from baton_simulator.traffic import library
from baton_simulator.traffic.overlay import held_out_part, overlay
from baton_simulator.traffic.trace import Trace

from benchmarks.report import RESULTS, commit, machine

DOCS: Final = Path(__file__).parents[1] / "docs"
BEGIN: Final = "<!-- the table: python -m benchmarks.separation -->\n"
END: Final = "<!-- end of the table -->\n"
AGGREGATED: Final = Fleet(aggregated=8)
FLEETS: Final = (AGGREGATED, *(Fleet(prefill=prefill, decode=8 - prefill) for prefill in (3, 4, 5)))
SEED: Final = 1
SHOWN: Final = (
    ("goodput", "good requests, %", 100.0, None),
    ("ttft_p99_s", "TTFT p99, s", 1.0, GOAL_TTFT_S),
    ("tpot_p99_ms", "TPOT p99, ms", 1.0, GOAL_TPOT_S * 1000),
)
"""Figures of a row that are drawn: name, label, factor, goal."""


@dataclass(frozen=True, slots=True)
class Point:
    trace: str
    load: float
    fleet: Fleet
    minutes: float

    def replay(self) -> dict[str, Any]:
        trace = _scaled(self.trace, self.load, self.minutes)
        fleet, new_router = on_fleet("baton-without-objectives", self.fleet)
        outcomes = Replay(trace, fleet, new_router, seed=SEED).run()
        figures = summarise(outcomes, fleet)
        lasts_s = max((each.last_s for each in outcomes if each.last_s is not None), default=0.0)
        tokens = sum(each.request.output_tokens for each in outcomes if each.last_s is not None)
        names = ("requests", "refused", "goodput", "good_per_s", "cached_share")
        times = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_ms", "tpot_p99_ms")
        return {
            "trace": self.trace,
            "load": self.load,
            "fleet": name_of(self.fleet),
            **{name: getattr(figures, name) for name in (*names, *times)},
            "tokens_per_s": tokens / lasts_s if lasts_s else 0.0,
        }


def name_of(fleet: Fleet) -> str:
    return f"{fleet.prefill} prefill + {fleet.decode} decode" if fleet.prefill else f"{fleet.aggregated} aggregated"


@lru_cache(maxsize=1)
def _scaled(name: str, load: float, minutes: float) -> Trace:
    """Return a trace at a load of the aggregated workers, in as many copies as it takes to last that long."""
    part = held_out_part(library.load(name, SEED))
    copies = 1
    while True:
        trace = at_load(overlay(part, copies, Random(f"{SEED} copies")), AGGREGATED, load, copies=copies)
        lasts_s = trace.requests[-1].at_s
        if lasts_s >= minutes * 60:
            return trace
        copies = max(copies + 1, round(copies * minutes * 60 / lasts_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", default="conversation,agents", help="default: %(default)s")
    add("--loads", default="0.7,1.0,1.5", help="shares of the aggregated workers' capacity; default: %(default)s")
    add("--minutes", type=float, default=20.0, help="least simulated time; default: %(default)s")
    add("--processes", type=int, default=2)
    parsed = parser.parse_args()
    loads = [float(load) for load in parsed.loads.split(",")]
    points = [Point(*each, parsed.minutes) for each in product(parsed.traces.split(","), loads, FLEETS)]
    rows: list[dict[str, Any]] = []
    with get_context("spawn").Pool(parsed.processes) as pool:
        for row in pool.imap(Point.replay, points):
            rows.append(row)
            print(f"{len(rows)} of {len(points)}: {json.dumps(row)}", file=sys.stderr, flush=True)
    write(rows, parsed.minutes)


def write(rows: Sequence[dict[str, Any]], minutes: float) -> None:
    facts = {"machine": machine(), "commit": commit(), "seed": SEED, "minutes": minutes}
    lines = ",\n".join(json.dumps(row) for row in rows)
    (RESULTS / "separation.json").write_text(f'{json.dumps(facts)[:-1]}, "rows": [\n{lines}\n]}}\n')
    page = DOCS / "separation.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + table(rows) + END + rest.split(END)[1])
    draw(rows, DOCS / "images" / "separation.png")


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| trace, load | workers | good | good/s | tokens/s | TTFT p50, s | p99 | TPOT p50, ms | p99 | refused |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        best = max(each["goodput"] for each in rows if (each["trace"], each["load"]) == (row["trace"], row["load"]))
        mark = "**" if row["goodput"] == best else ""
        cells = (
            f"{row['trace']}, {row['load']:g}",
            row["fleet"],
            f"{mark}{row['goodput']:.0%}{mark}",
            f"{row['good_per_s']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            *(f"{row[name]:.2f}" for name in ("ttft_p50_s", "ttft_p99_s")),
            *(f"{row[name]:.0f}" for name in ("tpot_p50_ms", "tpot_p99_ms")),
            f"{row['refused'] / row['requests']:.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each figure over the load: a row of plots for each trace, a line for each fleet."""
    from matplotlib.figure import Figure

    traces, loads = (list(dict.fromkeys(row[name] for row in rows)) for name in ("trace", "load"))
    figure = cast("Any", Figure)(figsize=(10, 0.5 + 2.7 * len(traces)), layout="constrained")
    plots = figure.subplots(len(traces), len(SHOWN), squeeze=False)
    for trace, line in zip(traces, plots, strict=True):
        for (name, label, factor, goal), axes in zip(SHOWN, line, strict=True):
            for fleet in map(name_of, FLEETS):
                shown = [row for row in rows if (row["trace"], row["fleet"]) == (trace, fleet)]
                style = {"color": "black"} if fleet == name_of(AGGREGATED) else {"linestyle": "--"}
                values = [row[name] * factor for row in shown]
                axes.plot([row["load"] for row in shown], values, marker="o", label=fleet, **style)
            if goal is not None:
                axes.axhline(goal, color="grey", linestyle=":")
            axes.set_title(f"{trace}: {label}", fontsize=10)
            axes.set_xticks(loads)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
    figure.supxlabel("load, share of the aggregated workers' capacity", fontsize=10)
    plots[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
