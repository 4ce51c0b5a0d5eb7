"""The placement of an attempt, as a pure function."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest
from baton_scheduler.loads import Loads, LoadsOptions
from baton_scheduler.placement import choose, soft_placements
from baton_scheduler.policies.predicted import SHORTLIST, Predicted
from baton_scheduler.prediction import MEMORY_S, PRESSURE_S, WAIT_S, Demand, PrefixMatch
from baton_scheduler.team import Serving
from baton_scheduler.worker_load import WorkerLoad

from baton.errors import ContextLengthExceeded, ModelNotFound, NoWorkers
from baton.messages.base import Context
from baton.messages.placement import Disaggregation, Placed, Placement
from baton.messages.workers import Role
from tests.harness.placements import (
    ALWAYS,
    AUTO,
    NEVER,
    OPTIONS,
    bandwidth,
    decode,
    demand,
    names,
    place,
    prefill,
    steps,
    worker,
)

# ---------------------------------------------------------------- prediction


def test_speculative_blocks_count_as_cached_and_are_told_apart() -> None:
    match = PrefixMatch(held={"p1": 10}, speculative={"p1": 12, "p2": 20})
    serving = Serving([prefill("p1"), prefill("p2"), decode()])
    placement = choose(demand(ALWAYS), serving, match, Predicted(), OPTIONS, Random(0), 0.0)
    assert names(placement) == ("p2", "d1")
    speculative = {each.prefill: (each.cached_tokens, each.speculative_tokens) for each in placement.candidates}
    assert speculative == {"p1": (384, 64), "p2": (640, 640)}


def test_a_pair_takes_queue_compute_the_tail_of_the_pull_and_a_step() -> None:
    """The pull of 8.4 MB takes 0.84 s, of which 0.68 s pass while prefill computes."""
    slow = decode(transfers=(bandwidth("p1", 1e7),))
    placement = place(demand(ALWAYS), prefill(prefill_tokens_queued=500), slow, held={"p1": 10, "d1": 5})
    assert names(placement) == ("p1", "d1")
    queue_s, compute_s = 500 / 1000, (1000 - 320) / 1000
    tail_s, entry_s = (1000 - 160) * 10_000 / 1e7 - compute_s, 0.01
    assert placement.predicted.predicted_ttft_s == pytest.approx(queue_s + compute_s + tail_s + entry_s)
    assert placement.predicted.predicted_token_interval_s == pytest.approx(0.01)
    assert (placement.predicted.cached_tokens, placement.predicted.decode_cached_tokens) == (320, 160)
    assert placement.decode.generation == 3


def test_a_pull_that_ends_while_prefill_computes_costs_nothing() -> None:
    fast, slow = decode(transfers=(bandwidth("p1", 1e9),)), decode(transfers=(bandwidth("p1", 1.1e7),))
    times = [place(demand(ALWAYS), prefill(), each).predicted.predicted_ttft_s for each in (fast, slow)]
    assert times == pytest.approx([1.01, 1.01])
    cached = place(demand(ALWAYS), prefill(), slow, held={"p1": 31}).predicted
    assert cached.predicted_ttft_s == pytest.approx(1e7 / 1.1e7 + 0.01), "with nothing to compute, all of it is left"


def test_the_bandwidth_is_that_of_the_pair() -> None:
    """Two prefill workers of the same speed; one is far away, as the decode worker has measured."""
    near = decode(transfers=(bandwidth("p1", 1e6), bandwidth("p2", 1e9)))
    assert {names(place(demand(ALWAYS), prefill("p1"), prefill("p2"), near, seed=seed)) for seed in range(9)} == {
        ("p2", "d1")
    }


def test_a_pulled_sequence_joins_after_the_step_under_way() -> None:
    busy = decode(running=4, steps=steps(sequence_s=0.01))
    predicted = place(demand(ALWAYS), prefill(), busy).predicted
    assert predicted.predicted_ttft_s == pytest.approx(1.0 + (0.01 + 4 * 0.01) / 2 + (0.01 + 5 * 0.01))


def test_an_aggregated_worker_takes_its_queue_and_the_steps_of_what_runs_there() -> None:
    idle = place(demand(NEVER), decode(prefill_tokens_queued=500)).predicted
    assert idle.predicted_ttft_s == pytest.approx(0.5 + 1.0)
    others = decode(running=4, steps=steps(sequence_s=0.01))
    beside = place(demand(NEVER, prompt_tokens=4096), others).predicted
    assert beside.predicted_ttft_s == pytest.approx(4.096 + 2.5 * (0.01 + 4 * 0.01)), (
        "half a step passes before its first"
    )
    assert beside.predicted_token_interval_s == pytest.approx(0.01 + 5 * 0.01)


def test_the_token_interval_is_predicted_by_batch_and_kv_in_use() -> None:
    slow = decode(running=3, kv_blocks_used=500, steps=steps(decode_step_s=0.01, sequence_s=0.001, kv_s=0.02))
    predicted = place(demand(NEVER), slow).predicted.predicted_token_interval_s
    assert predicted == pytest.approx(0.01 + 4 * 0.001 + 0.5 * 0.02)


def test_a_long_prompt_takes_more_than_its_tokens() -> None:
    """Attention grows with the square of the context, and only the uncached part is computed."""
    quadratic = decode(steps=steps(prompt_pair_s=1e-6))
    whole = place(demand(NEVER, prompt_tokens=4000), quadratic).predicted.predicted_ttft_s
    assert whole == pytest.approx(4.0 + 16.0)
    rest = place(demand(NEVER, prompt_tokens=4000), quadratic, held={"d1": 100}).predicted.predicted_ttft_s
    assert rest == pytest.approx(0.8 + (4000**2 - 3200**2) * 1e-6)


def test_a_queue_gets_shorter_while_no_heartbeat_comes() -> None:
    queued = decode(prefill_tokens_queued=2000, prefill_elapsed_s=0.5)
    times = [place(demand(NEVER), queued, now_s=now_s).predicted.predicted_ttft_s for now_s in (0.0, 0.25, 9.0)]
    assert times == pytest.approx([2.5, 2.25, 1.0])


def test_the_last_prompt_token_is_computed_even_when_all_is_cached() -> None:
    predicted = place(demand(NEVER, prompt_tokens=64), decode(), held={"d1": 2}).predicted
    assert predicted.cached_tokens == 63
    assert predicted.predicted_ttft_s == pytest.approx(0.001, rel=1e-3)


# ---------------------------------------------------------------- cost


def test_a_full_worker_that_has_the_prefix_is_waited_for() -> None:
    """It lacks 2 % of its KV, which is predicted to take 0.2 s; to compute the prompt elsewhere takes 0.97 s more."""
    full = decode("d1", kv_blocks_used=1000 - 15)
    placement = place(demand(NEVER), full, decode("d2"), held={"d1": 31})
    assert names(placement) == ("", "d1")
    missing_share = (1100 - 15 * 32) / 32_000
    assert placement.predicted.waiting_s == pytest.approx(WAIT_S * missing_share)
    assert placement.predicted.predicted_ttft_s == pytest.approx(WAIT_S * missing_share + 0.008, rel=1e-3)
    fuller = decode("d1", kv_blocks_used=1000, running=12)
    assert names(place(demand(NEVER), fuller, decode("d2"), held={"d1": 31})) == ("", "d2")


def test_a_prefix_that_running_attempts_hold_takes_no_room() -> None:
    """30 blocks of the prompt are cached, and half of what is cached there is shared, as the worker says."""
    full = decode("d1", kv_blocks_used=1000 - 15, kv_shared_share=0.5)
    placement = place(demand(NEVER), full, held={"d1": 30})
    missing_share = (1100 - 15 * 32 - 30 * 32 / 2) / 32_000
    assert placement.predicted.waiting_s == pytest.approx(WAIT_S * missing_share)


def test_decode_goes_where_the_prompt_takes_least_room() -> None:
    sharing, empty = decode("d1", kv_blocks_used=50, kv_shared_share=1.0), decode("d2")
    pairs = place(demand(ALWAYS), prefill(), sharing, empty, held={"d1": 30}).candidates
    assert [each.decode for each in pairs] == ["d1", "d2"]
    saved_s = MEMORY_S * 30 * 32 / 32_000 - PRESSURE_S * 50 / 1000
    assert pairs[1].cost_s - pairs[0].cost_s == pytest.approx(saved_s)


def test_where_all_are_full_one_is_chosen_and_the_wait_is_stated() -> None:
    for full in (decode(running=6, waiting=2), decode(kv_blocks_used=990)):
        assert place(demand(NEVER), full).predicted.waiting_s > 0
    assert place(demand(NEVER), decode(running=7)).predicted.waiting_s == 0
    busy = place(demand(ALWAYS), prefill(running=8), decode(running=9)).predicted
    assert busy.waiting_s == pytest.approx(WAIT_S * 2 / 8), "the pair waits for both at once"


def test_a_prompt_weighs_more_where_others_wait_for_it() -> None:
    """A free worker would give the first token a little earlier, but the prompts that come next would wait a second
    for this one; the other worker has most of it cached."""
    queued, free = decode("d1", prefill_tokens_queued=1100), decode("d2")
    placement = place(demand(NEVER), queued, free, held={"d1": 30})
    assert names(placement) == ("", "d1")
    one, two = placement.candidates
    assert one.predicted_ttft_s > 1.1 * two.predicted_ttft_s


def test_a_prompt_weighs_more_where_sequences_run() -> None:
    """The worker with running sequences would be ready first, but all of them would stand still for a second."""
    running, queued = decode("d1", running=6), decode("d2", prefill_tokens_queued=300)
    assert names(place(demand(NEVER), running, queued)) == ("", "d2")
    assert place(demand(NEVER), running).predicted.predicted_ttft_s < 1.1


def test_a_worker_with_a_long_token_interval_is_not_left_out() -> None:
    """There is no hard limit: a worker that holds the prompt is chosen although its steps take 0.3 s."""
    slow = decode("d1", steps=steps(decode_step_s=0.3))
    assert names(place(demand(NEVER), slow, decode("d2"), held={"d1": 31})) == ("", "d1")


def test_kv_in_use_counts_against_a_decode_worker() -> None:
    used = decode("d1", kv_blocks_used=400, transfers=(bandwidth("p1", 1e9),))
    empty = decode("d2", transfers=(bandwidth("p1", 1e9),))
    pairs = place(demand(ALWAYS), prefill(), used, empty).candidates
    assert [each.decode for each in pairs] == ["d2", "d1"]
    assert pairs[1].cost_s - pairs[0].cost_s == pytest.approx(0.4 * PRESSURE_S)
    assert pairs[1].predicted_ttft_s == pytest.approx(pairs[0].predicted_ttft_s), "it is a cost, not a prediction"
    slower = decode("d2", steps=steps(decode_step_s=0.09))
    assert names(place(demand(ALWAYS), prefill(), used, slower)) == ("p1", "d2")


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
    cached = place(demand(AUTO), prefill(), decode(running=4), held={"d1": 31})
    assert names(cached) == ("", "d1")


def test_auto_without_prefill_workers_is_aggregated_and_always_is_refused() -> None:
    assert names(place(demand(AUTO), decode())) == ("", "d1")
    with pytest.raises(NoWorkers, match="prefill"):
        place(demand(ALWAYS), decode())
    assert names(place(demand(AUTO), prefill(running=8), decode())) == ("", "d1"), "a full one would be waited for"


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
    idle = [prefill(f"a{number}", kv_identity="dtype=bfloat16") for number in range(SHORTLIST)]
    busy = prefill("z", kv_identity="dtype=float32", prefill_tokens_queued=9000)
    assert names(place(demand(ALWAYS), *idle, busy, decode(kv_identity="dtype=float32"))) == ("z", "d1")


# ---------------------------------------------------------------- refusals


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="nobody"):
        place(demand(model="nobody"))


def test_without_a_decode_worker_nothing_can_run() -> None:
    with pytest.raises(NoWorkers, match="decode"):
        place(demand(), prefill())
    with pytest.raises(NoWorkers, match="decode"):
        place(demand(), prefill(), decode(draining=True))
    with pytest.raises(NoWorkers, match="failed this request"):
        place(demand(exclude=frozenset({"d1"})), prefill(), decode())


def test_blocks_are_counted_as_the_ledger_will_reserve_them() -> None:
    asked = demand(NEVER, prompt_tokens=33, output_tokens_max=31)
    assert place(asked, decode(kv_blocks_total=2)).predicted.waiting_s == 0
    assert place(asked, decode(kv_blocks_total=4, kv_blocks_used=3)).predicted.waiting_s > 0
    endless = demand(NEVER, prompt_tokens=32, output_tokens_max=100_000)
    assert place(endless, decode(kv_blocks_total=17)).predicted.waiting_s == 0
    with pytest.raises(ContextLengthExceeded):
        place(endless, decode(kv_blocks_total=16))


def test_a_prompt_that_never_fits_is_not_told_to_retry() -> None:
    with pytest.raises(ContextLengthExceeded):
        place(demand(), decode(context_tokens_max=1000))
    with pytest.raises(ContextLengthExceeded):
        place(demand(), decode(kv_blocks_total=20))
    with pytest.raises(ContextLengthExceeded, match="prefill"):
        place(demand(ALWAYS), prefill(kv_blocks_total=50), decode())
    assert names(place(demand(AUTO), prefill(kv_blocks_total=50), decode())) == ("", "d1")


def test_a_prompt_that_only_an_excluded_worker_can_hold_may_be_tried_again() -> None:
    workers = (decode("large"), decode("small", kv_blocks_total=20))
    with pytest.raises(NoWorkers, match="that can hold it failed this request"):
        place(demand(NEVER, exclude=frozenset({"large"})), *workers)


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
    asked, serving = demand(mode), Serving(pool)
    chosen = {
        names(choose(asked, serving, PrefixMatch(), Predicted(), OPTIONS, Random(seed), 0.0)) for seed in range(200)
    }
    assert len({decode for _, decode in chosen}) > 30
    assert len({prefill for prefill, _ in chosen}) > (30 if mode is ALWAYS else 0)


def test_among_equals_the_less_loaded_is_chosen_more_often() -> None:
    pool = [decode("busy", waiting=6), *(decode(f"d{number}", waiting=1) for number in range(3))]
    asked = demand(ALWAYS)
    chosen = Counter(names(place(asked, prefill(), *pool, seed=seed))[1] for seed in range(100))
    assert chosen["busy"] == 0
    assert min(chosen[f"d{number}"] for number in range(3)) > 10, "no worker is the one that all choose"


def test_what_lies_outside_the_tie_never_wins() -> None:
    pool = (decode("d1"), decode("d2", prefill_tokens_queued=110))
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


def loads_of(*workers: WorkerLoad) -> Loads:
    loads = Loads(LoadsOptions())
    for each in workers:
        loads.take(each.heartbeat, 0.0)
    return loads


def test_a_placement_without_a_prediction_takes_nothing() -> None:
    hint = msgspec.structs.replace(placed(place(demand(), decode()), demand()), predicted=None)
    assert soft_placements(hint, loads_of(decode()), now_s=0.0, options=OPTIONS) == {}


def test_soft_placements_take_from_both_sides_what_the_attempt_will_use() -> None:
    asked = demand(ALWAYS)
    pair = place(asked, prefill(), decode(), held={"p1": 10})
    taken = soft_placements(placed(pair, asked), loads_of(prefill(), decode()), now_s=10.0, options=OPTIONS)
    assert (taken["p1"].prefill_s, taken["p1"].kv_tokens) == (pytest.approx(0.68), 1000)
    assert (taken["d1"].prefill_s, taken["d1"].kv_tokens) == (0, 1100)
    assert taken["d1"].until_s == pytest.approx(10.0 + pair.predicted.predicted_ttft_s + 100 * 0.01)
    asked = demand(NEVER)
    taken = soft_placements(placed(place(asked, decode()), asked), loads_of(decode()), now_s=0.0, options=OPTIONS)
    assert taken["d1"].prefill_s == pytest.approx(1.0)
