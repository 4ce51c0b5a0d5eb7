"""Loans in placements: who lends, that it counts in the ranking, and only where it is faster than to compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
import pytest
from baton_scheduler.lenders import ASK_S, find_lenders
from baton_scheduler.placement import PlacementOptions, choose
from baton_scheduler.policies.predicted import Predicted
from baton_scheduler.prediction import OWN, QUEUE, Demand, Prediction, PrefixMatch
from baton_scheduler.team import Serving, prefill_s
from baton_scheduler.worker_load import WorkerLoad
from hypothesis import given
from hypothesis import strategies as st

from baton.messages.placement import Disaggregation
from baton.messages.workers import Heartbeat, PromotionFit, Role, TransferFit
from tests.harness.heartbeats import heartbeat
from tests.harness.placements import steps

KV_BYTES_PER_TOKEN = 1000


def beat(name: str, role: Role = Role.DECODE, *, pool: bool = True, **fields: Any) -> Heartbeat:
    promotion = PromotionFit(bytes_per_s=1e9, samples=1) if pool else None
    return heartbeat(name, role, steps=steps(), kv_bytes_per_token=KV_BYTES_PER_TOKEN, promotion=promotion, **fields)


def lender(match: PrefixMatch, *beats: Heartbeat, mode: Disaggregation = Disaggregation.NEVER) -> tuple[str, str]:
    """Return the worker that computes, and the one that lends to it."""
    demand = Demand(model="tiny", prompt_tokens=1000, output_tokens_max=100, disaggregation=mode)
    serving = Serving([WorkerLoad(each) for each in beats])
    placement = choose(demand, serving, match, Predicted(), PlacementOptions(), Random(0), 0.0)
    return placement.predicted.prefill or placement.predicted.decode, placement.lender


def test_a_busy_worker_lends_what_an_idle_one_would_compute() -> None:
    busy = beat("busy", prefill_tokens_queued=5000)
    assert lender(PrefixMatch({"busy": 20}), busy, beat("idle")) == ("idle", "busy")
    assert lender(PrefixMatch({"busy": 2}, {}, {"busy": 20}), busy, beat("idle")) == ("idle", "busy")


def test_the_longest_prefix_is_borrowed() -> None:
    beats = [beat("idle"), *(beat(name, prefill_tokens_queued=5000) for name in ("a", "b"))]
    assert lender(PrefixMatch({"a": 20, "b": 25}), *beats)[1] == "b"


def test_a_prefill_worker_borrows_from_one_that_decodes() -> None:
    beats = [beat("p", Role.PREFILL), beat("d")]
    assert lender(PrefixMatch({"d": 20}), *beats, mode=Disaggregation.ALWAYS) == ("p", "d")


def test_a_prefill_worker_lends_to_a_decode_worker_and_to_another_prefill_worker() -> None:
    busy, other = (beat(name, Role.PREFILL, prefill_tokens_queued=tokens) for name, tokens in (("p", 5000), ("q", 0)))
    match = PrefixMatch({"p": 20})
    assert lender(match, busy, beat("d")) == ("d", "p")
    assert lender(match, busy, other, beat("d"), mode=Disaggregation.ALWAYS) == ("q", "p")


@pytest.mark.parametrize(
    ("match", "busy", "idle"),
    [
        (PrefixMatch(), {}, {}),
        (PrefixMatch({"busy": 20, "idle": 20}), {}, {}),
        (PrefixMatch({"busy": 20}), {"pool": False}, {}),
        (PrefixMatch({"busy": 20}), {}, {"pool": False}),
        (PrefixMatch({"busy": 20}), {"draining": True}, {}),
        (PrefixMatch({"busy": 20}), {"kv_identity": "dtype=bfloat16"}, {}),
        (
            PrefixMatch({"busy": 20}),
            {},
            {"transfers": (TransferFit(peer="busy", backend="tcp", bytes_per_s=500e3, samples=9),)},
        ),
        (PrefixMatch({"gone": 20}), {}, {}),
    ],
    ids=[
        "nothing held",
        "held here as well",
        "lender without pool",
        "borrower without pool",
        "lender leaves",
        "other KV",
        "slower than to compute",
        "lender is gone",
    ],
)
def test_nobody_lends(match: PrefixMatch, busy: dict[str, Any], idle: dict[str, Any]) -> None:
    beats = [beat("busy", prefill_tokens_queued=50_000, **busy), beat("idle", **idle)]
    assert lender(match, *beats)[1] == ""


def pulls(peer: str, spread: float, samples: int = 50) -> tuple[TransferFit, ...]:
    """Return a rate at which a loan takes half the time of computing."""
    return (TransferFit(peer=peer, backend="tcp", bytes_per_s=2e6, spread=spread, samples=samples),)


@pytest.mark.parametrize(("spread", "samples", "lends"), [(0.1, 50, True), (0.5, 50, False), (0.5, 3, True)])
def test_a_loan_whose_bound_is_longer_than_computing_is_not_taken(spread: float, samples: int, lends: bool) -> None:
    beats = [beat("busy", prefill_tokens_queued=5000), beat("idle", transfers=pulls("busy", spread, samples))]
    assert lender(PrefixMatch({"busy": 20}), *beats) == ("idle", "busy" if lends else "")


def test_the_lender_with_the_least_bound_is_asked() -> None:
    beats = [beat(name, prefill_tokens_queued=50_000) for name in ("a", "b")]
    idle = beat("idle", transfers=pulls("a", 0.3) + pulls("b", 0.1))
    assert lender(PrefixMatch({"a": 20, "b": 20}), *beats, idle)[1] == "b"


def test_a_prediction_has_a_bound_once_enough_is_measured() -> None:
    def bound_by_prediction(spread: float, samples: int) -> float:
        rates = steps(spread=spread, samples=samples)
        demand = Demand(model="tiny", prompt_tokens=1000, output_tokens_max=1, disaggregation=Disaggregation.NEVER)
        serving = Serving([WorkerLoad(msgspec.structs.replace(beat("w", prefill_tokens_queued=500), steps=rates))])
        predicted = choose(demand, serving, PrefixMatch(), Predicted(), PlacementOptions(), Random(0), 0.0).predicted
        return predicted.ttft_bound_s / predicted.predicted_ttft_s

    assert bound_by_prediction(0.2, 7) == pytest.approx(1.0)
    assert bound_by_prediction(0.2, 8) == pytest.approx(math.exp(2 * 0.2))
    assert bound_by_prediction(1e9, 8) < 100


def test_a_lender_of_another_role_has_the_same_kv() -> None:
    beats = [beat("p", Role.PREFILL), beat("d"), beat("other", kv_identity="dtype=bfloat16")]
    assert lender(PrefixMatch({"other": 20}), *beats, mode=Disaggregation.ALWAYS)[1] == ""
    assert lender(PrefixMatch({"other": 20, "d": 10}), *beats, mode=Disaggregation.ALWAYS) == ("p", "d")


@pytest.mark.parametrize(
    ("queued_tokens", "pool_tokens_free", "chosen"),
    [(500, 1000, ("b", "a")), (500, 250, ("a", "")), (500, 0, ("a", "")), (1500, 0, ("b", "a"))],
)
def test_a_loan_counts_in_the_ranking_with_what_it_displaces(
    queued_tokens: int, pool_tokens_free: int, chosen: tuple[str, str]
) -> None:
    """Computing takes a second and costs others another one; a loan costs others what it displaces in a full pool."""
    match, holder = PrefixMatch({"a": 31}), beat("a", prefill_tokens_queued=queued_tokens)
    assert lender(match, holder, beat("b", pool=False)) == ("a", "")
    assert lender(match, holder, beat("b", pool_tokens_free=pool_tokens_free)) == chosen


def test_a_placement_tells_of_its_loan() -> None:
    demand = Demand(model="tiny", prompt_tokens=1000, output_tokens_max=1, disaggregation=Disaggregation.NEVER)
    beats = [beat("busy", prefill_tokens_queued=5000), beat("idle")]
    serving = Serving([WorkerLoad(each) for each in beats])
    placement = choose(demand, serving, PrefixMatch({"busy": 20}), Predicted(), PlacementOptions(), Random(0), 0.0)
    chosen = placement.predicted
    assert (chosen.cached_tokens, chosen.borrowed_tokens, chosen.lender) == (0, 640, "busy")
    assert placement.reason.startswith("everything on idle: 360 of 1000 tokens to compute, 640 to borrow from busy, ")
    assert chosen.predicted_ttft_s == pytest.approx(0.36 + ASK_S + 640 * 1000 / 4e9 + 640 * 1000 / 1e9, rel=0.01)
    without = PlacementOptions(loans=False)
    assert choose(demand, serving, PrefixMatch({"busy": 20}), Predicted(), without, Random(0), 0.0).lender == ""


@given(
    workers=st.lists(
        st.fixed_dictionaries(
            {
                "pool": st.booleans(),
                "draining": st.booleans(),
                "held": st.integers(0, 40),
                "more_pooled": st.integers(0, 20),
                "identity": st.sampled_from(["dtype=float32", "dtype=bfloat16"]),
                "bytes_per_s": st.lists(st.sampled_from([5e5, 2e6, 5e7, 4e9]), min_size=4, max_size=4),
                "spread": st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=4, max_size=4),
            }
        ),
        min_size=1,
        max_size=4,
    ),
    prompt_tokens=st.integers(2, 1500),
)
def test_each_worker_takes_the_fastest_of_computing_promoting_and_borrowing(
    workers: list[dict[str, Any]], prompt_tokens: int
) -> None:
    names = [f"w{number}" for number in range(len(workers))]
    loads = [
        WorkerLoad(
            beat(
                name,
                pool=each["pool"],
                draining=each["draining"],
                kv_identity=each["identity"],
                transfers=tuple(
                    TransferFit(peer=peer, backend="tcp", bytes_per_s=rate, spread=spread, samples=9)
                    for peer, rate, spread in zip(names, each["bytes_per_s"], each["spread"], strict=False)
                ),
            )
        )
        for name, each in zip(names, workers, strict=True)
    ]
    held = {name: each["held"] for name, each in zip(names, workers, strict=True) if each["held"]}
    pooled = {
        name: each["held"] + each["more_pooled"]
        for name, each in zip(names, workers, strict=True)
        if each["pool"] and each["more_pooled"]
    }
    serving, match = Serving(loads), PrefixMatch(held, {}, pooled)
    demand = Demand(model="tiny", prompt_tokens=prompt_tokens, output_tokens_max=1, disaggregation=Disaggregation.NEVER)
    predict = Prediction(demand, match, 512, 0.0, find_lenders(serving, held, pooled))
    team = serving.teams[Role.DECODE]
    leg = predict.compute(team, team.every, Role.DECODE)

    def reach(name: str, known: Mapping[str, int]) -> int:
        return min(known.get(name, 0) * 32, prompt_tokens - 1)

    def compute_s(load: WorkerLoad, own_tokens: int) -> float:
        return prefill_s(load, prompt_tokens - own_tokens, prompt_tokens)[1]

    for row, load in enumerate(team.loads):
        device = reach(load.worker, held)
        own = max(device, reach(load.worker, pooled))
        compute = compute_s(load, device)
        options = [(compute, compute)]
        """By the upper bound, and as predicted."""
        if pooled:
            promote = (own - device) * load.promoted_token_s + compute_s(load, own)
            options.append((promote, promote))
        for peer in team.loads:
            lent = max(reach(peer.worker, held), reach(peer.worker, pooled))
            able = peer is not load and peer.promotion_bytes_per_s and peer.ready and peer.identity == load.identity
            if able and lent > own:
                pull_s = (lent - own) * KV_BYTES_PER_TOKEN / load.bandwidths[peer.worker]
                loan_s = ASK_S + pull_s + (lent - own) * load.promoted_token_s
                others_s = (own - device) * load.promoted_token_s + compute_s(load, lent)
                options.append((loan_s * load.pull_bound_ratio(peer.worker) + others_s, loan_s + others_s))
        # Few enough for all lenders to be considered.
        column = leg.column(row)
        assert column[OWN] == pytest.approx(min(options)[1], rel=1e-9)
        assert leg.bound_s(load, column) >= column[OWN] + column[QUEUE]
        borrowed_tokens, lender = leg.borrowed(column)
        if lender:
            peer = team.loads[team.rows[lender]]
            assert peer.identity == load.identity
            assert borrowed_tokens == max(reach(lender, held), reach(lender, pooled)) - own > 0
            assert load.promotion_bytes_per_s
        else:
            assert borrowed_tokens == 0
