"""Reconciles the index with the workers: routes messages to each worker's state machine and applies what it releases.

Pure: the shell in `service.py` passes in messages and the time, asks `due_resyncs` and `due_reloads` what to fetch, and
passes in the results.

    heartbeats, goodbyes, time ──▶ membership ──▶ a machine for each generation of a worker, see `indexed_worker.py`
    events, pages, reloads ──▶ machine ──▶ events to apply now ──▶ trees, journal, speculation

Membership also learns of workers from the durable form and from events: their heartbeats have `lost_after_s` to come.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

import msgspec

from baton.errors import MalformedMessage
from baton.messages.base import WorkerAddress
from baton.messages.index import KvEvents, ShadowPage
from baton.messages.placement import Audited, Placed
from baton.messages.workers import Fingerprint, Goodbye, Heartbeat
from baton.node.membership import Event, Joined, Left, Lost, Restarted, Workers
from baton_kvindex.apply import PartlyCold, apply_events
from baton_kvindex.cold import Cold, ColdIndex
from baton_kvindex.config import IndexSettings
from baton_kvindex.counters import Counters
from baton_kvindex.durable import Batch, Journal, SavedWorker, WorkerState
from baton_kvindex.index import Index, IndexFull, IndexSize, NewIndex, Run, Tier, check_ids
from baton_kvindex.indexed_worker import IndexedWorker, SyncState
from baton_kvindex.speculation import Speculation, SpeculativePrompt
from baton_kvindex.trees import Trees

logger = logging.getLogger(__name__)


PLACED_WORKERS_MAX: Final = 8
"""Most workers of one placement: today one of each role."""


class LocalMatch(msgspec.Struct, frozen=True, gc=False):
    """Answer of memory for a prompt: leading blocks by worker, and the cold blocks that may add to them."""

    held: dict[str, int]
    pooled: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    filed: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """`held`, `pooled` and `filed` are those of `Matched`."""
    cold: Cold | None = None


class Reconciler:
    def __init__(self, new_index: NewIndex, settings: IndexSettings, journal: Journal) -> None:
        self._settings = settings
        self.journal = journal
        self._trees = Trees(new_index)
        self._speculation = Speculation(new_index)
        self._membership = Workers(lost_after_s=settings.lost_after_s)
        self._workers: dict[str, IndexedWorker] = {}
        self._due_reloads: list[tuple[WorkerAddress, Cold]] = []
        self.counters = Counters()
        self.stream_sequence = 0
        """Sequence of the newest message of the stream that was passed in."""

    # ------------------------------------------------------------ answers

    def match(self, model_digest: str, blocks: bytes) -> LocalMatch:
        """Return the leading blocks of a prompt by worker. Raises MalformedMessage for an invalid run."""
        held, pooled, filed = self._trees.match_tiers(model_digest, blocks)
        index = self._trees.models().get(model_digest)
        reach = max((*held.values(), *pooled.values(), *filed.values()), default=0)
        if isinstance(index, ColdIndex) and (wanted := index.behind(blocks, reach)):
            return LocalMatch(held, pooled, filed, Cold(index, wanted))
        return LocalMatch(held, pooled, filed)

    def speculative(self, model_digest: str, blocks: bytes, held: Mapping[str, int]) -> dict[str, int]:
        """Return the speculative leading blocks of the workers for which they are more than `held`."""
        leading = self._speculation.match(model_digest, blocks)
        return {worker: count for worker, count in leading.items() if count > held.get(worker, 0)}

    def workers(self) -> Mapping[str, IndexedWorker]:
        return self._workers

    def fingerprint(self, worker: str, tier: Tier = Tier.DEVICE) -> Fingerprint:
        return self._trees.fingerprint(worker, tier)

    def models(self) -> Mapping[str, Index]:
        """Return the index of each model."""
        return self._trees.models()

    def cold_indexes(self) -> list[ColdIndex]:
        return [index for index in self._trees.models().values() if isinstance(index, ColdIndex)]

    @property
    def speculative_blocks(self) -> int:
        return self._speculation.blocks

    def size(self) -> IndexSize:
        """Return the total size of all models' trees."""
        sizes = self._trees.sizes().values()
        return IndexSize(
            workers=len(self._workers),
            blocks=sum(size.blocks for size in sizes),
            holdings=sum(size.holdings for size in sizes),
        )

    def settled(self) -> bool:
        """Return whether no live worker waits for a resync, so that answers are complete."""
        return all(worker.is_settled for worker in self._workers.values())

    # ------------------------------------------------------------ durable form

    def state_of(self, worker: str) -> WorkerState | None:
        known = self._workers.get(worker)
        if known is None:
            return None
        # A state that is known to be wrong or incomplete must not be loaded as the one after that event.
        index = self._trees.models().get(known.model_digest)
        lacks_some = isinstance(index, ColdIndex) and index.has_forgotten(worker)
        sequence = 0 if lacks_some else known.sound_sequence
        return WorkerState(generation=known.address.generation, model_digest=known.model_digest, sequence=sequence)

    def dump(self, worker: str) -> list[Run]:
        return self._trees.dump(worker)

    def take_batch(self) -> Batch:
        """Return all unwritten changes; the journal takes them back if the write fails. Raises Cold."""
        return self.journal.take(self.stream_sequence, self.state_of, self.dump)

    def go_on_from(self, written: Mapping[str, WorkerState]) -> None:
        """Become the index that writes; `written` is what the previous one has written."""
        present = {worker: state for worker in self._workers if (state := self.state_of(worker)) is not None}
        self.journal.go_on(written, present)

    def restore_worker(self, name: str, saved: SavedWorker, now_s: float) -> None:
        """Restore a worker from its durable form. Raises Cold."""
        state = saved.state
        self._trees.load(name, state.model_digest, saved.runs)
        if self._membership.meet(name, state.generation, now_s):
            self._workers[name] = IndexedWorker(name, state, self._settings, self.counters)
        else:
            self._trees.drop(name)

    def begin(self, stream_sequence: int, now_s: float) -> None:
        """Start after this event of the stream. The workers' heartbeats have `lost_after_s` from now on to come."""
        self.stream_sequence = stream_sequence
        self._membership.extend_deadlines(inf, now_s)

    # ------------------------------------------------------------ messages

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        name, generation = heartbeat.address.worker, heartbeat.address.generation
        known = self._find(name, generation)
        if known is not None and self._is_foreign(known, heartbeat.model_digest):
            return
        worker = self._admit(name, generation, heartbeat.model_digest, self._membership.take(heartbeat, now_s))
        if worker is not None:
            worker.on_heartbeat(heartbeat, now_s)
            self._compare(worker)
            self._speculation.on_heartbeat(name, heartbeat.attempts, now_s)

    def on_goodbye(self, goodbye: Goodbye, now_s: float) -> None:
        self._end(self._membership.take(goodbye, now_s))

    def on_events(self, message: KvEvents, stream_sequence: int, now_s: float) -> None:
        # Not the maximum: a stream that was created again counts from 1.
        self.stream_sequence = stream_sequence
        name, generation = message.worker, message.generation
        worker = self._find(name, generation)
        if worker is None:
            events = self._membership.meet(name, generation, now_s)
            worker = self._admit(name, generation, message.model_digest, events)
        if worker is not None and not self._is_foreign(worker, message.model_digest):
            worker.on_events(message)
            self._advance(worker)

    def on_odd_message(self, stream_sequence: int) -> None:
        """Count a message of the stream that is not from the worker that its subject names."""
        self.stream_sequence = stream_sequence
        self.counters.malformed += 1

    def on_placed(self, placed: Placed, now_s: float) -> None:
        """Add the prompt as speculative blocks of its workers. Raises MalformedMessage."""
        check_ids(placed.blocks)
        if len(placed.workers) > PLACED_WORKERS_MAX:
            raise MalformedMessage(f"a placement on {len(placed.workers)} workers: it has {PLACED_WORKERS_MAX} at most")
        prompt = SpeculativePrompt(
            attempt=placed.context.attempt,
            model_digest=placed.model_digest,
            blocks=placed.blocks,
            placed_s=now_s,
            until_s=now_s + placed.context.budget_s,
        )
        for address in placed.workers:
            worker = self._find(address.worker, address.generation)
            if worker is None:
                self.counters.unknown_workers += 1
            elif not self._is_foreign(worker, placed.model_digest):
                self._speculation.add(address.worker, placed.context.request, prompt)

    def on_audited(self, audited: Audited) -> None:
        """Compare a worker's hits with the predictions. Raises MalformedMessage."""
        if min(audited.predicted_tokens, audited.cached_tokens) < 0:
            raise MalformedMessage("an audit with a negative number of tokens")
        worker = self._find(audited.address.worker, audited.address.generation)
        if worker is None:
            self.counters.unknown_workers += 1
        elif worker.on_audited(audited):
            logger.warning("resyncing %s: its hits are fewer than half of those predicted", audited.address.worker)

    # ------------------------------------------------------------ time

    def extend_deadlines(self, pause_s: float, now_s: float) -> None:
        """Move all deadlines by a pause of this process, see `PauseDetector`."""
        self._membership.extend_deadlines(pause_s, now_s)
        for worker in self._workers.values():
            worker.extend_deadlines(pause_s, now_s)

    def on_tick(self, now_s: float) -> None:
        """Drop lost workers, and detect workers whose newest events are lost. Called many times a second."""
        self._end(self._membership.expire(now_s))
        for worker in self._workers.values():
            worker.on_tick(now_s)

    # ------------------------------------------------------------ resyncs

    def due_resyncs(self, now_s: float) -> list[WorkerAddress]:
        """Return the workers to resync now. Each resync must end in `on_pages` or `on_resync_failed`."""
        return [worker.address for worker in self._workers.values() if worker.start_resync(now_s)]

    def on_pages(self, address: WorkerAddress, pages: Sequence[ShadowPage]) -> None:
        """Replace a worker's blocks by its shadow map, and apply the events that waited. Raises Cold."""
        worker = self._in_resync(address)
        if worker is None:
            return
        if any((page.generation, page.model_digest) != (address.generation, worker.model_digest) for page in pages):
            self.counters.stale += 1
            self.on_resync_failed(address)
            return
        try:
            self._trees.load(address.worker, worker.model_digest, [run for page in pages for run in page.runs])
        except (MalformedMessage, IndexFull) as error:
            logger.warning("the shadow map of %s cannot be loaded: %s", address.worker, error)
            self.counters.full += isinstance(error, IndexFull)
            self.counters.malformed += isinstance(error, MalformedMessage)
            self.on_resync_failed(address)
            return
        self.journal.rewrite(address.worker)
        worker.on_pages(pages[0].sequence if pages else 0)
        self._compare(worker)
        self._advance(worker)

    def on_resync_failed(self, address: WorkerAddress) -> None:
        """Retry later, unless the missing events arrive meanwhile."""
        worker = self._in_resync(address)
        if worker is not None:
            worker.on_resync_failed()
            self._advance(worker)

    def _in_resync(self, address: WorkerAddress) -> IndexedWorker | None:
        worker = self._find(address.worker, address.generation)
        return worker if worker is not None and worker.state is SyncState.RUNNING else None

    # ------------------------------------------------------------ cold blocks

    def due_reloads(self) -> list[tuple[WorkerAddress, Cold]]:
        """Return the reloads to start now. Each must end in `on_reloaded`."""
        due, self._due_reloads = self._due_reloads, []
        return due

    def on_reloaded(self, address: WorkerAddress) -> None:
        """Continue with a worker: the blocks that it needed are hot, or were given up."""
        worker = self._find(address.worker, address.generation)
        if worker is not None:
            worker.on_reloaded()
            self._advance(worker)

    def forget_cold(self) -> int:
        """Give up all cold blocks; return how many workers must be resynced for it."""
        workers = [worker for index in self.cold_indexes() for worker in index.forget_cold()]
        for worker in workers:
            self._workers[worker].on_cold_lost()
        return len(workers)

    # ------------------------------------------------------------ one worker

    def _find(self, name: str, generation: int) -> IndexedWorker | None:
        """Return the worker if this is its present generation."""
        worker = self._workers.get(name)
        return worker if worker is not None and worker.generation == generation else None

    def _is_foreign(self, worker: IndexedWorker, model_digest: str) -> bool:
        """Return whether a message names another model than the worker's, and count it."""
        # A generation has one model; a message that names another one is not trusted.
        is_foreign = worker.model_digest != model_digest
        self.counters.foreign_models += is_foreign
        return is_foreign

    def _admit(self, name: str, generation: int, model_digest: str, events: Sequence[Event]) -> IndexedWorker | None:
        """Return the worker of this generation, created if it is new; None, and counted, if the generation is over."""
        if any(isinstance(event, Joined | Restarted) for event in events):
            self._drop(name)
            self.journal.rewrite(name)
            self._trees.assign(name, model_digest)
            state = WorkerState(generation=generation, model_digest=model_digest, sequence=0)
            self._workers[name] = IndexedWorker(name, state, self._settings, self.counters)
        worker = self._find(name, generation)
        self.counters.stale += worker is None
        return worker

    def _end(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Left | Lost):
                self._drop(event.member)

    def _drop(self, worker: str) -> None:
        if self._workers.pop(worker, None) is not None:
            self._trees.drop(worker)
            self._speculation.drop(worker)
            self.journal.rewrite(worker)

    def _advance(self, worker: IndexedWorker) -> None:
        """Apply all events that a worker's machine releases."""
        while (message := worker.next_events()) is not None:
            self.journal.touch(message.worker, message.sequence - 1)
            index = self._trees.assign(message.worker, message.model_digest)
            self._trees.note_tiers(message.model_digest, message.events)
            try:
                reason = apply_events(message, index, self.journal, self._speculation, self.counters)
            except PartlyCold as partly:
                worker.on_cold(partly.rest)
                self._due_reloads.append((worker.address, partly.cold))
            else:
                worker.on_applied(message, reason)
                self._compare(worker)

    def _compare(self, worker: IndexedWorker) -> None:
        """Compare the fingerprints of index and worker, once both are for the same event."""
        if worker.fingerprint_is_due:
            held = tuple(self._trees.fingerprint(worker.name, tier) for tier in Tier)
            if not worker.on_fingerprint(held):
                logger.warning(
                    "resyncing %s: the fingerprints of its %d blocks here, %d in its pool and %d in its file differ "
                    "from its own after event %d",
                    *(worker.name, *(each.blocks for each in held), worker.sequence),
                )
