"""Round-robin: each pool's workers in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from random import Random

from baton_simulator.routers.events_ignored import EventsIgnored
from baton_simulator.routers.in_flight import decoding, prefilling
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec


class RoundRobin(EventsIgnored):
    """Round-robin over each pool, as `src/policies/round_robin.rs` of sglang-router 0.3.2 and of vllm-router 0.1.17.

    Both keep one counter per pool and take its remainder. There is nothing to configure.
    """

    def __init__(self, workers: Sequence[WorkerSpec], options: None, random: Random) -> None:
        del options, random
        self._decode = cycle(decoding(workers))
        prefill = prefilling(workers)
        self._prefill = cycle(prefill) if prefill else None

    def route(self, arrival: Arrival, now_s: float) -> Route:
        return Route(next(self._decode), next(self._prefill) if self._prefill else None)
