"""The policy `cache_aware` over one pool of workers, as sglang-router and its fork vllm-router have it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from baton_simulator.routers.history_tree import HistoryTree, Node
from baton_simulator.routers.in_flight import InFlight
from baton_simulator.routers.protocol import Arrival


@dataclass(frozen=True, slots=True)
class CacheAwareOptions:
    """What both routers configure, with the defaults that they share."""

    eviction_interval_s: float
    tree_tokens_max: int
    """Most tokens of the tree for each worker, kept at each eviction."""
    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5


class CacheAware:
    """The worker with the fewest requests among those that hold the prompt's prefix.

    Among all, if more than `balance_abs_threshold` and `balance_rel_threshold` lie between the fewest and the most
    requests, or if no more than `cache_threshold` of the prompt is known.
    """

    def __init__(
        self,
        workers: Iterable[str],
        block_tokens: int,
        options: CacheAwareOptions,
        holders: Callable[[HistoryTree, Node], Collection[str]],
    ) -> None:
        self.in_flight = InFlight(workers)
        self.tree = HistoryTree(block_tokens, options.tree_tokens_max)
        self._options = options
        self._holders = holders
        self._evict_at_s = options.eviction_interval_s

    def choose(self, arrival: Arrival, now_s: float) -> str:
        """Return the request's worker and record it in the tree. The caller counts it as in flight."""
        if now_s >= self._evict_at_s:
            self.tree.evict()
            self._evict_at_s = now_s + self._options.eviction_interval_s
        worker = self.in_flight.least(self._candidates(arrival))
        self.tree.insert(arrival.blocks, arrival.prompt_tokens, worker)
        return worker

    def _candidates(self, arrival: Arrival) -> Collection[str]:
        counts, options = self.in_flight.counts, self._options
        fewest, most = min(counts.values()), max(counts.values())
        if most - fewest > options.balance_abs_threshold and most > fewest * options.balance_rel_threshold:
            return counts
        node, matched_tokens = self.tree.match(arrival.blocks)
        holders = self._holders(self.tree, node)
        return holders if matched_tokens > options.cache_threshold * arrival.prompt_tokens else counts
