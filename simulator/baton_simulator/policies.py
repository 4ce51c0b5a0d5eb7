"""The routers that can be replayed, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from baton_scheduler.admission import Objectives
from baton_scheduler.policies import PolicyName

from baton.messages.placement import Disaggregation
from baton_simulator.bound import LeastWork
from baton_simulator.goals import GOAL_TPOT_S, GOAL_TTFT_S
from baton_simulator.replay import Fleet, RouterFactory
from baton_simulator.routers.baton import BatonOptions, BatonRouter
from baton_simulator.routers.peers import PEERS
from baton_simulator.routers.protocol import Router, WorkerSpec

GOALS: Final = Objectives(ttft_s=GOAL_TTFT_S, tpot_s=GOAL_TPOT_S)
"""Objectives of a deployment that is judged by the goals."""


def _baton(
    policy: PolicyName = PolicyName.PREDICTED,
    disaggregation: Disaggregation = Disaggregation.ALWAYS,
    objectives: Objectives = GOALS,
) -> RouterFactory:
    """Return Baton's router. A fleet without prefill workers serves aggregated, whatever `disaggregation` says."""

    def build(workers: Sequence[WorkerSpec], random: Random) -> Router:
        is_separated = any(spec.role == "prefill" for spec in workers)
        mode = disaggregation if is_separated else Disaggregation.NEVER
        options = BatonOptions(mode, policy, objectives=objectives)
        return BatonRouter(workers, options, random)

    return build


POLICIES: Mapping[str, RouterFactory] = {
    "baton": _baton(),
    "baton-auto": _baton(disaggregation=Disaggregation.AUTO),
    "baton-never": _baton(disaggregation=Disaggregation.NEVER),
    "baton-without-objectives": _baton(objectives=Objectives()),
    **{f"baton-{name}": _baton(name) for name in PolicyName if name is not PolicyName.PREDICTED},
    **PEERS,
}
BOUND: Final = "bound"
"""No policy: least work over an infinite shared cache."""
NAMES: Final = (*POLICIES, BOUND)


def on_fleet(policy: str, fleet: Fleet) -> tuple[Fleet, RouterFactory]:
    """Return the workers and the router of a policy's replay."""
    if policy == BOUND:
        return replace(fleet, shared_cache=True), LeastWork
    return fleet, POLICIES[policy]
