"""Baton's native core. `baton.blocks`, `baton.transfer.native` and `baton_kvindex.radix` import this, nothing else."""

from baton_native import core
from baton_native._core import (
    Agent,
    FlatTable,
    IndexFull,
    MalformedRun,
    Options,
    RadixSize,
    RadixTree,
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
    "FlatTable",
    "IndexFull",
    "MalformedRun",
    "Options",
    "RadixSize",
    "RadixTree",
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
