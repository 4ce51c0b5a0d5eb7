"""Copies between an engine's cache and its KV pool, where hand-offs are staged in the pool's memory.

What a hand-off stages is not copied again: the pool's slot shares its cell (`baton.pool.cells`).

    save, blocks of a lease      copied to the host for the lease      ──end──▶ the slots are filled
    save, other blocks           copied to the host                    ──end──▶ the slots are filled
    keep, blocks of a pull       the pull has ended, all of it here    ───────▶ the slots are filled
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from baton.errors import TransferFailed
from baton.pool.block_copies import BlockCopies
from baton.pool.cells import CellTable
from baton.pool.copier import CopyEnd, CopyJob
from baton.pool.staged_leases import StagedLease
from baton.pool.staged_pulls import StagedPull
from baton.transfer.device import CopyEnded

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    job: CopyJob
    began_s: float = field(default_factory=time.monotonic)
    tickets: set[int] = field(default_factory=set[int])
    shared: set[int] = field(default_factory=set[int])
    """Blocks that a lease has copied."""
    failed: bool = False


class StagedCopier:
    """A `Copier` and `CellSharing`, part of a `StagedAgent`, whose lock it shares."""

    def __init__(
        self,
        lock: threading.Lock,
        copies: BlockCopies,
        cells: CellTable,
        leases: Callable[[bytes], StagedLease | None],
        let_go: Callable[[StagedLease], None],
        stream: Callable[[], int | None],
    ) -> None:
        """`leases`: returns the lease that is open under a key. `let_go`: frees the slots of one that was held.

        `stream`: see `baton.pool.staging.Stream`.
        """
        self._lock = lock
        self._copies = copies
        self._cells = cells
        self._leases = leases
        self._let_go = let_go
        self._stream = stream
        self._ended: list[CopyEnd] = []
        self._expected: dict[bytes, _Running] = {}
        """Saves by the key of their leases."""
        self._holding: frozenset[bytes] = frozenset()
        self._held: list[StagedLease] = []
        """Leases that have ended and are held."""
        self._to_keep: dict[bytes, CopyJob] = {}
        self._kept: set[bytes] = set()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._eventfd)

    def submit(self, job: CopyJob) -> None:
        with self._lock:
            running = self._expected.pop(job.key, None) or _Running(job)
            try:
                if job.promotes:
                    self._copy(running, job.blocks, self._cells.of(job.slots))
                else:
                    self._save(running)
            except (TransferFailed, ValueError) as error:
                self._failed(running, str(error))
            self._settle(running)

    def fileno(self) -> int:
        return self._eventfd

    def poll(self) -> list[CopyEnd]:
        with self._lock:
            ended, self._ended = self._ended, []
            if ended:
                os.eventfd_read(self._eventfd)
            return ended

    def close(self) -> None:
        """Do nothing: the agent closes the engine of the copies."""

    def expect(self, job: CopyJob) -> None:
        if job.key:
            with self._lock:
                running = self._expected[job.key] = _Running(job)
                for lease in self._held:
                    if lease.key == job.key and not lease.failure:
                        self._share(running, lease)

    def hold(self, keys: Collection[bytes]) -> None:
        with self._lock:
            self._holding = frozenset(keys)
            held, self._held = self._held, []
            for lease in held:
                self._let_go(lease)

    def keep(self, key: bytes, job: CopyJob) -> None:
        with self._lock:
            self._to_keep[key] = job

    def kept(self, key: bytes) -> bool:
        with self._lock:
            self._to_keep.pop(key, None)
            kept = key in self._kept
            self._kept.discard(key)
            return kept

    # All that follows runs under the lock.

    def lease_ends(self, lease: StagedLease) -> None:
        """Note that a lease is about to give its cells back."""
        if (running := self._expected.get(lease.key)) is not None:
            self._share(running, lease)
        if lease.key in self._holding:
            lease.held = True
            self._held.append(lease)

    def pulled(self, pull: StagedPull) -> None:
        """Note that all of a pull is in its cells, which nothing writes any more."""
        if (job := self._to_keep.pop(pull.key, None)) is not None:
            cells = dict(zip(pull.blocks, pull.slots, strict=True))
            for block, slot in zip(job.blocks, job.slots, strict=True):
                self._cells.share(slot, cells[block])
            self._kept.add(pull.key)

    def _save(self, running: _Running) -> None:
        job = running.job
        if job.key and (lease := self._leases(job.key)) is not None:
            self._share(running, lease)
        copied = [pair for pair in zip(job.blocks, job.slots, strict=True) if pair[0] not in running.shared]
        cells = self._cells.renew([slot for _, slot in copied])
        self._copy(running, [block for block, _ in copied], cells)

    def _share(self, running: _Running, lease: StagedLease) -> None:
        """Let the job's slots have what the lease has copied, or is copying."""
        cells = lease.copied_blocks(self._copies.block_tokens)
        before = len(running.shared)
        for block, slot in zip(running.job.blocks, running.job.slots, strict=True):
            if block in cells and block not in running.shared:
                self._cells.share(slot, cells[block])
                running.shared.add(block)
        if len(running.shared) > before:
            tickets = lease.tickets - running.tickets
            running.tickets |= tickets
            self._copies.follow(tickets, partial(self._copied, running))

    def _copy(self, running: _Running, blocks: Iterable[int], cells: Iterable[int]) -> None:
        promotes = running.job.promotes
        copies = list(self._copies.between(tuple(blocks), tuple(cells), self._copies.tensors, to_device=promotes))
        for ticket in self._copies.submit(copies, after=self._stream(), ended=partial(self._copied, running)):
            running.tickets.add(ticket)

    def _copied(self, running: _Running, ended: CopyEnded) -> None:
        running.tickets.discard(ended.ticket)
        if ended.failure:
            self._failed(running, ended.failure)
        if self._expected.get(running.job.key) is not running:
            self._settle(running)

    def _failed(self, running: _Running, reason: str) -> None:
        _log.error("a copy of the KV pool failed: %s", reason)
        running.failed = True

    def _settle(self, running: _Running) -> None:
        if not running.tickets:
            copying_s = time.monotonic() - running.began_s
            self._ended.append(CopyEnd(job=running.job, copying_s=copying_s, failed=running.failed))
            os.eventfd_write(self._eventfd, 1)
