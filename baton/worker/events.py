"""Publishes engine block events as `KvEvents`: shadow map, sequence numbers, JetStream, resync pages.

    engine.events() ──▶ follow (shadow map) ──▶ changes ──▶ publish (sequence, fingerprint, JetStream)

Changes are gathered for some milliseconds before they are numbered: each message costs NATS and every index more than
its blocks do, and while many sequences run, every step fills blocks.

When JetStream is slow or unreachable, changes gather up to a limit, and `follow` stops reading. The engine then drops
events, which shows as a gap in its sequence and clears the shadow map. Nothing grows without bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from baton import subjects
from baton.blocks import ID_BYTES
from baton.bus import Delivery
from baton.engines.engine import EngineBlocksStored, EngineEventBatch
from baton.errors import BatonError, MalformedMessage
from baton.messages.base import ErrorReport, Refused, WorkerAddress
from baton.messages.index import (
    BlockEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvents,
    ShadowPage,
    ShadowQuery,
    Tier,
)
from baton.messages.workers import Fingerprint
from baton.node.ports import Ports
from baton.worker.shadow import ShadowMap, count_ids

_log = logging.getLogger("baton.worker")

CHANGES_MAX: Final = 1024
"""Changes that wait for a number, and messages that wait for the stream, beyond which no engine event is read."""
GATHER_S: Final = 0.02
"""Time from the first change to the message that tells of it; replays of placement have events arrive 50 ms late."""
MESSAGE_IDS_MAX: Final = 16_384
"""Block ids in one message or page: 256 KiB, a quarter of the smallest usual payload limit."""
_THREAD_TOKENS_MIN: Final = 2048
"""A batch with more tokens is hashed on a thread, where it cannot delay token frames."""
_RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_SNAPSHOTS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The shadow map at one sequence, split into pages; all pages of a resync come from one snapshot."""

    sequence: int
    pages: list[tuple[BlocksStored, ...]]


class EventPublisher:
    """Follows one engine. `follow` and `publish` are tasks; `answer` handles the worker's shadow subject."""

    def __init__(self, ports: Ports, address: WorkerAddress, model_digest: str, shadow: ShadowMap) -> None:
        self._bus = ports.bus
        self._clock = ports.clock
        self._threads = ports.threads
        self._address = address
        self._model_digest = model_digest
        self._shadow = shadow
        self._sequence = 0
        self._changes: list[BlockEvent] = []
        """What the shadow map has applied since the newest number."""
        self._numbered: deque[KvEvents] = deque()
        """Messages that the stream has not stored."""
        self._changed = asyncio.Event()
        """Set while there are any of the two."""
        self._has_room = asyncio.Event()
        self._snapshots: OrderedDict[int, _Snapshot] = OrderedDict()
        self._snapshot_numbers = count(1)
        # The map is changed on a thread and read on the event loop: one at a time.
        self._map_free = asyncio.Lock()
        self.published_sequence = 0
        """Sequence of the newest message that the stream has stored."""
        self.held = Fingerprint()
        """Fingerprint of the shadow map after message `held_sequence`, stored or not; not of changes after it."""
        self.pooled = Fingerprint()
        """The same of the blocks in the pool."""
        self.filed = Fingerprint()
        """The same of the blocks in the pool's file."""
        self.held_sequence = 0

    @property
    def waiting_messages(self) -> int:
        """Messages that the stream has not stored yet."""
        return len(self._numbered) + bool(self._changes)

    async def follow(self, batches: AsyncIterator[EngineEventBatch]) -> None:
        """Apply every batch of the engine, in order, and gather the changes."""
        async for batch in batches:
            async with self._map_free:
                if sum(len(e.tokens) for e in batch.events if isinstance(e, EngineBlocksStored)) >= _THREAD_TOKENS_MIN:
                    changes = await self._threads.run(self._shadow.apply, batch)
                else:
                    changes = self._shadow.apply(batch)
                self._changes += changes
            if self._changes:
                self._changed.set()
            while max(len(self._changes), len(self._numbered)) >= CHANGES_MAX:
                self._has_room.clear()
                await self._has_room.wait()

    def _number_changes(self) -> None:
        """Make messages of all changes so far; the map must be free, so that number and fingerprint fit each other."""
        changes, self._changes = self._changes, []
        for part in split_events(changes, MESSAGE_IDS_MAX):
            self._sequence += 1
            message = KvEvents(
                worker=self._address.worker,
                generation=self._address.generation,
                model_digest=self._model_digest,
                sequence=self._sequence,
                events=part,
            )
            self._numbered.append(message)
        self.held, self.pooled, self.filed = map(self._shadow.fingerprint, Tier)
        self.held_sequence = self._sequence

    async def publish(self) -> None:
        """Number changes and store every message, in order; retry for as long as the stream is unreachable."""
        while True:
            await self._changed.wait()
            await self._clock.sleep(GATHER_S)
            async with self._map_free:
                self._number_changes()
            self._changed.clear()
            while self._numbered:
                await self._store(self._numbered[0])
                self.published_sequence = self._numbered.popleft().sequence
                self._has_room.set()

    async def _store(self, message: KvEvents) -> None:
        subject = subjects.kv_events(self._address.worker)
        message_id = f"{message.worker}/{message.generation}/{message.sequence}"
        for attempt in count():
            try:
                await self._bus.append(subjects.KV_STREAM, subject, message, message_id=message_id)
                return
            except BatonError as error:
                if attempt == 0:
                    _log.warning("KV events wait because the stream cannot store them: %s", error)
                await self._clock.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])

    async def holds(self, blocks: Sequence[bytes]) -> list[bool]:
        """Return, for each of the blocks, whether the shadow map holds it."""
        async with self._map_free:
            return [block in self._shadow for block in blocks]

    def describe(self) -> str:
        """Return a summary of the engine's events so far, in words."""
        shadow = self._shadow
        return (
            f"{len(shadow)} blocks held in {shadow.batches} batches, with {shadow.ignored_blocks} engine blocks ignored"
        )

    # ------------------------------------------------------------ resync

    async def answer(self, delivery: Delivery) -> None:
        """Answer a `ShadowQuery` with one page."""
        query = delivery.message
        if not isinstance(query, ShadowQuery):
            wrong = MalformedMessage(f"{type(query).__name__} is no message for a worker's shadow subject")
            await delivery.respond(Refused(error=ErrorReport.of(wrong)))
            return
        number, page = divmod(query.cursor, 1 << 32)
        if query.cursor == 0:
            number = await self._take_snapshot()
        snapshot = self._snapshots.get(number)
        if snapshot is None or not 0 <= page < max(1, len(snapshot.pages)):
            gone = MalformedMessage(f"cursor {query.cursor} is not known any more; begin again at 0")
            await delivery.respond(Refused(error=ErrorReport.of(gone)))
            return
        last = page + 1 >= len(snapshot.pages)
        await delivery.respond(
            ShadowPage(
                worker=self._address.worker,
                generation=self._address.generation,
                model_digest=self._model_digest,
                sequence=snapshot.sequence,
                runs=snapshot.pages[page] if snapshot.pages else (),
                next_cursor=0 if last else (number << 32) + page + 1,
            )
        )

    async def _take_snapshot(self) -> int:
        async with self._map_free:
            # The pages hold changes that have no number yet.
            self._number_changes()
            runs = await self._threads.run(lambda: list(self._shadow.runs(MESSAGE_IDS_MAX)))
            sequence = self._sequence
        number = next(self._snapshot_numbers)
        pages = [tuple(e for e in page if isinstance(e, BlocksStored)) for page in split_events(runs, MESSAGE_IDS_MAX)]
        self._snapshots[number] = _Snapshot(sequence, pages)
        while len(self._snapshots) > _SNAPSHOTS_MAX:
            self._snapshots.popitem(last=False)
        return number


def split_events(events: Sequence[BlockEvent], ids_max: int) -> Iterator[tuple[BlockEvent, ...]]:
    """Split changes into messages of at most `ids_max` block ids, in order."""
    part: list[BlockEvent] = []
    ids = 0
    for event in (piece for whole in events for piece in _split_event(whole, ids_max)):
        # An event costs as much room as a few ids even if it names none.
        weight = 4 + count_ids(event)
        if part and ids + weight > ids_max:
            yield tuple(part)
            part, ids = [], 0
        part.append(event)
        ids += weight
    if part:
        yield tuple(part)


def _split_event(event: BlockEvent, ids_max: int) -> Iterator[BlockEvent]:
    if isinstance(event, BlocksCleared):
        yield event
        return
    step = max(1, ids_max - 4) * ID_BYTES
    for start in range(0, len(event.blocks), step):
        blocks = event.blocks[start : start + step]
        if isinstance(event, BlocksStored):
            parent = event.blocks[start - ID_BYTES : start] if start else event.parent
            yield BlocksStored(parent=parent, blocks=blocks, tier=event.tier)
        else:
            yield BlocksRemoved(blocks=blocks, tier=event.tier)
