"""Totals of all pulls of an engine, for its metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.transfer.protocol import Cause


@dataclass(slots=True)
class PullTotals:
    pulls: int = 0
    moved_bytes: int = 0
    waiting_s: float = 0.0
    moving_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PullTally:
    done: dict[str, PullTotals] = field(default_factory=dict[str, PullTotals])
    """Totals by backend."""
    failed: Counter[Cause] = field(default_factory=Counter[Cause])

    def add(self, backend: str, cause: Cause, *, moved_bytes: int, waiting_s: float, moving_s: float) -> None:
        if cause is not Cause.NONE:
            self.failed[cause] += 1
            return
        totals = self.done.setdefault(backend, PullTotals())
        totals.pulls += 1
        totals.moved_bytes += moved_bytes
        totals.waiting_s += waiting_s
        totals.moving_s += moving_s
