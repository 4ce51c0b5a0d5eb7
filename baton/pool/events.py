"""Changes of a pool's contents, in a form that the index can follow: which tokens a stored block stands for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.pool.directory import PoolDirectory, SlotState


@dataclass(frozen=True, slots=True)
class PoolStored:
    """One block that is READY now."""

    key: bytes
    parent: bytes | None
    """Key of the block before it; None: it is the first."""
    tokens: tuple[int, ...]
    salt: str
    index: int
    """Number of the block in its sequence."""


@dataclass(frozen=True, slots=True)
class PoolRemoved:
    keys: tuple[bytes, ...]


PoolEvent = PoolStored | PoolRemoved


class PoolEvents:
    def __init__(self) -> None:
        self._reserved: dict[bytes, PoolStored] = {}
        """Blocks that are being filled, by key."""

    def reserve(
        self, chain: Sequence[bytes], indexes: Iterable[int], tokens: Sequence[int], block_tokens: int, salt: str
    ) -> None:
        """Note blocks of a sequence that will be filled: `tokens` are all of the sequence's."""
        for index in indexes:
            own = tuple(tokens[index * block_tokens : (index + 1) * block_tokens])
            parent = chain[index - 1] if index else None
            self._reserved[chain[index]] = PoolStored(chain[index], parent, own, salt, index)

    def take(self, directory: PoolDirectory) -> list[PoolEvent]:
        """Return the changes since the last call: removals, then stored blocks, each after the one before it."""
        changes = directory.take_changes()
        events: list[PoolEvent] = [PoolRemoved(changes.removed)] if changes.removed else []
        stored = [self._reserved.pop(key) for key in changes.stored]
        events += sorted(stored, key=lambda block: block.index)
        if len(self._reserved) > directory.filling:
            # The others were abandoned, or stored and evicted since.
            filling = self._reserved.items()
            self._reserved = {key: block for key, block in filling if directory.state(key) is SlotState.FILLING}
        return events
