"""Overload, and tenants that share: Baton's queue and admission over simulated workers on virtual time.

Overload: recorded and skewed traffic at 1 and 2 times what the workers could do at best. Every request has a TTFT
objective of 2 s and a TPOT objective of 50 ms, and is admitted by both. The same traffic at 1.5 times the capacity
of eight aggregated workers, for these and for separated ones. Tenants: three with weights 1, 2 and 4.
First all of them ask for more than their shares; then only the first one does, and the others are compared to
themselves without it, and beside it when it asks for no more than its share. Writes `benchmarks/results/fairness.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from baton_simulator.capacity import at_load
from baton_simulator.goals import GOAL_TPOT_S, GOAL_TTFT_S
from baton_simulator.policies import GOALS
from baton_simulator.replay import Fleet, Outcome, Replay
from baton_simulator.report import is_good, percentile, summarise
from baton_simulator.routers.baton import BatonOptions, BatonRouter
from baton_simulator.traffic import library
from baton_simulator.traffic.overlay import held_out_part
from baton_simulator.traffic.tenants import Tenant, generate
from baton_simulator.traffic.trace import Trace

from baton.messages.placement import Disaggregation
from benchmarks.report import RESULTS, commit, machine

SEED: Final = 1
FLEETS: Final = (Fleet(aggregated=8), Fleet(prefill=4, decode=4))
TRACES: Final = ("conversation", "skewed")
BEYOND: Final = 1.5
"""Load, as a part of the capacity of eight aggregated workers, at which these are compared with separated ones."""
WEIGHTS: Final = {"a": 1.0, "b": 2.0, "c": 4.0}
FLOOD: Final = 2.0
"""Load of the tenant that floods."""
OTHERS: Final = 0.8
"""Load of each other tenant, as a part of its share."""
WARM_UP_S: Final = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration-s", type=float, default=120.0, help="of the tenants' traffic; default: %(default)s")
    duration_s = parser.parse_args().duration_s
    overloads = [row for trace in TRACES for fleet in FLEETS for row in overload(trace, fleet)]
    shares = [row for fleet in FLEETS for row in tenants(fleet, duration_s)]
    equal = list(equal_resources())
    facts = {"machine": machine(), "commit": commit(), "seed": SEED}
    results = {**facts, "overload": overloads, "equal_resources": equal, "tenants": shares}
    (RESULTS / "fairness.json").write_text(json.dumps(results, indent=1) + "\n")


def run(trace: Trace, fleet: Fleet) -> list[Outcome]:
    mode = Disaggregation.NEVER if fleet.aggregated else Disaggregation.ALWAYS
    options = BatonOptions(mode, objectives=GOALS)
    return Replay(trace, fleet, lambda specs, random: BatonRouter(specs, options, random), seed=SEED).run()


# ---------------------------------------------------------------- overload


def overload(name: str, fleet: Fleet) -> Iterator[dict[str, Any]]:
    """Yield the figures at 1 and 2 times capacity."""
    once_per_s = 0.0
    for load in (1.0, 2.0):
        outcomes = run(at_load(held_out_part(library.load(name, SEED)), fleet, load), fleet)
        summary = summarise(outcomes, fleet)
        once_per_s = once_per_s or summary.good_per_s
        row = {
            "trace": name,
            "fleet": str(fleet),
            "load": load,
            "requests": summary.requests,
            "good_per_s": summary.good_per_s,
            "of_once": summary.good_per_s / once_per_s,
            "refused": summary.refused / summary.requests,
            **attainment(outcomes),
            "ttft_p99_s": summary.ttft_p99_s,
            "tpot_p99_ms": summary.tpot_p99_ms,
        }
        print(
            f"{name}, {fleet}, {load:g}×: {row['good_per_s']:.2f} good/s ({row['of_once']:.0%} of 1×), "
            f"{row['refused']:.0%} refused; of the admitted, {row['admitted_within_ttft']:.1%} within the TTFT "
            f"objective, {row['admitted_within_tpot']:.1%} within that of TPOT, {row['admitted_within_both']:.1%} "
            f"within both; p99 {row['ttft_p99_s']:.2f} s, {row['tpot_p99_ms']:.0f} ms",
            flush=True,
        )
        yield row


def attainment(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the shares of the admitted requests within each objective, and within both."""
    admitted = [outcome for outcome in outcomes if outcome.ttft_s is not None]
    ttft = [(outcome.ttft_s or 0.0) <= GOAL_TTFT_S for outcome in admitted]
    tpot = [(outcome.tpot_s or 0.0) <= GOAL_TPOT_S for outcome in admitted]
    return {
        "admitted_within_ttft": sum(ttft) / len(admitted),
        "admitted_within_tpot": sum(tpot) / len(admitted),
        "admitted_within_both": sum(map(is_good, admitted)) / len(admitted),
    }


def equal_resources() -> Iterator[dict[str, Any]]:
    """Yield the figures of eight workers, aggregated and separated, under the same traffic beyond their capacity."""
    trace = at_load(held_out_part(library.load("conversation", SEED)), FLEETS[0], BEYOND)
    for fleet in (*FLEETS, Fleet(prefill=5, decode=3)):
        outcomes = run(trace, fleet)
        summary = summarise(outcomes, fleet)
        refused = summary.refused / summary.requests
        times = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_ms", "tpot_p99_ms")
        row = {name: getattr(summary, name) for name in ("good_per_s", *times)} | attainment(outcomes)
        print(
            f"conversation, {fleet}, {BEYOND:g}× of aggregated: {summary.good_per_s:.2f} good/s, "
            f"{refused:.0%} refused, TTFT p50 {summary.ttft_p50_s:.2f} s, p99 {summary.ttft_p99_s:.2f} s, "
            f"TPOT p50 {summary.tpot_p50_ms:.0f} ms, p99 {summary.tpot_p99_ms:.0f} ms",
            flush=True,
        )
        yield {"fleet": str(fleet), "load": BEYOND, "refused": refused, **row}


# ---------------------------------------------------------------- tenants


def tenants(fleet: Fleet, duration_s: float) -> Iterator[dict[str, Any]]:
    """Yield each tenant's figures where all flood, where the others are alone, and where the first one comes, too."""
    total = sum(WEIGHTS.values())
    flood = Tenant("a", WEIGHTS["a"], FLOOD)
    modest = replace(flood, load=WEIGHTS["a"] / total)
    others = [Tenant(name, weight, OTHERS * weight / total) for name, weight in WEIGHTS.items() if name != flood.name]
    all_flood = [Tenant(name, weight, FLOOD) for name, weight in WEIGHTS.items()]
    scenes = {
        "all flood": all_flood,
        "alone": others,
        "beside one that asks for its share": [modest, *others],
        "beside a flood": [flood, *others],
    }
    for scene, who in scenes.items():
        for row in shares(run(generate(who, fleet, duration_s, SEED), fleet)):
            print(
                f"{fleet}, {scene}, tenant {row['tenant']}: share {row['share']:.3f}, served {row['served']:.1%}, "
                f"TTFT p50 {row['ttft_p50_s']:.2f} s, p99 {row['ttft_p99_s']:.2f} s",
                flush=True,
            )
            yield {"fleet": str(fleet), "scene": scene, **row}


def shares(outcomes: Sequence[Outcome], warm_up_s: float = WARM_UP_S) -> Iterator[dict[str, Any]]:
    """Yield each tenant's share of the tokens that were placed, and its figures."""
    counted = [outcome for outcome in outcomes if outcome.arrived_s >= warm_up_s]
    served = [outcome for outcome in counted if outcome.ttft_s is not None]
    total_tokens = sum(map(tokens_of, served))
    for tenant in sorted({outcome.request.tenant for outcome in counted}):
        mine = [outcome for outcome in served if outcome.request.tenant == tenant]
        ttfts = [outcome.ttft_s for outcome in mine if outcome.ttft_s is not None]
        yield {
            "tenant": tenant,
            "share": sum(map(tokens_of, mine)) / total_tokens,
            "served": len(mine) / sum(outcome.request.tenant == tenant for outcome in counted),
            "ttft_p50_s": percentile(ttfts, 0.5),
            "ttft_p99_s": percentile(ttfts, 0.99),
        }


def tokens_of(outcome: Outcome) -> int:
    """Return what the queue charged: the prompt, and the output for which workers reserve KV."""
    return outcome.request.prompt_tokens + 512


if __name__ == "__main__":
    main()
