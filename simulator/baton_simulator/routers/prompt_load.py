"""Prompt tokens at each worker that are not computed yet, and what its cache holds, as routers with KV events know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton_simulator.routers.prefix_index import PrefixIndex
from baton_simulator.routers.protocol import Arrival


class PromptLoad:
    """Prompts of one pool of workers, from when they are sent there until they are computed."""

    def __init__(self, workers: Sequence[str]) -> None:
        self.tokens = dict.fromkeys(workers, 0)
        self._cached = PrefixIndex(workers, lag_s=0.0)
        self._started: dict[str, tuple[str, int]] = {}

    def cached_blocks(self, arrival: Arrival, now_s: float) -> Mapping[str, int]:
        """Return the leading blocks that each worker's cache holds, where there are any."""
        return self._cached.match(arrival.blocks, now_s).held

    def start(self, arrival: Arrival, worker: str, uncached_tokens: int) -> None:
        self.tokens[worker] += uncached_tokens
        self._started[arrival.id] = worker, uncached_tokens

    def end(self, arrival: Arrival) -> None:
        if arrival.id in self._started:
            worker, tokens = self._started.pop(arrival.id)
            self.tokens[worker] -= tokens

    def change(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        if worker in self.tokens:
            self._cached.change(worker, stored, evicted, now_s)
