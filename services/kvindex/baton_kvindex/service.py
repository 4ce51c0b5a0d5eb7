"""The index as a service: receives, lets the follower decide, answers, and writes behind."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from typing import Final

from baton import subjects
from baton.bus import Bus, Delivery
from baton.clock import Clock
from baton.errors import BatonError, MalformedMessage
from baton.messages import (
    Goodbye,
    Heartbeat,
    KvEvents,
    Match,
    Matched,
    Refused,
    ShadowPage,
    ShadowQuery,
    WorkerAddress,
)
from baton.telemetry import Tracing
from baton_kvindex.config import IndexSettings
from baton_kvindex.durable import Journal, Saved
from baton_kvindex.follower import Follower, FollowerOptions
from baton_kvindex.index import ID_BYTES
from baton_kvindex.radix import RadixIndex
from baton_kvindex.store import Store, StoreEmptied, StoreUnavailable

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05
HEARTBEATS_S: Final = 0.5
"""Two heartbeats: after this time every live worker is known."""
PAGES_MAX: Final = 10_000
"""Of one resync, so that a worker whose cursor never ends cannot hold one for ever."""
LAST_WRITE_S: Final = 2.0


class IndexService:
    """Runs until it is cancelled. The bus is the caller's to close; the store is closed here."""

    def __init__(
        self, *, bus: Bus, store: Store | None, clock: Clock, tracing: Tracing, settings: IndexSettings
    ) -> None:
        self._bus = bus
        self._store = store
        self._clock = clock
        self._tracing = tracing
        self._settings = settings
        self._resyncs = asyncio.Semaphore(settings.resyncs_max)
        self.follower = Follower(
            RadixIndex,
            FollowerOptions(
                dead_after_s=settings.dead_after_s,
                behind_s=settings.behind_s,
                resync_interval_s=settings.resync_interval_s,
            ),
            Journal(settings.unwritten_blocks_max),
        )

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            if self._store is not None:
                stack.push_async_callback(self._store.close)
            self.follower.restore(await self._load(), self._clock.now_s())
            heartbeats = await self._bus.subscribe(subjects.HEARTBEAT, self._on_heartbeat)
            stack.push_async_callback(heartbeats.unsubscribe)
            events = await self._bus.follow(
                subjects.KV_STREAM, subjects.KV_EVENTS_ALL, self._on_events, after=self.follower.stream_sequence
            )
            stack.push_async_callback(events.unsubscribe)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(tasks))
                if self._store is not None:
                    tasks.create_task(self._write_behind(self._store))
                await self._settle()
                matches = await self._bus.subscribe(subjects.MATCH, self._on_match, group=subjects.INDEXES)
                stack.push_async_callback(matches.unsubscribe)
                logger.info("the index answers")

    # ------------------------------------------------------------ messages

    async def _on_match(self, delivery: Delivery) -> None:
        """Answer; the bus turns what is raised here into `Refused`."""
        message = delivery.message
        if not isinstance(message, Match):
            raise MalformedMessage(f"the index answers Match, not {type(message).__name__}")
        with self._tracing.span("match", parent=message.context.trace) as span:
            held = self.follower.match(message.model_digest, message.blocks)
            span.set("workers", len(held))
            await delivery.respond(Matched(held=held))

    async def _on_heartbeat(self, delivery: Delivery) -> None:
        match delivery.message:
            case Heartbeat() as heartbeat:
                self.follower.on_heartbeat(heartbeat, self._clock.now_s())
            case Goodbye(address=address):
                self.follower.on_goodbye(address)
            case other:
                logger.warning("%s on %s is not for the index", type(other).__name__, delivery.subject)

    async def _on_events(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, KvEvents):
            self.follower.on_events(delivery.message, delivery.stream_sequence, self._clock.now_s())

    # ------------------------------------------------------------ resync

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self.follower.on_tick(self._clock.now_s())
            for address in self.follower.due_resyncs(self._clock.now_s()):
                tasks.create_task(self._resync(address))
            await self._clock.sleep(TICK_S)

    async def _resync(self, address: WorkerAddress) -> None:
        try:
            async with self._resyncs:
                pages = await self._read_pages(address.worker)
        except (BatonError, TimeoutError) as error:
            logger.warning("resync of %s failed: %s", address.worker, error)
            self.follower.on_resync_failed(address)
        else:
            self.follower.on_pages(address, pages)
            blocks = sum(len(run.blocks) for page in pages for run in page.runs) // ID_BYTES
            logger.info("resynced %s: %d blocks in %d pages", address.worker, blocks, len(pages))

    async def _read_pages(self, worker: str) -> list[ShadowPage]:
        pages: list[ShadowPage] = []
        cursor = 0
        while len(pages) < PAGES_MAX:
            page = await self._bus.request(
                subjects.shadow(worker), ShadowQuery(cursor=cursor), timeout_s=self._settings.resync_page_timeout_s
            )
            if isinstance(page, Refused):
                raise page.error.to_error()
            if not isinstance(page, ShadowPage) or page.worker != worker:
                raise MalformedMessage(f"what answers for {worker} is no page of its shadow map: {type(page).__name__}")
            pages.append(page)
            cursor = page.next_cursor
            if not cursor:
                return pages
        raise MalformedMessage(f"the shadow map of {worker} does not end after {PAGES_MAX} pages")

    async def _settle(self) -> None:
        """Wait until every live worker is known and synced, so that a new replica does not answer from half a tree."""
        started_s = self._clock.now_s()
        while (waited_s := self._clock.now_s() - started_s) < self._settings.settle_s:
            if waited_s >= HEARTBEATS_S and self.follower.settled():
                return
            await self._clock.sleep(TICK_S)
        logger.warning("answering before every worker is synced")

    # ------------------------------------------------------------ durable form

    async def _load(self) -> Saved:
        if self._store is None:
            return Saved()
        try:
            saved = await self._store.load()
        except StoreUnavailable as error:
            logger.warning("starting empty, workers will be queried: %s", error)
            return Saved()
        logger.info("loaded %d workers up to event %d of the stream", len(saved.workers), saved.stream_sequence)
        return saved

    async def _write_behind(self, store: Store) -> None:
        """Write what changed every `write_interval_s`. While Redis is down, changes wait in bounded form."""
        failing = False
        try:
            while True:
                await self._clock.sleep(self._settings.write_retry_s if failing else self._settings.write_interval_s)
                failing = not await self._write(store, failing=failing)
        finally:
            # A clean end leaves the newest state. Where Redis is down, the next start catches up from the workers.
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WRITE_S):
                    written = True
                    while written and self.follower.has_unwritten:
                        written = await self._write(store, failing=failing)

    async def _write(self, store: Store, *, failing: bool) -> bool:
        if not self.follower.has_unwritten:
            return not failing
        batch = self.follower.take_batch()
        written = False
        try:
            await store.write(batch)
            written = True
        except StoreEmptied as error:
            logger.warning("writing the whole index again: %s", error)
            self.follower.rewrite_all()
            return True
        except StoreUnavailable as error:
            if not failing:
                logger.warning("serving from memory, writes wait: %s", error)
            return False
        finally:
            if not written:
                self.follower.give_back(batch)
        if failing:
            logger.info("Redis takes writes again")
        return True
