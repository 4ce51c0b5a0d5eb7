"""The vLLM project's cache-aware router."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton_simulator.routers.cache_aware import CacheAware, CacheAwareOptions
from baton_simulator.routers.events_ignored import EventsIgnored
from baton_simulator.routers.in_flight import decoding, prefilling
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec

VLLM = CacheAwareOptions(eviction_interval_s=120.0, tree_tokens_max=2**25 // 8)
"""Defaults of `py_src/vllm_router/router_args.py`. The tree holds token ids of eight characters each."""


class Vllm(EventsIgnored):
    """vllm-router 0.1.17 with its default policy, `cache_aware` (`src/policies/cache_aware.rs`).

    A prefix belongs to all workers to which it was sent. Prompts are compared by the tokens that the workers'
    `/tokenize` returns.

    Separated (`src/routers/http/pd_router.rs`): both pools have the policy. A prefill worker counts a request until
    its answer is there, a decode worker from admission to the last token.
    """

    def __init__(self, workers: Sequence[WorkerSpec], options: CacheAwareOptions, random: Random) -> None:
        del random
        pools = [
            CacheAware(names, workers[0].block_tokens, options, lambda _, node: node.used)
            for names in (decoding(workers), prefilling(workers))
            if names
        ]
        self._decode = pools[0]
        self._prefill = pools[1] if len(pools) > 1 else None

    def route(self, arrival: Arrival, now_s: float) -> Route:
        prefill = None
        if self._prefill is not None:
            prefill = self._prefill.choose(arrival, now_s)
            self._prefill.in_flight.start(arrival.id, prefill)
        decode = self._decode.choose(arrival, now_s)
        self._decode.in_flight.start(arrival.id, decode)
        return Route(decode, prefill)

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        if self._prefill is not None:
            self._prefill.in_flight.end(arrival.id)

    def ended(self, arrival: Arrival, now_s: float) -> None:
        self.prefilled(arrival, now_s)
        self._decode.in_flight.end(arrival.id)
