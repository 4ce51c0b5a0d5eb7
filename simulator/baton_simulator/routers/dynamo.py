"""Dynamo's KV router."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from baton_simulator.routers.events_ignored import EventsIgnored
from baton_simulator.routers.in_flight import decoding, prefilling
from baton_simulator.routers.prefix_index import PrefixIndex
from baton_simulator.routers.prompt_load import PromptLoad
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec


@dataclass(frozen=True, slots=True)
class DynamoOptions:
    """Defaults of `KvRouterConfig`."""

    overlap_score_credit: float = 1.0
    prefill_load_scale: float = 1.0
    router_temperature: float = 0.0


class Dynamo(EventsIgnored):
    """ai-dynamo 1.6.1 with `--router-mode kv` (`lib/kv-router/src/scheduling/selector`, `lib/kv-router/src/sequences`).

    Cost in blocks: prompt tokens not yet computed at the worker, plus the request's without those that its cache holds
    by its KV events, plus the blocks that its active requests and this one would hold, shared ones once. Output blocks
    are not counted, and nothing is queued. Ties are broken at random.

    Separated: the prefill router counts no active blocks, the decode router only these, all as if none were shared.
    Both choose at once, as where workers hand over by a bootstrap address.
    """

    def __init__(self, workers: Sequence[WorkerSpec], options: DynamoOptions, random: Random) -> None:
        prefill, decode = prefilling(workers), decoding(workers)
        self._prompts = PromptLoad(prefill or decode)
        self._sequences = Sequences(decode, is_shared=not prefill)
        self._is_separated = bool(prefill)
        self._options = options
        self._random = random

    def route(self, arrival: Arrival, now_s: float) -> Route:
        cached = self._prompts.cached_blocks(arrival, now_s)
        prefill_costs = self._prefill_costs(arrival, cached)
        decode_costs = self._sequences.costs(arrival, now_s)
        if self._is_separated:
            prefill, decode = self._pick(prefill_costs), self._pick(decode_costs)
        else:
            costs = {worker: cost + decode_costs[worker] for worker, cost in prefill_costs.items()}
            prefill = decode = self._pick(costs)
        uncached_tokens = arrival.prompt_tokens - cached.get(prefill, 0) * arrival.block_tokens
        self._prompts.start(arrival, prefill, uncached_tokens)
        self._sequences.start(arrival, decode, now_s)
        return Route(decode, prefill if self._is_separated else None)

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        self._prompts.end(arrival)

    def ended(self, arrival: Arrival, now_s: float) -> None:
        self._prompts.end(arrival)
        self._sequences.end(arrival, now_s)

    def cached(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        self._prompts.change(worker, stored, evicted, now_s)

    def _prefill_costs(self, arrival: Arrival, cached: Mapping[str, int]) -> dict[str, float]:
        """Return each worker's prompt blocks, this request's included, less those that it has cached."""
        credit, scale = self._options.overlap_score_credit, self._options.prefill_load_scale
        return {
            worker: scale
            * max(0.0, (tokens + arrival.prompt_tokens) / arrival.block_tokens - credit * cached.get(worker, 0))
            for worker, tokens in self._prompts.tokens.items()
        }

    def _pick(self, costs: Mapping[str, float]) -> str:
        """Return the cheapest worker, or one drawn by a softmax of where the costs lie between the least and most."""
        low, high = min(costs.values()), max(costs.values())
        temperature = self._options.router_temperature
        if temperature == 0.0 or low == high:
            return self._random.choice([worker for worker, cost in costs.items() if cost == low])
        weights = [math.exp((low - cost) / (high - low) / temperature) for cost in costs.values()]
        return self._random.choices(list(costs), weights)[0]


class Sequences:
    """Blocks of the prompts that are active at each worker."""

    def __init__(self, workers: Sequence[str], is_shared: bool) -> None:
        self._is_shared = is_shared
        self._active = PrefixIndex(workers, lag_s=0.0)
        self._users: dict[str, Counter[int]] = {worker: Counter() for worker in workers}
        self._blocks = dict.fromkeys(workers, 0)
        self._started: dict[str, str] = {}

    def costs(self, arrival: Arrival, now_s: float) -> dict[str, int]:
        """Return the blocks that each worker would hold with this request."""
        active = self._active.match(arrival.blocks, now_s).held
        return {worker: blocks + len(arrival.blocks) - active.get(worker, 0) for worker, blocks in self._blocks.items()}

    def start(self, arrival: Arrival, worker: str, now_s: float) -> None:
        self._started[arrival.id] = worker
        self._blocks[worker] += len(arrival.blocks)
        if self._is_shared:
            users = self._users[worker]
            self._active.change(worker, [block for block in arrival.blocks if block not in users], (), now_s)
            users.update(arrival.blocks)
            self._blocks[worker] = len(users)

    def end(self, arrival: Arrival, now_s: float) -> None:
        worker = self._started.pop(arrival.id, None)
        if worker is None:
            return
        self._blocks[worker] -= len(arrival.blocks)
        if self._is_shared:
            users = self._users[worker]
            users.subtract(arrival.blocks)
            unused = [block for block in arrival.blocks if not users[block]]
            for block in unused:
                del users[block]
            self._active.change(worker, (), unused, now_s)
            self._blocks[worker] = len(users)
