"""The simulated engine's blocks: reference counts, and a prefix cache with LRU eviction.

A block with no references lies in the free queue, oldest first; while it lies there its content can
still be found by hash and taken back. Taking a block for new content drops what it held before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from baton.engines.engine import EngineBlockEvent, EngineBlocksRemoved, EngineBlocksStored
from baton.messages.base import pack_tokens

HASH_BYTES = 16


class BlockCache:
    """Pure bookkeeping over block numbers; `nonce` scopes the hashes to one run of the engine."""

    def __init__(self, *, blocks: int, block_tokens: int, nonce: bytes) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._nonce = nonce
        self._references = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._hash_of: dict[int, bytes] = {}
        self._copies: dict[bytes, dict[int, None]] = {}
        """Hash → the blocks that hold this content; two requests may have computed the same."""
        self._events: list[EngineBlockEvent] = []

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks with a reference; cached blocks without one are free."""
        return self.blocks - len(self._free)

    def extend_hashes(self, hashes: list[bytes], tokens: Sequence[int], salt: str) -> None:
        """Append the hashes of the full blocks of `tokens` that are not in `hashes` yet."""
        for start in range(len(hashes) * self.block_tokens, len(tokens) - self.block_tokens + 1, self.block_tokens):
            parent = hashes[-1] if hashes else blake2b(salt.encode(), key=self._nonce, digest_size=HASH_BYTES).digest()
            packed = pack_tokens(tokens[start : start + self.block_tokens])
            hashes.append(blake2b(parent + packed, digest_size=HASH_BYTES).digest())

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest cached prefix of `hashes`."""
        matched: list[int] = []
        for block_hash in hashes:
            copies = self._copies.get(block_hash)
            if copies is None:
                break
            matched.append(next(iter(copies)))
        return matched

    def can_take(self, cached: Sequence[int], fresh: int) -> bool:
        """Tell whether the `cached` blocks and `fresh` new ones can be taken."""
        return fresh + sum(1 for block in cached if not self._references[block]) <= len(self._free)

    def take(self, cached: Sequence[int]) -> None:
        """Hold blocks that `match` returned."""
        for block in cached:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def take_fresh(self, count: int) -> list[int]:
        """Hold `count` free blocks for new content, the least recently used first."""
        assert count <= len(self._free), "the scheduler asks before it takes"
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        removed: list[bytes] = []
        for block in taken:
            self._references[block] = 1
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                copies = self._copies[block_hash]
                del copies[block]
                if not copies:
                    del self._copies[block_hash]
                removed.append(block_hash)
        if removed:
            self._events.append(EngineBlocksRemoved(hashes=tuple(removed)))
        return taken

    def give_back(self, table: Sequence[int]) -> None:
        """Drop one reference of each block of a table; its tail will be evicted before its head."""
        for block in reversed(table):
            self._references[block] -= 1
            assert self._references[block] >= 0, "a block was given back twice"
            if not self._references[block]:
                self._free[block] = None

    def register(
        self, table: Sequence[int], hashes: Sequence[bytes], tokens: Sequence[int], first: int, salt: str
    ) -> None:
        """Make the full blocks of a table from number `first` on findable, copies of what is cached included.

        A holder of a block thus also holds a findable copy of every block before it, and since tails are
        evicted before heads, no block outlives its parent.
        """
        fresh = [index for index in range(first, len(hashes)) if table[index] not in self._hash_of]
        for index in fresh:
            self._copies.setdefault(hashes[index], {})[table[index]] = None
            self._hash_of[table[index]] = hashes[index]
        for start, end in _runs(fresh):
            self._events.append(
                EngineBlocksStored(
                    parent=hashes[start - 1] if start else None,
                    hashes=tuple(hashes[start:end]),
                    tokens=tuple(tokens[start * self.block_tokens : end * self.block_tokens]),
                    block_tokens=self.block_tokens,
                    cache_salt=salt,
                )
            )

    def drain_events(self) -> tuple[EngineBlockEvent, ...]:
        """Take the changes since the last call, in order."""
        events = tuple(self._events)
        self._events.clear()
        return events


def _runs(indexes: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for index in indexes:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs
