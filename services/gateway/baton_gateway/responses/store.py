"""The store of responses, and an implementation in memory.

A response that is being generated has an owner: the gateway that generates it. An owner that renews its lease no more
is lost, and any gateway may then end the response; from its end on, nothing of a response changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import msgspec

from baton.clock import Clock

LEASE_S: Final = 10.0
"""Silence after which an owner is lost."""


class Key(NamedTuple):
    """Name of a response; tenants do not see each other's."""

    tenant: str
    response: str


class NewRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it is created."""

    owner: str
    """Gateway that generates it."""
    previous: str
    """The response that it continues; empty: none."""
    background: bool
    keeps_events: bool
    head: bytes
    """The response without its output: a JSON object."""
    items: tuple[bytes, ...]
    """The request's own items: JSON objects."""

    @property
    def size_bytes(self) -> int:
        return len(self.head) + sum(map(len, self.items))


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it is now."""

    owner: str
    owner_lost: bool
    running: bool
    background: bool
    keeps_events: bool
    head: bytes
    output: bytes
    """Its items: a JSON array."""
    events: int
    """Number of its stored events."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One response's part of a conversation."""

    previous: str
    running: bool
    items: tuple[bytes, ...]
    output: bytes


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    events: tuple[bytes, ...]
    running: bool
    owner_lost: bool


class ResponseStore(Protocol):
    """All methods raise StoreUnavailable."""

    async def create(self, key: Key, record: NewRecord) -> None:
        """Store a response; where its tenant has no room, those that were used least lately are deleted.

        To repeat a call changes nothing: the client of Redis does so where the connection breaks before the answer.
        """
        ...

    async def append(self, key: Key, first: int, events: Sequence[bytes], head: bytes) -> bool:
        """Store events, the number of the first being `first`, and the head unless it is empty.

        Return False if the response has ended or is gone. To repeat a call changes nothing.
        """
        ...

    async def finish(self, key: Key, first: int, events: Sequence[bytes], head: bytes, output: bytes) -> bool:
        """Store the end of a response, with its last events; as `append`."""
        ...

    async def lose(self, key: Key, first: int, events: Sequence[bytes], head: bytes) -> bool:
        """Store the end of a response whose owner is lost.

        Return False if it has ended, is gone, has another number of events, or its owner is back.
        """
        ...

    async def read(self, key: Key) -> Record | None: ...

    async def items(self, key: Key) -> list[bytes] | None:
        """Return the request's own items."""
        ...

    async def turn(self, key: Key) -> Turn | None:
        """Return a response as a part of the conversation that continues it, and keep it for longer."""
        ...

    async def events(self, key: Key, first: int) -> EventPage | None:
        """Return stored events, from number `first` on: a page of them."""
        ...

    async def delete(self, key: Key) -> bool: ...

    async def ask_cancel(self, key: Key, owner: str) -> None:
        """Ask an owner to cancel a response."""
        ...

    async def renew(self, owner: str, cancelled: Sequence[Key] = ()) -> list[Key]:
        """Renew an owner's lease; return the responses that it is asked to cancel, without those that it has cancelled.

        To repeat a call changes nothing: what an answer that was lost asked for, the next one asks for again.
        """
        ...


@dataclass(slots=True)
class _Kept:
    record: NewRecord
    expires_at_s: float
    head: bytes
    output: bytes = b"[]"
    running: bool = True
    events: list[bytes] = field(default_factory=list[bytes])


class MemoryStore:
    """Store in this process, for tests and simulators."""

    def __init__(self, clock: Clock, *, ttl_s: float, bytes_max: int, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._ttl_s = ttl_s
        self._bytes_max = bytes_max
        self._kept: dict[Key, _Kept] = {}
        self._leases: dict[str, float] = {}
        self._cancels: dict[str, set[Key]] = {}

    async def create(self, key: Key, record: NewRecord) -> None:
        if self._find(key) is not None:
            return
        self._leases[record.owner] = self._clock.now_s() + self._lease_s
        self._kept[key] = _Kept(record, self._clock.now_s() + self._ttl_s, record.head)
        own = {each: kept for each, kept in self._kept.items() if each.tenant == key.tenant and self._find(each)}
        for each in sorted(own, key=lambda each: own[each].expires_at_s):
            if sum(map(_size, own.values())) <= self._bytes_max or each == key:
                break
            del own[each], self._kept[each]

    async def append(self, key: Key, first: int, events: Sequence[bytes], head: bytes) -> bool:
        kept = self._find(key)
        if kept is None or not kept.running:
            return False
        kept.head = head or kept.head
        kept.events += events[max(0, len(kept.events) - first) :]
        kept.expires_at_s = self._clock.now_s() + self._ttl_s
        return True

    async def finish(self, key: Key, first: int, events: Sequence[bytes], head: bytes, output: bytes) -> bool:
        if not await self.append(key, first, events, head):
            return False
        kept = self._kept[key]
        kept.running, kept.output = False, output
        return True

    async def lose(self, key: Key, first: int, events: Sequence[bytes], head: bytes) -> bool:
        kept = self._find(key)
        if kept is None or not self._lost(kept.record.owner) or first != len(kept.events):
            return False
        return await self.finish(key, first, events, head, kept.output)

    async def read(self, key: Key) -> Record | None:
        kept = self._find(key)
        if kept is None:
            return None
        record = kept.record
        return Record(
            owner=record.owner,
            owner_lost=self._lost(record.owner),
            running=kept.running,
            background=record.background,
            keeps_events=record.keeps_events,
            head=kept.head,
            output=kept.output,
            events=len(kept.events),
        )

    async def items(self, key: Key) -> list[bytes] | None:
        kept = self._find(key)
        return None if kept is None else list(kept.record.items)

    async def turn(self, key: Key) -> Turn | None:
        kept = self._find(key)
        if kept is None:
            return None
        kept.expires_at_s = self._clock.now_s() + self._ttl_s
        record = kept.record
        return Turn(previous=record.previous, running=kept.running, items=record.items, output=kept.output)

    async def events(self, key: Key, first: int) -> EventPage | None:
        kept = self._find(key)
        if kept is None:
            return None
        lost = self._lost(kept.record.owner)
        return EventPage(events=tuple(kept.events[first:]), running=kept.running, owner_lost=lost)

    async def delete(self, key: Key) -> bool:
        return self._find(key) is not None and self._kept.pop(key, None) is not None

    async def ask_cancel(self, key: Key, owner: str) -> None:
        self._cancels.setdefault(owner, set()).add(key)

    async def renew(self, owner: str, cancelled: Sequence[Key] = ()) -> list[Key]:
        self._leases[owner] = self._clock.now_s() + self._lease_s
        asked = self._cancels.get(owner, set[Key]())
        asked.difference_update(cancelled)
        return list(asked)

    def _find(self, key: Key) -> _Kept | None:
        kept = self._kept.get(key)
        if kept is not None and kept.expires_at_s <= self._clock.now_s():
            del self._kept[key]
            return None
        return kept

    def _lost(self, owner: str) -> bool:
        return self._leases.get(owner, 0.0) <= self._clock.now_s()


def _size(kept: _Kept) -> int:
    return kept.record.size_bytes + len(kept.output) + sum(map(len, kept.events))
