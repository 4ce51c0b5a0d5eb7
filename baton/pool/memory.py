"""Memory of one rank's KV pool: shared memory, cut into slots.

    slot s:  | layer 0 | layer 1 | … | layer n-1 | up to a multiple of 4 KiB |     each layer: one engine block

A slot has all layers of one engine block, in the engine's own bytes, so a block is one run of memory for its reader
(page-first). In the terms of `baton.transfer.Pool`, which describes it to peers: layer l begins at `base + l × block
bytes`, and blocks are a slot apart.

The memory is reserved at once, on the engine's NUMA node as far as that has room, and in huge pages where the system
gives shared memory these (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`).
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from baton.errors import ConfigurationError
from baton.transfer import Pool, share_memory
from baton.transfer.layout import Layout
from baton.transfer.layout import Pool as LayoutPool

_log = logging.getLogger(__name__)

PAGE_BYTES: Final = 4096

_MADV_HUGEPAGE: Final = 14


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

    def __init__(self, cache: Pool, budget_bytes: int) -> None:
        """Reserve the memory. Raises ConfigurationError if there is none, or if it is less than one slot."""
        tensors = len(cache.layer_addresses)
        stride_bytes = slot_bytes(tensors, cache.block_bytes)
        self.slots = budget_bytes // stride_bytes
        if self.slots < 1:
            raise ConfigurationError(
                f"a KV pool of {budget_bytes} bytes is smaller than one block of {stride_bytes}", param="kv_pool_bytes"
            )
        # Linux reserves shared memory page by page, and ends processes when none is left.
        if (available := available_bytes()) < self.slots * stride_bytes:
            raise ConfigurationError(
                f"memory for a KV pool of {budget_bytes} bytes is not available: {available} bytes are",
                param="kv_pool_bytes",
            )
        region = share_memory(self.slots * stride_bytes)
        _ask_for_huge_pages(region.address, region.bytes)
        self.pool = replace(
            cache,
            layer_addresses=tuple(region.address + number * cache.block_bytes for number in range(tensors)),
            blocks=self.slots,
            block_stride_bytes=stride_bytes,
            region=region,
        )
        # Copies take blocks as bytes, also where nothing describes what is in them.
        block = Layout(
            layers=tensors,
            kv_heads=1,
            dim=cache.block_bytes // cache.block_tokens,
            dtype="float8_e4m3",
            order="NHD",
            form="latent",
            block_tokens=cache.block_tokens,
        )
        assert block.block_bytes == cache.block_bytes
        self.cache_blocks = _as_bytes(block, cache)
        self.slot_blocks = _as_bytes(block, self.pool)
        self.block_tokens = cache.block_tokens
        self.tensors = tensors
        self.stride_bytes = stride_bytes

    def slot_address(self, slot: int) -> int:
        return self.pool.layer_addresses[0] + slot * self.stride_bytes


def _as_bytes(block: Layout, pool: Pool) -> LayoutPool:
    return LayoutPool(block, pool.layer_addresses, pool.blocks, pool.block_stride_bytes)


def _ask_for_huge_pages(address: int, size: int) -> None:
    if ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_HUGEPAGE):
        _log.debug("the KV pool gets no huge pages: error %d", ctypes.get_errno())
