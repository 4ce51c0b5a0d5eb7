"""Room of one worker: slots and KV blocks, and what its attempts hold of them. Pure."""

from __future__ import annotations

from baton.engines.engine import Leg
from baton.messages.attempts import AttemptState
from baton.worker.attempt import WITH_BLOCKS, WITH_SLOT, Ask, Attempt, Limits, Refusal
from baton.worker.kv_book import SHARED_TOKENS, Holding, KvBook


class Room:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.slots_used = 0
        blocks_per_id = max(1, SHARED_TOKENS // limits.engine_block_tokens)
        self._kv = KvBook(blocks_per_id)
        self._leases = KvBook(blocks_per_id)
        """Part of `_kv` that prefill legs hold."""

    @property
    def blocks_used(self) -> int:
        """Blocks that attempts hold, shared ones counted once."""
        return self._kv.used

    @property
    def leased_blocks(self) -> int:
        return self._leases.used

    @property
    def shared_share(self) -> float:
        """See `KvBook.shared_share`."""
        return self._kv.shared_share

    def blocks_of(self, ask: Ask) -> int:
        """Return the blocks that an attempt reserves, shared ones included."""
        # Prefill's sampled token is discarded, so it never takes a place in the cache.
        output = 0 if ask.leg is Leg.PREFILL else min(ask.output_tokens_max, self._limits.output_headroom_tokens_max)
        return -(-(ask.prompt_tokens + output) // self._limits.engine_block_tokens)

    def blocks_lacking(self, attempt: Attempt) -> int:
        """Return how many more blocks are used once a waiting attempt takes what it needs."""
        return self._kv.lacking(attempt.kv)

    def exceeded_by(self, blocks: int, leg: Leg) -> Refusal | None:
        """Return why an attempt would not fit even alone, if so."""
        blocks_max = int(self._limits.kv_blocks * (self._limits.leased_share_max if leg is Leg.PREFILL else 1.0))
        if blocks > blocks_max:
            return Refusal("full", f"{blocks} KV blocks asked, the worker has {blocks_max}")
        return None

    def lack(self, kv: Holding, leg: Leg) -> Refusal | None:
        """Return what an attempt lacks now, if anything."""
        limits = self._limits
        blocks = self._kv.lacking(kv)
        if self.slots_used >= limits.slots:
            return Refusal("full", f"all {limits.slots} run slots are taken")
        if self.blocks_used + blocks > limits.kv_blocks:
            return Refusal("full", f"{blocks} KV blocks asked, {limits.kv_blocks - self.blocks_used} free")
        leased_max = int(limits.kv_blocks * limits.leased_share_max)
        blocks = self._leases.lacking(kv)
        if leg is Leg.PREFILL and self.leased_blocks + blocks > leased_max:
            return Refusal(
                "leases", f"{blocks} KV blocks to lease, {leased_max - self.leased_blocks} of {leased_max} free"
            )
        return None

    def take(self, attempt: Attempt) -> None:
        """Give an attempt its slot and its blocks."""
        self.slots_used += 1
        self._kv.take(attempt.kv)
        if attempt.leg is Leg.PREFILL:
            self._leases.take(attempt.lease)

    def settle(self, attempt: Attempt) -> None:
        """Record that the prompt's KV exists: others may share it now."""
        # What was promoted took room of its own.
        cached = (attempt.cached_tokens - attempt.promoted_tokens) // SHARED_TOKENS
        self._kv.settle(attempt.kv, cached)
        if attempt.leg is Leg.PREFILL:
            self._leases.settle(attempt.lease, cached)

    def release(self, attempt: Attempt, state: AttemptState | None) -> None:
        """Take back what an attempt holds in its present state and not in `state`; None: it is forgotten."""
        if attempt.state in WITH_SLOT and state not in WITH_SLOT:
            self.slots_used -= 1
        if attempt.state in WITH_BLOCKS and state not in WITH_BLOCKS:
            self._kv.release(attempt.kv)
            if attempt.leg is Leg.PREFILL:
                self._leases.release(attempt.lease)
