"""One rank's KV file: blocks of the KV pool on a disk, read back only if they are what was written.

The file is reserved at once, so that a full disk is found at the start. Where the file system allows it, the page cache
is left out (`O_DIRECT`): blocks are read as rarely as they are evicted from host memory, which the pool itself uses
better. Nothing is flushed: see `file_format` for why a crash does no harm.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigurationError
from baton.pool.file_format import (
    PAGE_BYTES,
    FileBlock,
    Geometry,
    SlotHeader,
    decode_file_header,
    decode_slot_header,
    encode_file_header,
    encode_slot_header,
    identity_digest,
)
from baton.pool.memory import KvPool
from baton.transfer import checksum_bytes, checksum_memory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block and the slot of the file that holds it."""

    slot: int
    block: FileBlock


class KvFile:
    """Slots on a disk for the slots of `pool`. One thread may write and one may read at a time."""

    def __init__(self, path: Path, pool: KvPool, budget_bytes: int, *, content: str, direct: bool = True) -> None:
        """Open or make the file, and reserve its space. `content` describes the blocks.

        Raises ConfigurationError if that is not possible, or if something else lies there.
        """
        self.path = path
        self._pool = pool
        self._identity = identity_digest(content)
        self._geometry = Geometry(pool.stride_bytes)
        self.slots = self._geometry.slots(budget_bytes)
        if self.slots < 1:
            raise ConfigurationError(
                f"a KV file of {budget_bytes} bytes is smaller than one block of {self._geometry.slot_bytes}",
                param="kv_file_bytes",
            )
        self._fd, self.direct = _open(path, direct=direct)
        try:
            self._claim(content)
        except BaseException:
            os.close(self._fd)
            raise
        # Direct I/O needs memory at the start of a page.
        self._headers = {write: mmap.mmap(-1, PAGE_BYTES) for write in (False, True)}

    def write(self, slot: int, block: FileBlock, pool_slot: int) -> None:
        """Write a slot of the pool. Raises OSError."""
        address = self._pool.slot_address(pool_slot)
        size = self._geometry.block_bytes
        header = SlotHeader(block, checksum_memory(address, size))
        page = self._headers[True]
        page[:] = encode_slot_header(header, self._identity, checksum_bytes)
        written = os.pwritev(self._fd, [page, _memory(address, size)], self._geometry.offset(slot))
        if written != self._geometry.slot_bytes:
            raise OSError(errno.EIO, f"{written} of {self._geometry.slot_bytes} bytes were written")

    def read(self, slot: int, key: bytes, pool_slot: int) -> bool:
        """Read a slot into the pool; return whether it holds the whole block of this key. Raises OSError."""
        address = self._pool.slot_address(pool_slot)
        size = self._geometry.block_bytes
        page = self._headers[False]
        read = os.preadv(self._fd, [page, _memory(address, size)], self._geometry.offset(slot))
        header = decode_slot_header(page[:], self._identity, checksum_bytes)
        if read != self._geometry.slot_bytes or header is None or header.block.key != key:
            return False
        return checksum_memory(address, size) == header.checksum

    def scan(self) -> Iterator[PlacedBlock | None]:
        """Read the header of each slot; yield the block that it names, or None. Before any read or write."""
        page = self._headers[False]
        for slot in range(self.slots):
            try:
                os.preadv(self._fd, [page], self._geometry.offset(slot))
            except OSError as error:
                _log.warning("the KV file %s cannot be read at slot %d: %s", self.path, slot, error)
                yield None
                continue
            header = decode_slot_header(page[:], self._identity, checksum_bytes)
            yield None if header is None else PlacedBlock(slot, header.block)

    def close(self) -> None:
        os.close(self._fd)

    def _claim(self, content: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigurationError(f"the KV file {self.path} is in use by another engine", param="kv_file") from error
        size = os.fstat(self._fd).st_size
        page = mmap.mmap(-1, PAGE_BYTES)
        if size:
            os.preadv(self._fd, [page], 0)
            found = decode_file_header(page[:])
            if found is None and any(page[:]):
                raise ConfigurationError(f"{self.path} is no KV file and is left as it is", param="kv_file")
            if found != content and found is not None:
                _log.warning("the KV file %s holds other blocks and is overwritten: %s", self.path, found)
        try:
            if size > self._geometry.file_bytes(self.slots):
                os.ftruncate(self._fd, self._geometry.file_bytes(self.slots))
            self._reserve(size)
            page[:] = encode_file_header(content)
            os.pwritev(self._fd, [page], 0)
        except OSError as error:
            raise ConfigurationError(
                f"the KV file {self.path} cannot have {self._geometry.file_bytes(self.slots)} bytes: {error.strerror}",
                param="kv_file_bytes",
            ) from error

    def _reserve(self, size: int) -> None:
        """Reserve the file's space. `size`: what it had before. Raises OSError, with no more space taken than that."""
        try:
            os.posix_fallocate(self._fd, 0, self._geometry.file_bytes(self.slots))
        except OSError:
            # File systems keep what they could reserve, which may be all that the disk had left.
            os.ftruncate(self._fd, min(size, self._geometry.file_bytes(self.slots)))
            raise


def _open(path: Path, *, direct: bool) -> tuple[int, bool]:
    """Return a file's descriptor, and whether its I/O is direct."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                _log.info("the file system of %s has no direct I/O; the KV file goes through the page cache", path)
        return os.open(path, flags, 0o600), False
    except OSError as error:
        raise ConfigurationError(f"the KV file {path} cannot be opened: {error.strerror}", param="kv_file") from error


def _memory(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * size).from_address(address)


def parents_first(placed: Sequence[PlacedBlock]) -> list[PlacedBlock]:
    """Return the blocks whose whole prefix is among `placed`, each after its parent; of equal blocks, one."""
    reachable: dict[bytes, PlacedBlock] = {}
    for each in sorted(placed, key=lambda each: (each.block.index, each.slot)):
        if each.block.index == 0 or each.block.parent in reachable:
            reachable.setdefault(each.block.key, each)
    return list(reachable.values())
