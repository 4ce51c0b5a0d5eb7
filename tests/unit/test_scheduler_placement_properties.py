"""Properties of placements over any workers, with rates as extreme as heartbeats may have."""

from __future__ import annotations

import math
from random import Random

import msgspec
import numpy as np
from baton_scheduler.placement import choose
from baton_scheduler.policies import POLICIES, PolicyName
from baton_scheduler.policies.predicted import SHORTLIST, TIE_S, TIE_SHARE, Predicted
from baton_scheduler.pooling import RATES
from baton_scheduler.prediction import MISSING, OWN, Demand, Prediction, PrefixMatch
from baton_scheduler.team import Serving
from baton_scheduler.worker_load import WorkerLoad
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, NoWorkers
from baton.messages.placement import Disaggregation, Placement
from baton.messages.workers import Role
from tests.harness.placements import ALWAYS, NEVER, OPTIONS, bandwidth, steps, worker

rates = st.sampled_from([1e-29, 1e-9, 1e-3, 1.0, 1e29])
EXTREME_FITS = [
    steps(**{name: Random(f"{name} {number}").choice([1e-29, 1e-9, 1e-3, 1.0, 1e29]) for name in RATES})
    for number in range(16)
]


@st.composite
def pools(draw: st.DrawFn) -> list[WorkerLoad]:
    return [
        worker(
            f"w{number}",
            draw(st.sampled_from(Role)),
            model_digest=draw(st.sampled_from(["digest", "digest", "new"])),
            running=draw(st.integers(0, 9)),
            waiting=draw(st.integers(0, 3)),
            running_max=draw(st.sampled_from([0, 8, 8, 8])),
            kv_blocks_used=draw(st.integers(0, 1100)),
            kv_blocks_total=draw(st.sampled_from([0, 50, 1000, 1000])),
            prefill_tokens_queued=draw(st.integers(0, 5000)),
            prefill_pairs_queued=draw(st.sampled_from([0, 10**6, 10**15])),
            prefill_elapsed_s=draw(st.sampled_from([0.0, 0.1, 1e9])),
            steps=draw(st.sampled_from(EXTREME_FITS)),
            transfers=tuple(bandwidth(f"w{peer}", draw(rates)) for peer in range(draw(st.integers(0, 3)))),
            context_tokens_max=draw(st.sampled_from([512, 8192])),
            draining=draw(st.sampled_from([False, False, False, True])),
        )
        for number in range(draw(st.integers(0, 6)))
    ]


workers_named = st.sampled_from([f"w{number}" for number in range(6)])
held_blocks = st.dictionaries(workers_named, st.integers(0, 40))
demands = st.builds(
    Demand,
    model=st.just("tiny"),
    prompt_tokens=st.integers(1, 2000),
    output_tokens_max=st.integers(1, 1000),
    disaggregation=st.sampled_from(Disaggregation),
    exclude=st.frozensets(workers_named, max_size=3),
    exclude_pairs=st.frozensets(st.tuples(workers_named, workers_named), max_size=6),
    refused=st.frozensets(workers_named, max_size=1),
    session=st.sampled_from(["", "a", "b"]),
)
policies = st.sampled_from(PolicyName)
REFUSALS = (ModelNotFound, NoWorkers, InvalidRequest, ContextLengthExceeded)


@given(asked=demands, pool=pools(), held=held_blocks, policy=policies, seed=st.integers(0, 9))
def test_every_placement_is_allowed(
    asked: Demand, pool: list[WorkerLoad], held: dict[str, int], policy: PolicyName, seed: int
) -> None:
    """Whatever the policy, and whatever a heartbeat may state."""
    try:
        placement = choose(asked, Serving(pool), PrefixMatch(held), POLICIES[policy](), OPTIONS, Random(seed), 0.5)
    except REFUSALS as error:
        assert str(error)
        return
    loads = {load.worker: load for load in pool}
    assert placement.candidates[0] == placement.predicted
    for candidate in placement.candidates:
        used = [loads[candidate.decode]] + ([loads[candidate.prefill]] if candidate.prefill else [])
        assert loads[candidate.decode].role is Role.DECODE
        assert all(load.worker not in asked.exclude | asked.refused for load in used)
        assert all(load.ready > 0 and load.kv_tokens_max >= asked.prompt_tokens for load in used)
        assert len({load.heartbeat.model_digest for load in used}) == 1
        if candidate.prefill:
            assert loads[candidate.prefill].role is Role.PREFILL
            assert (candidate.prefill, candidate.decode) not in asked.exclude_pairs
            assert asked.disaggregation is not NEVER
        else:
            assert asked.disaggregation is not ALWAYS
        assert 0 < candidate.predicted_ttft_s < math.inf
        assert 0 < candidate.predicted_token_interval_s < math.inf
        assert 0 <= candidate.waiting_s <= candidate.predicted_ttft_s
        under_way_s = loads[candidate.decode].half_interval_s if candidate.prefill else 0.0
        assert candidate.predicted_ttft_s <= (candidate.cost_s + under_way_s) * (1 + 1e-9) < math.inf
    assert placement.reason.endswith(".")


@given(asked=demands, pool=pools(), held=held_blocks, policy=policies, seed=st.integers(0, 9), shuffle=st.randoms())
def test_a_seed_decides_whatever_the_order(
    asked: Demand, pool: list[WorkerLoad], held: dict[str, int], policy: PolicyName, seed: int, shuffle: Random
) -> None:
    def outcome() -> Placement | str:
        try:
            return choose(asked, Serving(pool), PrefixMatch(held), POLICIES[policy](), OPTIONS, Random(seed), 0.0)
        except REFUSALS as error:
            return str(error)

    first = outcome()
    shuffle.shuffle(pool)
    assert outcome() == first


@given(asked=demands, pool=pools(), held=held_blocks, policy=policies)
def test_a_choice_among_all_equals_one_that_looks_at_each(
    asked: Demand, pool: list[WorkerLoad], held: dict[str, int], policy: PolicyName
) -> None:
    """What every worker can take is not compared with each, unless a worker is to be left out: here one that is not
    there."""

    def outcome(asked: Demand) -> Placement | str:
        try:
            return choose(asked, Serving(pool), PrefixMatch(held), POLICIES[policy](), OPTIONS, Random(1), 0.0)
        except REFUSALS as error:
            return str(error)

    free = msgspec.structs.replace(asked, exclude=frozenset(), refused=frozenset())
    assert outcome(free) == outcome(msgspec.structs.replace(free, exclude=frozenset({"nobody"})))


@given(asked=demands, pool=pools(), held=held_blocks, better=workers_named, more=st.integers(1, 40))
def test_more_cached_tokens_never_make_a_prediction_or_a_cost_worse(
    asked: Demand, pool: list[WorkerLoad], held: dict[str, int], better: str, more: int
) -> None:
    before, after = (
        Prediction(asked, PrefixMatch(blocks), OPTIONS.output_headroom_tokens, 0.0)
        for blocks in (held, held | {better: held.get(better, 0) + more})
    )
    serving = Serving(pool)
    for role, team in serving.teams.items():
        rows = np.flatnonzero(team.figures().kv_tokens_max)
        then, now = before.compute(team, rows, role), after.compute(team, rows, role)
        assert (now.columns[OWN] <= then.columns[OWN]).all()
        assert (now.cost_s <= then.cost_s).all()
        assert (now.queue_s == then.queue_s).all()
        assert (now.waiting_s == then.waiting_s).all()
        if role is Role.DECODE:
            has, had = after.receive(team, rows), before.receive(team, rows)
            assert (has.columns[MISSING] <= had.columns[MISSING]).all()


def near_tie_s(best_s: float) -> float:
    """Return by how much two near-ties, one of each side, may exceed the best placement."""
    return TIE_SHARE * best_s + 2 * TIE_S


@given(asked=demands, pool=pools(), held=held_blocks)
def test_the_shortlist_keeps_the_best_cost(asked: Demand, pool: list[WorkerLoad], held: dict[str, int]) -> None:
    """Pairing only the best of each side loses no more than a near-tie of each where no pull takes time."""
    even = [
        worker(
            f"{load.worker}-{copy}",
            load.role,
            running=load.heartbeat.running,
            prefill_tokens_queued=load.heartbeat.prefill_tokens_queued + 100 * copy,
            kv_bytes_per_token=0,
        )
        for load in pool
        for copy in range(SHORTLIST)
    ]
    try:
        placement = choose(asked, Serving(even), PrefixMatch(held), Predicted(), OPTIONS, Random(0), 0.0)
    except REFUSALS:
        return
    predict = Prediction(asked, PrefixMatch(held), OPTIONS.output_headroom_tokens, 0.0)
    serving = Serving(even)
    source, sink = (
        (team, np.flatnonzero([load.worker not in asked.exclude for load in team.loads]))
        for team in (serving.prefill, serving.decode)
    )
    costs: list[float] = []
    if asked.disaggregation is not ALWAYS:
        costs += predict.compute(*sink, Role.DECODE).cost_s.tolist()
    if asked.disaggregation is not NEVER and len(source[1]):
        costs.append(predict.compute(*source, Role.PREFILL).cost_s.min() + predict.receive(*sink).cost_s.min())
    best_s = min(costs)
    assert best_s - 1e-9 <= min(each.cost_s for each in placement.candidates) <= best_s + near_tie_s(best_s) + 1e-9
