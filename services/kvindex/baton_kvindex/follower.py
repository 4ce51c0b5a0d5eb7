"""Keeps the index true to the workers: applies their events in order, and sees which worker needs a resync.

Pure: the shell in `service.py` hands in messages and the time, asks `due_resyncs` whom to query, and hands in
the pages. Per worker:

    events with the next sequence ──▶ applied          an older sequence, an older generation ──▶ dropped
    a gap, an unknown parent, a malformed event, a heartbeat that names an event which did not come within
    `behind_s`, a worker first seen that already has sent events, a fingerprint that differs
    ──▶ NEEDED ──▶ RUNNING ──▶ pages replace all that it held ──▶ events that came meanwhile are applied on top ──▶ NO

Storing and removing are idempotent and the last word on a block wins. So pages may be read while the worker
changes: everything after the first page's sequence is applied again.
Heartbeats carry a fingerprint of all that the worker holds after one of its events. It is compared once exactly that
event was applied; where it differs, what is held here has drifted without a word, and the worker is read anew.
A new generation, a Goodbye or silence drops what the worker held at once.
Where an index keeps a part of what it knows elsewhere (`cold.py`), messages that need it wait until it is back.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.errors import MalformedMessage
from baton.messages import (
    Audited,
    Fingerprint,
    Heartbeat,
    KvEvents,
    Placed,
    ShadowPage,
    WorkerAddress,
)
from baton_kvindex.apply import PartlyCold, apply_events
from baton_kvindex.cold import Cold, ColdIndex
from baton_kvindex.counters import Counters
from baton_kvindex.durable import Batch, Journal, Saved, SavedWorker, WorkerState
from baton_kvindex.index import Index, IndexFull, IndexSize, NewIndex, Run, check_ids
from baton_kvindex.life import Life, Resync
from baton_kvindex.speculation import Expectation, Speculation
from baton_kvindex.trees import Trees

logger = logging.getLogger(__name__)

DRIFT_DOUBLINGS_MAX = 6
"""Of the time between two resyncs of one worker, while they do not help."""
GONE_WORKERS_MAX = 4096
"""How many workers that said Goodbye are remembered, so that their late events are not taken for a new life."""


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    dead_after_s: float = 1.5
    """A worker without a heartbeat for this long is dead."""
    behind_s: float = 1.0
    """An event that a heartbeat named and that did not come for this long is lost."""
    resync_interval_s: float = 0.5
    """The least time between two resyncs of one worker."""
    listed_after_s: float = 0.25
    """A heartbeat that comes this long after a placement lists the attempt, if the worker has it."""
    expected_blocks_max: int = 1 << 18
    """Blocks of all prompts that were placed and are not held yet."""
    waiting_events_max: int = 4096
    """Messages of one worker that are kept while its resync runs."""


class Follower:
    def __init__(self, new_index: NewIndex, options: FollowerOptions, journal: Journal) -> None:
        self._options = options
        self._journal = journal
        self._trees = Trees(new_index)
        self._speculation = Speculation(
            new_index, blocks_max=options.expected_blocks_max, listed_after_s=options.listed_after_s
        )
        self._workers: dict[str, Life] = {}
        self._gone: OrderedDict[str, int] = OrderedDict()
        """Worker → the generation that said Goodbye."""
        self._due_recalls: list[tuple[WorkerAddress, Cold]] = []
        self.counters = Counters()
        self.stream_sequence = 0
        """The newest message of the stream that was handed in."""

    # ------------------------------------------------------------ answers

    def match(self, model_digest: str, blocks: bytes) -> dict[str, int]:
        return self._trees.match(model_digest, blocks)

    def behind(self, model_digest: str, blocks: bytes, held: Mapping[str, int]) -> Cold | None:
        """Return what is cold of a prompt of which this is held in memory; None: nothing, as mostly."""
        index = self._trees.models().get(model_digest)
        if not isinstance(index, ColdIndex):
            return None
        wanted = index.behind(blocks, max(held.values(), default=0))
        return Cold(index, wanted) if wanted else None

    def coming(self, model_digest: str, blocks: bytes) -> dict[str, int]:
        """Return the leading blocks that workers will hold when what was placed on them is computed."""
        return self._speculation.match(model_digest, blocks)

    def lives(self) -> Mapping[str, Life]:
        """Return what is known of each worker."""
        return self._workers

    def fingerprint(self, worker: str) -> Fingerprint:
        return self._trees.fingerprint(worker)

    def models(self) -> Mapping[str, Index]:
        """Return the index of each model."""
        return self._trees.models()

    @property
    def expected_blocks(self) -> int:
        """Blocks of prompts that were placed, and are not held yet."""
        return self._speculation.blocks

    def state_of(self, worker: str) -> WorkerState | None:
        known = self._workers.get(worker)
        if known is None:
            return None
        # Whoever loads what is known to be wrong, or not all, must not take it for the state after that event.
        index = self._trees.models().get(known.model_digest)
        lacks_some = isinstance(index, ColdIndex) and index.has_forgotten(worker)
        sequence = 0 if known.doubted or lacks_some else known.sequence
        return WorkerState(generation=known.generation, model_digest=known.model_digest, sequence=sequence)

    def dump(self, worker: str) -> list[Run]:
        return self._trees.dump(worker)

    def size(self) -> IndexSize:
        """Return the sizes of all models' trees together."""
        sizes = self._trees.sizes().values()
        return IndexSize(
            workers=len(self._workers),
            blocks=sum(size.blocks for size in sizes),
            holdings=sum(size.holdings for size in sizes),
        )

    def settled(self) -> bool:
        """Whether no live worker waits for a resync, so that answers are as good as they get."""
        return all(known.resync is Resync.NO for known in self._workers.values() if known.live)

    @property
    def has_unwritten(self) -> bool:
        return bool(self._journal)

    def unwritten_workers(self) -> list[str]:
        """Return the workers of which all is to be written."""
        return self._journal.whole_workers()

    def take_batch(self) -> Batch:
        """Return what waits to be written; `give_back` it where it could not be. Raises Cold."""
        return self._journal.take(self.stream_sequence, self.state_of, self.dump)

    def give_back(self, batch: Batch) -> None:
        self._journal.give_back(batch)

    def go_on_from(self, written: Mapping[str, WorkerState]) -> None:
        """Write from now on, in the place of whoever wrote this."""
        present = {worker: state for worker in self._workers if (state := self.state_of(worker)) is not None}
        self._journal.go_on(written, present)

    def forget_old_changes(self) -> None:
        """Call this now and then while another index writes."""
        self._journal.rotate()

    # ------------------------------------------------------------ what comes in

    def restore(self, saved: Saved, now_s: float) -> None:
        """Begin with what was written down."""
        for worker, entry in saved.workers.items():
            self.restore_worker(worker, entry)
        self.begin(saved.stream_sequence, now_s)

    def restore_worker(self, worker: str, entry: SavedWorker) -> None:
        """Know what was written down of a worker. Raises Cold."""
        state = entry.state
        self._trees.assign(worker, state.model_digest).load(worker, entry.runs)
        self._workers[worker] = Life(state.generation, state.model_digest, 0.0, state.sequence)

    def begin(self, stream_sequence: int, now_s: float) -> None:
        """Go on after this event of the stream. Each worker then has `dead_after_s` to show that it lives."""
        self.stream_sequence = stream_sequence
        for known in self._workers.values():
            known.heard_s = now_s

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        address = heartbeat.address
        known = self._life(address.worker, address.generation, heartbeat.model_digest, now_s)
        if known is None:
            return
        known.on_heartbeat(heartbeat, now_s)
        self._compare(address.worker, known)
        self._speculation.on_heartbeat(address.worker, heartbeat.attempts, now_s)

    def on_placed(self, placed: Placed, now_s: float) -> None:
        """Expect that the workers will hold the prompt. Raises MalformedMessage for a broken run."""
        check_ids(placed.blocks)
        expectation = Expectation(
            attempt=placed.context.attempt,
            model_digest=placed.model_digest,
            blocks=placed.blocks,
            placed_s=now_s,
            until_s=now_s + placed.context.budget_s,
        )
        for address in placed.workers:
            known = self._known(address)
            if known is not None and known.model_digest != placed.model_digest:
                self.counters.foreign_models += 1
            elif known is not None:
                self._speculation.expect(address.worker, placed.context.request, expectation)

    def on_audited(self, audited: Audited) -> None:
        """Compare a worker's hits with what was promised of them; one that lastingly falls short is read anew."""
        known = self._known(audited.address)
        if known is None:
            return
        if known.audit.note(audited.predicted_tokens, audited.cached_tokens, known.block_tokens):
            logger.warning("%s has half as many hits as it should: it is read anew", audited.address.worker)
            self.counters.shortfalls += 1
            known.read_anew()

    def on_goodbye(self, address: WorkerAddress) -> None:
        known = self._workers.get(address.worker)
        if known is not None and address.generation < known.generation:
            self.counters.stale += 1
            return
        self._gone[address.worker] = max(address.generation, self._gone.pop(address.worker, 0))
        if len(self._gone) > GONE_WORKERS_MAX:
            self._gone.popitem(last=False)
        self._drop(address.worker)

    def on_odd_message(self, stream_sequence: int) -> None:
        """Something in the stream is no message of the worker that its subject names."""
        self.stream_sequence = stream_sequence
        self.counters.malformed += 1

    def on_events(self, message: KvEvents, stream_sequence: int, now_s: float) -> None:
        # Not the maximum: a stream that was made anew counts from 1 again.
        self.stream_sequence = stream_sequence
        known = self._life(message.worker, message.generation, message.model_digest, now_s)
        if known is not None:
            self._take(message, known)

    def excuse(self, deaf_s: float, now_s: float) -> None:
        """Take it that nobody could be heard for `deaf_s`."""
        for known in self._workers.values():
            known.heard_s = min(now_s, known.heard_s + deaf_s)
            known.expected_since_s = min(now_s, known.expected_since_s + deaf_s)

    def on_tick(self, now_s: float) -> None:
        """Drop the dead, and find the workers whose events were lost at the tail. Called many times a second."""
        for worker, known in list(self._workers.items()):
            if now_s - known.heard_s > self._options.dead_after_s:
                self._drop(worker)
            elif known.recall is not None:
                known.expected_since_s = now_s
            elif known.expected > known.sequence and now_s - known.expected_since_s > self._options.behind_s:
                if known.resync is Resync.NO:
                    self.counters.behind += 1
                    known.resync = Resync.NEEDED
                known.expected_since_s = now_s

    # ------------------------------------------------------------ resync

    def due_resyncs(self, now_s: float) -> list[WorkerAddress]:
        """Return the workers to query now. Each must end in `on_pages` or `on_resync_failed`."""
        due: list[WorkerAddress] = []
        for worker, known in self._workers.items():
            if known.resync is Resync.NEEDED and known.live and now_s >= known.resync_from_s:
                known.resync = Resync.RUNNING
                # A fingerprint that stays wrong would have a large worker read for ever.
                waits = 2 ** min(known.drifts, DRIFT_DOUBLINGS_MAX)
                known.resync_from_s = now_s + self._options.resync_interval_s * waits
                due.append(WorkerAddress(worker=worker, generation=known.generation))
        return due

    def on_pages(self, address: WorkerAddress, pages: Sequence[ShadowPage]) -> None:
        """Replace all that a worker held by the pages of one query, and apply what came meanwhile. Raises Cold."""
        known = self._running(address)
        if known is None:
            return
        if any((page.generation, page.model_digest) != (known.generation, known.model_digest) for page in pages):
            self.counters.stale += 1
            self.on_resync_failed(address)
            return
        try:
            self._trees.assign(address.worker, known.model_digest).load(
                address.worker, [run for page in pages for run in page.runs]
            )
        except (MalformedMessage, IndexFull) as error:
            logger.warning("the shadow map of %s cannot be loaded: %s", address.worker, error)
            self.counters.full += isinstance(error, IndexFull)
            self.counters.malformed += isinstance(error, MalformedMessage)
            self.on_resync_failed(address)
            return
        self.counters.resyncs += 1
        self._journal.rewrite(address.worker)
        known.sequence = pages[0].sequence if pages else 0
        known.resync = Resync.NO
        known.doubted = known.must_read = False
        self._take_waiting(known)
        self._compare(address.worker, known)

    def on_resync_failed(self, address: WorkerAddress) -> None:
        """Try again later, unless what came meanwhile makes up for it."""
        known = self._running(address)
        if known is not None:
            known.resync = Resync.NEEDED
            self._take_waiting(known)

    def _running(self, address: WorkerAddress) -> Life | None:
        known = self._workers.get(address.worker)
        if known is None or known.generation != address.generation or known.resync is not Resync.RUNNING:
            return None
        return known

    # ------------------------------------------------------------ what is cold

    def due_recalls(self) -> list[tuple[WorkerAddress, Cold]]:
        """Return what must be fetched now. Each must end in `on_recalled`."""
        due, self._due_recalls = self._due_recalls, []
        return due

    def on_recalled(self, address: WorkerAddress) -> None:
        """Go on with a worker: what it needed is here, or was given up."""
        known = self._workers.get(address.worker)
        if known is not None and known.generation == address.generation:
            known.recall = None
            self._take_waiting(known)

    def forget_cold(self) -> int:
        """Give up all that is cold; return how many workers must be read anew for it."""
        indexes = [index for index in self._trees.models().values() if isinstance(index, ColdIndex)]
        workers = [worker for index in indexes for worker in index.forget_cold()]
        for worker in workers:
            known = self._workers[worker]
            known.doubted = True
            known.read_anew()
        self.counters.lost_cold += len(workers)
        return len(workers)

    # ------------------------------------------------------------ one worker

    def _known(self, address: WorkerAddress) -> Life | None:
        """Return the worker in just this life; None, and counted, where it is not known here."""
        known = self._workers.get(address.worker)
        if known is None or known.generation != address.generation:
            self.counters.unknown_workers += 1
            return None
        return known

    def _life(self, worker: str, generation: int, model_digest: str, now_s: float) -> Life | None:
        """Return the worker in this life, begun if it is new; None where that life is over."""
        known = self._workers.get(worker)
        if generation <= self._gone.get(worker, -1) or (known is not None and generation < known.generation):
            self.counters.stale += 1
            return None
        if known is None or generation > known.generation:
            return self._begin(worker, generation, model_digest, now_s)
        if model_digest != known.model_digest:
            # A life has one model. Whoever says otherwise is not understood, and not believed.
            self.counters.foreign_models += 1
            return None
        return known

    def _begin(self, worker: str, generation: int, model_digest: str, now_s: float) -> Life:
        self._drop(worker)
        self._gone.pop(worker, None)
        self._journal.rewrite(worker)
        self._trees.assign(worker, model_digest)
        known = self._workers[worker] = Life(generation, model_digest, heard_s=now_s)
        return known

    def _drop(self, worker: str) -> None:
        if self._workers.pop(worker, None) is not None:
            self._trees.drop(worker)
            self._speculation.drop(worker)
            self._journal.rewrite(worker)

    def _take_waiting(self, known: Life) -> None:
        waiting, known.waiting = known.waiting, []
        for message in waiting:
            self._take(message, known)

    def _take(self, message: KvEvents, known: Life) -> None:
        """Apply the next message of a worker, or put it aside for the resync that it must wait for."""
        if message.sequence <= known.sequence:
            self.counters.duplicates += 1
            return
        if known.recall is not None:
            self._put_aside(message, known)
            return
        follows_on = message.sequence == known.sequence + 1 and not known.waiting and not known.doubted
        if known.resync is Resync.RUNNING or not follows_on:
            if known.resync is Resync.NO:
                self.counters.gaps += 1
                known.resync = Resync.NEEDED
            self._put_aside(message, known)
            return
        try:
            self._journal.touch(message.worker, message.sequence - 1)
            index = self._trees.assign(message.worker, message.model_digest)
            known.doubted = not apply_events(message, index, self._journal, self._speculation, self.counters)
        except PartlyCold as partly:
            known.recall = partly.cold
            known.waiting.append(partly.rest)
            self._due_recalls.append((WorkerAddress(worker=message.worker, generation=message.generation), partly.cold))
            return
        known.sequence = message.sequence
        if known.doubted:
            known.resync = Resync.NEEDED
        elif known.sequence >= known.expected and not known.must_read:
            # What a resync would have brought has come by itself.
            known.resync = Resync.NO
        self._compare(message.worker, known)

    def _put_aside(self, message: KvEvents, known: Life) -> None:
        if len(known.waiting) >= self._options.waiting_events_max:
            # The gap that this leaves is seen after the resync, which is then repeated.
            known.waiting.clear()
        known.waiting.append(message)

    def _compare(self, worker: str, known: Life) -> None:
        """Compare what is held here with what the worker said, once both speak of the same event."""
        claimed = known.claimed
        if claimed is None or not known.can_compare():
            return
        held = self._trees.fingerprint(worker)
        if held == claimed:
            known.claimed = None
            known.agreed_sequence, known.drifts = known.sequence, 0
            return
        # The claim stays, for what the resync brings.
        logger.warning(
            "%s holds %d blocks after event %d, here it holds %d, or others: it is read anew",
            *(worker, claimed.blocks, known.sequence, held.blocks),
        )
        self.counters.drifts += 1
        known.agreed_sequence = -1
        known.drifts += 1
        known.read_anew()
