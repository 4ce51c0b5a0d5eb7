"""The index as a service: receives messages, lets the reconciler decide, answers, and writes behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from opentelemetry.trace import SpanKind

from baton import subjects
from baton.bus import Delivery, Subscription
from baton.errors import (
    BatonError,
    BusUnavailable,
    ConfigurationError,
    MalformedMessage,
    StoreUnavailable,
    Unavailable,
)
from baton.messages.base import Refused, WorkerAddress
from baton.messages.index import IndexQuery, KvEvents, Match, Matched, ShadowPage, ShadowQuery, Tier
from baton.messages.placement import Audited, Placed
from baton.messages.workers import Goodbye, Heartbeat
from baton.node.failure_detector import PauseDetector
from baton.node.service import Node, subscribed
from baton.telemetry import Reading, catalogue
from baton_kvindex.cold import ColdIndex
from baton_kvindex.config import IndexSettings
from baton_kvindex.durable import Journal, SavedWorker
from baton_kvindex.index import ID_BYTES
from baton_kvindex.reconciler import LocalMatch, Reconciler
from baton_kvindex.report import make_report
from baton_kvindex.spill import Spill
from baton_kvindex.store import Store
from baton_kvindex.writer import Writer

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05
HEARTBEATS_S: Final = 0.5
"""Time of two heartbeats, after which every live worker is known."""
FETCHES_MAX: Final = 256
"""Most matches that wait for Redis at the same time; further ones are answered from memory."""
RESYNC_BLOCKS_MAX: Final = 1 << 22
"""Most blocks of one shadow map; each run and each page counts as one more."""
RESYNC_S_MAX: Final = 30.0
"""Longest time to read one shadow map, so that a worker whose map never ends does not hold up other resyncs."""


class IndexService:
    """The index's shell; it closes the store at its end."""

    def __init__(self, settings: IndexSettings, node: Node, store: Store | None) -> None:
        self._ports = node.ports
        self._bus = node.ports.bus
        self._clock = node.ports.clock
        self._tracing = node.tracing
        self._metrics = node.metrics
        self._store = store
        self._settings = settings
        self._resyncs = asyncio.Semaphore(settings.resyncs_max)
        self._instance = node.ports.new_id()[:8]
        self._matches: list[Subscription] = []
        """Subscriptions to matches; empty before this index answers, and once it drains."""
        self._writer: Writer | None = None
        self._tasks: asyncio.TaskGroup
        self._behind: asyncio.TaskGroup | None = None
        """Tasks that are cancelled when this index ends."""
        self._fetching = 0
        # Without a store, the journal keeps no changes.
        journal = Journal(settings.unwritten_blocks_max if store is not None else 0)
        self.reconciler = Reconciler(ColdIndex, settings, journal)
        if settings.memory_bytes_max and store is None:
            raise ConfigurationError("memory_bytes_max needs Redis for the blocks beyond it", param="memory_bytes_max")
        cold = store.cold(self._instance) if store is not None and settings.memory_bytes_max else None
        self._spill = Spill(ports=node.ports, store=cold, reconciler=self.reconciler, settings=settings)
        node.metrics.read(self._readings)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Answer inside this context. At its end, received requests are answered, and the newest state is written."""
        async with AsyncExitStack() as stack:
            if self._store is not None:
                stack.push_async_callback(self._store.close)
            stack.push_async_callback(self._spill.close)
            await self._load()
            handlers = {
                subjects.HEARTBEAT: self._on_heartbeat,
                subjects.PLACED: self._on_notice,
                subjects.AUDITS: self._on_notice,
                subjects.INDEX_QUERIES: self._on_query,
            }
            await stack.enter_async_context(subscribed(self._bus, handlers))
            events = await self._bus.follow(
                subjects.KV_STREAM, subjects.KV_EVENTS_ALL, self._on_events, after=self.reconciler.stream_sequence
            )
            stack.push_async_callback(events.unsubscribe)
            stack.push_async_callback(self.drain)
            async with asyncio.TaskGroup() as self._tasks:
                behind = self._tasks.create_task(self._work_behind())
                await self._settle()
                self._matches.append(await self._bus.subscribe(subjects.MATCH, self._on_match, group=subjects.INDEXES))
                self._matches.append(await self._bus.subscribe(subjects.MATCH_ALL, self._on_match))
                logger.info("the index answers")
                yield
                behind.cancel()

    async def drain(self) -> None:
        """Leave the queue group."""
        matches, self._matches = self._matches, []
        for each in matches:
            await each.unsubscribe()
        if matches:
            logger.info("draining: the newest state is written")

    async def check_ready(self) -> None:
        """Raise Unavailable unless a `Match` that comes now is answered, and from a complete tree."""
        if not self._matches:
            raise Unavailable("the index does not answer yet: it loads, or waits for the workers' shadow maps")
        if not self._bus.connected:
            raise BusUnavailable("the message bus cannot be reached")

    def _readings(self) -> Iterator[Reading]:
        reconciler, counters = self.reconciler, self.reconciler.counters
        size = reconciler.size()
        yield Reading(catalogue.INDEX_BLOCKS, size.blocks)
        for tier in Tier:
            holdings = sum(reconciler.fingerprint(worker, tier).blocks for worker in reconciler.workers())
            yield Reading(catalogue.INDEX_HOLDINGS, holdings, (tier.name.lower(),))
        yield Reading(catalogue.INDEX_WORKERS, size.workers)
        indexes = reconciler.cold_indexes()
        yield Reading(catalogue.INDEX_COLD, sum(index.cold_blocks for index in indexes))
        yield Reading(catalogue.INDEX_MEMORY, sum(index.used_bytes for index in indexes))
        yield Reading(catalogue.INDEX_FORGOTTEN, sum(index.forgotten for index in indexes))
        yield Reading(catalogue.INDEX_RELOADS, self._spill.reloads)
        yield Reading(catalogue.INDEX_SPECULATIVE, reconciler.speculative_blocks)
        writes = self._writer is not None and self._writer.is_writing
        yield Reading(catalogue.INDEX_WRITER, writes)
        yield Reading(catalogue.INDEX_UNWRITTEN, writes and bool(reconciler.journal))
        if self._writer is not None:
            yield Reading(catalogue.INDEX_STORE_UP, not self._writer.is_failing)
        yield Reading(catalogue.INDEX_SEQUENCE, reconciler.stream_sequence)
        for result, count in (
            ("applied", counters.applied),
            ("duplicate", counters.duplicates),
            ("stale", counters.stale),
            ("malformed", counters.malformed),
            ("oversized", counters.oversized),
            ("foreign_model", counters.foreign_models),
            ("unknown_worker", counters.unknown_workers),
            ("full", counters.full),
        ):
            yield Reading(catalogue.INDEX_MESSAGES, count, (result,))
        for reason, count in counters.resyncs.items():
            yield Reading(catalogue.INDEX_RESYNCS, count, (reason,))
        for worker, known in reconciler.workers().items():
            yield Reading(catalogue.INDEX_AUDIT_PREDICTED, known.audit.predicted_tokens, (worker,))
            yield Reading(catalogue.INDEX_AUDIT_CACHED, known.audit.cached_tokens, (worker,))

    # ------------------------------------------------------------ messages

    async def _on_match(self, delivery: Delivery) -> None:
        """Answer a match; the bus turns exceptions raised here into `Refused`."""
        message = delivery.message
        if not isinstance(message, Match):
            raise MalformedMessage(f"the index answers Match, not {type(message).__name__}")
        with self._tracing.span("match", parent=message.context.trace, kind=SpanKind.SERVER) as span:
            started_s = self._clock.now_s()
            local = self.reconciler.match(message.model_digest, message.blocks)
            span.set({"baton.blocks": len(message.blocks) // ID_BYTES, "baton.workers": len(local.held)})
            if local.cold is None or not self._may_fetch():
                matched = self._matched(message, local)
                self._metrics.observe(catalogue.MATCH_DURATION, self._clock.now_s() - started_s)
                await delivery.respond(matched)
                return
        # Deliveries come one at a time, and this one waits for Redis, so it gets a task.
        self._fetching += 1
        self._tasks.create_task(self._match_cold(delivery, message, local))

    def _may_fetch(self) -> bool:
        return self._spill.is_reachable and self._fetching < FETCHES_MAX

    async def _match_cold(self, delivery: Delivery, message: Match, local: LocalMatch) -> None:
        try:
            with self._tracing.span("match cold", parent=message.context.trace, kind=SpanKind.SERVER) as span:
                local = await self._spill.complete(local, message.model_digest, message.blocks)
                span.set({"baton.workers": len(local.held)})
                await delivery.respond(self._matched(message, local))
        except BatonError as error:
            logger.warning("an answer was lost: %s", error)
        finally:
            self._fetching -= 1

    def _matched(self, message: Match, found: LocalMatch) -> Matched:
        speculative = self.reconciler.speculative(message.model_digest, message.blocks, found.held)
        return Matched(held=found.held, pooled=found.pooled, filed=found.filed, speculative=speculative)

    async def _on_notice(self, delivery: Delivery) -> None:
        match delivery.message:
            case Placed() as placed:
                self.reconciler.on_placed(placed, self._clock.now_s())
            case Audited() as audited:
                self.reconciler.on_audited(audited)
            case other:
                raise MalformedMessage(f"{type(other).__name__} on {delivery.subject} is not for the index")

    async def _on_query(self, delivery: Delivery) -> None:
        query = delivery.message
        if not isinstance(query, IndexQuery):
            raise MalformedMessage(f"{type(query).__name__} on {delivery.subject} is not for the index")
        writes = self._writer is not None and self._writer.is_writing
        local = self.reconciler.match(query.model_digest, query.blocks)
        found = await self._spill.complete(local, query.model_digest, query.blocks)
        answer = await make_report(
            self.reconciler, self._ports.threads, query, found, instance=self._instance, writes=writes
        )
        await self._bus.publish(subjects.index_answers(query.asker), answer)

    async def _on_heartbeat(self, delivery: Delivery) -> None:
        match delivery.message:
            case Heartbeat() as heartbeat:
                self.reconciler.on_heartbeat(heartbeat, self._clock.now_s())
            case Goodbye() as goodbye:
                self.reconciler.on_goodbye(goodbye, self._clock.now_s())
            case other:
                logger.warning("%s on %s is not for the index", type(other).__name__, delivery.subject)

    async def _on_events(self, delivery: Delivery) -> None:
        message = delivery.message
        if isinstance(message, KvEvents) and delivery.subject == subjects.kv_events(message.worker):
            self.reconciler.on_events(message, delivery.stream_sequence, self._clock.now_s())
            self._start_reloads()
        else:
            self.reconciler.on_odd_message(delivery.stream_sequence)

    def _start_reloads(self) -> None:
        if self._behind is not None:
            for address, cold in self.reconciler.due_reloads():
                self._behind.create_task(self._spill.reload(address, cold))

    # ------------------------------------------------------------ resync

    async def _work_behind(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._behind = tasks
            tasks.create_task(self._spill.run())
            if self._store is not None:
                self._writer = Writer(
                    ports=self._ports,
                    store=self._store,
                    reconciler=self.reconciler,
                    spill=self._spill,
                    settings=self._settings,
                )
                tasks.create_task(self._writer.run())
            try:
                await self._watch(tasks)
            finally:
                # Events that arrive during the last write start no more reloads.
                self._behind = None

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        pauses = PauseDetector(interval_s=TICK_S)
        while True:
            now_s = self._clock.now_s()
            if pause_s := pauses.local_pause_s(now_s, connected=self._bus.connected):
                self.reconciler.extend_deadlines(pause_s, now_s)
            self.reconciler.on_tick(now_s)
            for address in self.reconciler.due_resyncs(now_s):
                tasks.create_task(self._resync(address))
            self._start_reloads()
            await self._clock.sleep(TICK_S)

    async def _resync(self, address: WorkerAddress) -> None:
        try:
            async with self._resyncs, self._clock.timeout(RESYNC_S_MAX):
                pages = await self._read_pages(address.worker)
        except (BatonError, TimeoutError) as error:
            logger.warning("resync of %s failed: %s", address.worker, str(error) or f"not read in {RESYNC_S_MAX:.0f} s")
            self.reconciler.counters.malformed += isinstance(error, MalformedMessage)
            self.reconciler.on_resync_failed(address)
        else:
            await self._spill.until_here(lambda: self.reconciler.on_pages(address, pages))
            blocks = sum(len(run.blocks) for page in pages for run in page.runs) // ID_BYTES
            logger.info("resynced %s: %d blocks in %d pages", address.worker, blocks, len(pages))

    async def _read_pages(self, worker: str) -> list[ShadowPage]:
        pages: list[ShadowPage] = []
        cursor = blocks = 0
        while blocks <= RESYNC_BLOCKS_MAX:
            page = await self._bus.request(
                subjects.shadow(worker), ShadowQuery(cursor=cursor), timeout_s=self._settings.resync_page_timeout_s
            )
            if isinstance(page, Refused):
                raise page.error.to_error()
            if not isinstance(page, ShadowPage) or page.worker != worker:
                raise MalformedMessage(f"the answer for {worker} is no page of its shadow map: {type(page).__name__}")
            pages.append(page)
            blocks += 1 + sum(1 + len(run.blocks) // ID_BYTES for run in page.runs)
            cursor = page.next_cursor
            if not cursor:
                return pages
        raise MalformedMessage(f"the shadow map of {worker} does not end after {len(pages)} pages")

    async def _settle(self) -> None:
        """Wait until every live worker is known and synced, so that a new replica does not answer incompletely."""
        started_s = self._clock.now_s()
        while (waited_s := self._clock.now_s() - started_s) < self._settings.settle_s:
            if waited_s >= HEARTBEATS_S and self.reconciler.settled():
                return
            await self._clock.sleep(TICK_S)
        logger.warning("answering before every worker is synced")

    # ------------------------------------------------------------ durable form

    async def _load(self) -> None:
        stream_sequence = 0
        if self._store is not None:
            try:
                stream_sequence = await self._store.load(self._take_saved)
            except StoreUnavailable as error:
                logger.warning("starting without the durable form, workers will be queried: %s", error)
        self.reconciler.begin(stream_sequence, self._clock.now_s())
        logger.info("loaded %d workers up to event %d of the stream", len(self.reconciler.workers()), stream_sequence)

    async def _take_saved(self, worker: str, saved: SavedWorker) -> None:
        await self._spill.until_here(lambda: self.reconciler.restore_worker(worker, saved, self._clock.now_s()))
        await self._spill.make_room()
