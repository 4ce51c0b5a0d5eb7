"""Policies: how a placement is chosen among those that are allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from baton_scheduler.policies.least_loaded import LeastLoaded
from baton_scheduler.policies.power_of_two import PowerOfTwo
from baton_scheduler.policies.predicted import Predicted
from baton_scheduler.policies.prefix_affinity import PrefixAffinity
from baton_scheduler.policies.protocol import Policy as Policy
from baton_scheduler.policies.protocol import PolicyName as PolicyName
from baton_scheduler.policies.round_robin import RoundRobin
from baton_scheduler.policies.sticky import Sticky

POLICIES: Final[dict[PolicyName, Callable[[], Policy]]] = {
    PolicyName.PREDICTED: Predicted,
    PolicyName.PREFIX_AFFINITY: PrefixAffinity,
    PolicyName.STICKY: Sticky,
    PolicyName.LEAST_LOADED: LeastLoaded,
    PolicyName.POWER_OF_TWO: PowerOfTwo,
    PolicyName.ROUND_ROBIN: RoundRobin,
}
