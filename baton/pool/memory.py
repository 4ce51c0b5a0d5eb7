"""Memory of one rank's KV pool: shared memory, cut into cells, of which each slot has one.

    cell c:  | layer 0 | layer 1 | … | layer n-1 | up to a multiple of 4 KiB |     each layer: one engine block

A cell has all layers of one engine block, in the engine's own bytes, so a block is one run of memory for its reader
(page-first). In the terms of `baton.transfer.Pool`, which describes it to peers: layer l begins at `base + l × block
bytes`, and blocks are a cell apart. Slot s is in cell s, but where hand-offs are staged in the same memory
(`baton.pool.cells`).

The memory is reserved at once, on the engine's NUMA node as far as that has room, and in huge pages where the system
gives shared memory these (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`: `advise`, `within_size` or `always`).
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final

from baton.errors import ConfigurationError
from baton.pool.cells import CellTable
from baton.transfer import Pool, share_memory
from baton.transfer.layout import Layout
from baton.transfer.layout import Pool as LayoutPool

_log = logging.getLogger(__name__)

PAGE_BYTES: Final = 4096

_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25


def slot_bytes(tensors: int, block_bytes: int) -> int:
    """Return the bytes of a slot for blocks of `block_bytes` in each of `tensors` tensors."""
    return -(-tensors * block_bytes // PAGE_BYTES) * PAGE_BYTES


def available_bytes() -> int:
    """Return the memory that this process can still take, by the machine's account and its control group's."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].removesuffix(" kB")) << 10
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # No control group limits this process, or it is of the old kind.
    return available


class KvPool:
    """Slots in shared memory for the blocks of `cache`, the engine's own KV cache."""

    def __init__(self, cache: Pool, budget_bytes: int, *, spare: int = 0) -> None:
        """Reserve the memory. The budget holds `spare` cells beside the slots; without a budget these are all.

        Raises ConfigurationError if there is none, or if the budget holds no slot.
        """
        tensors = len(cache.layer_addresses)
        stride_bytes = slot_bytes(tensors, cache.block_bytes)
        self.slots = budget_bytes // stride_bytes - spare if budget_bytes else 0
        size = (self.slots + spare) * stride_bytes
        if self.slots < 1 and (budget_bytes or not spare):
            beside = f" beside {spare} that stage hand-offs" if spare else ""
            raise ConfigurationError(
                f"a KV pool of {budget_bytes} bytes holds no block of {stride_bytes} bytes{beside}",
                param="kv_pool_bytes",
            )
        # Linux reserves shared memory page by page, and ends processes when none is left.
        if (available := available_bytes()) < size:
            raise ConfigurationError(
                f"memory for a KV pool of {size} bytes is not available: {available} bytes are", param="kv_pool_bytes"
            )
        region = share_memory(size)
        _ask_for_huge_pages(region.address, region.bytes)
        self.pool = replace(
            cache,
            layer_addresses=tuple(region.address + number * cache.block_bytes for number in range(tensors)),
            blocks=self.slots + spare,
            block_stride_bytes=stride_bytes,
            region=region,
        )
        """The cells, as peers read them."""
        self.cells = CellTable(self.slots, spare=spare)
        self._cache = cache
        self.block_tokens = cache.block_tokens
        self.tensors = tensors
        self.stride_bytes = stride_bytes

    def slot_address(self, slot: int) -> int:
        (cell,) = self.cells.of((slot,))
        return self.pool.layer_addresses[0] + cell * self.stride_bytes

    @cached_property
    def cache_blocks(self) -> LayoutPool:
        """The cache's blocks, as plain bytes."""
        return self._as_bytes(self._cache)

    @cached_property
    def cell_blocks(self) -> LayoutPool:
        return self._as_bytes(self.pool)

    def _as_bytes(self, pool: Pool) -> LayoutPool:
        # Copies take blocks as bytes, also where nothing describes what is in them.
        block = Layout(
            layers=self.tensors,
            kv_heads=1,
            dim=pool.block_bytes // pool.block_tokens,
            dtype="float8_e4m3",
            order="NHD",
            form="latent",
            block_tokens=pool.block_tokens,
        )
        assert block.block_bytes == pool.block_bytes
        return LayoutPool(block, pool.layer_addresses, pool.blocks, pool.block_stride_bytes)


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Advise huge pages, and gather the small ones that are reserved already: the advice alone is for later ones."""
    libc = ctypes.CDLL(None, use_errno=True)
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice):
            _log.debug("the KV pool gets no huge pages: error %d", ctypes.get_errno())
            return
