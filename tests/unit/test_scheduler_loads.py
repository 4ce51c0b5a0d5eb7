"""The scheduler's estimate of its workers' loads between two heartbeats."""

from __future__ import annotations

from typing import Any

import pytest
from baton_scheduler.loads import Loads, LoadsOptions, SoftPlacement, incompatible_pairs

from baton.errors import MalformedMessage
from baton.messages.base import WorkerAddress
from baton.messages.workers import Goodbye, Role
from tests.harness.heartbeats import heartbeat


def soft(placed_s: float, *, attempt: int = 0, lasts_s: float = 60.0) -> SoftPlacement:
    return SoftPlacement(
        attempt=attempt, placed_s=placed_s, until_s=placed_s + lasts_s, kv_tokens=64, prefill_tokens=50
    )


@pytest.fixture
def loads() -> Loads:
    made = Loads(LoadsOptions())
    made.take(heartbeat(), 0.0)
    return made


def soft_slots(loads: Loads, now_s: float) -> int:
    (load,) = loads.live(now_s)
    return load.soft_slots


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
    assert (load.soft_slots, load.soft_kv_tokens, load.soft_prefill_tokens) == (1, 64, 50)
    assert load.slots_free == 7
    assert load.prefill_tokens_queued == 50
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
    assert {load.worker: load.soft_slots for load in loads.live(0.0)} == {"w": 0, "v": 1}


@pytest.mark.parametrize(
    "nonsense",
    [
        {"block_tokens": 0},
        {"engine_block_tokens": -1},
        {"running": -1},
        {"prefill_tokens_per_s": float("nan")},
        {"transfer_bytes_per_s": float("inf")},
        {"decode_tokens_per_s": -1.0},
    ],
)
def test_a_heartbeat_with_impossible_figures_changes_nothing(loads: Loads, nonsense: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        loads.take(heartbeat(**nonsense), 0.1)
    (load,) = loads.live(0.1)
    assert load.heartbeat == heartbeat()
