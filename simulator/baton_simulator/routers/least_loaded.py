"""Least loaded: the worker with the fewest requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton_simulator.routers.events_ignored import EventsIgnored
from baton_simulator.routers.in_flight import InFlight, decoding, prefilling
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec


class LeastLoaded(EventsIgnored):
    """Fewest requests in flight in each pool, ties at random.

    The rule that sglang-router, vllm-router and AIBrix fall back on where the cache says nothing. A prefill worker
    counts a request until its first token exists, the worker that decodes it until its last.
    """

    def __init__(self, workers: Sequence[WorkerSpec], options: None, random: Random) -> None:
        del options
        self._random = random
        self._decode = InFlight(decoding(workers))
        self._prefill = InFlight(prefilling(workers))

    def route(self, arrival: Arrival, now_s: float) -> Route:
        decode = self._choose(self._decode, arrival)
        return Route(decode, self._choose(self._prefill, arrival) if self._prefill.counts else None)

    def _choose(self, pool: InFlight, arrival: Arrival) -> str:
        fewest = min(pool.counts.values())
        worker = self._random.choice([name for name, count in pool.counts.items() if count == fewest])
        pool.start(arrival.id, worker)
        return worker

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        self._prefill.end(arrival.id)

    def ended(self, arrival: Arrival, now_s: float) -> None:
        self._prefill.end(arrival.id)
        self._decode.end(arrival.id)
