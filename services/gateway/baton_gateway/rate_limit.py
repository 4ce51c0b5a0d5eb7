"""A limit on how often something is done. Pure; time is passed in."""

from __future__ import annotations


class RateLimit:
    """At most `per_s` times a second, after pauses up to `burst` times at once."""

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at_s = 0.0

    def allow(self, now_s: float) -> bool:
        """Return whether it may be done now, and count it if so."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
