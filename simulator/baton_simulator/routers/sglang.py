"""SGLang's cache-aware router."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton_simulator.routers.cache_aware import CacheAware, CacheAwareOptions
from baton_simulator.routers.events_ignored import EventsIgnored
from baton_simulator.routers.in_flight import decoding, prefilling
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec

SGLANG = CacheAwareOptions(eviction_interval_s=60.0, tree_tokens_max=2**26 // 4)
"""Defaults of `bindings/python/src/sglang_router/router_args.py`. The tree holds characters, of which a token is
taken to have four."""


class Sglang(EventsIgnored):
    """sglang-router 0.3.2 with its default policy, `cache_aware` (`src/policies/cache_aware.rs`).

    A prefix belongs to one worker, the first to which it was sent.

    Separated (`src/routers/http/pd_router.rs`): both pools have the policy, each its own tree. Requests count in both
    pools from when their stream begins, hence not while they wait for prefill: SGLang answers with the first token.
    This is the policy as written. In 0.3.2 nothing creates these two trees (`init_pd_cache_aware_policies` has no
    caller), and without them the package chooses at random while load is even.
    """

    def __init__(self, workers: Sequence[WorkerSpec], options: CacheAwareOptions, random: Random) -> None:
        del random
        pools = [
            CacheAware(names, workers[0].block_tokens, options, lambda tree, node: (tree.name(node),))
            for names in (decoding(workers), prefilling(workers))
            if names
        ]
        self._decode = pools[0]
        self._prefill = pools[1] if len(pools) > 1 else None
        self._waiting: dict[str, Route] = {}

    def route(self, arrival: Arrival, now_s: float) -> Route:
        prefill = self._prefill.choose(arrival, now_s) if self._prefill is not None else None
        route = Route(self._decode.choose(arrival, now_s), prefill)
        if prefill is None:
            self._decode.in_flight.start(arrival.id, route.decode)
        else:
            self._waiting[arrival.id] = route
        return route

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        route = self._waiting.pop(arrival.id, None)
        if route is not None and route.prefill is not None and self._prefill is not None:
            self._prefill.in_flight.start(arrival.id, route.prefill)
            self._decode.in_flight.start(arrival.id, route.decode)

    def ended(self, arrival: Arrival, now_s: float) -> None:
        self._waiting.pop(arrival.id, None)
        self._decode.in_flight.end(arrival.id)
        if self._prefill is not None:
            self._prefill.in_flight.end(arrival.id)
