"""The leases of an in-memory transfer agent, and what it remembers of those that are over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from baton.transfer.protocol import Cause

_ENDED_MAX: Final = 4096


@dataclass(slots=True)
class Lease:
    """A lease at its source; while it is revoked it is not open, and has the next generation already."""

    generation: int
    opened_s: float
    layers: int
    open: bool = False
    unclaimed_ttl_s: float = 0.0
    blocks: list[int] = field(default_factory=list[int])
    ready_tokens: list[int] = field(default_factory=list[int])
    """Per layer."""
    complete_tokens: int | None = None
    claimed_s: float | None = None
    """When a sink last said that it wants the lease."""

    def reset(self) -> None:
        self.blocks = []
        self.ready_tokens = [0] * self.layers
        self.complete_tokens = None

    def expires_s(self, claimed_ttl_s: float) -> float:
        if self.claimed_s is None:
            return self.opened_s + self.unclaimed_ttl_s
        return self.claimed_s + claimed_ttl_s


@dataclass(frozen=True, slots=True)
class EndedLease:
    cause: Cause
    """NONE: the sink released it."""
    generation: int
    by_sink: bool
    """The sink is done with it: when it is opened, for the first time or again, it ends at once."""


class Leases:
    """Leases by key. What is not here and not in `ended` may still be opened: its sinks wait."""

    def __init__(self, on_end: Callable[[bytes, Cause], None]) -> None:
        self.held: dict[bytes, Lease] = {}
        self.ended: dict[bytes, EndedLease] = {}
        """The newest leases that are over, so that a late sink need not wait."""
        self._on_end = on_end

    def open(self, key: bytes, now_s: float, *, layers: int, unclaimed_ttl_s: float) -> int:
        """Open a lease, or open one that was revoked again; return its generation."""
        lease = self.held.get(key)
        if lease is not None and lease.open:
            raise ValueError("this lease is open already")
        ended = self.ended.pop(key, None)
        if lease is None:
            lease = self.held[key] = Lease(1, now_s, layers)
        lease.open = True
        lease.unclaimed_ttl_s = unclaimed_ttl_s
        lease.reset()
        if ended is not None:
            lease.generation = ended.generation + 1
            if ended.by_sink:
                self.end(key, ended.cause, by_sink=True)
        return lease.generation

    def current(self, key: bytes, generation: int) -> Lease | None:
        """Return a lease while it is open and of this generation."""
        lease = self.held.get(key)
        return lease if lease is not None and lease.open and lease.generation == generation else None

    def revoke(self, key: bytes, *, final: bool) -> bool:
        """Take the blocks back, for good or until it is opened again; return whether there was something to take."""
        lease = self.held.get(key)
        revoked = lease is not None and (lease.open or final)
        if lease is not None and revoked:
            lease.open = False
            lease.generation += 1
            lease.reset()
        if final and lease is not None:
            self.end(key, Cause.REVOKED)
        elif final and key not in self.ended:
            self._remember(key, EndedLease(Cause.REVOKED, 0, by_sink=False))
        return revoked

    def release(self, key: bytes, cause: Cause) -> None:
        """The sink is done with a lease, or gave it up; that may cross the lease's opening."""
        if key in self.held:
            self.end(key, cause, by_sink=True)
        elif key not in self.ended:
            self._remember(key, EndedLease(cause, 0, by_sink=True))

    def expire(self, now_s: float, claimed_ttl_s: float) -> int:
        """End the leases whose time is up; return how many."""
        late = [key for key, lease in self.held.items() if now_s >= lease.expires_s(claimed_ttl_s)]
        for key in late:
            self.end(key, Cause.EXPIRED)
        return len(late)

    def end(self, key: bytes, cause: Cause, *, by_sink: bool = False) -> None:
        lease = self.held.pop(key)
        self._remember(key, EndedLease(cause, lease.generation, by_sink))
        self._on_end(key, cause)

    def _remember(self, key: bytes, ended: EndedLease) -> None:
        self.ended[key] = ended
        if len(self.ended) > _ENDED_MAX:
            del self.ended[next(iter(self.ended))]
