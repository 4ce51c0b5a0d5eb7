"""Copies of whole blocks between an engine's cache and cells of host memory, and who is told of their end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from baton.transfer import Pool
from baton.transfer.device import COPIES_MAX, Copy, CopyEnded, CopyEngine

_log = logging.getLogger(__name__)

Listener = Callable[[CopyEnded], None]


class BlockCopies:
    """Not thread-safe: its owner's lock is held in every call, and while listeners are told."""

    def __init__(self, engine: CopyEngine, cache: Pool, cells: Pool) -> None:
        self._engine = engine
        self._cache = cache
        self._cells = cells
        self.tensors = range(len(cache.layer_addresses))
        self.block_tokens = cache.block_tokens
        self._listeners: dict[int, list[Listener]] = {}

    def between(
        self, blocks: Sequence[int], cells: Sequence[int], tensors: range, *, to_device: bool
    ) -> Iterator[Copy]:
        """Yield the copies of these tensors of the cache: `blocks[i]` to or from `cells[i]`."""
        cache, host = self._cache, self._cells
        for tensor in tensors:
            for block, cell in zip(blocks, cells, strict=True):
                at_block = cache.layer_addresses[tensor] + block * cache.block_stride_bytes
                at_cell = host.layer_addresses[tensor] + cell * host.block_stride_bytes
                to, source = (at_block, at_cell) if to_device else (at_cell, at_block)
                yield Copy(to, source, cache.block_bytes)

    def submit(self, copies: Sequence[Copy], *, after: int | None, ended: Listener) -> Iterator[int]:
        """Start copies in one direction; yield the ticket of each batch. Raises what `CopyEngine.submit` raises."""
        for first in range(0, len(copies), COPIES_MAX):
            ticket = self._engine.submit(copies[first : first + COPIES_MAX], after=after)
            self._listeners[ticket] = [ended]
            yield ticket

    def follow(self, tickets: Iterable[int], ended: Listener) -> None:
        """Tell of the end of batches that run, too."""
        for ticket in tickets:
            self._listeners[ticket].append(ended)

    def take_ended(self) -> None:
        """Tell of the batches that have ended since the last call."""
        for end in self._engine.poll():
            for listener in self._listeners.pop(end.ticket):
                try:
                    listener(end)
                except Exception:  # noqa: BLE001
                    # The boundary of one batch: whatever it was, others are told of theirs.
                    _log.exception("the end of a copy was not taken")
