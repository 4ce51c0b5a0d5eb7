"""The KV pool's file, as plain decisions: what is written to it, and what is read back before it is promised.

    write  READY in the pool ──file slots reserved, pool slots pinned──▶ on the disk of all ranks ──▶ READY in the file
    load   wanted ──file slots pinned, pool slots reserved──▶ reading ──whole on all ranks──▶ READY in the pool
                                                                └──late──▶ its request computes; the end comes later
    start  what the files of all ranks hold in the same slots, with its whole prefix ──▶ READY in the file

A block is written as soon as the pool has it, not when the pool evicts it: an eviction then never waits for the disk,
and what a killed engine computed is there at the next start. It is written once either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from baton.connectors.pool_report import FileReport
from baton.pool.chain import BlockChain
from baton.pool.directory import PoolDirectory, SlotState
from baton.pool.file import PlacedBlock, parents_first
from baton.pool.file_format import FileBlock
from baton.pool.file_io import FileJob
from baton.pool.policy import PolicyName, make_policy

WRITING_SHARE_MAX: Final = 0.25
"""Share of the pool's slots that writes may hold; blocks beyond that are written with a later save, or not at all."""
LOAD_S_MAX: Final = 1.0
"""Longest wait for a file by a request for which the time to compute is not known."""
RETRY_DECAY: Final = 0.9
"""How much of the measured time per block is left after each prefix that was not read because of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStep:
    job: FileJob
    budget_s: float
    """Time in which its request would have computed these blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One step's orders for the ranks' files."""

    writes: tuple[FileJob, ...] = ()
    loads: tuple[LoadStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProgress:
    """What ranks' files have done since their last step."""

    slots: tuple[int, ...] = ()
    """Slots of the files, one number for each rank; 0: a rank has none."""
    found: tuple[PlacedBlock, ...] = ()
    """Blocks that files hold from before."""
    scanned: int = 0
    """Number of ranks whose whole file is read."""
    jobs: Counter[int] = field(default_factory=Counter[int])
    """Number of ranks on which a job has ended."""
    done: dict[int, int] = field(default_factory=dict[int, int])
    """Leading blocks that every rank has moved, by job."""
    moving_s: dict[int, float] = field(default_factory=dict[int, float])
    late: frozenset[int] = frozenset()
    """Loads that have taken longer than computing would have."""

    def joined(self, other: FileProgress) -> FileProgress:
        return FileProgress(
            slots=self.slots + other.slots,
            found=self.found + other.found,
            scanned=self.scanned + other.scanned,
            jobs=self.jobs + other.jobs,
            done={
                job: min(each.done[job] for each in (self, other) if job in each.done) for job in self.done | other.done
            },
            moving_s={
                job: max(self.moving_s.get(job, 0.0), other.moving_s.get(job, 0.0))
                for job in self.moving_s | other.moving_s
            },
            late=self.late | other.late,
        )

    def __bool__(self) -> bool:
        return bool(self.slots or self.found or self.scanned or self.jobs or self.late)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """Blocks that the file holds now, by the ids of their canonical blocks."""

    parent: bytes
    """Id of the block before the first; empty at the start of a prompt."""
    ids: tuple[bytes, ...]


@dataclass(slots=True)
class _Moving:
    keys: tuple[bytes, ...]
    writes: bool
    is_late: bool = False
    moving_s: float = 0.0


class PoolFiling:
    """Decides each step's reads and writes. Only with a pool's directory in which all ranks agree."""

    def __init__(
        self, pool: PoolDirectory, *, block_tokens: int, ranks: int, policy: PolicyName = PolicyName.S3_FIFO
    ) -> None:
        self.directory: PoolDirectory | None = None
        """None until the files of all ranks are read."""
        self.written_blocks = 0
        self.failed_blocks = 0
        """Blocks that could not be written, or were not what had been written."""
        self.deferred_blocks = 0
        """Blocks that were not written when they could have been: the disk was too slow."""
        self.loaded_tokens = 0
        self.loading_s = 0.0
        self.loads_late = 0
        self.loads_declined = 0
        """Prefixes that were computed since reading had taken longer lately."""
        self._pool = pool
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._policy = policy
        self._slots: list[int] = []
        self._found = Counter[PlacedBlock]()
        self._scanned = 0
        self._numbers = count(1)
        self._moving: dict[int, _Moving] = {}
        self._loading: dict[bytes, int] = {}
        """Job by key that is being read."""
        self._writing_blocks = 0
        self._ended = Counter[int]()
        self._done: dict[int, int] = {}
        self._block_s = 0.0
        """Measured time to read a block; 0: none was read yet."""
        self._names: dict[bytes, FileBlock] = {}
        """Blocks that the file holds or is about to."""
        self._writes: list[FileJob] = []
        self._loads: list[LoadStep] = []

    @property
    def is_busy(self) -> bool:
        is_starting = self.directory is None and bool(self._slots) and all(self._slots)
        return is_starting or bool(self._moving)

    # Writing.

    def write(self, chain: BlockChain, first: int, end: int) -> None:
        """Order writes of those of the blocks from `first` to `end` that the pool has and the file lacks.

        Blocks before them that the file lacks are written as well: they were too many at their time.
        """
        if self.directory is None:
            return
        keys = chain.keys
        while first and self.directory.state(keys[first - 1]) is SlotState.FREE:
            first -= 1
        end = first + self._pool.match(keys[first:end])
        room = int(self._pool.slots * WRITING_SHARE_MAX) - self._writing_blocks
        if end - first > room:
            self.deferred_blocks += end - first - max(room, 0)
            end = first + max(room, 0)
        reserved = self.directory.reserve(keys[:end], first)
        if not reserved:
            return
        indexes = [index for index, _ in reserved]
        written = tuple(keys[index] for index in indexes)
        blocks = tuple(_name(chain, index) for index in indexes)
        self._names |= {block.key: block for block in blocks}
        job = FileJob(
            job=next(self._numbers),
            writes=True,
            blocks=blocks,
            slots=tuple(slot for _, slot in reserved),
            pool_slots=self._pool.hold(written),
        )
        self._moving[job.job] = _Moving(written, writes=True)
        self._writing_blocks += len(written)
        self._writes.append(job)

    # Reading.

    def load(self, chain: BlockChain, first: int, token_s: float) -> tuple[int, range]:
        """Order that what the file has from block `first` on is read into the pool.

        Returns a job to wait for, which may be another request's, or 0; and the blocks that it will add. `token_s`:
        predicted time to compute a token; 0: not known.
        """
        keys = chain.keys
        if self.directory is None or first >= len(keys):
            return 0, range(0)
        if keys[first] in self._loading:
            return self._loading[keys[first]], range(0)
        blocks = self.directory.match(keys[first:])
        budget_s = blocks * self._block_tokens * token_s or LOAD_S_MAX
        if blocks and blocks * self._block_s > budget_s:
            # It is tried again some time: the disk may have been busy.
            self._block_s *= RETRY_DECAY
            self.loads_declined += 1
            return 0, range(0)
        reserved = self._pool.reserve(keys[: first + blocks], first)
        run = sum(index == first + number for number, (index, _) in enumerate(reserved))
        self._pool.abandon([keys[index] for index, _ in reserved[run:]])
        if not run:
            return 0, range(0)
        end = first + run
        job = FileJob(
            job=next(self._numbers),
            writes=False,
            blocks=tuple(_name(chain, index) for index in range(first, end)),
            slots=self.directory.pin(keys, first, end),
            pool_slots=tuple(slot for _, slot in reserved[:run]),
        )
        self._moving[job.job] = _Moving(tuple(keys[first:end]), writes=False)
        self._loading |= dict.fromkeys(keys[first:end], job.job)
        self._loads.append(LoadStep(job=job, budget_s=budget_s))
        return job.job, range(first, end)

    def loads(self, job: int) -> bool:
        """Return whether a request goes on waiting for a job."""
        moving = self._moving.get(job)
        return moving is not None and not moving.is_late

    def is_late(self, job: int) -> bool:
        moving = self._moving.get(job)
        return moving is not None and moving.is_late

    def touch(self, chain: Sequence[bytes]) -> None:
        """Count a use of a prefix that the pool has: it is of use here, too, once the pool has evicted it."""
        if self.directory is not None:
            self.directory.touch(chain)

    # Both.

    def plan(self) -> FilePlan:
        """Return this step's orders and forget them."""
        plan = FilePlan(writes=tuple(self._writes), loads=tuple(self._loads))
        self._writes, self._loads = [], []
        return plan

    def progress(self, progress: FileProgress) -> None:
        """Note what ranks have done."""
        self._slots.extend(progress.slots)
        self._found.update(progress.found)
        self._scanned += progress.scanned
        if self.directory is None and self._scanned == self._ranks == len(self._slots) and all(self._slots):
            self._restore(min(self._slots))
        for job in progress.late:
            if (moving := self._moving.get(job)) is not None and not moving.is_late:
                moving.is_late = True
                self.loads_late += 1
        for job, ranks in progress.jobs.items():
            moving = self._moving[job]
            moving.moving_s = max(moving.moving_s, progress.moving_s.get(job, 0.0))
            self._done[job] = min(self._done.get(job, progress.done[job]), progress.done[job])
            self._ended[job] += ranks
            if self._ended[job] == self._ranks:
                del self._ended[job]
                self._end(self._moving.pop(job), self._done.pop(job))

    def take_changes(self) -> tuple[list[NamedRun], tuple[bytes, ...]]:
        """Return the blocks that the file has got since the last call, and the ids of those it has dropped."""
        if self.directory is None:
            return [], ()
        changes = self.directory.take_changes()
        runs: list[NamedRun] = []
        for key in changes.stored:
            block = self._names[key]
            if runs and runs[-1].ids[-1] == block.parent:
                last = runs.pop()
                runs.append(NamedRun(parent=last.parent, ids=last.ids + block.units))
            else:
                runs.append(NamedRun(parent=block.parent, ids=block.units))
        removed = tuple(unit for key in changes.removed for unit in self._names[key].units)
        free = SlotState.FREE
        for key in changes.removed:
            if self.directory.state(key) is free:
                del self._names[key]
        if len(self._names) > 2 * self.directory.slots:
            # Of blocks that came and went between two calls, or could not be written.
            self._names = {key: name for key, name in self._names.items() if self.directory.state(key) is not free}
        return runs, removed

    def report(self) -> FileReport | None:
        """Return the figures; None where there is no file."""
        if self.directory is None:
            return None
        return FileReport(
            slots=self.directory.slots,
            ready=self.directory.ready,
            written_blocks=self.written_blocks,
            evicted_blocks=self.directory.counts.evicted,
            deferred_blocks=self.deferred_blocks,
            failed_blocks=self.failed_blocks,
            loaded_tokens=self.loaded_tokens,
            loading_s=self.loading_s,
            loads_late=self.loads_late,
            loads_declined=self.loads_declined,
        )

    def _restore(self, slots: int) -> None:
        placed = parents_first([each for each, ranks in self._found.items() if ranks == self._ranks])
        self._found.clear()
        self._names = {each.block.key: each.block for each in placed}
        self.directory = PoolDirectory(slots, make_policy(self._policy, slots))
        self.directory.restore((each.slot, each.block.key, each.block.parent) for each in placed)

    def _end(self, moving: _Moving, done: int) -> None:
        assert self.directory is not None
        whole, rest = moving.keys[:done], moving.keys[done:]
        self.failed_blocks += bool(rest)
        if moving.writes:
            self._pool.unpin(moving.keys)
            self._writing_blocks -= len(moving.keys)
            self.written_blocks += len(whole)
            self.directory.filled(whole)
            self.directory.abandon(rest)
            return
        self.directory.unpin(moving.keys)
        for key in moving.keys:
            del self._loading[key]
        self._pool.filled(whole)
        self._pool.abandon(rest)
        if rest:
            self.directory.drop(rest[0])
        if whole:
            self.loaded_tokens += len(whole) * self._block_tokens
            self.loading_s += moving.moving_s
            self._block_s = moving.moving_s / len(whole)


def _name(chain: BlockChain, index: int) -> FileBlock:
    parent = chain.keys[index - 1] if index else b""
    return FileBlock(key=chain.keys[index], parent=parent, index=index, units=chain.units(index))
