"""Virtual time: a queue of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Any


class EventQueue:
    """Callbacks in order of their virtual times; those of equal times in the order in which they were added."""

    __slots__ = ("_count", "_heap", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def add(self, at_s: float, act: Callable[[Any], None], argument: object = None) -> None:
        """Call `act(argument)` at a time, which is not before the present one."""
        self._count += 1
        heapq.heappush(self._heap, (at_s if at_s > self.now_s else self.now_s, self._count, act, argument))

    @property
    def next_s(self) -> float:
        """Time of the next event; infinite if there is none."""
        return self._heap[0][0] if self._heap else inf

    def advance(self, now_s: float) -> None:
        """Move on to a time at which something outside the queue happens, before its next event."""
        self.now_s = max(self.now_s, now_s)

    def step(self) -> bool:
        """Run the next event; return whether there was one."""
        if not self._heap:
            return False
        self.now_s, _, act, argument = heapq.heappop(self._heap)
        act(argument)
        return True
