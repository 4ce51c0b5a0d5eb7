"""Copies between an engine's KV cache and its pool, beside the engine's steps.

The order of copies is free; whoever orders one keeps both its sides unchanged until its end is reported.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from baton.pool.memory import KvPool
from baton.transfer.layout import Table, convert

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyJob:
    """Blocks to copy: `blocks[i]` of the cache to or from `slots[i]` of the pool."""

    job: int
    promotes: bool
    """True: from the pool into the cache; False: from the cache into the pool."""
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    key: bytes = b""
    """Key of the request's hand-off, if it is staged in the pool's memory; see `CellSharing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEnd:
    """End of a job: nothing reads or writes its blocks and slots any more."""

    job: CopyJob
    copying_s: float = 0.0
    failed: bool = False


class Copier(Protocol):
    def submit(self, job: CopyJob) -> None:
        """Order a copy; return at once. Bounded by its owner: each job has slots of its own."""
        ...

    def fileno(self) -> int:
        """Return an eventfd that is readable while `poll` has something to return."""
        ...

    def poll(self) -> list[CopyEnd]:
        """Take the jobs that have ended since the last call."""
        ...

    def close(self) -> None:
        """End the copy that runs and drop the others."""
        ...


class CellSharing(Protocol):
    """Lets slots of the pool have what hand-offs stage in its memory, without a copy."""

    def expect(self, job: CopyJob) -> None:
        """Note a save that is submitted after the step's computation; a lease of the same blocks may end before."""
        ...

    def hold(self, keys: Collection[bytes]) -> None:
        """Hold what leases of these keys stage until the next call, even if they end: saves of it may be expected."""
        ...

    def keep(self, key: bytes, job: CopyJob) -> None:
        """Let a job's slots have blocks of the pull of this key, which is about to begin, once all of it is here."""
        ...

    def kept(self, key: bytes) -> bool:
        """Return whether the slots have these blocks now. Asked once, after the pull's end."""
        ...


def copy(pool: KvPool, job: CopyJob) -> None:
    """Copy a job's blocks, without the GIL."""
    cache, slots = (pool.cache_blocks, job.blocks), (pool.cell_blocks, pool.cells.of(job.slots))
    (source, sources), (sink, sinks) = (slots, cache) if job.promotes else (cache, slots)
    tokens = len(job.blocks) * pool.block_tokens
    convert(source, Table(sources), sink, Table(sinks), 0, tokens, 0, pool.tensors)


class ThreadCopier:
    """A `Copier` with one thread. Requests wait for promotions, so they go first."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._promotions: deque[CopyJob] = deque()
        self._saves: deque[CopyJob] = deque()
        self._ended: list[CopyEnd] = []
        self._changed = threading.Condition()
        self._closed = False
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._eventfd)
        self._thread = threading.Thread(target=self._run, name="baton-kv-pool", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        with self._changed:
            (self._promotions if job.promotes else self._saves).append(job)
            self._changed.notify()

    def fileno(self) -> int:
        return self._eventfd

    def poll(self) -> list[CopyEnd]:
        with self._changed:
            ended, self._ended = self._ended, []
            if ended:
                os.eventfd_read(self._eventfd)
            return ended

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            began_s, failed = time.monotonic(), False
            try:
                copy(self._pool, job)
            except Exception:  # noqa: BLE001
                # The boundary of one job: whatever it was, the thread serves the others.
                _log.exception("a copy of the KV pool failed")
                failed = True
            with self._changed:
                self._ended.append(CopyEnd(job=job, copying_s=time.monotonic() - began_s, failed=failed))
                os.eventfd_write(self._eventfd, 1)

    def _next(self) -> CopyJob | None:
        with self._changed:
            while not self._closed:
                for queue in (self._promotions, self._saves):
                    if queue:
                        return queue.popleft()
                self._changed.wait()
            return None
