"""The routers that can be replayed, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from baton.messages.placement import Disaggregation
from baton_simulator.replay import RouterFactory
from baton_simulator.routers.baton import BatonOptions, BatonRouter
from baton_simulator.routers.peers import PEERS
from baton_simulator.routers.protocol import Router, WorkerSpec


def _baton(disaggregation: Disaggregation) -> RouterFactory:
    """Return Baton's router. A fleet without prefill workers serves aggregated, whatever `disaggregation` says."""

    def build(workers: Sequence[WorkerSpec], random: Random) -> Router:
        is_separated = any(spec.role == "prefill" for spec in workers)
        options = BatonOptions(disaggregation if is_separated else Disaggregation.NEVER)
        return BatonRouter(workers, options, random)

    return build


POLICIES: Mapping[str, RouterFactory] = {
    "baton": _baton(Disaggregation.ALWAYS),
    "baton-auto": _baton(Disaggregation.AUTO),
    **PEERS,
}
