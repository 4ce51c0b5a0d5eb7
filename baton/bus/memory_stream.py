"""Streams of the in-memory bus: a log with sequences, and its followers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from baton.bus.delivery import Arrival, HandlerRunner, matches, parent_wildcard
from baton.bus.protocol import BusLimits, Handler, Retention
from baton.clock import Clock


class MemoryStream:
    """Keeps messages up to a limit of age and bytes; remembers message ids for the duplicate window."""

    def __init__(self, subject: str, clock: Clock, limits: BusLimits) -> None:
        self.pattern = parent_wildcard(subject)
        self.last_sequence = 0
        self.appended = asyncio.Event()
        """Set by the next append, which also replaces it for later waiters."""
        self.retention = Retention(age_s_max=limits.stream_age_s_max, bytes_max=limits.stream_bytes_max)
        self._clock = clock
        self._limits = limits
        self._kept: OrderedDict[int, tuple[float, str, bytes]] = OrderedDict()
        self._kept_bytes = 0
        self._ids: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def append(self, subject: str, payload: bytes, message_id: str = "") -> int:
        """Store a message, unless one with this id was stored lately; without an id, in any case."""
        now_s = self._clock.now_s()
        self._forget(now_s)
        if message_id in self._ids:
            return self._ids[message_id][1]
        self.last_sequence += 1
        if message_id:
            self._ids[message_id] = (now_s, self.last_sequence)
        self._kept[self.last_sequence] = (now_s, subject, payload)
        self._kept_bytes += len(payload)
        self._forget(now_s)
        self.appended.set()
        self.appended = asyncio.Event()
        return self.last_sequence

    def first_from(self, sequence: int) -> Arrival | None:
        """Return the first kept message at or after `sequence`."""
        first_kept = next(iter(self._kept), self.last_sequence + 1)
        found = max(sequence, first_kept)
        if found not in self._kept:
            return None
        _, subject, payload = self._kept[found]
        return Arrival(subject, payload, stream_sequence=found)

    def find(self, subject: str, after: int | None) -> Arrival | None:
        """Return the first message on a subject beyond a sequence, or the last one."""
        self._forget(self._clock.now_s())
        kept = reversed(self._kept) if after is None else (each for each in self._kept if each > after)
        sequence = next((each for each in kept if self._kept[each][1] == subject), None)
        return None if sequence is None else self.first_from(sequence)

    def _forget(self, now_s: float) -> None:
        while self._kept:
            appended_s, _, payload = next(iter(self._kept.values()))
            is_old = now_s - appended_s > self.retention.age_s_max
            if not is_old and self._kept_bytes <= self.retention.bytes_max:
                break
            self._kept.popitem(last=False)
            self._kept_bytes -= len(payload)
        while self._ids:
            message_id, (seen_s, _) = next(iter(self._ids.items()))
            if now_s - seen_s <= self._limits.duplicate_window_s:
                break
            del self._ids[message_id]


class Follower:
    """Reads a stream from a sequence on. The stream waits for a slow handler; nothing is dropped."""

    def __init__(
        self,
        stream: MemoryStream,
        subject: str,
        handler: Handler,
        after: int,
        limits: BusLimits,
        on_end: Callable[[Follower], None],
    ) -> None:
        self._stream = stream
        self.subject = subject
        self._next = after + 1 if after <= stream.last_sequence else 1
        self._limits = limits
        self._on_end = on_end
        self._runner = HandlerRunner(handler)
        self.counts = self._runner.counts
        self._closed = False
        self._task = asyncio.create_task(self._read(), name=f"follow {subject}")

    async def unsubscribe(self) -> None:
        self._closed = True
        self._on_end(self)
        await self._runner.stop(self._task, self._limits.handler_grace_s)

    async def _read(self) -> None:
        while not self._closed:
            arrival = self._stream.first_from(self._next)
            if arrival is None:
                await self._stream.appended.wait()
                continue
            self._next = arrival.stream_sequence + 1
            if matches(self.subject, arrival.subject):
                await self._runner.handle(arrival)
            # A handler that never waits must not block the event loop.
            await asyncio.sleep(0)
