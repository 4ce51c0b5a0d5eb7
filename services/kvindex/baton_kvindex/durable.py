"""What of the index is written down, and the changes that wait to be: pure, the database is in `store.py`.

A worker's durable form is a map from block to the block before it, with the life (generation), the model and
the newest event that the map contains. Changes of a block overwrite each other while they wait, so what waits
is bounded by what exists; above `blocks_max` of one worker, and after a failed write, the details are dropped
and the worker is written anew as a whole. While another index writes, `rotate` lets go of what is old, and what is
left makes it cheap to `go_on` in that one's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import msgspec

from baton_kvindex.index import Run, link, split_ids

WORKERS_MAX: Final = 1 << 14
"""Workers of which changes wait. Beyond it, what is written must be looked at before the next write."""


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """Which life of a worker the index knows, and up to which of its events."""

    generation: int
    model_digest: str
    sequence: int


@dataclass(frozen=True, slots=True)
class SavedWorker:
    state: WorkerState
    runs: Sequence[Run]


@dataclass(slots=True)
class _Waiting:
    """`whole`: write all that the worker holds instead of single blocks. A parent of None: removed."""

    after: float = inf
    """Every change after this event of the worker is here."""
    whole: bool = False
    blocks: dict[bytes, bytes | None] = field(default_factory=dict[bytes, bytes | None])


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """What to write of one worker: `runs` in place of everything, or else single blocks."""

    state: WorkerState
    runs: Sequence[Run] | None
    stored: Mapping[bytes, bytes]
    removed: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Batch:
    """One atomic write. A worker whose change is None is gone."""

    stream_sequence: int
    workers: Mapping[str, WorkerChange | None]


class Journal:
    """Changes that wait to be written."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._waiting: dict[str, _Waiting] = {}
        self._older: dict[str, _Waiting] = {}
        """What waited at the last `rotate`."""
        self.is_complete = True
        """Whether all changes since `go_on` are here, or were taken; else it must be called before the next `take`."""

    def __bool__(self) -> bool:
        return bool(self._waiting) or not self.is_complete

    def whole_workers(self) -> list[str]:
        """Return the workers of which all is to be written."""
        return [worker for worker, waiting in self._waiting.items() if waiting.whole]

    def touch(self, worker: str, after: int) -> None:
        """Write the worker's state: it moves on from this event, perhaps without a change of blocks."""
        self._entry(worker, after)

    def store(self, worker: str, parent: bytes, blocks: bytes) -> None:
        self._note(worker, dict(link(parent, blocks)))

    def remove(self, worker: str, blocks: bytes) -> None:
        self._note(worker, dict.fromkeys(split_ids(blocks)))

    def rewrite(self, worker: str) -> None:
        """Write all of the worker, whatever was written before."""
        entry = self._entry(worker)
        entry.whole = True
        entry.blocks.clear()

    def take(
        self,
        stream_sequence: int,
        state_of: Callable[[str], WorkerState | None],
        dump: Callable[[str], Sequence[Run]],
    ) -> Batch:
        """Return all that waits, as the workers are now, and forget it."""
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
        """Forget what waited before the last call: another index writes."""
        self._older, self._waiting = self._waiting, {}

    def go_on(self, written: Mapping[str, WorkerState], present: Mapping[str, WorkerState]) -> None:
        """Wait with what lacks in what another index has written: single changes, or all of a worker."""
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
        """Write the workers of a batch anew: it was not written, or may not have been."""
        for worker in batch.workers:
            self.rewrite(worker)

    def _entry(self, worker: str, after: float = inf) -> _Waiting:
        if worker not in self._waiting:
            if len(self._waiting) >= WORKERS_MAX:
                self._waiting, self.is_complete = {}, False
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
    """Return every single change after this event of a worker; None where they are not all known."""
    if newer is not None and (newer.whole or newer.after <= sequence):
        return None if newer.whole else newer
    if older is None or older.whole or older.after > sequence:
        return None
    return _Waiting(older.after, blocks=older.blocks | newer.blocks) if newer else older


def runs_of(parents: Mapping[bytes, bytes]) -> list[Run]:
    """Return the blocks of a map from block to parent as the longest runs that branches allow."""
    children: dict[bytes, list[bytes]] = {}
    for block, parent in parents.items():
        children.setdefault(parent, []).append(block)
    heads = [block for block, parent in parents.items() if parent not in parents or children[parent][0] != block]
    runs: list[Run] = []
    for head in heads:
        run = [head]
        while below := children.get(run[-1]):
            run.append(below[0])
        runs.append(Run(parent=parents[head], blocks=b"".join(run)))
    return runs
