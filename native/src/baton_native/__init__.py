"""Baton's native core. One module knows each of its jobs.

They are `baton.blocks`, `baton.transfer.native`, `baton.transfer.layout` and `baton_kvindex.radix`.
"""

from baton_native import core
from baton_native._core import (
    Agent,
    DeviceMemory,
    Faults,
    FlatTable,
    GpuError,
    GpuUnavailable,
    IndexFull,
    MalformedRun,
    Options,
    RadixSize,
    RadixTree,
    RailShare,
    Region,
    Report,
    Stats,
    UnknownBlock,
    blake3,
    blake3_keyed,
    crc32c,
    crc32c_portable,
    hash_blocks,
)

__all__ = [
    "Agent",
    "DeviceMemory",
    "Faults",
    "FlatTable",
    "GpuError",
    "GpuUnavailable",
    "IndexFull",
    "MalformedRun",
    "Options",
    "RadixSize",
    "RadixTree",
    "RailShare",
    "Region",
    "Report",
    "Stats",
    "UnknownBlock",
    "blake3",
    "blake3_keyed",
    "core",
    "crc32c",
    "crc32c_portable",
    "hash_blocks",
]
