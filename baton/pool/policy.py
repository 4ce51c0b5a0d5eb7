"""Eviction policies of the KV pool: which of the stored blocks leaves first.

A policy orders keys and knows nothing of slots; its owner says which keys are in use.

S3-FIFO (Yang et al., SOSP 2023) with an earlier promotion than its authors', and shares that follow the traffic:

    new ──▶ small, FIFO ──oldest, unused──▶ ghost of small: the key alone
              │ oldest, used once or more     │ inserted again: small gets one slot more
              ▼                               ▼
            main, FIFO: the oldest goes round once more for each use, then leaves
              ▲                               │
              └── inserted again: ◀── ghost of main: the key alone
                  main gets one slot more

A key that comes back after it left the small queue says that this queue was too short; one that comes back after it
left the main queue, that the main queue was (`docs/decisions/0065-shares-that-follow-the-traffic.md`). Until something
leaves for the first time, what the small queue has no place for goes to the main queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import Final, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)

SMALL_SHARE: Final = 0.45
"""Share of the slots that the small queue may take at first before it is evicted from."""
SMALL_SHARE_MIN: Final = 0.05
SMALL_SHARE_MAX: Final = 0.9
USES_MAX: Final = 3
"""Number of uses that are remembered per key, hence of rounds through the main queue."""


class EvictionPolicy(Protocol[Key]):
    def insert(self, key: Key) -> None:
        """Add a key that is not here."""
        ...

    def touch(self, key: Key) -> None:
        """Note a use of a key."""
        ...

    def evict(self, pinned: Callable[[Key], bool]) -> Key | None:
        """Drop and return the key that is worth least; None: every key is pinned."""
        ...

    def remove(self, key: Key) -> None:
        """Drop a key for another reason than room."""
        ...


class Lru(EvictionPolicy[Key]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key) -> None:
        self._keys[key] = None

    def touch(self, key: Key) -> None:
        self._keys.move_to_end(key)

    def evict(self, pinned: Callable[[Key], bool]) -> Key | None:
        victim = next((key for key in self._keys if not pinned(key)), None)
        if victim is not None:
            del self._keys[victim]
        return victim

    def remove(self, key: Key) -> None:
        del self._keys[key]


class S3Fifo(EvictionPolicy[Key]):
    """S3-FIFO for `capacity` keys: a scan passes through the small queue and leaves the main queue as it is.

    `adapts`: the queues' shares follow the keys that come back; without it they stay as in the paper.
    """

    def __init__(self, capacity: int, *, adapts: bool = True) -> None:
        self._capacity = capacity
        self._adapts = adapts
        self._small_max = int(capacity * SMALL_SHARE)
        self._is_filling = True
        """Whether nothing was evicted yet."""
        self._small: OrderedDict[Key, int] = OrderedDict()
        """Number of uses by key, oldest key first; so in the main queue."""
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._small_ghosts: OrderedDict[Key, None] = OrderedDict()
        """Keys that left the small queue unused, at most `capacity`."""
        self._main_ghosts: OrderedDict[Key, None] = OrderedDict()
        """Keys that left the main queue, at most `capacity`; none unless the shares adapt."""

    def insert(self, key: Key) -> None:
        if key in self._small_ghosts:
            del self._small_ghosts[key]
            self._resize_small(1)
            self._main[key] = 0
        elif key in self._main_ghosts:
            del self._main_ghosts[key]
            self._resize_small(-1)
            self._main[key] = 0
        elif self._is_filling and len(self._small) >= self._small_max:
            self._main[key] = 0
        else:
            self._small[key] = 0

    def _resize_small(self, slots: int) -> None:
        if self._adapts:
            least, most = int(self._capacity * SMALL_SHARE_MIN), int(self._capacity * SMALL_SHARE_MAX)
            self._small_max = min(max(self._small_max + slots, least), most)

    def touch(self, key: Key) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, USES_MAX)

    def evict(self, pinned: Callable[[Key], bool]) -> Key | None:
        self._is_filling = False
        if len(self._main) > self._capacity - self._small_max and (victim := self._evict_main(pinned)) is not None:
            return victim
        # What the small queue holds but does not evict moves to the main queue, so that is looked through afterwards.
        victim = self._evict_small(pinned)
        return self._evict_main(pinned) if victim is None else victim

    def remove(self, key: Key) -> None:
        del (self._small if key in self._small else self._main)[key]

    def _evict_small(self, pinned: Callable[[Key], bool]) -> Key | None:
        while self._small:
            key, uses = self._small.popitem(last=False)
            if uses == 0 and not pinned(key):
                self._remember(self._small_ghosts, key)
                return key
            self._main[key] = 0
        return None

    def _evict_main(self, pinned: Callable[[Key], bool]) -> Key | None:
        for _ in range((USES_MAX + 1) * len(self._main)):
            key, uses = self._main.popitem(last=False)
            in_use = pinned(key)
            if uses == 0 and not in_use:
                if self._adapts:
                    self._remember(self._main_ghosts, key)
                return key
            self._main[key] = uses if in_use else max(uses - 1, 0)
        return None

    def _remember(self, ghosts: OrderedDict[Key, None], key: Key) -> None:
        ghosts[key] = None
        if len(ghosts) > self._capacity:
            ghosts.popitem(last=False)


class PolicyName(StrEnum):
    S3_FIFO = "s3-fifo"
    LRU = "lru"


def make_policy(name: PolicyName, capacity: int) -> EvictionPolicy[bytes]:
    return Lru[bytes]() if name is PolicyName.LRU else S3Fifo[bytes](capacity)
