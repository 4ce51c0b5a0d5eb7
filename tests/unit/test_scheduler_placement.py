"""The placement of an attempt, as a pure function."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from baton_scheduler.loads import WorkerLoad
from baton_scheduler.placement import Demand, PlacementOptions, PrefixMatch, choose, soft_placements
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ContextLengthExceeded, ModelNotFound, NoWorkers, Overloaded
from baton.messages.base import Context, WorkerAddress
from baton.messages.placement import Candidate, Disaggregation, Placed, Placement
from baton.messages.workers import Heartbeat, Role

OPTIONS = PlacementOptions()
AUTO, ALWAYS, NEVER = Disaggregation.AUTO, Disaggregation.ALWAYS, Disaggregation.NEVER


def worker(
    name: str, role: Role, *, soft_slots: int = 0, agents: tuple[str, ...] = ("agent",), **changes: Any
) -> WorkerLoad:
    heartbeat = Heartbeat(
        address=WorkerAddress(worker=name, generation=3, agents=agents),
        role=role,
        model="tiny",
        model_path="tiny",
        model_digest="digest",
        engine="simulated",
        block_tokens=32,
        context_tokens_max=8192,
        running_max=8,
        kv_blocks_total=1000,
        engine_block_tokens=32,
        prefill_tokens_per_s=1000.0,
        decode_tokens_per_s=100.0,
        transfer_bytes_per_s=1e9,
        kv_bytes_per_token=10_000,
    )
    return WorkerLoad(msgspec.structs.replace(heartbeat, **changes), soft_slots=soft_slots)


def prefill(name: str = "p1", **changes: Any) -> WorkerLoad:
    return worker(name, Role.PREFILL, **changes)


def decode(name: str = "d1", **changes: Any) -> WorkerLoad:
    return worker(name, Role.DECODE, **changes)


def demand(mode: Disaggregation = AUTO, **changes: Any) -> Demand:
    plain = Demand(model="tiny", prompt_tokens=1000, output_tokens_max=100, disaggregation=mode)
    return dataclasses.replace(plain, **changes)


def place(asked: Demand, *workers: WorkerLoad, held: dict[str, int] | None = None, seed: int = 0) -> Placement:
    return choose(asked, workers, PrefixMatch(held or {}), OPTIONS, Random(seed))


def names(placement: Placement) -> tuple[str, str]:
    return (placement.prefill.worker if placement.prefill else "", placement.decode.worker)


# ---------------------------------------------------------------- prediction


def test_speculative_blocks_count_as_cached_and_are_told_apart() -> None:
    match = PrefixMatch(held={"p1": 10}, speculative={"p1": 12, "p2": 20})
    placement = choose(demand(ALWAYS), [prefill("p1"), prefill("p2"), decode()], match, OPTIONS, Random(0))
    assert names(placement) == ("p2", "d1")
    speculative = {each.prefill: (each.cached_tokens, each.speculative_tokens) for each in placement.candidates}
    assert speculative == {"p1": (384, 64), "p2": (640, 640)}


def test_a_pair_costs_queue_compute_transfer_and_entry() -> None:
    placement = place(demand(ALWAYS), prefill(prefill_tokens_queued=500), decode(), held={"p1": 10, "d1": 5})
    assert names(placement) == ("p1", "d1")
    queue_s, compute_s = 500 / 1000, (1000 - 320) / 1000
    transfer_s, entry_s = (1000 - 160) * 10_000 / 1e9, 0.01
    assert placement.predicted.predicted_ttft_s == pytest.approx(queue_s + compute_s + transfer_s + entry_s)
    assert placement.predicted.predicted_token_interval_s == pytest.approx(0.01)
    assert (placement.predicted.cached_tokens, placement.predicted.decode_cached_tokens) == (320, 160)
    assert placement.decode.generation == 3


def test_the_slower_side_sets_the_bandwidth() -> None:
    fast = place(demand(ALWAYS), prefill(), decode()).predicted.predicted_ttft_s
    for pool in (
        (prefill(transfer_bytes_per_s=1e7), decode()),
        (prefill(), decode(transfer_bytes_per_s=1e7)),
    ):
        slow = place(demand(ALWAYS), *pool).predicted.predicted_ttft_s
        assert slow - fast == pytest.approx(1.0 - 0.01)


def test_an_aggregated_worker_pays_its_own_queue_and_delays_who_runs_there() -> None:
    idle = place(demand(NEVER), decode(prefill_tokens_queued=500)).predicted
    assert idle.predicted_ttft_s == pytest.approx(0.5 + 1.0 + 0.01)
    assert idle.predicted_token_interval_s == pytest.approx(0.01)
    shared = place(demand(NEVER), decode(running=1)).predicted
    assert shared.predicted_token_interval_s == pytest.approx(0.01 + 1.0)


def test_the_last_prompt_token_is_computed_even_when_all_is_cached() -> None:
    predicted = place(demand(NEVER, prompt_tokens=64), decode(), held={"d1": 2}).predicted
    assert predicted.cached_tokens == 63
    assert predicted.predicted_ttft_s == pytest.approx(0.001 + 0.01)


def test_workers_that_have_measured_nothing_yet_are_predicted_by_assumption() -> None:
    bare: dict[str, Any] = {"prefill_tokens_per_s": 0.0, "decode_tokens_per_s": 0.0, "transfer_bytes_per_s": 0.0}
    assert place(demand(ALWAYS), prefill(**bare), decode(**bare)).predicted.predicted_ttft_s > 0


# ---------------------------------------------------------------- always, auto, never


def test_modes_are_kept() -> None:
    pool = (prefill(), decode())
    assert names(place(demand(ALWAYS), *pool)) == ("p1", "d1")
    assert names(place(demand(NEVER), *pool)) == ("", "d1")


def test_auto_takes_what_is_faster() -> None:
    idle = place(demand(AUTO), prefill(), decode())
    assert names(idle) == ("", "d1"), "nothing runs on decode, so moving the KV only costs"
    queued = place(demand(AUTO), prefill(), decode(prefill_tokens_queued=3000))
    assert names(queued) == ("p1", "d1")
    assert "against" in queued.reason
    cached = place(demand(AUTO), prefill(), decode(prefill_tokens_queued=600), held={"d1": 31})
    assert names(cached) == ("", "d1")


def test_auto_spares_running_attempts_a_long_step() -> None:
    busy = place(demand(AUTO), prefill(), decode(running=4))
    assert names(busy) == ("p1", "d1"), "computing here would stop four attempts for a second"
    short = place(demand(AUTO, prompt_tokens=20), prefill(), decode(running=4))
    assert names(short) == ("", "d1")


def test_auto_without_prefill_workers_is_aggregated_and_always_is_refused() -> None:
    assert names(place(demand(AUTO), decode())) == ("", "d1")
    with pytest.raises(NoWorkers, match="prefill"):
        place(demand(ALWAYS), decode())
    with pytest.raises(Overloaded):
        place(demand(ALWAYS), prefill(running=8), decode())
    assert names(place(demand(AUTO), prefill(running=8), decode())) == ("", "d1")


def test_workers_of_two_versions_of_a_model_are_never_paired() -> None:
    with pytest.raises(NoWorkers):
        place(demand(ALWAYS), prefill(), decode(model_digest="new"))
    pool = (prefill(), decode(model_digest="new"), decode("d2", running=7))
    assert names(place(demand(ALWAYS), *pool)) == ("p1", "d2")


def test_workers_whose_kv_means_something_else_are_never_paired() -> None:
    """A client that asked for a pair gets the reason why there is none."""
    bf16 = {"kv_identity": "model=qwen3 dtype=bfloat16 scales=none"}
    fp8 = {"kv_identity": "model=qwen3 dtype=float8_e4m3 scales=1.0/1.0"}
    why = "p1 has dtype=bfloat16 scales=none, d1 has dtype=float8_e4m3 scales=1.0/1.0"
    with pytest.raises(NoWorkers, match=why):
        place(demand(ALWAYS), prefill(**bf16), decode(**fp8))
    assert why in place(demand(AUTO), prefill(**bf16), decode(**fp8)).reason
    pool = (prefill(**bf16), decode(**fp8), decode("d2", running=7, **bf16))
    assert names(place(demand(ALWAYS), *pool)) == ("p1", "d2")


def test_workers_without_a_transfer_agent_are_never_paired() -> None:
    for pool in ((prefill(agents=()), decode(running=4)), (prefill(), decode(running=4, agents=()))):
        placement = place(demand(AUTO), *pool)
        assert names(placement) == ("", "d1")
        assert "has no transfer agent" in placement.reason
        with pytest.raises(NoWorkers, match="has no transfer agent"):
            place(demand(ALWAYS), *pool)


def test_unlike_workers_take_no_place_on_the_shortlist() -> None:
    idle = [prefill(f"a{number}", kv_identity="dtype=bfloat16") for number in range(OPTIONS.shortlist)]
    busy = prefill("z", kv_identity="dtype=float32", prefill_tokens_queued=9000)
    assert names(place(demand(ALWAYS), *idle, busy, decode(kv_identity="dtype=float32"))) == ("z", "d1")


# ---------------------------------------------------------------- refusals


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="nobody"):
        place(demand(model="nobody"), prefill(), decode())


def test_without_a_decode_worker_nothing_can_run() -> None:
    with pytest.raises(NoWorkers, match="decode"):
        place(demand(), prefill())
    with pytest.raises(NoWorkers, match="decode"):
        place(demand(), prefill(), decode(draining=True))
    with pytest.raises(NoWorkers, match="failed this request"):
        place(demand(exclude=frozenset({"d1"})), prefill(), decode())


def test_full_decode_workers_refuse_with_a_time_to_retry() -> None:
    for full in (
        decode(running=6, waiting=2),
        decode(running=6, soft_slots=2),
        decode(kv_blocks_used=990),
    ):
        with pytest.raises(Overloaded) as caught:
            place(demand(), prefill(), full)
        assert caught.value.retry_after_s == OPTIONS.retry_after_s
        assert names(place(demand(ALWAYS), prefill(), full, decode("d2"))) == ("p1", "d2")
    with pytest.raises(Overloaded) as caught:
        place(demand(), decode(running=8, prefill_tokens_queued=7000))
    assert caught.value.retry_after_s == 7.0


def test_blocks_are_counted_as_the_ledger_will_reserve_them() -> None:
    asked = demand(NEVER, prompt_tokens=33, output_tokens_max=31)
    assert names(place(asked, decode(kv_blocks_total=2))) == ("", "d1")
    with pytest.raises(Overloaded):
        place(asked, decode(kv_blocks_total=4, kv_blocks_used=3))
    endless = demand(NEVER, prompt_tokens=32, output_tokens_max=100_000)
    assert names(place(endless, decode(kv_blocks_total=17))) == ("", "d1")


def test_a_prompt_that_never_fits_is_not_told_to_retry() -> None:
    with pytest.raises(ContextLengthExceeded):
        place(demand(), decode(context_tokens_max=1000))
    with pytest.raises(ContextLengthExceeded):
        place(demand(), decode(kv_blocks_total=20))
    with pytest.raises(ContextLengthExceeded, match="prefill"):
        place(demand(ALWAYS), prefill(kv_blocks_total=50), decode())
    assert names(place(demand(AUTO), prefill(kv_blocks_total=50), decode())) == ("", "d1")


def test_excluded_pairs_leave_other_pairs() -> None:
    pool = (prefill("p1"), prefill("p2"), decode("d1"))
    only = demand(ALWAYS, exclude_pairs=frozenset({("p1", "d1")}))
    assert {names(place(only, *pool, seed=seed)) for seed in range(20)} == {("p2", "d1")}
    with pytest.raises(NoWorkers, match="reach"):
        place(demand(ALWAYS, exclude_pairs=frozenset({("p1", "d1"), ("p2", "d1")})), *pool)


# ---------------------------------------------------------------- ties


def test_near_ties_are_broken_by_chance_and_held_prefixes_before_that() -> None:
    pool = [decode(f"d{number}", prefill_tokens_queued=number) for number in range(4)]
    asked = demand(NEVER)
    assert len({names(place(asked, *pool, seed=seed)) for seed in range(50)}) == 4
    near = [decode("d1", prefill_tokens_queued=40), decode("d2")]
    assert {names(place(asked, *near, held={"d1": 1}, seed=seed)) for seed in range(50)} == {("", "d1")}


@pytest.mark.parametrize("mode", [NEVER, ALWAYS])
def test_of_many_workers_as_good_as_each_other_all_are_chosen(mode: Disaggregation) -> None:
    """However short the list of those that are looked at closely, and though no two measure the very same."""
    pool = [worker(f"{role}-{number}", role, prefill_tokens_queued=number) for role in Role for number in range(40)]
    chosen = {names(place(demand(mode), *pool, seed=seed)) for seed in range(200)}
    assert len({decode for _, decode in chosen}) > 30
    assert len({prefill for prefill, _ in chosen}) > (30 if mode is ALWAYS else 0)


def test_among_equals_the_less_loaded_is_chosen_more_often() -> None:
    pool = [decode("busy", running=6), *(decode(f"d{number}", running=1) for number in range(3))]
    asked = demand(ALWAYS)
    chosen = Counter(names(place(asked, prefill(), *pool, seed=seed))[1] for seed in range(100))
    assert chosen["busy"] == 0
    assert min(chosen[f"d{number}"] for number in range(3)) > 10, "no worker is the one that all choose"


def test_decode_workers_that_break_the_limit_take_no_place_on_the_shortlist() -> None:
    slow = [decode(f"a{number}", decode_tokens_per_s=9.0) for number in range(OPTIONS.shortlist)]
    keeps = decode("z", decode_tokens_per_s=100.0, transfer_bytes_per_s=1e6)
    assert names(place(demand(ALWAYS), prefill(), *slow, keeps)) == ("p1", "z")


def test_what_lies_outside_the_tie_never_wins() -> None:
    pool = (decode("d1"), decode("d2", prefill_tokens_queued=100))
    assert {names(place(demand(NEVER), *pool, seed=seed)) for seed in range(50)} == {("", "d1")}


def test_candidates_are_the_best_few_in_order() -> None:
    pool = [prefill(f"p{number}", prefill_tokens_queued=500 * number) for number in range(6)]
    placement = place(demand(ALWAYS), *pool, decode())
    costs = [candidate.predicted_ttft_s for candidate in placement.candidates]
    assert len(costs) == OPTIONS.candidates_max
    assert costs == sorted(costs)
    assert placement.candidates[0] == placement.predicted


def placed(placement: Placement, asked: Demand) -> Placed:
    return Placed(
        context=Context(request="r", attempt=2, budget_s=5.0),
        model_digest="digest",
        blocks=b"",
        workers=(),
        prompt_tokens=asked.prompt_tokens,
        output_tokens_max=asked.output_tokens_max,
        predicted=placement.predicted,
    )


def test_a_placement_without_a_prediction_takes_nothing() -> None:
    unpredicted = msgspec.structs.replace(placed(place(demand(), decode()), demand()), predicted=None)
    assert soft_placements(unpredicted, now_s=0.0, options=OPTIONS) == {}


def test_soft_placements_take_from_both_sides_what_the_attempt_will_use() -> None:
    asked = demand(ALWAYS)
    pair = place(asked, prefill(), decode(), held={"p1": 10})
    taken = soft_placements(placed(pair, asked), now_s=10.0, options=OPTIONS)
    assert (taken["p1"].prefill_tokens, taken["p1"].kv_tokens) == (680, 1000)
    assert (taken["d1"].prefill_tokens, taken["d1"].kv_tokens) == (0, 1100)
    assert taken["d1"].until_s == pytest.approx(10.0 + pair.predicted.predicted_ttft_s + 100 * 0.01)
    asked = demand(NEVER)
    taken = soft_placements(placed(place(asked, decode()), asked), now_s=0.0, options=OPTIONS)
    assert taken["d1"].prefill_tokens == 1000


# ---------------------------------------------------------------- properties

rates = st.sampled_from([0.0, 1.0, 50.0, 1000.0, 1e6])


@st.composite
def pools(draw: st.DrawFn) -> list[WorkerLoad]:
    return [
        worker(
            f"w{number}",
            draw(st.sampled_from(Role)),
            soft_slots=draw(st.integers(0, 3)),
            model=draw(st.sampled_from(["tiny", "tiny", "tiny", "other"])),
            model_digest=draw(st.sampled_from(["digest", "digest", "new"])),
            running=draw(st.integers(0, 6)),
            waiting=draw(st.integers(0, 3)),
            kv_blocks_used=draw(st.integers(0, 1000)),
            prefill_tokens_queued=draw(st.integers(0, 5000)),
            prefill_tokens_per_s=draw(rates),
            decode_tokens_per_s=draw(rates),
            transfer_bytes_per_s=draw(rates),
            context_tokens_max=draw(st.sampled_from([512, 8192])),
            draining=draw(st.sampled_from([False, False, False, True])),
        )
        for number in range(draw(st.integers(0, 6)))
    ]


held_blocks = st.dictionaries(st.sampled_from([f"w{number}" for number in range(6)]), st.integers(0, 40))
workers_named = st.sampled_from([f"w{number}" for number in range(6)])
demands = st.builds(
    Demand,
    model=st.just("tiny"),
    prompt_tokens=st.integers(1, 2000),
    output_tokens_max=st.integers(1, 1000),
    disaggregation=st.sampled_from(Disaggregation),
    exclude=st.frozensets(workers_named, max_size=3),
    exclude_pairs=st.frozensets(st.tuples(workers_named, workers_named), max_size=6),
)
REFUSALS = (ModelNotFound, NoWorkers, Overloaded, ContextLengthExceeded)


@given(asked=demands, pool=pools(), held=held_blocks, seed=st.integers(0, 9))
def test_every_placement_is_allowed(asked: Demand, pool: list[WorkerLoad], held: dict[str, int], seed: int) -> None:
    try:
        placement = choose(asked, pool, PrefixMatch(held), OPTIONS, Random(seed))
    except REFUSALS as error:
        assert str(error)
        return
    loads = {load.worker: load for load in pool}
    for candidate in (placement.predicted, *placement.candidates):
        used = [loads[candidate.decode]] + ([loads[candidate.prefill]] if candidate.prefill else [])
        assert loads[candidate.decode].role is Role.DECODE
        assert all(load.worker not in asked.exclude for load in used)
        assert all(load.heartbeat.model == "tiny" and not load.heartbeat.draining for load in used)
        assert all(load.slots_free > 0 for load in used)
        assert len({load.heartbeat.model_digest for load in used}) == 1
        if candidate.prefill:
            assert loads[candidate.prefill].role is Role.PREFILL
            assert (candidate.prefill, candidate.decode) not in asked.exclude_pairs
            assert asked.disaggregation is not NEVER
        else:
            assert asked.disaggregation is not ALWAYS
        assert 0 < candidate.predicted_ttft_s < float("inf")
    assert placement.reason.endswith(".")


@given(asked=demands, pool=pools(), held=held_blocks, seed=st.integers(0, 9), shuffle=st.randoms())
def test_a_seed_decides_whatever_the_order(
    asked: Demand, pool: list[WorkerLoad], held: dict[str, int], seed: int, shuffle: Random
) -> None:
    def outcome() -> Placement | str:
        try:
            return choose(asked, pool, PrefixMatch(held), OPTIONS, Random(seed))
        except REFUSALS as error:
            return str(error)

    first = outcome()
    shuffle.shuffle(pool)
    assert outcome() == first


@given(asked=demands, pool=pools(), held=held_blocks, better=workers_named, more=st.integers(1, 40))
def test_more_cached_tokens_never_make_a_prediction_worse(
    asked: Demand, pool: list[WorkerLoad], held: dict[str, int], better: str, more: int
) -> None:
    everything = dataclasses.replace(OPTIONS, candidates_max=1000, shortlist=1000)

    def candidates(holding: dict[str, int]) -> dict[tuple[str, str], Candidate]:
        try:
            placement = choose(asked, pool, PrefixMatch(holding), everything, Random(0))
        except REFUSALS:
            return {}
        return {(each.prefill, each.decode): each for each in placement.candidates}

    before, after = candidates(held), candidates(held | {better: held.get(better, 0) + more})
    assert before.keys() == after.keys()
    for key, candidate in before.items():
        assert after[key].predicted_ttft_s <= candidate.predicted_ttft_s
        assert after[key].predicted_token_interval_s <= candidate.predicted_token_interval_s


@given(asked=demands, pool=pools(), held=held_blocks)
def test_the_shortlist_keeps_the_best_prediction(asked: Demand, pool: list[WorkerLoad], held: dict[str, int]) -> None:
    """Pairing only the best of each side loses nothing where all bandwidths are equal."""
    even = [
        dataclasses.replace(
            load, heartbeat=msgspec.structs.replace(load.heartbeat, transfer_bytes_per_s=1e9, model_digest="digest")
        )
        for load in pool
    ]
    bests: list[float | None] = []
    for shortlist in (1, 1000):
        try:
            options = dataclasses.replace(OPTIONS, shortlist=shortlist, tie_share=0.0, tie_s=0.0)
            bests.append(choose(asked, even, PrefixMatch(held), options, Random(0)).candidates[0].predicted_ttft_s)
        except REFUSALS:
            bests.append(None)
    assert bests[0] == bests[1]
