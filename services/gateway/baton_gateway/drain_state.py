"""Drain state: whether the gateway takes requests. Transitions only move forward: open, closing, closed."""

from __future__ import annotations

from enum import IntEnum

from baton.errors import Unavailable


class DrainState(IntEnum):
    OPEN = 0
    CLOSING = 1
    """State in which `/ready` fails, for proxies to see; requests are still taken, each answer ends its connection."""
    CLOSED = 2
    """State in which the gateway only finishes running answers."""

    def check_ready(self) -> None:
        """Raise Unavailable unless a proxy should send requests here."""
        if self is not DrainState.OPEN:
            raise Unavailable("this gateway is being stopped")

    def check_takes(self) -> None:
        """Raise Unavailable if a request comes too late; another gateway can take it."""
        if self is DrainState.CLOSED:
            raise Unavailable("this gateway is being stopped, others serve", retry_after_s=1.0)
