"""A worker's KV pool: the product's directory, eviction policies and decisions on loans, without bytes.

Saves take no time and no memory of the engine. Promotions follow each other at the bandwidth of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from baton.connectors.pool_lending import PoolLending
from baton.pool.directory import PoolDirectory
from baton.pool.policy import PolicyName, make_policy

KEY_BYTES: Final = 16


class WorkerPool:
    def __init__(
        self, *, slots: int, policy: PolicyName, block_tokens: int, block_bytes: int, bytes_per_s: float
    ) -> None:
        self.directory = PoolDirectory(slots, make_policy(policy, slots))
        self.lending = PoolLending(self.directory, block_tokens, ranks=1)
        self.block_bytes = block_bytes
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        """Instant at which all promotions so far will have ended."""

    def match(self, blocks: Sequence[int], held: int) -> int:
        """Return how many leading blocks device and pool hold, of which the device holds `held`."""
        return held + self.directory.match(self.keys(blocks[held:]))

    def promote(self, blocks: Sequence[int], first: int, end: int, now_s: float) -> float:
        """Begin to copy `blocks[first:end]`, which stay until `promoted`; return when that ends."""
        self.directory.pin(self.keys(blocks), first, end)
        self._free_at_s = max(self._free_at_s, now_s) + self.copy_s(end - first)
        return self._free_at_s

    def promoted(self, blocks: Sequence[int], first: int, end: int) -> None:
        self.directory.unpin(self.keys(blocks[first:end]))

    def copy_s(self, blocks: int) -> float:
        return blocks * self.block_bytes / self._bytes_per_s

    def save(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Save the blocks of a prompt that are not here; return `take_changes`."""
        keys = self.keys(blocks)
        self.directory.filled([keys[index] for index, _ in self.directory.reserve(keys, 0)])
        return self.take_changes()

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return the blocks that were stored since the last call, and those evicted."""
        changes = self.directory.take_changes()
        return list(map(_block, changes.stored)), list(map(_block, changes.removed))

    @staticmethod
    def keys(blocks: Sequence[int]) -> list[bytes]:
        return [block.to_bytes(KEY_BYTES, "little") for block in blocks]


def _block(key: bytes) -> int:
    return int.from_bytes(key, "little")
