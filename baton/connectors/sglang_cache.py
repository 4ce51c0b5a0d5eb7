"""SGLang's prefix cache, extended by KV that came from a peer and KV that a peer still reads.

SGLang lets others bring a cache of their own (`register_radix_cache_backend`). This one is SGLang's tree with two
additions, each at a place that the tree has for it:

    decode    KV that was pulled belongs to no node yet. `match_prefix` counts it as a hit, `prefix_device_indices`
              gives its slots to the request that it was pulled for, and SGLang's next checkpoint puts it into the
              tree, as it does with every prompt that was computed.
    prefill   a finished request gives its slots back through `claim_kv_row`. Those of a lease stay: the tree's part
              by a lock, the rest, less than a page, in our hands, until no peer reads them any more.
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache, match_kv_cache
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

if TYPE_CHECKING:
    from sglang.srt.disaggregation.kv_events import KVCacheEvent
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchPrefixParams, MatchResult, TreeLock
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

BACKEND = "baton"
"""The name under which SGLang knows this cache."""


class KvRetention(Protocol):
    """Decides which KV of a request stays."""

    def checkpointed(self, req: Req, tokens: int) -> None:
        """Note that the tree took the request's first `tokens`; if it had them, the request moved to its slots."""
        ...

    def finished(self, req: Req) -> bool:
        """Note that SGLang is done with a request; return whether its KV has to stay."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """Slots for KV from a peer, and the tree's prefix before it, which is locked."""

    cached_tokens: int
    tokens: int
    slots: torch.Tensor
    """Slots of all tokens, the tree's first."""
    own_slots: torch.Tensor
    """Slots allocated for this request: whole pages."""
    lock: TreeLock | None
    match: MatchResult


@dataclass(frozen=True, slots=True)
class _Held:
    lock: TreeLock | None
    tail: torch.Tensor
    tail_start: int


class HandoffCache(UnifiedRadixCache):
    def __init__(self, params: CacheInitParams) -> None:
        self.retention: KvRetention | None = None
        self._arrivals: dict[str, Arrival] = {}
        self._held: dict[str, _Held] = {}
        self.pool_events: Callable[[], Iterable[KVCacheEvent]] = tuple
        """Returns events about the KV pool, which SGLang publishes with its own."""
        self._has_published = False
        super().__init__(params)

    def take_events(self) -> list[KVCacheEvent]:
        own = super().take_events()
        if not self._has_published:
            # SGLang's first batch may come before anything listens, and a file's blocks are told once.
            self._has_published = bool(own)
            return own
        return [*own, *self.pool_events()]

    # Decode.

    def match_prompt(self, req: Req) -> int:
        """Return how many leading tokens of a prompt the tree holds; the last token does not count."""
        tokens = len(req.origin_input_ids) - 1
        return match_kv_cache(req, self, req.origin_input_ids, max_prefix_len=tokens).device_prefix_len

    def make_room(self, req: Req, tokens: int, spare_tokens: int) -> Arrival | None:
        """Find what the tree holds of a request's first `tokens`, and allocate slots for the rest.

        Returns None when the pool has no room for it and `spare_tokens` more.
        """
        match = match_kv_cache(req, self, req.origin_input_ids, max_prefix_len=tokens)
        cached_tokens = match.device_prefix_len
        cached = self.path_device_indices(match.last_device_node)[:cached_tokens].clone()
        lock = self.lock(match.last_device_node)
        lacking = -(-(tokens - cached_tokens) // self.page_size) * self.page_size
        allocator = self.token_to_kv_pool_allocator
        own_slots = None
        if lacking + spare_tokens <= allocator.available_size() + self.evictable_size():
            evict_from_tree_cache(self, lacking)
            own_slots = allocator.alloc(lacking) if lacking else cached[:0]
        if own_slots is None:
            self.unlock(lock)
            return None
        slots = torch.cat((cached, own_slots))[:tokens]
        return Arrival(cached_tokens, tokens, slots, own_slots, lock, match)

    def offer(self, rid: str, arrival: Arrival) -> None:
        """Offer KV that has arrived in full: the request starts behind it when SGLang schedules it."""
        if arrival.tokens:
            self._arrivals[rid] = arrival
        else:
            # For a prompt of one token nothing is pulled, and no request would take it.
            self.give_up(arrival)

    def has_arrived(self, rid: str) -> bool:
        """Return whether KV is offered to a request that SGLang has not scheduled yet."""
        return rid in self._arrivals

    def give_up(self, arrival: Arrival) -> None:
        self.token_to_kv_pool_allocator.free(arrival.own_slots)
        self.unlock(arrival.lock)

    def withdraw(self, rid: str) -> None:
        """Withdraw the offer: the request will not be scheduled."""
        if arrival := self._arrivals.pop(rid, None):
            self.give_up(arrival)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        arrival = self._arrivals.get(params.req.rid) if params.req is not None else None
        if arrival is None:
            return super().match_prefix(params)
        return arrival.match._replace(device_prefix_len=arrival.tokens, cache_protected_len=arrival.cached_tokens)

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        arrival = self._arrivals.pop(req.rid, None)
        if arrival is None:
            return super().prefix_device_indices(req)
        # From here on the request's own: SGLang has locked the tree's part for it, and frees the rest with it.
        self.unlock(arrival.lock)
        return arrival.slots

    # Prefill.

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: object) -> None:
        super().checkpoint(req, up_to=up_to, **kwargs)
        if self.retention is not None:
            self.retention.checkpointed(req, up_to)

    def claim_kv_row(self, req: Req) -> bool:
        if super().claim_kv_row(req):
            return True
        # A request that was retracted gives its slots back as well, and comes again.
        if self.retention is None or not req.finished() or not self.retention.finished(req):
            return False
        kv, tokens = req.kv, req.owned_kv_len()
        req.refresh_fill_ids()
        self.checkpoint(req, up_to=tokens)
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        tail = row[kv.cache_protected_len : tokens].to(torch.int64, copy=True)
        self._held[req.rid] = _Held(req.lock, tail, kv.cache_protected_len)
        # From here on, as SGLang does with a request that keeps nothing.
        req.lock = None
        self.on_release(req, checkpointed=True)
        self.req_to_token_pool.free(req)
        kv.mark_kv_released()
        return True

    def free_leased(self, rid: str) -> None:
        """Free the request's KV, which no peer reads any more."""
        if held := self._held.pop(rid, None):
            self.token_to_kv_pool_allocator.free_segment(held.tail, start_pos=held.tail_start)
            self.unlock(held.lock)

    @property
    def has_handoffs(self) -> bool:
        return bool(self._arrivals or self._held)


def build(context: TreeCacheBuildContext) -> BasePrefixCache:
    """Return the cache, as `register_radix_cache_backend` wants it."""
    return create_unified_radix_cache(context, cache_class=HandoffCache)
