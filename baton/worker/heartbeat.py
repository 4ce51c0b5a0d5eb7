"""The heartbeat of a worker: what schedulers, gateways and indexes know of its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from baton.connectors.pool_report import FileReport
from baton.engines.engine import EngineFacts, EngineLoad
from baton.messages.attempts import AttemptState, FinishReason
from baton.messages.workers import Heartbeat, PromotionFit
from baton.worker.admission import Identity
from baton.worker.events import EventPublisher
from baton.worker.ledger import Ledger
from baton.worker.rates import Rates, prompt_pairs
from baton.worker.role import WorkerRole

COMPUTING: Final = frozenset({AttemptState.QUEUED, AttemptState.RUNNING, AttemptState.COMPUTING})
"""States of attempts that the engine has to advance."""
LOADED_BYTE_GUESS_S: Final = 1e-9
"""Time per byte of a read from a disk."""
ENDED_WELL: Final = (FinishReason.STOP, FinishReason.LENGTH, "held")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """The parts of a worker that its heartbeat tells of."""

    identity: Identity
    role: WorkerRole
    facts: EngineFacts
    load: EngineLoad
    ledger: Ledger
    rates: Rates
    publisher: EventPublisher
    leaves_at_s: float


def _loading(file: FileReport, kv_bytes_per_token: int) -> PromotionFit:
    """Return the bandwidth of all reads from the pool's file so far."""
    if not file.loaded_tokens or file.loading_s <= 0:
        return PromotionFit(bytes_per_s=1 / LOADED_BYTE_GUESS_S)
    loaded_bytes = file.loaded_tokens * kv_bytes_per_token
    return PromotionFit(bytes_per_s=loaded_bytes / file.loading_s, samples=file.loaded_tokens)


def heartbeat_of(worker: WorkerState, now_s: float) -> Heartbeat:
    """Return the heartbeat of this instant."""
    identity, facts, ledger, rates, load = worker.identity, worker.facts, worker.ledger, worker.rates, worker.load
    states = [attempt.state for attempt in ledger]
    prompts = [(attempt.uncached_tokens, attempt.prompt_tokens) for attempt in ledger.prompts_queued()]
    elapsed_s = min(rates.prefill_elapsed_s(now_s), rates.prefill_s(*prompts[0])) if prompts else 0.0
    engine_blocks = round(load.kv_usage * facts.kv_blocks)
    waiting = sum(state in (AttemptState.RESERVED, AttemptState.QUEUED) for state in states)
    overbooked = ledger.waiting
    pulling = [attempt.kv.blocks for attempt in ledger if attempt.state is AttemptState.PULLING]
    drained_at_s = min(worker.leaves_at_s, worker.role.changes_at_s)
    return Heartbeat(
        address=msgspec.structs.replace(identity.address, role_epoch=worker.role.epoch),
        role=worker.role.role,
        model=identity.model_name,
        model_path=identity.model_path,
        model_digest=facts.model_digest,
        kv_identity=facts.kv_identity,
        engine=facts.engine,
        engine_kind=identity.engine_kind,
        parameters=facts.parameters,
        block_tokens=identity.block_tokens,
        context_tokens_max=facts.context_tokens_max,
        running=ledger.room.slots_used - waiting,
        waiting=waiting,
        overbooked=len(overbooked),
        overbooked_kv_tokens=ledger.waiting_blocks * facts.block_tokens,
        pulling=len(pulling),
        pulling_kv_blocks=sum(pulling),
        running_max=ledger.limits.slots,
        # Reserved blocks count as used, because the ledger admits by its own reservations.
        kv_blocks_used=min(max(ledger.room.blocks_used, engine_blocks), facts.kv_blocks),
        kv_blocks_total=facts.kv_blocks,
        kv_shared_share=ledger.room.shared_share,
        engine_block_tokens=facts.block_tokens,
        prefill_tokens_queued=sum(uncached_tokens for uncached_tokens, _ in prompts),
        prefill_pairs_queued=sum(prompt_pairs(prompt, uncached) for uncached, prompt in prompts),
        prefill_elapsed_s=elapsed_s,
        step_tokens_max=facts.step_tokens_max,
        steps=rates.steps(),
        transfers=rates.transfers(),
        promotion=rates.promotion() if facts.pool_blocks else None,
        pool_tokens_free=(facts.pool_blocks - load.pool.ready) * facts.block_tokens,
        loading=None if load.pool.file is None else _loading(load.pool.file, facts.kv_bytes_per_token),
        kv_bytes_per_token=facts.kv_bytes_per_token,
        computing=sum(state in COMPUTING for state in states),
        progress_tokens=load.prompt_tokens_computed + ledger.output_tokens,
        completed=sum(ledger.ends[end] for end in ENDED_WELL),
        attempts=tuple(attempt.key for attempt in ledger),
        events_sequence=worker.publisher.published_sequence,
        held=worker.publisher.held,
        pooled=worker.publisher.pooled,
        filed=worker.publisher.filed,
        held_sequence=worker.publisher.held_sequence,
        draining=ledger.draining,
        next_role=worker.role.next_role,
        leaves_in_s=max(0.0, drained_at_s - now_s) if ledger.draining else 0.0,
    )
