"""Free slots of a memory, and the owners that wait for some: first come, first served, each with all that it needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from baton.errors import ConfigurationError
from baton.pool.cells import CellTable


def staging_slots(tokens: int, context_tokens: int, *, blocks: int, block_tokens: int) -> int:
    """Return the slots that stage `tokens` tokens at a time; 0: twice the engine's longest context.

    More than the cache's blocks are of no use. Raises ConfigurationError if the longest context has no room.
    """
    longest = min(-(-context_tokens // block_tokens), blocks)
    slots = min(-(-(tokens or 2 * context_tokens) // block_tokens), blocks)
    if slots < longest:
        raise ConfigurationError(
            f"kv_staging_tokens={tokens} is less than the engine's longest context of {context_tokens} tokens",
            param="kv_staging_tokens",
        )
    return slots


Owner = TypeVar("Owner")


class SlotQueue(Generic[Owner]):
    """An owner that got a part of its slots and waits for the rest could block others that do the same. So none does:
    an owner asks once, for all of them, and waits until as many are free."""

    def __init__(self, cells: CellTable) -> None:
        """The slots are the table's spare cells."""
        self.slots = self.free = cells.spare
        self._cells = cells
        self._waiting: deque[tuple[Owner, int]] = deque()

    def ask(self, owner: Owner, count: int) -> None:
        """Put an owner at the end of the queue. Raises ValueError if there are not as many slots at all."""
        if count > self.slots:
            raise ValueError(f"{count} slots are needed, and there are {self.slots}")
        self._waiting.append((owner, count))

    def grant(self) -> tuple[Owner, list[int]] | None:
        """Take the first owner out of the queue, with its cells; None if there is none, or too few slots for it."""
        if not self._waiting or self._waiting[0][1] > self.free:
            return None
        owner, count = self._waiting.popleft()
        self.free -= count
        return owner, self._cells.take(count)

    def leave(self, owner: Owner) -> bool:
        """Take an owner out of the queue; return whether it waited."""
        before = len(self._waiting)
        self._waiting = deque(entry for entry in self._waiting if entry[0] != owner)
        return len(self._waiting) < before

    def give_back(self, cells: Sequence[int]) -> None:
        self.free += len(cells)
        self._cells.drop(cells)
