"""Whether the gateway takes requests, as seen from outside. Only the one way round: open, closing, closed."""

from __future__ import annotations

from enum import IntEnum

from baton.errors import Unavailable


class DrainState(IntEnum):
    OPEN = 0
    CLOSING = 1
    """`/ready` says no, for proxies to see; requests are still taken, and connections end with their answer."""
    CLOSED = 2
    """Only what runs is finished."""

    def check_ready(self) -> None:
        """Raise Unavailable unless a proxy should send requests here."""
        if self is not DrainState.OPEN:
            raise Unavailable("this gateway is being stopped")

    def check_takes(self) -> None:
        """Raise Unavailable where a request came too late; another gateway takes it."""
        if self is DrainState.CLOSED:
            raise Unavailable("this gateway is being stopped, others serve", retry_after_s=1.0)
