"""Baton's native core.

Its users are `baton.blocks`, `native`, `native_values`, `memory`, `layout` and `device` in `baton.transfer`,
`baton_kvindex.radix`, and `prediction` and `policies.predicted` in `baton_scheduler`.
"""

from baton_native import core
from baton_native._core import (
    Agent,
    CopyEngine,
    DeviceMemory,
    Faults,
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
    crc32c_at,
    crc32c_portable,
    hash_blocks,
)

__all__ = [
    "Agent",
    "CopyEngine",
    "DeviceMemory",
    "Faults",
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
    "crc32c_at",
    "crc32c_portable",
    "hash_blocks",
]
