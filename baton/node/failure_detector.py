"""Local pauses: while this process itself receives nothing, silence of others is no sign of a failure."""

from __future__ import annotations

from typing import Final

PAUSE_S_MIN: Final = 0.5
"""A call that comes this late, or twice as late as meant, shows that this process was paused."""
RETURN_S: Final = 1.0
"""Time after the bus is back in which others may reconnect, too."""


class PauseDetector:
    """Measures the time in which this process could receive nothing: it was stopped, or its bus unreachable. Pure.

    Failure detectors call `local_pause_s` at every tick and extend all deadlines by what it returns. Without
    that, one restart of NATS would look like the failure of the whole deployment.
    """

    def __init__(self, *, interval_s: float) -> None:
        """Expect a call every `interval_s`."""
        self._pause_s = max(PAUSE_S_MIN, 2 * interval_s)
        self._called_s: float | None = None
        self._returning_until_s = 0.0

    def local_pause_s(self, now_s: float, *, connected: bool) -> float:
        """Return the seconds since the last call if nothing could be received in them, else 0.

        `connected`: whether the bus is connected.
        """
        gap_s = 0.0 if self._called_s is None else now_s - self._called_s
        self._called_s = now_s
        if not connected:
            self._returning_until_s = now_s + RETURN_S
        return gap_s if gap_s > self._pause_s or now_s < self._returning_until_s else 0.0
