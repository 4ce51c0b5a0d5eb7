"""What became of the messages and events that came in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    applied: int = 0
    duplicates: int = 0
    stale: int = 0
    """Messages of a life that is over."""
    gaps: int = 0
    unknown_parents: int = 0
    unknown_blocks: int = 0
    """Removals of blocks that the worker did not hold here."""
    malformed: int = 0
    behind: int = 0
    drifts: int = 0
    """Workers that held something else than was held here of them, though every event had come."""
    shortfalls: int = 0
    """Workers whose hits were lastingly fewer than was promised of them."""
    lost_cold: int = 0
    """Workers of which something was cold that Redis does not have any more."""
    resyncs: int = 0
    oversized: int = 0
    """Messages that name more blocks than one may."""
    foreign_models: int = 0
    """Messages that give a worker another model than it has."""
    unknown_workers: int = 0
    """Placements and audits of workers, or lives of them, that are not known here."""
    full: int = 0
    """Stores for which the index had no room."""
