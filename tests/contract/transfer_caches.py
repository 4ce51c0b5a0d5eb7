"""Agents over caches of any layout, and the memory expected after a pull between two of them, byte for byte."""

from __future__ import annotations

import ctypes
import random

import numpy as np
from transfer_rig import Party

from baton.transfer import Pool, TransferAgent, share_memory
from baton.transfer.layout import Layout, common_heads
from tests.harness.limits import HANG_S
from tests.harness.transfer import Cache


class CacheNode(Party):
    """An agent and one rank's cache, which holds random bytes or, on a source, the KV of one sequence."""

    def __init__(self, agent: TransferAgent, cache: Cache, *, shared: bool = False) -> None:
        super().__init__(agent)
        self.cache = cache
        self.region = share_memory(sum(tensor.nbytes for tensor in cache.memory)) if shared else None
        if self.region is not None:
            self._move_to(self.region.address)
        agent.set_pool(
            Pool(
                layer_addresses=tuple(tensor.ctypes.data for tensor in cache.memory),
                blocks=cache.pool_blocks,
                block_bytes=cache.layout.block_bytes,
                block_stride_bytes=cache.layout.block_bytes + cache.gap_bytes,
                block_tokens=cache.layout.block_tokens,
                fingerprint="model",
                region=self.region,
                layout=str(cache.layout),
            )
        )

    def _move_to(self, address: int) -> None:
        for index, tensor in enumerate(self.cache.memory):
            memory = memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(address))
            self.cache.memory[index] = np.frombuffer(memory, dtype=np.uint8).reshape(tensor.shape)
            self.cache.memory[index][:] = tensor
            address += tensor.nbytes

    def offer(self, key: bytes, tokens: int) -> int:
        generation = self.lease(key, self.cache.blocks)
        self.agent.post_ready(key, generation, -1, tokens)
        self.agent.complete_lease(key, generation, tokens)
        return generation

    def pull(self, key: bytes, source: CacheNode, first: int, tokens: int) -> None:
        """Pull tokens [first, tokens) to their places in this cache."""
        size = self.cache.layout.block_tokens
        blocks = self.cache.blocks[first // size : -(-tokens // size)]
        self.agent.pull(key, source.agent.endpoint, first_token=first, tokens=tokens, blocks=blocks, budget_s=HANG_S)

    def expect(self, source: CacheNode, first: int, tokens: int) -> None:
        """Expect the source's tokens [first, tokens) from now on, in all heads that both hold."""
        theirs, ours = source.cache, self.cache
        head, heads = common_heads(theirs.layout, ours.layout)
        from_head, to_head = head - theirs.layout.heads[0], head - ours.layout.heads[0]
        ours.kv[:, :, ours.slots(first, tokens - first), to_head : to_head + heads] = theirs.kv[
            :, :, theirs.slots(first, tokens - first), from_head : from_head + heads
        ]

    def snapshot(self) -> bytes:
        return b"".join(tensor.tobytes() for tensor in self.cache.memory)

    def is_part_of(self, before: bytes) -> bool:
        """Return whether every byte has its old or its expected value."""
        after, now = b"".join(tensor.tobytes() for tensor in self.cache.expected()), self.snapshot()
        old, new, got = (np.frombuffer(data, dtype=np.uint8) for data in (before, after, now))
        return bool(np.all((got == old) | (got == new)))


def scattered(layout: Layout, tokens: int, seed: int) -> Cache:
    """Return a cache with room for some tokens, in blocks in random order with gaps between them."""
    needed = -(-tokens // layout.block_tokens)
    pool_blocks = needed + 3
    blocks = tuple(random.Random(seed).sample(range(pool_blocks), needed))
    return Cache(layout, blocks, pool_blocks=pool_blocks, gap_bytes=64, seed=seed)
