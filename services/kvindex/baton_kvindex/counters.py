"""What the index counts: what became of the messages that came in, and why workers were read anew."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class ResyncReason(enum.StrEnum):
    """Why a worker's shadow map is read."""

    JOINED = "joined"
    """The worker's first heartbeat names events that were not applied here."""
    BEHIND = "behind"
    """An event that a heartbeat named did not come."""
    GAP = "gap"
    """An event came before the one that it follows."""
    UNKNOWN_PARENT = "unknown_parent"
    """A run was stored behind a block that the worker does not hold here."""
    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    """A message names more blocks than one may."""
    FULL = "full"
    """The index had no room for a run."""
    DRIFT = "drift"
    """The worker holds something else than is held here of it, though every event has come."""
    AUDIT = "audit"
    """The worker's hits are lastingly fewer than was promised of them."""
    COLD = "cold"
    """Redis lost blocks of the worker that were cold."""


@dataclass(slots=True)
class Counters:
    applied: int = 0
    duplicates: int = 0
    stale: int = 0
    """Messages of a life that is over."""
    unknown_blocks: int = 0
    """Removals of blocks that the worker did not hold here."""
    malformed: int = 0
    oversized: int = 0
    """Messages that name more blocks than one may."""
    foreign_models: int = 0
    """Messages that give a worker another model than it has."""
    unknown_workers: int = 0
    """Placements and audits of workers, or lives of them, that are not known here."""
    full: int = 0
    """Stores for which the index had no room."""
    resyncs: dict[ResyncReason, int] = field(default_factory=lambda: dict.fromkeys(ResyncReason, 0))
    """Resyncs that were needed; one for which several reasons came counts for the first."""
