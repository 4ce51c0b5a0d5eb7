"""Baton's native core. Only `baton.blocks`, `baton.transfer.native` and `baton.transfer.layout` import this."""

from baton_native import core
from baton_native._core import (
    Agent,
    Options,
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
    "Report",
    "Stats",
    "blake3",
    "blake3_keyed",
    "core",
    "crc32c",
    "crc32c_portable",
    "hash_blocks",
]
