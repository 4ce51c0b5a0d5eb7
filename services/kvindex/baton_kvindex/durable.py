"""Durable form of the index, and the journal of changes that wait to be written. Pure: the database is in `store.py`.

A worker's durable form is a map from **slot** to the block before it, with the generation, the model and the newest
event that the map contains. A slot is a block on a tier: the block's id, followed by a byte for a tier beyond the
device. A later change of a block replaces an earlier one in the journal, so the journal is bounded by the index; above
`blocks_max` changes of one worker, and after a failed write, its changes are dropped and the whole worker is written
again. While another index writes, `rotate` drops old changes, and the rest makes it cheap to `go_on` in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import msgspec

from baton_kvindex.index import ID_BYTES, Run, Tier, link, split_ids

WORKERS_MAX: Final = 1 << 14
"""Most workers in the journal. Beyond it, the journal is incomplete: the database is read before the next write."""


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """Generation of a worker that the index knows, and its newest event that was applied."""

    generation: int
    model_digest: str
    sequence: int


@dataclass(frozen=True, slots=True)
class SavedWorker:
    state: WorkerState
    runs: Sequence[Run]


@dataclass(slots=True)
class _Waiting:
    """Unwritten changes of one worker: all that it holds if `whole`, else slot → parent, None if removed."""

    after: float = inf
    """Sequence of an event; the journal has every change after it."""
    whole: bool = False
    blocks: dict[bytes, bytes | None] = field(default_factory=dict[bytes, bytes | None])


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """Change of one worker: `runs` replace everything, or single slots are stored and removed."""

    state: WorkerState
    runs: Sequence[Run] | None
    stored: Mapping[bytes, bytes]
    removed: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Batch:
    """One atomic write. A change of None deletes the worker."""

    stream_sequence: int
    workers: Mapping[str, WorkerChange | None]


class Journal:
    """Changes that wait to be written."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._waiting: dict[str, _Waiting] = {}
        self._older: dict[str, _Waiting] = {}
        """Changes from before the last `rotate`."""
        self.is_complete = True
        """Whether all changes since `go_on` are here or were taken; if not, `go_on` must precede the next `take`."""

    def __bool__(self) -> bool:
        return bool(self._waiting) or not self.is_complete

    def whole_workers(self) -> list[str]:
        """Return the workers that are to be written as a whole."""
        return [worker for worker, waiting in self._waiting.items() if waiting.whole]

    def touch(self, worker: str, after: int) -> None:
        """Have the worker's state written: events after this one are applied, perhaps without a change of blocks."""
        self._entry(worker, after)

    def store(self, worker: str, parent: bytes, blocks: bytes, tier: Tier = Tier.DEVICE) -> None:
        self._note(worker, dict(slots(parent, blocks, tier)))

    def remove(self, worker: str, blocks: bytes, tier: Tier = Tier.DEVICE) -> None:
        mark = _MARKS[tier]
        self._note(worker, dict.fromkeys([block + mark for block in split_ids(blocks)] if mark else split_ids(blocks)))

    def rewrite(self, worker: str) -> None:
        """Have the whole worker written, in place of its single changes."""
        entry = self._entry(worker)
        entry.whole = True
        entry.blocks.clear()

    def take(
        self,
        stream_sequence: int,
        state_of: Callable[[str], WorkerState | None],
        dump: Callable[[str], Sequence[Run]],
    ) -> Batch:
        """Return all changes, with the present states of the workers, and empty the journal."""
        changes: dict[str, WorkerChange | None] = {}
        for worker, waiting in self._waiting.items():
            state = state_of(worker)
            if state is None:
                changes[worker] = None
                continue
            changes[worker] = WorkerChange(
                state=state,
                runs=dump(worker) if waiting.whole else None,
                stored={block: parent for block, parent in waiting.blocks.items() if parent is not None},
                removed=[block for block, parent in waiting.blocks.items() if parent is None],
            )
        self._waiting = {}
        return Batch(stream_sequence, changes)

    def rotate(self) -> None:
        """Drop the changes from before the previous call: another index writes."""
        self._older, self._waiting = self._waiting, {}

    def go_on(self, written: Mapping[str, WorkerState], present: Mapping[str, WorkerState]) -> None:
        """Keep what is missing from `written`, another index's state: single changes, or whole workers."""
        older, newer = self._older, self._waiting
        self._older, self._waiting, self.is_complete = {}, {}, True
        for worker in written.keys() | present.keys():
            there, here = written.get(worker), present.get(worker)
            if there == here:
                continue
            found = None
            if there and here and (there.generation, there.model_digest) == (here.generation, here.model_digest):
                found = _changes_after(there.sequence, older.get(worker), newer.get(worker))
            self._waiting[worker] = found or _Waiting(whole=True)

    def give_back(self, batch: Batch) -> None:
        """Have the workers of a batch written as a whole: the batch was not written, or may not have been."""
        for worker in batch.workers:
            self.rewrite(worker)

    def _entry(self, worker: str, after: float = inf) -> _Waiting:
        if worker not in self._waiting:
            if len(self._waiting) >= WORKERS_MAX:
                # The older changes go, too: without these in between they lead to no present state.
                self._older, self._waiting, self.is_complete = {}, {}, False
            self._waiting[worker] = _Waiting(after)
        return self._waiting[worker]

    def _note(self, worker: str, changes: Mapping[bytes, bytes | None]) -> None:
        waiting = self._entry(worker)
        if waiting.whole:
            return
        waiting.blocks.update(changes)
        if len(waiting.blocks) > self._blocks_max:
            self.rewrite(worker)


def _changes_after(sequence: int, older: _Waiting | None, newer: _Waiting | None) -> _Waiting | None:
    """Return all single changes after this event of a worker; None if some are unknown."""
    if newer is not None and (newer.whole or newer.after <= sequence):
        return None if newer.whole else newer
    if older is None or older.whole or older.after > sequence:
        return None
    return _Waiting(older.after, blocks=older.blocks | newer.blocks) if newer else older


_MARKS: Final = {tier: bytes([tier]) if tier else b"" for tier in Tier}
"""Last byte of a slot."""


def slots(parent: bytes, blocks: bytes, tier: Tier) -> Iterable[tuple[bytes, bytes]]:
    """Return (slot, parent id) for each block of a run."""
    mark = _MARKS[tier]
    return ((block + mark, before) for block, before in link(parent, blocks)) if mark else link(parent, blocks)


def is_slot(key: bytes) -> bool:
    return len(key) >= ID_BYTES and key[ID_BYTES:] in _MARKS.values()


def runs_of(parents: Mapping[bytes, bytes]) -> list[Run]:
    """Return a map from slot to parent as the longest runs that its branches allow."""
    by_tier = {tier: dict[bytes, bytes]() for tier in Tier}
    for slot, parent in parents.items():
        by_tier[Tier(slot[ID_BYTES] if len(slot) > ID_BYTES else Tier.DEVICE)][slot[:ID_BYTES]] = parent
    return [run for tier, held in by_tier.items() for run in _runs_on(tier, held)]


def _runs_on(tier: Tier, parents: Mapping[bytes, bytes]) -> list[Run]:
    children: dict[bytes, list[bytes]] = {}
    for block, parent in parents.items():
        children.setdefault(parent, []).append(block)
    heads = [block for block, parent in parents.items() if parent not in parents or children[parent][0] != block]
    runs: list[Run] = []
    for head in heads:
        run = [head]
        while below := children.get(run[-1]):
            run.append(below[0])
        runs.append(Run(parent=parents[head], blocks=b"".join(run), tier=tier))
    return runs
