"""A worker as the index sees it, and questions to the index and its database."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from uuid import uuid4

from baton_kvindex.durable import SavedWorker
from baton_kvindex.index import link, split_ids
from baton_kvindex.store import RedisStore, Store

from baton import subjects
from baton.bus import Bus, Delivery
from baton.clock import SystemClock
from baton.errors import BusUnavailable, DeadlineExceeded, Unavailable
from baton.messages.base import Context, WorkerAddress
from baton.messages.index import (
    BlockEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvents,
    Match,
    Matched,
    ShadowPage,
    ShadowQuery,
    Tier,
)
from baton.messages.workers import Fingerprint, Heartbeat, Role
from tests.harness.heartbeats import MODEL_DIGEST, heartbeat
from tests.harness.limits import HANG_S

MODEL = MODEL_DIGEST


def chain(path: str) -> bytes:
    return b"".join(hashlib.blake2b(path[:end].encode(), digest_size=16).digest() for end in range(1, len(path) + 1))


@dataclass
class Cache:
    """A worker's cached blocks and the messages that report them."""

    name: str = "w"
    generation: int = 1
    sequence: int = 0
    held: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """Block on the device → the block before it."""
    pooled: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """The same of the blocks in the pool."""
    filed: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """The same of the blocks in the pool's file."""

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(worker=self.name, generation=self.generation)

    def restart(self) -> None:
        self.generation += 1
        self.sequence = 0
        self.held, self.pooled, self.filed = {}, {}, {}

    def on(self, tier: Tier) -> dict[bytes, bytes]:
        return (self.held, self.pooled, self.filed)[tier]

    def stored(self, path: str, tier: Tier = Tier.DEVICE) -> KvEvents:
        self.on(tier).update(link(b"", chain(path)))
        return self.changed(BlocksStored(parent=b"", blocks=chain(path), tier=tier))

    def removed(self, blocks: bytes, tier: Tier = Tier.DEVICE) -> KvEvents:
        for block in split_ids(blocks):
            self.on(tier).pop(block, None)
        return self.changed(BlocksRemoved(blocks=blocks, tier=tier))

    def cleared(self) -> KvEvents:
        self.held, self.pooled, self.filed = {}, {}, {}
        return self.changed(BlocksCleared())

    def changed(self, *events: BlockEvent) -> KvEvents:
        self.sequence += 1
        return KvEvents(
            worker=self.name, generation=self.generation, model_digest=MODEL, sequence=self.sequence, events=events
        )

    def fingerprint(self, tier: Tier = Tier.DEVICE) -> Fingerprint:
        blocks = self.on(tier)
        return Fingerprint.of(sum(int.from_bytes(block, "little") for block in blocks), len(blocks))

    def heartbeat(self) -> Heartbeat:
        return heartbeat(
            self.name,
            Role.PREFILL,
            generation=self.generation,
            events_sequence=self.sequence,
            held=self.fingerprint(),
            pooled=self.fingerprint(Tier.POOL),
            filed=self.fingerprint(Tier.FILE),
            held_sequence=self.sequence,
        )

    def pages(self, blocks_max: int = 2) -> list[ShadowPage]:
        """Return the shadow map, `blocks_max` to a page."""
        runs = [
            BlocksStored(parent=parent, blocks=block, tier=tier)
            for tier in Tier
            for block, parent in self.on(tier).items()
        ]
        starts = range(0, max(1, len(runs)), blocks_max)
        return [
            ShadowPage(
                worker=self.name,
                generation=self.generation,
                model_digest=MODEL,
                sequence=self.sequence,
                runs=tuple(runs[start : start + blocks_max]),
                next_cursor=number if number < len(starts) else 0,
            )
            for number, start in enumerate(starts, start=1)
        ]


@dataclass(kw_only=True)
class Worker(Cache):
    """A worker as the index sees it: heartbeats, events, and a shadow map behind a subject."""

    bus: Bus
    answers_queries: bool = True
    silent: bool = False
    queries: int = 0
    cursors: set[int] = field(default_factory=set[int])
    """Pages that were asked for."""
    page_blocks: int = 3
    """Pages are cut again for each answer, so a map that changes while it is read must fit into one page."""

    async def store(self, path: str, *, lost: bool = False) -> None:
        event = self.stored(path)
        if not lost:
            await self.send(event)

    async def remove(self, blocks: bytes) -> None:
        await self.send(self.removed(blocks))

    async def send(self, event: KvEvents, message_id: str = "") -> None:
        message_id = message_id or f"{event.worker}/{event.generation}/{event.sequence}"
        await self.bus.append(subjects.KV_STREAM, subjects.kv_events(self.name), event, message_id=message_id)

    async def beat(self) -> None:
        while True:
            if not self.silent:
                with suppress(BusUnavailable):
                    await self.bus.publish(subjects.HEARTBEAT, self.heartbeat())
            await asyncio.sleep(0.1)

    async def answer(self, delivery: Delivery) -> None:
        """Answer with a page of the shadow map."""
        self.queries += 1
        assert isinstance(delivery.message, ShadowQuery)
        self.cursors.add(delivery.message.cursor)
        if not self.answers_queries:
            return
        await delivery.respond(self.pages(self.page_blocks)[delivery.message.cursor])


@asynccontextmanager
async def working(bus: Bus, kind: type[Worker] = Worker) -> AsyncGenerator[Worker]:
    """Run a worker with a unique name, so that tests can share one server."""
    worker = kind(bus=bus, name=f"w-{uuid4().hex[:8]}")
    subscription = await bus.subscribe(subjects.shadow(worker.name), worker.answer)
    beating = asyncio.create_task(worker.beat())
    try:
        yield worker
    finally:
        beating.cancel()
        await asyncio.wait([beating])
        await subscription.unsubscribe()


async def match(
    bus: Bus, blocks: bytes, model_digest: str = MODEL, *, timeout_s: float = HANG_S
) -> dict[str, int] | None:
    """Query the index as the scheduler does; None: no index answered."""
    message = Match(context=Context(request="r", budget_s=timeout_s), model_digest=model_digest, blocks=blocks)
    try:
        answer = await bus.request(subjects.MATCH, message, timeout_s=timeout_s)
    except (Unavailable, DeadlineExceeded):
        return None
    assert isinstance(answer, Matched), answer
    return answer.held


async def until_held(bus: Bus, worker: Worker, path: str, count: int) -> None:
    """Wait until the index reports that the worker holds `count` leading blocks of `path`."""
    async with asyncio.timeout(HANG_S):
        while True:
            held = await match(bus, chain(path), timeout_s=1.0)
            if held is not None and held.get(worker.name, 0) == count:
                return
            await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Saved:
    """The complete content of a store."""

    stream_sequence: int = 0
    workers: dict[str, SavedWorker] = field(default_factory=dict[str, SavedWorker])


async def load_all(store: Store) -> Saved:
    workers: dict[str, SavedWorker] = {}

    async def take(worker: str, saved: SavedWorker) -> None:
        workers[worker] = saved

    return Saved(await store.load(take), workers)


async def written(redis_url: str, prefix: str, worker: Worker) -> dict[Tier, dict[bytes, bytes]]:
    """Return a worker's entries in Redis, by tier."""
    store = RedisStore(redis_url, clock=SystemClock(), prefix=prefix, timeout_s=1.0)
    try:
        saved = await load_all(store)
    finally:
        await store.close()
    found = {tier: dict[bytes, bytes]() for tier in Tier}
    for run in saved.workers[worker.name].runs:
        found[run.tier].update(link(run.parent, run.blocks))
    return found
