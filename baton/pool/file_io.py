"""Reads and writes of a KV file, on threads of their own beside the engine's steps.

Requests wait for reads, so reads have a thread for themselves; first it looks for what the file holds from before.
Whoever orders a job keeps its slots in the pool unchanged until its end is reported.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from baton.pool.file import KvFile, PlacedBlock
from baton.pool.file_format import FileBlock

_log = logging.getLogger(__name__)

CLOSING_S_MAX: Final = 2.0
"""Longest wait for a disk that does not answer while the engine ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileJob:
    """Blocks to move: `blocks[i]` between `slots[i]` of the file and `pool_slots[i]` of the pool."""

    job: int
    writes: bool
    """True: from the pool to the file; False: from the file to the pool."""
    blocks: tuple[FileBlock, ...]
    slots: tuple[int, ...]
    pool_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEnd:
    """End of a job: nothing reads or writes its slots any more."""

    job: FileJob
    done: int
    """Leading blocks that were moved; what was read is what was written."""
    moving_s: float = 0.0


class FileTier(Protocol):
    """One rank's file, as its `PoolRank` sees it."""

    slots: int

    def submit(self, job: FileJob) -> None:
        """Order a job; return at once. Bounded by its owner: each job has slots of its own."""
        ...

    def fileno(self) -> int:
        """Return an eventfd that is readable while there is something to take."""
        ...

    def poll(self) -> list[FileEnd]:
        """Take the jobs that have ended since the last call."""
        ...

    def take_found(self, count_max: int) -> tuple[list[PlacedBlock], bool]:
        """Take blocks that the file held at the start, and whether these were the last."""
        ...

    def close(self) -> None:
        """End the jobs that run and drop the others."""
        ...


class FileIo:
    """A `FileTier` with a thread for reads and one for writes."""

    def __init__(self, file: KvFile) -> None:
        self.slots = file.slots
        self._file = file
        self._waiting: dict[bool, deque[FileJob]] = {write: deque() for write in (False, True)}
        self._ended: list[FileEnd] = []
        self._found: deque[PlacedBlock] = deque()
        self._scanned = False
        self._found_taken = False
        self._is_readable = False
        self._failures: dict[bool, str] = {}
        """The last failure of reads and of writes, so that the log has each kind once."""
        self._changed = threading.Condition()
        self._closed = False
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._eventfd)
        self._threads = [
            threading.Thread(target=run, name=f"baton-kv-file-{name}", daemon=True)
            for name, run in (("read", self._read), ("write", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: FileJob) -> None:
        with self._changed:
            self._waiting[job.writes].append(job)
            self._changed.notify_all()

    def fileno(self) -> int:
        return self._eventfd

    def poll(self) -> list[FileEnd]:
        with self._changed:
            ended, self._ended = self._ended, []
            self._tell()
            return ended

    def take_found(self, count_max: int) -> tuple[list[PlacedBlock], bool]:
        with self._changed:
            if not self._scanned:
                return [], False
            found = list(islice(self._found, count_max))
            for _ in found:
                self._found.popleft()
            self._found_taken = not self._found
            self._tell()
            return found, self._found_taken

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        give_up_s = time.monotonic() + CLOSING_S_MAX
        for thread in self._threads:
            thread.join(max(give_up_s - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            # The descriptor stays open: a number that is used again must not be written to.
            _log.warning("the disk of the KV file %s does not answer", self._file.path)
            return
        self._file.close()

    def _read(self) -> None:
        for placed in self._file.scan():
            if self._closed:
                return
            if placed is not None:
                self._found.append(placed)
        with self._changed:
            self._scanned = True
            self._tell()
        self._serve(writes=False)

    def _write(self) -> None:
        self._serve(writes=True)

    def _serve(self, *, writes: bool) -> None:
        while (job := self._next(writes=writes)) is not None:
            began_s, done = time.monotonic(), 0
            for block, slot, pool_slot in zip(job.blocks, job.slots, job.pool_slots, strict=True):
                if self._closed or not self._move(block, slot, pool_slot, writes=writes):
                    break
                done += 1
            with self._changed:
                self._ended.append(FileEnd(job=job, done=done, moving_s=time.monotonic() - began_s))
                self._tell()

    def _tell(self) -> None:
        """Make the eventfd readable while there is something to take."""
        is_readable = bool(self._ended) or (self._scanned and not self._found_taken)
        if is_readable and not self._is_readable:
            os.eventfd_write(self._eventfd, 1)
        elif self._is_readable and not is_readable:
            os.eventfd_read(self._eventfd)
        self._is_readable = is_readable

    def _move(self, block: FileBlock, slot: int, pool_slot: int, *, writes: bool) -> bool:
        try:
            if writes:
                self._file.write(slot, block, pool_slot)
                moved = True
            else:
                moved = self._file.read(slot, block.key, pool_slot)
            failure = "" if moved else "a block is not what was written"
        except Exception as error:  # noqa: BLE001
            # The boundary of one block: whatever it was, the thread serves the others.
            moved, failure = False, str(error)
        if failure and failure != self._failures.get(writes):
            self._failures[writes] = failure
            action = "written to" if writes else "read from"
            _log.warning("blocks cannot be %s the KV file %s and are computed: %s", action, self._file.path, failure)
        return moved

    def _next(self, *, writes: bool) -> FileJob | None:
        with self._changed:
            while not self._closed:
                if waiting := self._waiting[writes]:
                    return waiting.popleft()
                self._changed.wait()
            return None
