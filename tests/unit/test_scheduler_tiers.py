"""Prefixes in workers' pools: what a placement costs that promotes them, and where it is not worth it."""

from __future__ import annotations

from random import Random

import pytest
from baton_scheduler.loads import Loads, LoadsOptions
from baton_scheduler.placement import PlacementOptions, choose, soft_placements
from baton_scheduler.policies.predicted import Predicted
from baton_scheduler.prediction import Demand, PrefixMatch
from baton_scheduler.team import Serving
from baton_scheduler.worker_load import WorkerLoad
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import MalformedMessage
from baton.messages.base import Context, WorkerAddress
from baton.messages.placement import Candidate, Disaggregation, Placed
from baton.messages.workers import Heartbeat, PromotionFit, Role, TransferFit
from tests.harness.heartbeats import heartbeat
from tests.harness.placements import steps

OPTIONS = PlacementOptions()
PROMPT_TOKENS = 1000
KV_BYTES_PER_TOKEN = 1_000_000


def beat(
    name: str,
    role: Role = Role.DECODE,
    *,
    promoted_tokens_per_s: float | None = None,
    loaded_tokens_per_s: float | None = None,
) -> Heartbeat:
    rate, loaded = promoted_tokens_per_s, loaded_tokens_per_s
    return heartbeat(
        name,
        role,
        steps=steps(),
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        promotion=None if rate is None else PromotionFit(bytes_per_s=rate * KV_BYTES_PER_TOKEN, samples=1),
        loading=None if loaded is None else PromotionFit(bytes_per_s=loaded * KV_BYTES_PER_TOKEN, samples=1),
    )


def place(match: PrefixMatch, *beats: Heartbeat, mode: Disaggregation = Disaggregation.NEVER) -> Candidate:
    demand = Demand(model="tiny", prompt_tokens=PROMPT_TOKENS, output_tokens_max=100, disaggregation=mode)
    serving = Serving([WorkerLoad(each) for each in beats])
    return choose(demand, serving, match, Predicted(), OPTIONS, Random(0), 0.0).predicted


def test_a_prefix_in_the_pool_is_promoted_and_told_apart() -> None:
    match = PrefixMatch({"w": 5}, {}, {"w": 20})
    chosen = place(match, beat("v"), beat("w", promoted_tokens_per_s=10_000))
    assert chosen.decode == "w"
    assert (chosen.cached_tokens, chosen.promoted_tokens, chosen.speculative_tokens) == (640, 480, 0)
    assert chosen.predicted_ttft_s == pytest.approx(480 / 10_000 + (1000 - 640) / 1000, rel=1e-3)


@pytest.mark.parametrize("rate", [None, 900.0], ids=["no pool any more", "slower than to compute"])
def test_a_prefix_in_the_pool_is_computed_where_that_is_faster(rate: float | None) -> None:
    match = PrefixMatch({"w": 5}, {}, {"w": 20})
    chosen = place(match, beat("w", promoted_tokens_per_s=rate))
    assert (chosen.cached_tokens, chosen.promoted_tokens) == (160, 0)
    assert chosen.predicted_ttft_s == pytest.approx(0.84, rel=1e-3)


def test_speculative_blocks_are_not_promoted() -> None:
    chosen = place(PrefixMatch({"w": 5}, {"w": 15}, {"w": 20}), beat("w", promoted_tokens_per_s=1e9))
    assert (chosen.cached_tokens, chosen.promoted_tokens, chosen.speculative_tokens) == (640, 160, 320)


def test_a_decode_worker_promotes_what_it_would_pull_more_slowly() -> None:
    pair = [beat("p", Role.PREFILL), beat("d", promoted_tokens_per_s=1e9)]
    chosen = place(PrefixMatch({"p": 20}, {}, {"d": 20}), *pair, mode=Disaggregation.ALWAYS)
    assert (chosen.cached_tokens, chosen.promoted_tokens) == (640, 0)
    assert (chosen.decode_cached_tokens, chosen.decode_promoted_tokens) == (640, 640)
    fast_link = (TransferFit(peer="p", backend="verbs", bytes_per_s=1e20, samples=9),)
    loads = Loads(LoadsOptions())
    for each in (pair[0], heartbeat("d", steps=steps(), promotion=pair[1].promotion, transfers=fast_link)):
        loads.take(each, 0.0)
    demand = Demand(model="tiny", prompt_tokens=1000, output_tokens_max=9, disaggregation=Disaggregation.ALWAYS)
    match = PrefixMatch({"p": 20}, {}, {"d": 20})
    pulled = choose(demand, loads.serving("tiny", 0.0), match, Predicted(), OPTIONS, Random(0), 0.0).predicted
    assert (pulled.decode_cached_tokens, pulled.decode_promoted_tokens) == (0, 0)


@given(device=st.integers(0, 31), pooled=st.integers(0, 31), speculative=st.integers(0, 31), rate=st.floats(1e2, 1e6))
def test_a_prefix_costs_the_lesser_of_computing_and_promoting(
    device: int, pooled: int, speculative: int, rate: float
) -> None:
    match = PrefixMatch(
        {"w": device} if device else {},
        {"w": speculative} if speculative > device else {},
        {"w": pooled} if pooled > device else {},
    )
    chosen = place(match, beat("w", promoted_tokens_per_s=rate))
    held = max(device, speculative) * 32
    offered = max(0, min(pooled * 32, PROMPT_TOKENS - 1) - held)
    computing_s = (PROMPT_TOKENS - held) / 1000
    promoting_s = offered / rate + (PROMPT_TOKENS - held - offered) / 1000
    assert chosen.predicted_ttft_s == pytest.approx(min(computing_s, promoting_s), rel=1e-3)
    if abs(computing_s - promoting_s) > 1e-6:
        promoted = offered if promoting_s < computing_s else 0
        assert (chosen.cached_tokens, chosen.promoted_tokens) == (held + promoted, promoted)


@given(
    device=st.integers(0, 31),
    pooled=st.integers(0, 31),
    filed=st.integers(0, 31),
    rate=st.floats(1e2, 1e6),
    loaded=st.floats(1e2, 1e6),
)
def test_a_prefix_in_the_file_is_read_where_that_is_fastest(
    device: int, pooled: int, filed: int, rate: float, loaded: float
) -> None:
    pooled = max(device, pooled)
    filed = max(pooled, filed)
    match = PrefixMatch(
        {"w": device} if device else {},
        {},
        {"w": pooled} if pooled > device else {},
        {"w": filed} if filed > pooled else {},
    )
    chosen = place(match, beat("w", promoted_tokens_per_s=rate, loaded_tokens_per_s=loaded))
    held, in_pool, in_file = (min(blocks * 32, PROMPT_TOKENS - 1) for blocks in (device, pooled, filed))
    promoting_s = (in_pool - held) / rate
    costs_s = {
        held: (PROMPT_TOKENS - held) / 1000,
        in_pool: promoting_s + (PROMPT_TOKENS - in_pool) / 1000,
        in_file: promoting_s + (in_file - in_pool) * (1 / rate + 1 / loaded) + (PROMPT_TOKENS - in_file) / 1000,
    }
    assert chosen.predicted_ttft_s == pytest.approx(min(costs_s.values()), rel=1e-3)
    assert costs_s[chosen.cached_tokens] == pytest.approx(min(costs_s.values()), rel=1e-3)
    assert chosen.cached_tokens - chosen.promoted_tokens == held


def test_a_decode_worker_reads_what_it_would_pull_more_slowly() -> None:
    pair = [beat("p", Role.PREFILL), beat("d", promoted_tokens_per_s=1e9, loaded_tokens_per_s=1e9)]
    chosen = place(PrefixMatch({"p": 20}, {}, {"d": 5}, {"d": 20}), *pair, mode=Disaggregation.ALWAYS)
    assert (chosen.decode_cached_tokens, chosen.decode_promoted_tokens) == (640, 640)
    pair[1] = beat("d", promoted_tokens_per_s=1e9, loaded_tokens_per_s=1.0)
    chosen = place(PrefixMatch({"p": 20}, {}, {"d": 5}, {"d": 20}), *pair, mode=Disaggregation.ALWAYS)
    assert (chosen.decode_cached_tokens, chosen.decode_promoted_tokens) == (160, 160)


def test_what_is_promoted_takes_room_of_its_own() -> None:
    loads = Loads(LoadsOptions())
    loads.take(heartbeat("w", promotion=PromotionFit(bytes_per_s=1e12, samples=1), kv_shared_share=1.0), 0.0)
    predicted = Candidate(
        decode="w",
        cached_tokens=640,
        decode_cached_tokens=640,
        promoted_tokens=480,
        decode_promoted_tokens=480,
        predicted_ttft_s=1.0,
    )
    placed = Placed(
        context=Context(request="r", budget_s=1.0),
        model_digest="digest",
        blocks=b"",
        workers=(WorkerAddress(worker="w", generation=1),),
        prompt_tokens=1000,
        output_tokens_max=100,
        predicted=predicted,
    )
    assert soft_placements(placed, loads, now_s=0.0, options=OPTIONS)["w"].kv_tokens == 1000 + 100 - 160


def test_a_worker_that_has_not_promoted_yet_takes_the_bandwidth_of_its_kind() -> None:
    loads = Loads(LoadsOptions(pool_s=0.0))
    guess = PromotionFit(bytes_per_s=1e10)
    for name, fit in (("a", PromotionFit(bytes_per_s=3e9, samples=5)), ("b", guess), ("b", guess)):
        loads.take(heartbeat(name, engine_kind="kind", promotion=fit), 0.0)
    rates = {load.worker: load.promotion_bytes_per_s for load in loads.live(0.0)}
    assert rates == {"a": 3e9, "b": 3e9}
    loads.take(heartbeat("b", engine_kind="kind"), 0.0)
    assert {load.worker: load.promotion_bytes_per_s for load in loads.live(0.0)} == {"a": 3e9, "b": 0.0}
    with pytest.raises(MalformedMessage, match="impossible"):
        loads.take(heartbeat("a", promotion=PromotionFit(bytes_per_s=0.0)), 0.0)
