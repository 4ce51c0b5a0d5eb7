"""A worker as the index sees it, and questions to the index and its database, for tests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from uuid import uuid4

from baton_kvindex.index import link
from baton_kvindex.store import RedisStore

from baton import subjects
from baton.bus import Bus, Delivery
from baton.errors import BusUnavailable, DeadlineExceeded, Unavailable
from baton.messages import (
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    Context,
    Heartbeat,
    KvEvents,
    Match,
    Matched,
    Role,
    ShadowPage,
    ShadowQuery,
    WorkerAddress,
)

MODEL = "digest"


def chain(path: str) -> bytes:
    return b"".join(hashlib.blake2b(path[:end].encode(), digest_size=16).digest() for end in range(1, len(path) + 1))


@dataclass
class Worker:
    """A worker as the index sees it: heartbeats, events, and a shadow map behind a subject."""

    bus: Bus
    name: str
    generation: int = 1
    sequence: int = 0
    held: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    answers_queries: bool = True
    silent: bool = False
    queries: int = 0

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(worker=self.name, generation=self.generation)

    async def store(self, path: str, *, lost: bool = False) -> None:
        self.held |= dict(link(b"", chain(path)))
        await self._send(BlocksStored(parent=b"", blocks=chain(path)), lost=lost)

    async def remove(self, block: bytes) -> None:
        del self.held[block]
        await self._send(BlocksRemoved(blocks=block), lost=False)

    async def _send(self, event: BlockEvent, *, lost: bool) -> None:
        self.sequence += 1
        message = KvEvents(
            worker=self.name,
            generation=self.generation,
            model_digest=MODEL,
            sequence=self.sequence,
            events=(event,),
        )
        if not lost:
            message_id = f"{self.name}/{self.generation}/{self.sequence}"
            await self.bus.append(subjects.KV_STREAM, subjects.kv_events(self.name), message, message_id=message_id)

    async def beat(self) -> None:
        while True:
            if not self.silent:
                with suppress(BusUnavailable):
                    await self.bus.publish(subjects.HEARTBEAT, self.heartbeat())
            await asyncio.sleep(0.1)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            address=self.address,
            role=Role.PREFILL,
            model="tiny",
            model_path="tiny",
            model_digest=MODEL,
            engine="simulated",
            block_tokens=32,
            context_tokens_max=4096,
            running_max=8,
            kv_blocks_total=100,
            engine_block_tokens=32,
            prefill_tokens_per_s=1000.0,
            decode_tokens_per_s=100.0,
            transfer_bytes_per_s=1e9,
            kv_bytes_per_token=1024,
            events_sequence=self.sequence,
        )

    async def answer(self, delivery: Delivery) -> None:
        """Page through the shadow map, three blocks at a time."""
        self.queries += 1
        assert isinstance(delivery.message, ShadowQuery)
        if not self.answers_queries:
            return
        start = delivery.message.cursor
        runs = [BlocksStored(parent=parent, blocks=block) for block, parent in self.held.items()]
        page = ShadowPage(
            worker=self.name,
            generation=self.generation,
            model_digest=MODEL,
            sequence=self.sequence,
            runs=tuple(runs[start : start + 3]),
            next_cursor=start + 3 if start + 3 < len(runs) else 0,
        )
        await delivery.respond(page)


@asynccontextmanager
async def working(bus: Bus) -> AsyncGenerator[Worker]:
    """A worker with a name of its own, so that tests can share one server."""
    worker = Worker(bus, f"w-{uuid4().hex[:8]}")
    subscription = await bus.subscribe(subjects.shadow(worker.name), worker.answer)
    beating = asyncio.create_task(worker.beat())
    try:
        yield worker
    finally:
        beating.cancel()
        await asyncio.wait([beating])
        await subscription.unsubscribe()


async def match(bus: Bus, blocks: bytes, model_digest: str = MODEL) -> dict[str, int] | None:
    """Ask as the scheduler does; None while no index answers."""
    message = Match(context=Context(request="r", budget_s=1.0), model_digest=model_digest, blocks=blocks)
    try:
        answer = await bus.request(subjects.MATCH, message, timeout_s=1.0)
    except (Unavailable, DeadlineExceeded):
        return None
    assert isinstance(answer, Matched), answer
    return answer.held


async def until_held(bus: Bus, worker: Worker, path: str, count: int, *, within_s: float = 5.0) -> None:
    """Wait until the index says that the worker holds `count` leading blocks of `path`."""
    async with asyncio.timeout(within_s):
        while True:
            held = await match(bus, chain(path))
            if held is not None and held.get(worker.name, 0) == count:
                return
            await asyncio.sleep(0.02)


async def written(redis_url: str, prefix: str, worker: Worker) -> dict[bytes, bytes]:
    """Return what Redis has of a worker."""
    store = RedisStore(redis_url, prefix=prefix, timeout_s=1.0)
    try:
        saved = await store.load()
    finally:
        await store.close()
    return {block: parent for run in saved.workers[worker.name].runs for block, parent in link(run.parent, run.blocks)}
