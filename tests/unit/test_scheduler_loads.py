"""The scheduler's estimate of its workers' loads between two heartbeats."""

from __future__ import annotations

from math import exp
from typing import Any

import msgspec
import pytest
from baton_scheduler.loads import Loads, LoadsOptions, incompatible_pairs
from baton_scheduler.pooling import RATES, pooled, typical
from baton_scheduler.team import Figures
from baton_scheduler.worker_load import BANDWIDTH_GUESS, PROMPTS_S, PROMPTS_SHARE_MAX, SoftPlacement, WorkerLoad
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import MalformedMessage
from baton.messages.base import WorkerAddress
from baton.messages.workers import Goodbye, PromotionFit, Role, StepFit, TransferFit
from tests.harness.heartbeats import STEPS, heartbeat


def soft(placed_s: float, *, attempt: int = 0, lasts_s: float = 60.0) -> SoftPlacement:
    return SoftPlacement(attempt=attempt, placed_s=placed_s, until_s=placed_s + lasts_s, kv_tokens=64, prefill_s=0.05)


@pytest.fixture
def loads() -> Loads:
    made = Loads(LoadsOptions())
    made.take(heartbeat(), 0.0)
    return made


def soft_slots(loads: Loads, now_s: float) -> int:
    (load,) = loads.live(now_s)
    return len(load.soft)


def test_a_lost_worker_takes_no_placements_and_its_model_stays_known_for_a_while(loads: Loads) -> None:
    loads.tick(1.5)
    assert [load.worker for load in loads.live(1.5)] == ["w"]
    loads.tick(1.6)
    assert loads.live(1.6) == []
    assert loads.served_lately("tiny")
    loads.tick(61.0)
    assert not loads.served_lately("tiny")


def test_a_pause_of_this_process_costs_no_worker(loads: Loads) -> None:
    loads.tick(61.4, pause_s=60.0)
    assert len(loads.live(61.4)) == 1
    loads.tick(61.6)
    assert loads.live(61.6) == []


def test_a_goodbye_is_final_for_its_generation(loads: Loads) -> None:
    goodbye = Goodbye(address=WorkerAddress(worker="w", generation=1))
    loads.place("r", {"w": soft(0.0)})
    loads.take(goodbye, 0.0)
    assert loads.live(0.0) == []
    loads.take(heartbeat(), 0.1)
    assert loads.live(0.1) == [], "a heartbeat that was under way"
    loads.take(heartbeat(generation=2), 0.2)
    assert soft_slots(loads, 0.2) == 0
    loads.take(goodbye, 0.3)
    assert len(loads.live(0.3)) == 1


def test_an_older_generation_is_ignored_and_a_newer_one_starts_empty(loads: Loads) -> None:
    loads.place("r", {"w": soft(0.0)})
    loads.take(heartbeat(generation=3, running=1), 0.1)
    assert soft_slots(loads, 0.1) == 0
    loads.take(heartbeat(generation=2, running=5), 0.2)
    (load,) = loads.live(0.2)
    assert load.heartbeat.running == 1


def test_pairs_that_cannot_hand_over_are_counted_by_model(loads: Loads) -> None:
    """Three decode workers: one alike, one that differs, one that declares nothing. Other models do not matter."""
    alike = "digest=digest dtype=float32"
    for name in ("p1", "p2"):
        loads.take(heartbeat(name, Role.PREFILL, kv_identity=alike), 0.0)
    loads.take(heartbeat("alike", kv_identity=alike), 0.0)
    loads.take(heartbeat("unlike", kv_identity="digest=digest dtype=bfloat16"), 0.0)
    loads.take(heartbeat("other", model="other"), 0.0)
    assert incompatible_pairs(loads.live(0.0)) == {"tiny": 4}


def test_a_soft_placement_counts_until_the_attempt_is_listed(loads: Loads) -> None:
    loads.place("r", {"w": soft(0.0)})
    (load,) = loads.live(0.0)
    assert (load.slots_free, load.tokens_free) == (7, 32_000 - 64)
    assert load.computes_until_s == 0.05
    loads.take(heartbeat(attempts=(("r", 1),)), 0.1)
    assert soft_slots(loads, 0.1) == 1, "another attempt of the request"
    loads.take(heartbeat(attempts=(("r", 0),)), 0.1)
    assert soft_slots(loads, 0.1) == 0


def test_a_soft_placement_ends_after_two_seconds_without_a_heartbeat_to_tell() -> None:
    loads = Loads(LoadsOptions(lost_after_s=10.0))
    loads.take(heartbeat(), 0.0)
    loads.place("r", {"w": soft(0.0)})
    assert soft_slots(loads, 1.99) == 1
    assert soft_slots(loads, 2.0) == 0


def test_a_late_heartbeat_that_does_not_list_the_attempt_ends_it(loads: Loads) -> None:
    loads.place("r", {"w": soft(0.0)})
    loads.take(heartbeat(), 0.2)
    assert soft_slots(loads, 0.2) == 1, "it may still be on its way"
    loads.take(heartbeat(), 0.3)
    assert soft_slots(loads, 0.3) == 0


def test_a_short_request_stops_counting_when_it_must_be_over(loads: Loads) -> None:
    loads.place("r", {"w": soft(0.0, lasts_s=0.05)})
    assert soft_slots(loads, 0.04) == 1
    assert soft_slots(loads, 0.05) == 0


def test_a_repeated_or_retried_request_counts_once(loads: Loads) -> None:
    loads.take(heartbeat("v"), 0.0)
    loads.place("r", {"w": soft(0.0)})
    loads.place("r", {"v": soft(0.0, attempt=1)})
    assert {load.worker: len(load.soft) for load in loads.live(0.0)} == {"w": 0, "v": 1}


@pytest.mark.parametrize(
    "nonsense",
    [
        {"block_tokens": 0},
        {"engine_block_tokens": -1},
        {"running": -1},
        {"pool_tokens_free": -1},
        {"step_tokens_max": 0},
        {"prefill_elapsed_s": float("nan")},
        {"steps": msgspec.structs.replace(STEPS, prompt_token_s=float("nan"))},
        {"steps": msgspec.structs.replace(STEPS, kv_s=-1.0)},
        {"steps": msgspec.structs.replace(STEPS, spread=float("inf"))},
        {"transfers": (TransferFit(peer="p", backend="tcp", bytes_per_s=0.0),)},
        {"transfers": (TransferFit(peer="p", backend="tcp", bytes_per_s=1e9, spread=float("nan")),)},
        {"transfers": (TransferFit(peer="p", backend="tcp", bytes_per_s=1e9, spread=-1.0),)},
    ],
)
def test_a_heartbeat_with_impossible_figures_changes_nothing(loads: Loads, nonsense: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        loads.take(heartbeat(**nonsense), 0.1)
    (load,) = loads.live(0.1)
    assert load.heartbeat == heartbeat()


# ---------------------------------------------------------------- what decisions read


def test_workers_are_kept_by_model_and_role_in_the_order_of_their_names() -> None:
    loads = Loads(LoadsOptions())
    for name in ("b", "c", "a"):
        loads.take(heartbeat(name), 0.0)
    loads.take(heartbeat("p", Role.PREFILL), 0.0)
    loads.take(heartbeat("x", model="other"), 0.0)

    def decodes(model: str) -> list[str]:
        return [load.worker for load in loads.serving(model, 0.0).teams[Role.DECODE].loads]

    assert decodes("tiny") == ["a", "b", "c"]
    assert [load.worker for load in loads.serving("tiny", 0.0)] == ["p", "a", "b", "c"]
    loads.take(Goodbye(address=heartbeat("b").address), 0.1)
    assert decodes("tiny") == ["a", "c"]
    assert not loads.serving("nothing", 0.1)
    loads.take(heartbeat("a", generation=2, model="other"), 0.2)
    assert decodes("tiny") == ["c"], "a serves another model now"
    assert decodes("other") == ["a", "x"]


def test_prompts_placed_between_heartbeats_queue_behind_each_other(loads: Loads) -> None:
    loads.place("r1", {"w": soft(1.0)})
    loads.place("r2", {"w": soft(1.0)})
    assert loads.live(1.0)[0].computes_until_s == pytest.approx(1.1)
    loads.place("r3", {"w": soft(1.5)})
    assert loads.live(1.5)[0].computes_until_s == pytest.approx(1.55), "the others are computed by then"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["beat", "goodbye", "place", "tick", "read"]),
            st.sampled_from(["u", "v", "w"]),
            st.integers(0, 4),
            st.floats(0.0, 0.6),
        ),
        max_size=60,
    )
)
def test_what_is_kept_equals_what_is_computed_anew(steps: list[tuple[str, str, int, float]]) -> None:
    """After any order of heartbeats, placements and time, a load is that of its heartbeat and its soft placements."""
    loads, now_s = Loads(LoadsOptions()), 0.0
    for step, name, number, passed_s in steps:
        now_s += passed_s
        match step:
            case "beat":
                attempts = tuple((f"r{each}", 0) for each in range(number))
                changes: dict[str, Any] = {
                    "draining": number == 4,
                    "context_tokens_max": 1024 + number,
                    "model_digest": f"{number % 2}",
                    "promotion": PromotionFit(bytes_per_s=1e10, samples=1) if number == 3 else None,
                }
                generation = 1 + number // 3
                loads.take(heartbeat(name, generation=generation, running=number, attempts=attempts, **changes), now_s)
            case "goodbye":
                loads.take(Goodbye(address=WorkerAddress(worker=name, generation=1 + number // 3)), now_s)
            case "place":
                loads.place(f"r{number}", {name: soft(now_s), "u": soft(now_s)})
            case "tick":
                loads.tick(now_s)
            case _:
                pass
        for team in loads.serving("tiny", now_s).teams.values():
            is_open = bool(team.loads) and all(load.ready for load in team.loads)
            assert team.prompt_tokens_max == (
                min(load.context_tokens_max for load in team.loads) - 1 if is_open else -1
            )
            assert team.need_tokens_max == (min(load.kv_tokens_max for load in team.loads) if is_open else -1)
            assert team.every.tolist() == list(range(len(team.loads)))
            assert team.digests == {load.heartbeat.model_digest for load in team.loads}
            assert team.any_lends == any(load.heartbeat.promotion and load.identity for load in team.loads)
        for load in loads.live(now_s):
            assert all(now_s < min(each.until_s, each.placed_s + 2.0) for each in load.soft.values())
            anew = WorkerLoad(load.heartbeat, load.heard_s)
            anew.steps, anew.soft, anew.bandwidth = load.steps, load.soft, load.bandwidth
            anew.refresh()
            team = loads.serving("tiny", now_s).teams[load.role]
            figures = team.figures()
            for name_of in Figures._fields:
                assert getattr(figures, name_of)[team.rows[load.worker]] == getattr(anew, name_of)


def stretch(loads: Loads, now_s: float) -> float:
    (load,) = loads.live(now_s)
    return load.answer_interval_s / load.next_interval_s


def test_prompts_placed_lately_stretch_the_token_interval_of_answers(loads: Loads) -> None:
    assert stretch(loads, 0.0) == 1.0
    loads.place("r", {"w": msgspec.structs.replace(soft(0.0), prompt_s=PROMPTS_S / 2)})
    assert stretch(loads, 0.0) == pytest.approx(2.0), "half of its time goes to the prompt"
    loads.take(heartbeat(attempts=(("r", 0),)), 0.5)
    assert stretch(loads, 0.5) == pytest.approx(1 / (1 - 0.5 * exp(-0.5 / PROMPTS_S)))
    loads.place("s", {"w": msgspec.structs.replace(soft(0.6), prompt_s=1e9)})
    assert stretch(loads, 0.6) == pytest.approx(1 / (1 - PROMPTS_SHARE_MAX)), "some time is left"
    later_s = 0.6 + 60 * PROMPTS_S
    loads.take(heartbeat(), later_s)
    assert stretch(loads, later_s) == pytest.approx(1.0), "old prompts no longer count"


# ---------------------------------------------------------------- rates of a kind


def fit(factor: float, *, samples: int = 50, spread: float = 0.1) -> StepFit:
    """Return rates by which everything takes `factor` times as long."""
    rates = {name: factor * getattr(STEPS, name) for name in RATES}
    return StepFit(**rates, samples=samples, spread=spread)


def pooled_factors(*fits: StepFit, kinds: str = "") -> list[float]:
    """Return how slow each worker counts, by kind."""
    loads = Loads(LoadsOptions())
    for now_s in (0.0, 2.0):
        for number, each in enumerate(fits):
            kind = kinds[number] if kinds else "A"
            loads.take(heartbeat(f"w{number}", steps=each, engine_kind=kind), now_s)
    return [load.steps.prompt_token_s / STEPS.prompt_token_s for load in loads.serving("tiny", 2.0)]


def test_a_worker_that_has_measured_nothing_takes_the_rates_of_its_kind() -> None:
    new = fit(5.0, samples=0)
    assert pooled_factors(fit(1.0), fit(1.1), fit(0.9), new)[3] == pytest.approx(1.0)
    assert pooled_factors(fit(1.0), new, kinds="AB")[1] == pytest.approx(5.0), "another kind says nothing"


def test_noise_is_drawn_towards_the_median_and_a_slow_worker_stays_slow() -> None:
    equal = [fit(factor, samples=5, spread=0.4) for factor in (0.6, 0.8, 1.0, 1.3, 1.7)]
    assert all(0.85 < factor < 1.15 for factor in pooled_factors(*equal))
    half = pooled_factors(*(fit(1.0) for _ in range(7)), fit(2.0, samples=500))
    assert half[7] > 1.8, "it has measured enough to be sure"


def test_a_few_samples_of_new_workers_do_not_change_what_is_typical() -> None:
    many_new = [fit(9.0, samples=2) for _ in range(5)]
    assert pooled_factors(fit(1.0), fit(1.0), *many_new)[0] == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(0, 1000), st.floats(0.0, 2.0)), min_size=1, max_size=9))
def test_pooled_rates_lie_between_a_workers_own_and_its_kinds(drawn: list[tuple[float, int, float]]) -> None:
    fits = [fit(factor, samples=samples, spread=spread) for factor, samples, spread in drawn]
    measured = [each for each in fits if each.samples]
    kind = typical(fits)
    assert (kind is None) == (not measured)
    for own in fits:
        result = pooled(own, kind)
        for name in RATES:
            mine, theirs = getattr(own, name), getattr(kind or own, name)
            assert min(mine, theirs) * (1 - 1e-9) <= getattr(result, name) <= max(mine, theirs) * (1 + 1e-9)


def test_a_repeated_heartbeat_counts_as_heard_and_takes_over_the_newest_rates_of_its_kind() -> None:
    loads, idle = Loads(LoadsOptions(pool_s=10.0)), heartbeat("idle", steps=fit(1.0, samples=0), engine_kind="A")
    for now_s, factor in ((0.0, 1.0), (5.0, 3.0), (10.0, 3.0)):
        loads.take(heartbeat("busy", steps=fit(factor), running=1, engine_kind="A"), now_s)
        loads.take(idle, now_s)
    load = next(each for each in loads.live(10.0) if each.worker == "idle")
    assert load.steps.prompt_token_s == pytest.approx(3.0 * STEPS.prompt_token_s)
    assert load.token_s == load.steps.prompt_token_s
    loads.take(idle, 11.0)
    assert (load.heard_s, load.computes_until_s) == (11.0, 11.0)
    figures = loads.serving("tiny", 11.0).teams[Role.DECODE].figures()
    assert figures.computes_until_s.tolist() == [10.0, 11.0]


def test_bandwidth_that_was_not_measured_is_that_of_the_workers_other_peers_then_of_its_kind(loads: Loads) -> None:
    def measured(*rates: float) -> tuple[TransferFit, ...]:
        return tuple(TransferFit(peer=f"p{n}", backend="tcp", bytes_per_s=rate) for n, rate in enumerate(rates))

    assert loads.live(0.0)[0].bandwidth == BANDWIDTH_GUESS
    loads = Loads(LoadsOptions())
    for now_s in (0.0, 2.0):
        loads.take(heartbeat("a", engine_kind="A", transfers=measured(1e9, 2e9, 6e9)), now_s)
        loads.take(heartbeat("b", engine_kind="A", transfers=measured(4e9)), now_s)
        loads.take(heartbeat("c", engine_kind="A"), now_s)
    loads.take(heartbeat("a", engine_kind="A", transfers=measured(1e9, 2e9, 6e9)), 4.0)
    assert [load.bandwidth for load in loads.live(4.0)] == [2e9, 4e9, 3e9]
    assert loads.live(4.0)[0].bandwidths["p2"] == 6e9
