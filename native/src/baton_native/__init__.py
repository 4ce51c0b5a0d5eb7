"""Baton's native core. Only `baton.blocks` and `baton.transfer.native` import this."""

from baton_native import core
from baton_native._core import (
    Agent,
    Options,
    Region,
    Report,
    Stats,
    blake3,
    blake3_keyed,
    crc32c,
    crc32c_portable,
    hash_blocks,
)

__all__ = [
    "Agent",
    "Options",
    "Region",
    "Report",
    "Stats",
    "blake3",
    "blake3_keyed",
    "core",
    "crc32c",
    "crc32c_portable",
    "hash_blocks",
]
