"""The policies beside `predicted`, which `test_scheduler_placement.py` tests."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from baton_scheduler.placement import PlacementOptions, choose
from baton_scheduler.policies import POLICIES, Policy, PolicyName
from baton_scheduler.policies.protocol import OVERLOAD_S
from baton_scheduler.prediction import Demand, PrefixMatch
from baton_scheduler.team import Serving
from baton_scheduler.worker_load import WorkerLoad

from baton.messages.placement import Disaggregation, Placement
from baton.messages.workers import Role
from tests.harness.heartbeats import heartbeat

ALWAYS, AUTO, NEVER = Disaggregation.ALWAYS, Disaggregation.AUTO, Disaggregation.NEVER
PLAIN = Demand(model="tiny", prompt_tokens=1000, output_tokens_max=100, disaggregation=NEVER)
OTHERS = [name for name in PolicyName if name is not PolicyName.PREDICTED]
LONG_QUEUE: dict[str, Any] = {"prefill_tokens_queued": int(1000 * OVERLOAD_S) + 100}


def decodes(count: int = 4, **changes: Any) -> list[WorkerLoad]:
    return [WorkerLoad(heartbeat(f"d{number}", **changes)) for number in range(count)]


def prefills(count: int = 4, **changes: Any) -> list[WorkerLoad]:
    return [WorkerLoad(heartbeat(f"p{number}", Role.PREFILL, **changes)) for number in range(count)]


def place(policy: Policy, loads: list[WorkerLoad], *, seed: int = 0, held: Any = None, **changes: Any) -> Placement:
    demand = msgspec.structs.replace(PLAIN, **changes)
    return choose(demand, Serving(loads), PrefixMatch(held or {}), policy, PlacementOptions(), Random(seed), 0.0)


def names(placement: Placement) -> tuple[str, str]:
    return (placement.prefill.worker if placement.prefill else "", placement.decode.worker)


def test_every_policy_has_a_name_and_an_implementation() -> None:
    assert set(POLICIES) == set(PolicyName)


@pytest.mark.parametrize("name", OTHERS)
def test_where_a_request_may_run_either_way_the_prediction_decides(name: PolicyName) -> None:
    """Prefill workers that are busy for seconds, then decode workers that are."""
    idle: dict[str, Any] = {"disaggregation": AUTO, "session": "s"}
    assert place(POLICIES[name](), [*prefills(**LONG_QUEUE), *decodes()], **idle).prefill is None
    assert place(POLICIES[name](), [*prefills(), *decodes(**LONG_QUEUE)], **idle).prefill is not None


@pytest.mark.parametrize("name", PolicyName)
def test_a_worker_without_room_is_not_chosen_while_others_have_some(name: PolicyName) -> None:
    full, *free = decodes(running=0)
    full.hear(heartbeat("d0", running=8), 0.0, 0.4)
    policy = POLICIES[name]()
    for number in range(12):
        assert place(policy, [full, *free], seed=number, session=f"s{number}").decode.worker != "d0"
    assert place(policy, [full]).predicted.waiting_s > 0, "where no other is left, it is, and says so"


@pytest.mark.parametrize("name", OTHERS)
def test_agents_that_cannot_reach_each_other_are_not_paired(name: PolicyName) -> None:
    cut = frozenset({(f"p{p}", f"d{d}") for p in range(2) for d in range(2)} - {("p1", "d0")})
    changes = {"disaggregation": ALWAYS, "exclude_pairs": cut, "session": "s"}
    for seed in range(8):
        assert names(place(POLICIES[name](), [*prefills(2), *decodes(2)], seed=seed, **changes)) == ("p1", "d0")


def test_round_robin_takes_all_workers_of_each_leg_in_turn() -> None:
    policy = POLICIES[PolicyName.ROUND_ROBIN]()
    chosen = [names(place(policy, [*prefills(2), *decodes(3)], disaggregation=ALWAYS)) for _ in range(6)]
    assert [prefill for prefill, _ in chosen] == ["p0", "p1"] * 3
    assert [decode for _, decode in chosen] == ["d0", "d1", "d2"] * 2


def test_least_loaded_takes_the_least_work_ahead() -> None:
    policy = POLICIES[PolicyName.LEAST_LOADED]()
    loads = decodes()
    for number, (queued, running) in enumerate([(500, 1), (0, 4), (0, 3), (100, 0)]):
        loads[number].hear(heartbeat(f"d{number}", prefill_tokens_queued=queued, running=running), 0.0, 0.4)
    assert place(policy, loads, held={"d0": 31}).decode.worker == "d2"


def test_power_of_two_spreads_and_never_takes_the_busiest() -> None:
    policy = POLICIES[PolicyName.POWER_OF_TWO]()
    loads = [*decodes(4), WorkerLoad(heartbeat("z", prefill_tokens_queued=500))]
    chosen = Counter(place(policy, loads, seed=seed).decode.worker for seed in range(100))
    assert set(chosen) == {"d0", "d1", "d2", "d3"}
    assert min(chosen.values()) > 5


def test_prefix_affinity_follows_the_prefix_until_its_worker_is_overloaded() -> None:
    policy = POLICIES[PolicyName.PREFIX_AFFINITY]()
    loads = decodes()
    loads[2].hear(heartbeat("d2", prefill_tokens_queued=int(1000 * OVERLOAD_S) - 100), 0.0, 0.4)
    assert place(policy, loads, held={"d2": 5, "d1": 4}).decode.worker == "d2"
    loads[2].hear(heartbeat("d2", **LONG_QUEUE), 0.0, 0.4)
    assert place(policy, loads, held={"d2": 5, "d1": 4}).decode.worker == "d1"


def test_sticky_keeps_sessions_and_moves_only_those_of_a_worker_that_left() -> None:
    policy = POLICIES[PolicyName.STICKY]()
    sessions = [f"s{number}" for number in range(64)]

    def homes(loads: list[WorkerLoad]) -> dict[str, str]:
        return {each: place(policy, loads, session=each, disaggregation=ALWAYS).predicted.prefill for each in sessions}

    before = homes([*prefills(4), *decodes()])
    assert before == homes([*prefills(4), *decodes()])
    assert min(Counter(before.values()).values()) >= 8, "sessions spread over all workers"
    after = homes([*prefills(3), *decodes()])
    assert all(before[each] in (after[each], "p3") for each in sessions)


def test_sticky_leaves_an_overloaded_worker_for_the_sessions_second_choice() -> None:
    policy = POLICIES[PolicyName.STICKY]()
    home = place(policy, decodes(), session="s").decode.worker
    second = place(policy, [load for load in decodes() if load.worker != home], session="s").decode.worker
    loads = decodes()
    busy = next(load for load in loads if load.worker == home)
    busy.hear(heartbeat(home, **LONG_QUEUE), 0.0, 0.4)
    assert place(policy, loads, session="s").decode.worker == second


def test_sticky_without_a_session_takes_the_least_work_ahead() -> None:
    policy = POLICIES[PolicyName.STICKY]()
    loads = decodes(2)
    loads[0].hear(heartbeat("d0", running=1), 0.0, 0.4)
    assert place(policy, loads).decode.worker == "d1"
