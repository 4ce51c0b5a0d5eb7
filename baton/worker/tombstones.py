"""Tombstones of attempts that must not run here any more: cancelled, ended, or older than one already seen."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class _Tombstone:
    attempt: int
    """This attempt of the request and all older ones are refused."""
    until_s: float


class Tombstones:
    """Tombstones, at most `entries_max`; beyond that, the one with the earliest deadline is dropped."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._by_request: dict[str, _Tombstone] = {}
        # Every deadline that a tombstone ever had. Outdated entries are skipped when they come up.
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._by_request)

    def bury(self, request: str, attempt: int, until_s: float) -> None:
        """Refuse `attempt` of `request` and all older ones until `until_s`, or longer if they already were."""
        if attempt < 0:
            return
        stone = self._by_request.get(request)
        if stone is None:
            self._by_request[request] = _Tombstone(attempt, until_s)
        else:
            stone.attempt = max(stone.attempt, attempt)
            if until_s <= stone.until_s:
                return
            stone.until_s = until_s
        heapq.heappush(self._deadlines, (until_s, request))
        while len(self._deadlines) > self._entries_max:
            self._remove_first()

    def refuses(self, request: str, attempt: int) -> bool:
        stone = self._by_request.get(request)
        return stone is not None and attempt <= stone.attempt

    def purge(self, now_s: float) -> None:
        """Drop the tombstones whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            self._remove_first()

    def _remove_first(self) -> None:
        until_s, request = heapq.heappop(self._deadlines)
        stone = self._by_request.get(request)
        if stone is not None and stone.until_s == until_s:
            del self._by_request[request]
