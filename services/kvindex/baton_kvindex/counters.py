"""Counters of the index: the fate of incoming messages, and the reasons of resyncs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class ResyncReason(enum.StrEnum):
    """Reason to read a worker's shadow map."""

    JOINED = "joined"
    """The worker's first heartbeat names events that were not applied here."""
    BEHIND = "behind"
    """An event that a heartbeat named did not arrive in time."""
    GAP = "gap"
    """An event arrived without the one before it."""
    UNKNOWN_PARENT = "unknown_parent"
    """A run was stored behind a block that the worker does not hold here."""
    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    """A message names more blocks than allowed."""
    FULL = "full"
    """The index had no room for a run."""
    DRIFT = "drift"
    """The fingerprints differ, though every event was applied."""
    AUDIT = "audit"
    """The worker's hits fall lastingly short of the predictions."""
    COLD = "cold"
    """Redis lost cold blocks of the worker."""


@dataclass(slots=True)
class Counters:
    applied: int = 0
    duplicates: int = 0
    stale: int = 0
    """Messages of a generation that is over."""
    unknown_blocks: int = 0
    """Removals of blocks that the worker did not hold here."""
    malformed: int = 0
    oversized: int = 0
    """Messages that name more blocks than allowed."""
    foreign_models: int = 0
    """Messages that name another model than their worker's."""
    unknown_workers: int = 0
    """Placements and audits of workers or generations that are not known here."""
    full: int = 0
    """Stores for which the index had no room."""
    resyncs: dict[ResyncReason, int] = field(default_factory=lambda: dict.fromkeys(ResyncReason, 0))
    """Resyncs that became necessary, by reason; one with several reasons counts for the first."""
