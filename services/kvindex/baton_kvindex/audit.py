"""Whether a worker's hits are what the index promised. Pure.

A worker may hold less by the time a request runs there: blocks are evicted, and an engine takes whole blocks of its own
size and computes the last token anyway. So one block is forgiven in each request, and what is left must fall short by
half over `REQUESTS` requests in a row. Eviction between a placement and its run takes milliseconds to seconds of other
requests' blocks; half of everything, lastingly, it does not explain.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

REQUESTS: Final = 16
SHARE_MIN: Final = 0.5


@dataclass(slots=True)
class Audit:
    """One life of one worker."""

    predicted_tokens: int = 0
    cached_tokens: int = 0
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=REQUESTS))
    """Tokens that should have been cached, and that were, of requests for which there should have been any."""

    def note(self, predicted_tokens: int, cached_tokens: int, forgiven_tokens: int) -> bool:
        """Note one request; return whether the worker holds lastingly less than the index believes."""
        self.predicted_tokens += predicted_tokens
        self.cached_tokens += min(cached_tokens, predicted_tokens)
        expected_tokens = predicted_tokens - forgiven_tokens
        if expected_tokens <= 0:
            return False
        self._recent.append((expected_tokens, min(cached_tokens, expected_tokens)))
        expected, found = (sum(side) for side in zip(*self._recent, strict=True))
        if len(self._recent) < REQUESTS or found >= expected * SHARE_MIN:
            return False
        self._recent.clear()
        return True
