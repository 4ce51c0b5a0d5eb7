"""The gateway's retry budget: failed attempts that are tried again never exceed a share of its traffic. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 10
"""Time over which traffic and retries are counted, in whole seconds."""
SHARE: Final = 0.2
"""Retries of answers of which no token has come, per answer of the window."""
BEGUN_SHARE: Final = 1.0
"""Limit of all retries while answers that have begun ask, per answer of the window: each can resume once."""
FLOOR: Final = 30
"""Retries that every window allows, so that a quiet deployment retries, too."""


@dataclass(slots=True)
class _Second:
    second: int
    ended: int = 0
    """Answers that ended in it."""
    retries: int = 0


class RetryBudget:
    """Budget of one gateway. The traffic of a window are all answers that ran in it, those begun before included."""

    def __init__(self) -> None:
        self._running = 0
        self._ended = 0
        self._retries = 0
        self._seconds: deque[_Second] = deque()
        """The seconds of the window in which something was counted."""

    def begin(self) -> None:
        """Count an answer that begins."""
        self._running += 1

    def end(self, now_s: float) -> None:
        """Count the end of an answer that was begun."""
        self._running -= 1
        self._ended += 1
        self._second(now_s).ended += 1

    def take(self, now_s: float, *, begun: bool) -> bool:
        """Take a retry out of the budget, if there is one; `begun`: a part of the answer has been delivered.

        Answers that have begun may use more of it, so they come first where retries are scarce.
        """
        second = self._second(now_s)
        traffic = self._running + self._ended
        if self._retries >= FLOOR + (BEGUN_SHARE if begun else SHARE) * traffic:
            return False
        second.retries += 1
        self._retries += 1
        return True

    def _second(self, now_s: float) -> _Second:
        """Drop what has left the window, and return the present second."""
        number, seconds = int(now_s), self._seconds
        while seconds and seconds[0].second <= number - WINDOW_S:
            old = seconds.popleft()
            self._ended -= old.ended
            self._retries -= old.retries
        if not seconds or seconds[-1].second < number:
            seconds.append(_Second(number))
        return seconds[-1]
