"""Cells of one rank's KV memory, shared by the slots of its pool and by hand-offs that are staged there.

    slot s of the pool ──▶ cell ◀── block b of a staged hand-off

All ranks have the same block in the same slot; in which cell the slot is, each rank decides alone. So what a hand-off
has staged becomes part of the pool, or the reverse, by naming a cell twice instead of copying it.

There are as many cells as slots and staged blocks together, so one is free whenever a slot has to leave a cell that
a hand-off still uses, or a hand-off has been granted another block.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence


class CellTable:
    """Thread-safe: hand-offs take and drop cells while the engine's steps order copies of slots."""

    def __init__(self, slots: int, *, spare: int = 0) -> None:
        """`spare`: cells that hand-offs may use at a time; the caller keeps to it."""
        self.spare = spare
        self._cell_of = list(range(slots))
        self._users = Counter(self._cell_of)
        self._free = list(range(slots + spare - 1, slots - 1, -1))
        self._lock = threading.Lock()

    def take(self, count: int) -> list[int]:
        """Return free cells, for a hand-off."""
        with self._lock:
            return [self._take() for _ in range(count)]

    def drop(self, cells: Iterable[int]) -> None:
        """Note that a hand-off does not use these cells any more."""
        with self._lock:
            for cell in cells:
                self._drop(cell)

    def of(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return the cells that hold these slots."""
        with self._lock:
            return tuple(self._cell_of[slot] for slot in slots)

    def renew(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return cells for slots that are to be written anew: other ones where hand-offs still use theirs."""
        with self._lock:
            for slot in slots:
                if self._users[self._cell_of[slot]] > 1:
                    self._drop(self._cell_of[slot])
                    self._cell_of[slot] = self._take()
            return tuple(self._cell_of[slot] for slot in slots)

    def share(self, slot: int, cell: int) -> None:
        """Let a slot be in a cell that a hand-off uses."""
        with self._lock:
            self._users[cell] += 1
            self._drop(self._cell_of[slot])
            self._cell_of[slot] = cell

    def _take(self) -> int:
        cell = self._free.pop()
        self._users[cell] = 1
        return cell

    def _drop(self, cell: int) -> None:
        self._users[cell] -= 1
        if not self._users[cell]:
            self._free.append(cell)
