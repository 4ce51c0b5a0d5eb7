"""Audit: compares a worker's prefix hits with what the index predicted. Pure.

A worker may hold less by the time a request runs there: blocks are evicted, and an engine takes whole blocks of its own
size and computes the last token anyway. So one block per request is tolerated, and the audit fails only if over
`REQUESTS` requests in a row fewer than half of the remaining tokens are found. Eviction in the milliseconds to seconds
between a placement and its run does not explain a lasting loss of half of everything.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

REQUESTS: Final = 16
SHARE_MIN: Final = 0.5


@dataclass(slots=True)
class Audit:
    """Audit of one generation of one worker."""

    predicted_tokens: int = 0
    cached_tokens: int = 0
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=REQUESTS))
    """(expected, found) cached tokens of the newest requests for which any were expected."""

    def note(self, predicted_tokens: int, cached_tokens: int, forgiven_tokens: int) -> bool:
        """Note one request; return whether the worker's hits fall lastingly short of the predictions."""
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
