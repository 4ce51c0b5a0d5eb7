"""The library's part of a placement decision, against the same in plain Python, worker by worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any, Final

import numpy as np
import pytest
from baton_native import placement
from baton_scheduler.prediction import (
    BORROWED,
    CACHED,
    COST,
    LENDER,
    LOAN,
    LOAN_BOUND,
    MISSING,
    OWN,
    PRESSURE,
    PROMOTED,
    PROMOTION,
    PULL,
    PULLED_PROMOTED,
    QUEUE,
    WAITING,
)
from baton_scheduler.team import Figures, Vector
from hypothesis import given
from hypothesis import strategies as st

WEIGHTS: Final = {"wait_s": 10.0, "pressure_s": 0.5, "memory_s": 7.0}
DISPLACED: Final = 0.75
ASK_S: Final = 0.005
NOTHING: Final[Vector] = np.empty(0)

# Few values, so that ties and limits are met often.
RANGES: Final = {
    "computes_until_s": (0.0, 1.0, 3.5),
    "half_interval_s": (0.0, 0.01),
    "interval_s": (0.0, 0.02),
    "kv_share": (0.0, 0.3, 1.0),
    "next_interval_s": (0.02, 0.03),
    "slots_lacking": (0.0, 0.1),
    "tokens_free": (-500.0, 400.0, 50_000.0),
    "used_share": (0.0, 0.5, 1.0),
    "block_tokens": (16.0, 32.0),
    "compute_weight": (1.0, 1.5),
    "kv_bytes_per_token": (0.0, 131_072.0),
    "kv_tokens_max": (1000.0, 64_000.0),
    "pair_s": (0.0, 1e-9),
    "pool_tokens_free": (0.0, 300.0, 1e6),
    "promoted_token_s": (1e-6, 1e-4, 1e30),
    "filed_token_s": (2e-6, 1e-3, 1e30),
    "shared_share": (0.0, 0.5, 1.0),
    "step_s": (0.0, 0.01),
    "step_tokens_max": (64.0, 2048.0),
    "token_s": (1e-6, 1e-4),
    "bandwidth": (1e8, 5e9),
}
UNREAD: Final = {"context_tokens_max": 1e6, "ready": 1.0}


@dataclass(frozen=True)
class Case:
    figures: Vector
    blocks: Vector
    prompt_tokens: int
    need_tokens: int
    lent_tokens: list[int]
    bandwidth: Vector
    bound_ratio: Vector


@st.composite
def cases(draw: st.DrawFn) -> Case:
    workers = draw(st.integers(1, 4))
    lenders = draw(st.integers(0, 2))

    def table(choices: Sequence[float]) -> list[float]:
        return [draw(st.sampled_from(choices)) for _ in range(workers)]

    figures = [table(RANGES.get(name, (UNREAD.get(name, 0.0),))) for name in Figures._fields]
    held = [float(draw(st.integers(0, 40))) for _ in range(workers)]
    blocks = [held, *(table((0.0, 20.0, 60.0)) for _ in range(draw(st.integers(0, 2))))]
    prompt_tokens = draw(st.integers(1, 3000))
    return Case(
        np.array(figures),
        np.array(blocks),
        prompt_tokens,
        prompt_tokens + draw(st.sampled_from((0, 512))),
        [draw(st.integers(0, 4000)) for _ in range(lenders)],
        np.array([each for _ in range(lenders) for each in table((0.0, 1e8, 5e9))]),
        np.array([each for _ in range(lenders) for each in table((1.0, 1.6))]),
    )


class Alone:
    """One worker of a case."""

    def __init__(self, case: Case, index: int) -> None:
        self.case, self.index, self.prompt = case, index, float(case.prompt_tokens)
        self.has: Any = Figures(*case.figures[:, index].tolist())
        reach = [min(each * self.has.block_tokens, self.prompt - 1) for each in case.blocks[:, index].tolist()]
        self.cached = reach[0]
        self.shared = self.cached * self.has.shared_share
        self.stored: list[tuple[float, float]] = []
        """Tokens beyond the device and the time to bring them there, down to each tier."""
        pooled = max(reach[1] - self.cached, 0.0) if len(reach) > 1 else 0.0
        if len(reach) > 1:
            self.stored = [(pooled, pooled * self.has.promoted_token_s)]
        if len(reach) > 2:
            filed = max(reach[2] - self.cached - pooled, 0.0)
            self.stored.append((pooled + filed, self.stored[0][1] + filed * self.has.filed_token_s))

    def prefill_s(self, uncached: float) -> tuple[float, float]:
        steps = ceil(uncached / self.has.step_tokens_max)
        pairs = uncached * (self.prompt + (self.prompt - uncached))
        prompt_s = self.has.step_s * steps + self.has.token_s * uncached + self.has.pair_s * pairs
        return prompt_s, prompt_s + self.has.interval_s * steps

    def room(self, *, most: float, decodes: bool) -> dict[int, float]:
        lacking = (self.case.need_tokens - self.shared - self.has.tokens_free) / self.has.kv_tokens_max
        beyond = most - self.shared / self.has.kv_tokens_max
        pressure_s = WEIGHTS["pressure_s"] * self.has.kv_share + WEIGHTS["memory_s"] * beyond
        waiting_s = WEIGHTS["wait_s"] * max(lacking, self.has.slots_lacking)
        return {WAITING: waiting_s, PRESSURE: pressure_s if decodes else 0.0}

    def computed(self, now_s: float) -> dict[int, float]:
        """Return what computing the prompt takes, without its cost: the best of all ways."""
        prompt_s, own_s = self.prefill_s(self.prompt - self.cached)
        best: dict[int, float] = {PROMOTED: 0.0, PROMOTION: 0.0, BORROWED: 0.0, LOAN: 0.0, LOAN_BOUND: 0.0, LENDER: 0.0}
        displaced_s = 0.0
        for tokens, fetching_s in self.stored:
            rest_prompt_s, rest_s = self.prefill_s(self.prompt - self.cached - tokens)
            if fetching_s + rest_s < own_s:
                prompt_s, own_s = rest_prompt_s, fetching_s + rest_s
                best |= {PROMOTED: tokens, PROMOTION: fetching_s}
        for tokens, fetching_s in self.stored or [(0.0, 0.0)]:
            own = self.cached + tokens
            whole_prompt_s, least_s = self.prefill_s(self.prompt - own)
            loan: tuple[Any, ...] | None = None
            for number, lent in enumerate(self.case.lent_tokens):
                link = number * self.case.figures.shape[1] + self.index
                more, bandwidth = min(lent, self.prompt - 1) - own, self.case.bandwidth.item(link)
                if more <= 0 or not bandwidth:
                    continue
                loan_s = ASK_S + more * (self.has.kv_bytes_per_token / bandwidth + self.has.promoted_token_s)
                bound_s = loan_s * self.case.bound_ratio.item(link)
                rest_prompt_s, rest_s = self.prefill_s(self.prompt - own - more)
                if bound_s + rest_s < least_s:
                    least_s = bound_s + rest_s
                    evicted = max(1 - self.has.pool_tokens_free / max(more, 1.0), 0.0) * (
                        whole_prompt_s - rest_prompt_s
                    )
                    loan = more, loan_s, bound_s, rest_prompt_s, rest_s, evicted, float(number)
            if loan is None:
                continue
            more, loan_s, bound_s, rest_prompt_s, rest_s, evicted, number = loan
            if fetching_s + bound_s + rest_s < own_s:
                prompt_s, own_s, displaced_s = rest_prompt_s, fetching_s + loan_s + rest_s, evicted
                best |= {PROMOTED: tokens, PROMOTION: fetching_s}
                best |= {BORROWED: more, LOAN: loan_s, LOAN_BOUND: bound_s, LENDER: number}
        queue_s = max(self.has.computes_until_s - now_s, self.has.half_interval_s)
        others_s = self.has.compute_weight * prompt_s
        return best | {QUEUE: queue_s, OWN: own_s, -1: others_s, -2: DISPLACED * displaced_s}

    def pulled(self) -> dict[int, float]:
        promoted, saved_s = 0.0, 0.0
        for tokens, fetching_s in self.stored:
            here_s = tokens * self.has.kv_bytes_per_token / self.has.bandwidth - fetching_s
            if here_s > saved_s:
                promoted, saved_s = tokens, here_s
        missing = (self.prompt - (self.cached + promoted)) * self.has.kv_bytes_per_token
        return {PULLED_PROMOTED: promoted, MISSING: missing, PULL: missing / self.has.bandwidth}


def alone(case: Case) -> tuple[list[Alone], float]:
    """Return the workers, and the share of its KV that the attempt shares where that is most."""
    workers = [Alone(case, index) for index in range(case.figures.shape[1])]
    return workers, max(each.shared / each.has.kv_tokens_max for each in workers)


def compute(case: Case, leg: Vector, *, decodes: bool = True, now_s: float = 0.5) -> Vector:
    placement.compute(
        leg,
        case.figures,
        case.blocks,
        case.prompt_tokens,
        case.need_tokens,
        now_s,
        decodes,
        **WEIGHTS,
        displaced=DISPLACED,
        ask_s=ASK_S,
        lent_tokens=case.lent_tokens,
        bandwidth=case.bandwidth,
        bound_ratio=case.bound_ratio,
    )
    return leg


def receive(case: Case, leg: Vector) -> Vector:
    placement.receive(leg, case.figures, case.blocks, case.prompt_tokens, case.need_tokens, **WEIGHTS)
    return leg


@given(case=cases(), decodes=st.booleans())
def test_a_leg_that_computes_is_each_worker_alone(case: Case, decodes: bool) -> None:
    height = 12 if case.lent_tokens else 8 if len(case.blocks) > 1 else 6
    leg = compute(case, np.full((height, case.figures.shape[1]), np.nan), decodes=decodes)
    workers, most = alone(case)
    for index, each in enumerate(workers):
        room, own = each.room(most=most, decodes=decodes), each.computed(0.5)
        cost_s = room[WAITING] + own[QUEUE] + own[OWN] + own[-1] + room[PRESSURE] + own[-2]
        whole = room | own | {CACHED: each.cached + own[PROMOTED], COST: cost_s}
        # Equal to the last digit: where no tier is known, promotions are left out, and so are loans without lenders.
        assert leg[:, index].tolist() == [whole[row] for row in range(height)]


@given(case=cases())
def test_a_leg_that_pulls_is_each_worker_alone(case: Case) -> None:
    height = 7 if len(case.blocks) > 1 else 6
    leg = receive(case, np.full((height, case.figures.shape[1]), np.nan))
    workers, most = alone(case)
    for index, each in enumerate(workers):
        room, pulled = each.room(most=most, decodes=True), each.pulled()
        cost_s = room[WAITING] + each.has.next_interval_s + room[PRESSURE]
        whole = room | pulled | {CACHED: each.cached + pulled[PULLED_PROMOTED], COST: cost_s}
        assert leg[:, index].tolist() == [whole[row] for row in range(height)]


def test_figures_have_the_order_that_the_library_knows() -> None:
    assert Figures._fields == placement.FIGURES


@given(
    tiers=st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 99)), min_size=1, max_size=3),
    names=st.lists(st.sampled_from("abcdef"), unique=True, max_size=6),
)
def test_blocks_are_counted_for_workers_of_the_team(tiers: list[dict[str, int]], names: list[str]) -> None:
    blocks = np.full((len(tiers), len(names)), np.nan)
    placement.count_blocks(tiers, {name: row for row, name in enumerate(names)}, blocks)
    assert blocks.tolist() == [[float(known.get(name, 0)) for name in names] for known in tiers]


costs_s = st.lists(st.sampled_from((0.0, 1.0, 1.0009, 1.04, 1.2, 7.0)), min_size=1, max_size=9)


@given(costs=costs_s, pulls=costs_s, own_s=st.sampled_from((0.0, 1.0)), count=st.integers(1, 6))
def test_a_shortlist_has_the_lowest_costs_or_all_near_ties(
    costs: list[float], pulls: list[float], own_s: float, count: int
) -> None:
    leg = np.zeros((6, len(costs)))
    leg[COST] = costs
    leg[PULL] = np.resize(pulls, len(costs))
    left = [cost + max(pull - own_s, 0.0) for cost, pull in zip(costs, leg[PULL].tolist(), strict=True)]
    plain = placement.shortlist(leg, count, 0.05, 0.001)
    for found, ranked in ((plain, costs), (placement.shortlist_pulls(leg, own_s, count, 0.05, 0.001), left)):
        limit = min(ranked) + max(0.05 * min(ranked), 0.001)
        near = [index for index, cost in enumerate(ranked) if cost <= limit]
        if len(near) > count:
            assert found == (near, True)
        else:
            assert found == (sorted(range(len(ranked)), key=ranked.__getitem__)[:count], False)


@st.composite
def legs(draw: st.DrawFn) -> Vector:
    """Return the numbers of three workers, of any kind of leg."""
    numbers = st.sampled_from((0.0, 1.0, 1.0005, 1.1, 3.0))
    return np.array([[draw(numbers) for _ in range(3)] for _ in range(8)])


chosen_workers = st.lists(st.integers(0, 2), unique=True, max_size=3)


@given(
    leg=legs(), source=legs(), sink=legs(), wholes=chosen_workers, sources=chosen_workers, sinks=chosen_workers,
    rates=st.lists(st.sampled_from((0.0, 0.5, 2.0)), min_size=9, max_size=9), count=st.integers(1, 5),
)  # fmt: skip
def test_options_are_ranked_as_if_each_were_looked_at(
    leg: Vector,
    source: Vector,
    sink: Vector,
    wholes: list[int],
    sources: list[int],
    sinks: list[int],
    rates: list[float],
    count: int,
) -> None:
    figures = np.arange(len(Figures._fields) * 3, dtype=np.float64).reshape(-1, 3)
    used_share = Figures(*figures).used_share.tolist()
    rates = rates[: len(sources) * len(sinks)]
    options = placement.Options()
    options.add_wholes(leg, figures, wholes)
    options.add_pairs(source, sink, figures, sources, sinks, rates, 0.5)
    looked_at = [
        (leg.item(COST, p), leg.item(CACHED, p), leg.item(CACHED, p), True, (used_share[p], 0, p, -1)) for p in wholes
    ]
    for (d, p), rate in zip(product(sinks, sources), rates, strict=True):
        if rate:
            left_s = max(sink.item(MISSING, d) / rate - 0.5 * source.item(OWN, p), 0.0)
            cost_s = source.item(COST, p) + sink.item(COST, d) + left_s
            cached = source.item(CACHED, p), sink.item(CACHED, d)
            looked_at.append((cost_s, *cached, False, (used_share[d], 1, p, d)))
    assert bool(options) == bool(looked_at)
    if not looked_at:
        with pytest.raises(ValueError, match="no option"):
            options.rank(0.05, 0.001, count)
        return
    cheapest = sorted(looked_at, key=lambda option: option[0])
    near = [each for each in looked_at if each[0] <= cheapest[0][0] + max(0.05 * cheapest[0][0], 0.001)]
    most = max(each[1:4] for each in near)
    best = [next((each[-1] for each in cheapest if each[3] is whole), None) for whole in (True, False)]
    ties = [each[-1] for each in near if each[1:4] == most]
    assert options.rank(0.05, 0.001, count) == (ties, [each[-1] for each in cheapest[:count]], *best)


WORKERS: Final = 3
FIGURES: Final = np.ones((len(Figures._fields), WORKERS))
ONE_TIER: Final = np.zeros((1, WORKERS))
LEG: Final = np.zeros((6, WORKERS))


def computing(leg: Any = LEG, figures: Any = FIGURES, blocks: Any = ONE_TIER, lent: Any = ()) -> None:
    placement.compute(leg, figures, blocks, 9, 9, 0.0, True, 1.0, 1.0, 1.0, 1.0, 1.0, lent, NOTHING, NOTHING)


def counting(tiers: Any) -> None:
    placement.count_blocks(tiers, {"a": 0}, np.zeros((1, 1)))


def receiving(leg: Any = LEG, figures: Any = FIGURES, blocks: Any = ONE_TIER) -> None:
    placement.receive(leg, figures, blocks, 9, 9, 1.0, 1.0, 1.0)


def pairing(
    sources: Any = (0,), sinks: Any = (0,), rates: Any = (1.0,), leg: Any = LEG, figures: Any = FIGURES
) -> None:
    placement.Options().add_pairs(leg, LEG, figures, sources, sinks, rates, 1.0)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: computing(figures=FIGURES[:5]), "a row for each"),
        (lambda: computing(figures=FIGURES[:, :2].copy()), "different workers"),
        (lambda: computing(leg=np.zeros((7, WORKERS))), "other rows"),
        (lambda: computing(blocks=np.zeros((4, WORKERS))), "its file"),
        (lambda: computing(blocks=np.zeros((0, WORKERS))), "its file"),
        (lambda: computing(blocks=np.zeros((1, 2))), "different workers"),
        (lambda: computing(lent=[3]), "a link to each worker"),
        (lambda: receiving(leg=np.zeros((8, WORKERS))), "other rows"),
        (lambda: receiving(figures=FIGURES[:1]), "a row for each"),
        (lambda: placement.count_blocks([{}], {}, np.zeros((2, 2))), "a row for each tier"),
        (lambda: placement.count_blocks([{"a": 1}], {"a": 2}, np.zeros((1, 2))), "no such row"),
        (lambda: placement.shortlist(np.zeros((2, 3)), 1, 0.0, 0.0), "more rows"),
        (lambda: placement.shortlist_pulls(np.zeros((4, 3)), 0.0, 1, 0.0, 0.0), "more rows"),
        (lambda: placement.Options().add_wholes(LEG, FIGURES, [WORKERS]), "no such worker"),
        (lambda: placement.Options().add_wholes(LEG[:2], FIGURES, [0]), "more rows"),
        (lambda: pairing(sources=[WORKERS]), "no such worker"),
        (lambda: pairing(sinks=[WORKERS]), "no such worker"),
        (lambda: pairing(rates=[]), "a bandwidth"),
        (lambda: placement.computing_terms(LEG, True, False, [0]), "more rows"),
        (lambda: placement.computing_terms(np.zeros((8, WORKERS)), True, True, [0]), "more rows"),
        (lambda: placement.computing_terms(LEG, False, False, [WORKERS]), "no such worker"),
        (lambda: placement.receiving_terms(LEG, True, [0]), "more rows"),
        (lambda: placement.receiving_terms(LEG, False, [WORKERS]), "no such worker"),
        (lambda: pairing(leg=np.zeros((4, WORKERS))), "more rows"),
        (lambda: pairing(figures=np.ones((len(Figures._fields), 2))), "different workers"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit_are_refused(call: Callable[[], object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: computing(leg=LEG.astype(np.float32)),
        lambda: computing(leg=np.zeros((WORKERS, 6)).T),
        lambda: computing(figures=[[1.0]]),
        lambda: receiving(leg=np.zeros(6)),
        lambda: pairing(sources=[-1]),
        lambda: counting([{"a": "many"}]),
        lambda: counting(["a"]),
    ],
)
def test_other_arrays_and_values_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        call()


def test_a_table_that_must_not_change_is_not_filled() -> None:
    leg = np.zeros((6, WORKERS))
    leg.setflags(write=False)
    with pytest.raises(TypeError):
        computing(leg=leg)
