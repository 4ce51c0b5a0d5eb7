"""Metrics of a worker: ledger, engine, transfers, KV events. Each scrape reads them from their owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from baton.clock import Clock
from baton.connectors.pool_report import FileReport, PoolReport
from baton.engines.engine import Engine, EngineFacts, TransferFigures
from baton.errors import BatonError
from baton.messages.index import Tier
from baton.telemetry import Reading, catalogue
from baton.worker.admission import Identity
from baton.worker.events import EventPublisher
from baton.worker.frames import FrameSender
from baton.worker.ledger import Ledger
from baton.worker.rates import Rates
from baton.worker.role import WorkerRole
from baton.worker.shadow import ShadowMap


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReadings:
    """Source of readings from the parts of one worker."""

    identity: Identity
    role: WorkerRole
    facts: EngineFacts
    engine: Engine
    clock: Clock
    ledger: Ledger
    refusals: Counter[str]
    rates: Rates
    frames: FrameSender
    publisher: EventPublisher
    shadow: ShadowMap

    def __call__(self) -> Iterator[Reading]:
        identity, rates = self.identity, self.rates
        names = (identity.address.worker, self.role.role, identity.model_name, self.facts.engine)
        yield Reading(catalogue.WORKER, 1, names)
        yield Reading(catalogue.ROLE_CHANGES, self.role.epoch)
        yield from self._ledger()
        yield from self._engine()
        yield Reading(catalogue.ENGINE_BUSY, rates.busy_s(self.clock.now_s()))
        yield Reading(catalogue.ENGINE_STEPS, rates.output_steps)
        yield Reading(catalogue.PREFILL_RATE, rates.prefill_tokens_per_s)
        yield Reading(catalogue.DECODE_RATE, 1 / rates.token_interval_s)
        yield Reading(catalogue.TRANSFER_RATE, rates.transfer_bytes_per_s)
        yield Reading(catalogue.EVENTS_PUBLISHED, self.publisher.published_sequence)
        yield Reading(catalogue.EVENTS_WAITING, self.publisher.waiting_messages)
        for tier in Tier:
            yield Reading(catalogue.SHADOW, self.shadow.fingerprint(tier).blocks, (tier.name.lower(),))
        yield Reading(catalogue.KV_CACHED, self.shadow.engine_blocks)
        yield Reading(catalogue.FRAMES_DROPPED, self.frames.dropped_frames)

    def _ledger(self) -> Iterator[Reading]:
        ledger = self.ledger
        for state, count in Counter(attempt.state for attempt in ledger).items():
            yield Reading(catalogue.HELD, count, (state,))
        for end, count in ledger.ends.items():
            yield Reading(catalogue.ENDED, count, (end,))
        for reason, count in self.refusals.items():
            yield Reading(catalogue.REFUSED, count, (reason,))
        yield Reading(catalogue.SLOTS, ledger.room.slots_used, ("used",))
        yield Reading(catalogue.SLOTS, ledger.limits.slots - ledger.room.slots_used, ("free",))
        yield Reading(catalogue.KV_RESERVED, ledger.room.blocks_used)
        yield Reading(catalogue.PREFILL_QUEUED, ledger.prefill_tokens_queued)
        yield Reading(catalogue.ENGINE_OUTPUT, ledger.output_tokens)

    def _engine(self) -> Iterator[Reading]:
        try:
            load, transfers = self.engine.load(), self.engine.transfers()
        except BatonError:
            return  # The engine is dead, and the worker is about to end.
        in_use = round(load.kv_usage * self.facts.kv_blocks)
        leased = min(load.leased_blocks, in_use)
        for state, blocks in (("used", in_use - leased), ("leased", leased), ("free", self.facts.kv_blocks - in_use)):
            yield Reading(catalogue.KV_BLOCKS, blocks, (state,))
        yield Reading(catalogue.ENGINE_REQUESTS, load.running, ("running",))
        yield Reading(catalogue.ENGINE_REQUESTS, load.waiting, ("waiting",))
        yield Reading(catalogue.ENGINE_PROMPT, load.prompt_tokens_computed, ("computed",))
        yield Reading(catalogue.ENGINE_PROMPT, load.prompt_tokens_cached, ("cached",))
        yield Reading(catalogue.ENGINE_PROMPT, load.prompt_tokens_promoted, ("promoted",))
        yield Reading(catalogue.ENGINE_PROMPT, load.prompt_tokens_pulled, ("pulled",))
        yield Reading(catalogue.PREEMPTIONS, load.preemptions)
        yield from _pool(load.pool)
        yield from _transfers(transfers)


def _pool(pool: PoolReport) -> Iterator[Reading]:
    yield Reading(catalogue.POOL_SLOTS, pool.pinned, ("pinned",))
    yield Reading(catalogue.POOL_SLOTS, pool.ready - pool.pinned, ("ready",))
    yield Reading(catalogue.POOL_SLOTS, pool.slots - pool.ready, ("free",))
    yield Reading(catalogue.POOL_BLOCKS, pool.saved_blocks, ("saved",))
    yield Reading(catalogue.POOL_BLOCKS, pool.evicted_blocks, ("evicted",))
    yield Reading(catalogue.POOL_BLOCKS, pool.dropped_blocks, ("dropped",))
    yield Reading(catalogue.POOL_BLOCKS, pool.stranded_blocks, ("stranded",))
    yield Reading(catalogue.POOL_LOANS, pool.lent_tokens, ("lent",))
    yield Reading(catalogue.POOL_LOANS, pool.borrowed_tokens, ("borrowed",))
    yield Reading(catalogue.POOL_LOANS_FAILED, pool.borrows_failed)
    yield from _file(pool.file or FileReport())


def _file(file: FileReport) -> Iterator[Reading]:
    yield Reading(catalogue.FILE_SLOTS, file.ready, ("ready",))
    yield Reading(catalogue.FILE_SLOTS, file.slots - file.ready, ("free",))
    yield Reading(catalogue.FILE_BLOCKS, file.written_blocks, ("written",))
    yield Reading(catalogue.FILE_BLOCKS, file.evicted_blocks, ("evicted",))
    yield Reading(catalogue.FILE_BLOCKS, file.deferred_blocks, ("deferred",))
    yield Reading(catalogue.FILE_BLOCKS, file.failed_blocks, ("failed",))
    yield Reading(catalogue.FILE_LOADED, file.loaded_tokens)
    yield Reading(catalogue.FILE_LOADING, file.loading_s)
    yield Reading(catalogue.FILE_UNREAD, file.loads_late, ("late",))
    yield Reading(catalogue.FILE_UNREAD, file.loads_declined, ("declined",))


def _transfers(transfers: TransferFigures) -> Iterator[Reading]:
    for backend, totals in transfers.pulls.done.items():
        yield Reading(catalogue.PULLS, totals.pulls, (backend,))
        yield Reading(catalogue.PULLED, totals.moved_bytes, (backend,))
        yield Reading(catalogue.PULL_WAITING, totals.waiting_s, (backend,))
        yield Reading(catalogue.PULL_MOVING, totals.moving_s, (backend,))
    for cause, count in transfers.pulls.failed.items():
        yield Reading(catalogue.PULL_FAILURES, count, (cause,))
    if (agents := transfers.agents) is None:
        return
    for kind, count in (("leases", agents.leases), ("pulls", agents.pulls), ("parked", agents.parked)):
        yield Reading(catalogue.AGENT_OPEN, count, (kind,))
    yield Reading(catalogue.SERVED, agents.served_bytes)
    yield Reading(catalogue.LEASES_LOST, agents.leases_expired, ("expired",))
    yield Reading(catalogue.LEASES_LOST, agents.leases_revoked, ("revoked",))
    yield Reading(catalogue.CHECKSUM_FAILURES, agents.checksum_failures)
    yield Reading(catalogue.PULL_FALLBACKS, agents.fallbacks)
    yield Reading(catalogue.LANES_RETIRED, agents.lanes_retired)
