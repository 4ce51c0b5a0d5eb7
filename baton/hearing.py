"""Whether silence says anything about others: it does not while this process itself could hear nobody."""

from __future__ import annotations

from typing import Final

PAUSE_S_MIN: Final = 0.5
"""A call that comes this late, or twice as late as meant, says that this process stood still."""
RETURN_S: Final = 1.0
"""Once the bus is back, the others have this long to come back to it as well."""


class Hearing:
    """Measures time in which nobody could be heard: this process was stopped, or its bus was away. Pure.

    Whoever takes the silent for dead calls `deaf_s` regularly, and lets what it returns count for nobody's
    silence. Else one restart of NATS would look like the death of the whole deployment.
    """

    def __init__(self, *, interval_s: float) -> None:
        """Expect a call every `interval_s`."""
        self._pause_s = max(PAUSE_S_MIN, 2 * interval_s)
        self._called_s: float | None = None
        self._returning_until_s = 0.0

    def deaf_s(self, now_s: float, *, connected: bool) -> float:
        """Return the seconds since the last call if nobody could be heard in them, else 0. `connected`: the bus is."""
        gap_s = 0.0 if self._called_s is None else now_s - self._called_s
        self._called_s = now_s
        if not connected:
            self._returning_until_s = now_s + RETURN_S
        return gap_s if gap_s > self._pause_s or now_s < self._returning_until_s else 0.0
