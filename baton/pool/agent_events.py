"""Events that an agent around other agents has for its caller, and the descriptor that says that there are any."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

from baton.transfer import EventKind, TransferEvent


class AgentEvents:
    """Not locked: its owner is."""

    def __init__(self) -> None:
        self._events: list[TransferEvent] = []
        self._readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._readable)

    def fileno(self) -> int:
        return self._readable

    def tell(self, event: TransferEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._readable, 1)

    def take(self) -> list[TransferEvent]:
        """Return the events since the last call; afterwards the descriptor is readable only because of newer ones."""
        events, self._events = self._events, []
        with suppress(BlockingIOError):
            os.eventfd_read(self._readable)
        return events

    def forget_staged(self, key: bytes) -> None:
        """Drop what tells that a lease is staged: of a revoked generation, it would free the next one's blocks."""
        self._events = [event for event in self._events if event.key != key or event.kind is not EventKind.LEASE_STAGED]
