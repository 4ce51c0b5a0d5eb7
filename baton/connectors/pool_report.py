"""Figures of a KV pool on their way to the streaming process."""

from __future__ import annotations

import msgspec


class Promotion(msgspec.Struct, frozen=True, kw_only=True):
    """A promotion that has ended, for the request's usage and the worker's rates."""

    request: str
    """The engine's id."""
    tokens: int
    copied_bytes: int
    copying_s: float
    loaded_tokens: int = 0
    """Part of `tokens` that the request had read from the file first."""


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the KV pool's file. Slots as of now, the others since the start."""

    slots: int = 0
    ready: int = 0
    written_blocks: int = 0
    evicted_blocks: int = 0
    deferred_blocks: int = 0
    """Blocks that were not written when they could have been, since too many were being written."""
    failed_blocks: int = 0
    """Blocks that could not be written or read, or were not what had been written."""
    loaded_tokens: int = 0
    loading_s: float = 0.0
    loads_late: int = 0
    """Prefixes whose request went on and computed, since reading took longer than that."""
    loads_declined: int = 0
    """Prefixes that were not read, since reading was expected to take longer than computing."""


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an engine's KV pool. Slots and pins as of now, the others since the start."""

    slots: int = 0
    ready: int = 0
    pinned: int = 0
    saved_blocks: int = 0
    evicted_blocks: int = 0
    dropped_blocks: int = 0
    """Full blocks that were not saved: nothing could be evicted for them, or their predecessor is not in the pool."""
    stranded_blocks: int = 0
    promotions: int = 0
    promoted_tokens: int = 0
    promoting_s: float = 0.0
    """Time in which promotions were copied."""
    lent_tokens: int = 0
    borrowed_tokens: int = 0
    borrows_failed: int = 0
    file: FileReport | None = None
    """None: there is no file, or what it holds is not known yet."""
    ended: tuple[Promotion, ...] = ()
    """Promotions that have ended since the last report; of a preempted request only the first."""
