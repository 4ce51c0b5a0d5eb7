"""Membership: which members are on the bus, learned from heartbeats and goodbyes. Pure and bounded; time is passed in.

A member has a name. Each start of its process is a generation of the member, numbered higher than the last:

                hear, meet                     hear(leaving)
    unknown ──────Joined──────▶ live ─────────────Leaving────────────▶ live, leaving
                                 │ ▲ Restarted: a newer generation takes the place of a live one
            goodbye: Left        │ └─┘
            silence: Lost        ▼
                              departed ──hear, meet of a generation that may still come: Joined──▶ live
                                 │
                                 └──`forget_after_s`──▶ unknown

A goodbye ends a generation for good: later messages of it, or of an earlier one, are ignored. A lost generation may
join again, since its process may only have been paused. Generations come from wall clocks; a clock that was set back
hides a restarted member only until its earlier generation is forgotten.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from baton.messages.workers import Goodbye, Heartbeat

Beat = TypeVar("Beat")
Value = TypeVar("Value")

logger = logging.getLogger(__name__)

LOST_AFTER_S: Final = 1.5
"""Default silence after which a worker counts as lost: six heartbeats."""
FORGET_AFTER_S: Final = 60.0
"""Default time for which a departed member is remembered; a restarted process is back within it."""
MEMBERS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Joined:
    member: str
    generation: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The generation `ended` is over, and `generation` is live in its place."""

    member: str
    generation: int
    ended: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A live member takes no new work any more."""

    member: str
    generation: int


@dataclass(frozen=True, slots=True)
class Left:
    """A member said goodbye."""

    member: str
    generation: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A member was silent for too long."""

    member: str
    generation: int


Event = Joined | Restarted | Leaving | Left | Lost


@dataclass(slots=True)
class Member(Generic[Beat]):
    """A live member."""

    generation: int
    heard_s: float
    """Instant of its last heartbeat; before the first one, the instant at which this generation was first named."""
    beat: Beat | None = None
    leaving: bool = False


class Membership(Generic[Beat]):
    """Live members and the departed ones that are still remembered, at most `members_max` of each."""

    def __init__(
        self, *, lost_after_s: float, forget_after_s: float = FORGET_AFTER_S, members_max: int = MEMBERS_MAX
    ) -> None:
        self._lost_after_s = lost_after_s
        self._members_max = members_max
        self._live: dict[str, Member[Beat]] = {}
        self._departed = Recent[int](forget_after_s, members_max)
        """Name → the lowest generation that may still come."""
        self._warned = False

    # ------------------------------------------------------------ reading

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def get(self, name: str) -> Member[Beat] | None:
        return self._live.get(name)

    def is_live(self, name: str, generation: int) -> bool:
        """Return whether this generation is the live one."""
        member = self._live.get(name)
        return member is not None and member.generation == generation

    def beats(self) -> Iterator[Beat]:
        """Yield the newest heartbeat of each live member."""
        return (member.beat for member in self._live.values() if member.beat is not None)

    # ------------------------------------------------------------ changing

    def hear(self, name: str, generation: int, beat: Beat, now_s: float, *, leaving: bool = False) -> list[Event]:
        """Take a member's heartbeat and return the events; the heartbeat of an ended generation changes nothing."""
        events: list[Event] = []
        member = self._live.get(name)
        if member is None or member.generation != generation:
            events = self.meet(name, generation, now_s)
            member = self._live.get(name)
            if member is None or member.generation != generation:
                return events
        member.beat, member.heard_s = beat, now_s
        if leaving and not member.leaving:
            events.append(Leaving(name, generation))
        member.leaving = leaving
        return events

    def meet(self, name: str, generation: int, now_s: float) -> list[Event]:
        """Learn of a generation from another message; its heartbeat must come within `lost_after_s`."""
        member = self._live.get(name)
        if member is None:
            if generation < self._departed.get(name, generation) or not self._has_room(name):
                return []
            self._departed.pop(name)
            self._live[name] = Member(generation, now_s)
            return [Joined(name, generation)]
        if generation <= member.generation:
            return []
        self._live[name] = Member(generation, now_s)
        return [Restarted(name, generation, member.generation)]

    def goodbye(self, name: str, generation: int, now_s: float) -> list[Event]:
        """End this generation of a member and all before it; an unknown one is remembered as ended."""
        member = self._live.get(name)
        if member is not None and generation < member.generation:
            return []
        self._departed.put(name, max(generation + 1, self._departed.get(name, 0)), now_s)
        if member is None:
            return []
        del self._live[name]
        return [Left(name, member.generation)]

    def extend_deadlines(self, pause_s: float, now_s: float) -> None:
        """Move all deadlines by a pause of this process, see `PauseDetector`."""
        for member in self._live.values():
            member.heard_s = min(now_s, member.heard_s + pause_s)
        self._departed.extend_deadlines(pause_s, now_s)

    def expire(self, now_s: float) -> list[Event]:
        """End the members that were silent for too long, and forget members that departed long ago."""
        lost = [name for name, member in self._live.items() if now_s - member.heard_s > self._lost_after_s]
        events: list[Event] = []
        for name in lost:
            generation = self._live.pop(name).generation
            self._departed.put(name, generation, now_s)
            events.append(Lost(name, generation))
        self._departed.expire(now_s)
        return events

    def _has_room(self, name: str) -> bool:
        has_room = len(self._live) < self._members_max
        if not has_room and not self._warned:
            logger.warning("%d members are live, no room for %s and others", self._members_max, name)
        self._warned = not has_room
        return has_room


class Workers(Membership[Heartbeat]):
    """The workers on the bus, and the models that they served recently."""

    def __init__(
        self,
        *,
        lost_after_s: float = LOST_AFTER_S,
        forget_after_s: float = FORGET_AFTER_S,
        members_max: int = MEMBERS_MAX,
    ) -> None:
        super().__init__(lost_after_s=lost_after_s, forget_after_s=forget_after_s, members_max=members_max)
        self._models = Recent[Heartbeat | None](forget_after_s, members_max)
        """Model → the newest heartbeat of any of its workers."""

    def take(self, message: Heartbeat | Goodbye, now_s: float) -> list[Event]:
        """Take a worker's message on `subjects.HEARTBEAT`, and return the events."""
        address = message.address
        if isinstance(message, Goodbye):
            return self.goodbye(address.worker, address.generation, now_s)
        events = self.hear(address.worker, address.generation, message, now_s, leaving=message.draining)
        if self.is_live(address.worker, address.generation):
            self._models.put(message.model, message, now_s)
        return events

    def newest(self, model: str) -> Heartbeat | None:
        """Return the newest heartbeat of a worker that served this model within `forget_after_s`, live or not."""
        return self._models.get(model, None)

    def newest_beats(self) -> list[Heartbeat]:
        """Return what `newest` returns for each model."""
        return [beat for beat in self._models.values() if beat is not None]

    def extend_deadlines(self, pause_s: float, now_s: float) -> None:
        super().extend_deadlines(pause_s, now_s)
        self._models.extend_deadlines(pause_s, now_s)

    def expire(self, now_s: float) -> list[Event]:
        self._models.expire(now_s)
        return super().expire(now_s)


class Recent(Generic[Value]):
    """Values put recently: kept for `keep_s`, and at most `entries_max`; the oldest are dropped first."""

    def __init__(self, keep_s: float, entries_max: int) -> None:
        self._keep_s = keep_s
        self._entries_max = entries_max
        self._entries: OrderedDict[str, tuple[Value, float]] = OrderedDict()
        """Entries in the order in which they were put."""

    def get(self, key: str, default: Value) -> Value:
        entry = self._entries.get(key)
        return default if entry is None else entry[0]

    def values(self) -> Iterator[Value]:
        return (value for value, _ in self._entries.values())

    def put(self, key: str, value: Value, now_s: float) -> None:
        self._entries[key] = (value, now_s)
        self._entries.move_to_end(key)
        if len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)

    def pop(self, key: str) -> None:
        self._entries.pop(key, None)

    def extend_deadlines(self, pause_s: float, now_s: float) -> None:
        for key, (value, put_s) in self._entries.items():
            self._entries[key] = (value, min(now_s, put_s + pause_s))

    def expire(self, now_s: float) -> None:
        while self._entries:
            key, (_, put_s) = next(iter(self._entries.items()))
            if now_s - put_s <= self._keep_s:
                return
            del self._entries[key]
