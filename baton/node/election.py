"""Election of one process among several: it holds a lease, an entry in a bucket of the bus. Pure.

    FOLLOWS ── there is no entry, or its revision stood still for `ttl_s`: put ──stored──▶ HOLDS ── put, again and
       ▲                                                                                    │       again
       └──── another one's entry was read, or no put was stored for `ttl_s` ────────────────┘

Each process uses its own clock: the holder counts from before it asked, the others from when they saw the revision, so
a holder that cannot reach the bus stops before another one begins. The **fence** is the revision with which a term
began. The next term's is higher, so a database can refuse what a holder that was paused writes late.
"""

from __future__ import annotations

from math import inf

from baton.bus import Entry
from baton.messages.base import Lease


class Election:
    def __init__(self, holder: str, ttl_s: float) -> None:
        self._holder = holder
        self._ttl_s = ttl_s
        self._revision: int | None = None
        """Revision of the entry; 0: there is no entry; None: unknown."""
        self._is_mine = False
        self._changed_s = -inf
        """Time at which another process's revision was first seen."""
        self._term = 0
        self._until_s = -inf

    def fence(self, now_s: float) -> int:
        """Return the revision with which the present term began; 0 where the lease is not held."""
        return self._term if now_s < self._until_s else 0

    @property
    def held_revision(self) -> int:
        """Revision of the entry if it is ours, else 0."""
        return self._revision or 0 if self._is_mine else 0

    @property
    def must_read(self) -> bool:
        """Whether `saw` must be called before `revision_to_put`."""
        return self._revision is None or not self._is_mine

    def revision_to_put(self, now_s: float) -> int | None:
        """Return the revision that a put must name now; None while another process holds the lease."""
        may_put = self._is_mine or not self._revision or now_s - self._changed_s >= self._ttl_s
        return self._revision if may_put else None

    def saw(self, entry: Entry | None, now_s: float) -> None:
        """Note the entry as it was read."""
        revision = entry.revision if entry else 0
        self._is_mine = entry is not None and entry.message == Lease(holder=self._holder)
        if revision != self._revision:
            self._revision, self._changed_s = revision, now_s
        if not self._is_mine:
            self._until_s = -inf

    def stored(self, revision: int, asked_s: float) -> None:
        """Note that the put that began at `asked_s` was stored with this revision."""
        if not self.fence(asked_s):
            self._term = revision
        self._revision, self._is_mine, self._until_s = revision, True, asked_s + self._ttl_s

    def failed(self) -> None:
        """Note a failed put: the bus did not answer, so it may have been stored, or another process was first."""
        self._revision = None
