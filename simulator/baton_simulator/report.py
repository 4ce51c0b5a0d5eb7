"""Figures of a replay: one summary for each policy, a table and a JSON value."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from baton_simulator.goals import GOAL_TPOT_S, GOAL_TTFT_S
from baton_simulator.replay import Fleet, Outcome
from baton_simulator.steps import MockerSteps

WARM_UP_SHARE: Final = 0.1
"""First part of the requests, which fills the caches and is left out."""
LOAD_WINDOW_S: Final = 60.0
LENGTHS: Final = (2_000, 8_000, 32_000, 128_000)
"""Upper bounds of the classes of prompt lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one policy. Percentiles are of requests that were served; goodput is of all."""

    requests: int
    refused: int
    refused_share_by_length: Mapping[str, float]
    """Class of prompt lengths → refused share of its requests."""
    duration_s: float
    """From the first arrival to the last."""
    cached_share: float
    """Prompt tokens that were cached or pooled where the prompt was computed, as a share of all prompt tokens."""
    promoted_share: float
    """Part of `cached_share` that was promoted from pools."""
    borrowed_share: float
    """Prompt tokens that other workers' pools lent, as a share of all prompt tokens."""
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    goodput: float
    """Share of requests with TTFT ≤ 2 s and TPOT ≤ 50 ms."""
    good_per_s: float
    imbalance: float
    """Work that arrives at the busiest worker of a role in a minute, relative to the mean: the mean over all minutes,
    of the role where it is larger."""
    predicted_p10: float | None
    """Predicted over actual TTFT, from the prediction on, where the policy predicts."""
    predicted_p50: float | None
    predicted_p90: float | None


def summarise(outcomes: Sequence[Outcome], fleet: Fleet) -> Summary:
    """Return the figures of all requests but the first ones, in order of arrival."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.arrived_s)
    counted = ordered[int(len(ordered) * WARM_UP_SHARE) :]
    served = [outcome for outcome in counted if outcome.last_s is not None]
    ttfts = [outcome.ttft_s for outcome in served if outcome.ttft_s is not None]
    tpots = [outcome.tpot_s for outcome in served if outcome.tpot_s is not None]
    ratios = [
        outcome.predicted_ttft_s / (outcome.first_s - outcome.predicted_at_s)
        for outcome in served
        if outcome.predicted_ttft_s is not None and outcome.first_s is not None
    ]
    good = sum(is_good(outcome) for outcome in counted)
    duration_s = counted[-1].arrived_s - counted[0].arrived_s if counted else 0.0
    prompt_tokens = sum(outcome.request.prompt_tokens for outcome in served)
    return Summary(
        requests=len(counted),
        refused=len(counted) - len(served),
        refused_share_by_length=_refused_by_length(counted),
        duration_s=duration_s,
        cached_share=sum(outcome.cached_tokens for outcome in served) / prompt_tokens if prompt_tokens else 0.0,
        promoted_share=sum(outcome.promoted_tokens for outcome in served) / prompt_tokens if prompt_tokens else 0.0,
        borrowed_share=sum(outcome.borrowed_tokens for outcome in served) / prompt_tokens if prompt_tokens else 0.0,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p90_s=percentile(ttfts, 0.9),
        ttft_p99_s=percentile(ttfts, 0.99),
        tpot_p50_ms=percentile(tpots, 0.5) * 1e3,
        tpot_p99_ms=percentile(tpots, 0.99) * 1e3,
        goodput=good / len(counted) if counted else 0.0,
        good_per_s=good / duration_s if duration_s else 0.0,
        imbalance=_imbalance(counted, fleet),
        predicted_p10=percentile(ratios, 0.1) if ratios else None,
        predicted_p50=percentile(ratios, 0.5) if ratios else None,
        predicted_p90=percentile(ratios, 0.9) if ratios else None,
    )


def is_good(outcome: Outcome) -> bool:
    ttft_s, tpot_s = outcome.ttft_s, outcome.tpot_s
    return ttft_s is not None and ttft_s <= GOAL_TTFT_S and (tpot_s is None or tpot_s <= GOAL_TPOT_S)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile; NaN if there are no values."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else math.nan


def _refused_by_length(outcomes: Sequence[Outcome]) -> dict[str, float]:
    counts, refused = Counter[str](), Counter[str]()
    for outcome in outcomes:
        label = length_class(outcome.request.prompt_tokens)
        counts[label] += 1
        refused[label] += bool(outcome.refused)
    labels = [length_class(length) for length in (*LENGTHS, LENGTHS[-1] + 1)]
    return {label: refused[label] / counts[label] for label in labels if counts[label]}


def length_class(prompt_tokens: int) -> str:
    for length in LENGTHS:
        if prompt_tokens <= length:
            return f"≤ {length // 1000}k"
    return f"> {LENGTHS[-1] // 1000}k"


def _imbalance(outcomes: Sequence[Outcome], fleet: Fleet) -> float:
    """Return the mean over whole minutes of the busiest worker's load relative to the mean, of the worse role."""
    model = MockerSteps()
    decode_s = model.step_s(1.0, 1, 0) / fleet.kv_tokens_in_use
    loads: dict[tuple[bool, int], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    placed = [outcome for outcome in outcomes if outcome.placed_s is not None and outcome.last_s is not None]
    for outcome in placed:
        minute, tokens = int((outcome.placed_s or 0.0) / LOAD_WINDOW_S), outcome.request.prompt_tokens
        computed_on = outcome.prefill or outcome.decode
        loads[bool(outcome.prefill), minute][computed_on] += model.prompt_s(outcome.cached_tokens, tokens)
        loads[False, minute][outcome.decode] += outcome.request.output_tokens * tokens * decode_s
    last = max((minute for _, minute in loads), default=0)
    worst = 0.0
    for is_prefill, workers in ((True, fleet.prefill), (False, fleet.decode or fleet.aggregated)):
        ratios = [
            max(load.values()) * workers / sum(load.values())
            for (of_prefill, minute), load in loads.items()
            if of_prefill == is_prefill and minute < last
        ]
        worst = max(worst, sum(ratios) / len(ratios) if ratios else 0.0)
    return worst


COLUMNS: Final = (
    ("goodput", "{0.goodput:.1%}"),
    ("good/s", "{0.good_per_s:.2f}"),
    ("cached", "{0.cached_share:.3f}"),
    ("promoted", "{0.promoted_share:.3f}"),
    ("borrowed", "{0.borrowed_share:.3f}"),
    ("TTFT p50", "{0.ttft_p50_s:.2f}"),
    ("p90", "{0.ttft_p90_s:.2f}"),
    ("p99 s", "{0.ttft_p99_s:.2f}"),
    ("TPOT p50", "{0.tpot_p50_ms:.0f}"),
    ("p99 ms", "{0.tpot_p99_ms:.0f}"),
    ("max/mean", "{0.imbalance:.2f}"),
    ("refused", "{0.refused}"),
)


def table(summaries: Mapping[str, Summary]) -> list[list[str]]:
    """Return the heading and one row per policy."""
    rows = [["policy", *(name for name, _ in COLUMNS), "predicted/actual p10 p50 p90"]]
    for policy, summary in summaries.items():
        ratios = (summary.predicted_p10, summary.predicted_p50, summary.predicted_p90)
        predicted = " ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
        rows.append([policy, *(form.format(summary) for _, form in COLUMNS), predicted or "-"])
    return rows


def refusals(summaries: Mapping[str, Summary]) -> list[list[str]]:
    """Return the refused shares by prompt length: a heading, and a row for each policy that refused any request."""
    refusing = {policy: summary for policy, summary in summaries.items() if summary.refused}
    lengths = list(next(iter(summaries.values())).refused_share_by_length)
    rows = [[policy, *(f"{each:.1%}" for each in s.refused_share_by_length.values())] for policy, s in refusing.items()]
    return [["refused, by prompt tokens", *lengths], *rows] if rows else []


def as_text(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )
