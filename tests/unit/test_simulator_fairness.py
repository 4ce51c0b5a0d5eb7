"""Tenants share simulated workers by their weights, and a flood of one leaves the others served."""

from __future__ import annotations

import pytest
from baton_scheduler.admission import Objectives
from baton_simulator.replay import Fleet, Outcome, Replay
from baton_simulator.routers.baton import BatonOptions, BatonRouter
from baton_simulator.traffic.tenants import Tenant, generate

from baton.messages.placement import Disaggregation
from benchmarks.fairness import shares

FLEET = Fleet(aggregated=4)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}
TTFT_S = 2.0
TPOT_S = 0.05
DURATION_S = 10.0
WARM_UP_S = 2.0


def replay(
    *tenants: Tenant, duration_s: float = DURATION_S, fleet: Fleet = FLEET, tpot_s: float = 0.0
) -> list[Outcome]:
    mode = Disaggregation.NEVER if fleet.aggregated else Disaggregation.ALWAYS
    options = BatonOptions(mode, objectives=Objectives(ttft_s=TTFT_S, tpot_s=tpot_s))
    trace = generate(tenants, fleet, duration_s, seed=1)
    return Replay(trace, fleet, lambda specs, random: BatonRouter(specs, options, random), seed=1).run()


def test_tenants_that_all_flood_share_by_their_weights() -> None:
    outcomes = replay(*(Tenant(name, weight, 1.2) for name, weight in WEIGHTS.items()))
    found = {row["tenant"]: row for row in shares(outcomes, WARM_UP_S)}
    for name, weight in WEIGHTS.items():
        assert found[name]["share"] == pytest.approx(weight / sum(WEIGHTS.values()), rel=0.1), name
        assert found[name]["ttft_p99_s"] <= TTFT_S, "what is admitted meets its objective"


def test_a_flood_of_one_tenant_leaves_the_others_served() -> None:
    outcomes = replay(Tenant("a", 1.0, 2.0), Tenant("b", 2.0, 0.2), Tenant("c", 4.0, 0.4))
    found = {row["tenant"]: row for row in shares(outcomes, WARM_UP_S)}
    assert found["a"]["served"] < 0.6
    assert min(found["b"]["served"], found["c"]["served"]) > 0.9
    # The flood waits in the queue, and hardly at workers, where the others would come behind it.
    assert max(found["b"]["ttft_p50_s"], found["c"]["ttft_p50_s"]) < 0.36


def test_one_tenants_requests_do_not_depend_on_the_others() -> None:
    alone = generate([Tenant("c", 4.0, 0.4)], FLEET, 10.0, seed=7)
    beside = generate([Tenant("a", 1.0, 2.0), Tenant("c", 4.0, 0.4)], FLEET, 10.0, seed=7)
    mine = [request for request in beside.requests if request.tenant == "c"]
    assert [(each.at_s, each.prompt_tokens) for each in mine] == [
        (each.at_s, each.prompt_tokens) for each in alone.requests
    ]
    ids = [block for request in beside.requests for block in request.blocks]
    assert len(set(ids)) == len(ids)


def test_a_flood_hardly_delays_the_others() -> None:
    fleet = Fleet(prefill=2, decode=2)
    others = (Tenant("b", 2.0, 0.23), Tenant("c", 4.0, 0.46))
    alone, beside = (
        {row["tenant"]: row for row in shares(replay(*tenants, duration_s=14.0, fleet=fleet), warm_up_s=4.0)}
        for tenants in (others, (Tenant("a", 1.0, 2.0), *others))
    )
    assert beside["a"]["share"] > 1 / 7, "what the others leave is used"
    for tenant in "bc":
        assert beside[tenant]["served"] >= 0.98
        assert beside[tenant]["ttft_p99_s"] <= 1.2 * alone[tenant]["ttft_p99_s"], tenant


def test_a_flood_leaves_the_others_room_in_the_token_interval() -> None:
    """Filled up to the objective by the flood's answers, workers would take none of the others' requests."""
    tenants = (Tenant("a", 1.0, 2.0), Tenant("b", 2.0, 0.23), Tenant("c", 4.0, 0.46))
    outcomes = replay(*tenants, duration_s=20.0, tpot_s=TPOT_S)
    others = [outcome for outcome in outcomes if outcome.request.tenant != "a" and outcome.arrived_s >= WARM_UP_S]
    assert [outcome for outcome in others if outcome.placed_s != outcome.arrived_s] == []
