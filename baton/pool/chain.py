"""Keys of a sequence's blocks in the KV pool: chained block ids (`baton.blocks`) at the ends of the pool's blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton.blocks import BLOCK_TOKENS_DEFAULT, ID_BYTES, hash_blocks, split_ids
from baton.errors import ConfigurationError


def check_block_tokens(block_tokens: int, unit_tokens: int = BLOCK_TOKENS_DEFAULT) -> None:
    """Raise ConfigurationError unless a pool can store blocks of this size."""
    if block_tokens <= 0 or block_tokens % unit_tokens:
        raise ConfigurationError(
            f"the KV pool stores blocks of a multiple of {unit_tokens} tokens, not of {block_tokens}"
        )


class BlockChain:
    """Keys of the full blocks of one sequence, in order. It grows with the sequence and hashes each token once."""

    def __init__(self, root: bytes, block_tokens: int, unit_tokens: int = BLOCK_TOKENS_DEFAULT) -> None:
        """`root`: see `baton.blocks.root_key`. Blocks are a multiple of the canonical block, `unit_tokens`."""
        check_block_tokens(block_tokens, unit_tokens)
        self.keys: list[bytes] = []
        self._units: list[bytes] = []
        self._root = root
        self._block_tokens = block_tokens
        self._unit_tokens = unit_tokens

    def units(self, index: int) -> tuple[bytes, ...]:
        """Return the ids of the canonical blocks of one block; the last one is its key."""
        per_block = self._block_tokens // self._unit_tokens
        return tuple(self._units[index * per_block : (index + 1) * per_block])

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the keys of the blocks that have become full; `tokens` is the whole sequence so far."""
        first, end = len(self.keys), len(tokens) // self._block_tokens
        if end <= first:
            return
        packed = array("I", tokens[first * self._block_tokens : end * self._block_tokens]).tobytes()
        units = split_ids(hash_blocks(self._root, packed, self._unit_tokens, self.keys[-1] if self.keys else b""))
        per_block = self._block_tokens // self._unit_tokens
        self.keys.extend(units[per_block - 1 :: per_block])
        self._units.extend(units)
        assert len(self.keys) == end and len(self.keys[-1]) == ID_BYTES
