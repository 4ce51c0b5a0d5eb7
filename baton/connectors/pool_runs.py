"""What the blocks of a KV pool hold, told in runs as they are stored: the pool's directory knows their keys only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.pool.directory import PoolDirectory, SlotState


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """Blocks that the pool holds now, each the successor of the one before."""

    parent: bytes
    """Key of the block before the first; empty at the start of a prompt."""
    keys: tuple[bytes, ...]
    tokens: tuple[int, ...]
    salt: str


class StoredRuns:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._described: dict[bytes, StoredRun] = {}
        """Runs of one block, for keys that are FILLING or have just become READY."""

    def describe(self, keys: Sequence[bytes], salt: str, tokens: Sequence[int], indexes: Sequence[int]) -> None:
        """Remember what the blocks of a sequence hold until they are READY and told."""
        size = self._block_tokens
        for index in indexes:
            self._described[keys[index]] = StoredRun(
                parent=keys[index - 1] if index else b"",
                keys=(keys[index],),
                tokens=tuple(tokens[index * size : (index + 1) * size]),
                salt=salt,
            )

    def take(self, directory: PoolDirectory) -> tuple[list[StoredRun], tuple[bytes, ...]]:
        """Return the blocks that the pool has stored since the last call, and the keys of those it has dropped."""
        changes = directory.take_changes()
        runs: list[StoredRun] = []
        for key in changes.stored:
            block = self._described[key]
            if runs and runs[-1].keys[-1] == block.parent and runs[-1].salt == block.salt:
                last = runs.pop()
                block = replace(last, keys=last.keys + block.keys, tokens=last.tokens + block.tokens)
            runs.append(block)
        filling = SlotState.FILLING
        self._described = {key: run for key, run in self._described.items() if directory.state(key) is filling}
        return runs, changes.removed
