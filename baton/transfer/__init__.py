"""Transfer of KV blocks between engines: the protocol, and its implementations in C++ and in memory."""

from __future__ import annotations

from baton.transfer.native import NativeAgent, checksum_bytes, checksum_memory, share_memory
from baton.transfer.protocol import (
    KEY_BYTES,
    AgentOptions,
    AgentStats,
    Cause,
    Corruption,
    EventKind,
    Pool,
    RailShare,
    SharedMemory,
    TransferAgent,
    TransferEvent,
    TransferFaults,
    Whole,
    lease_key,
    pull_failure,
    rank_key,
)
from baton.transfer.pull_watch import LayerGroup, PullWatch
from baton.transfer.tally import PullTally, PullTotals

__all__ = [
    "KEY_BYTES",
    "AgentOptions",
    "AgentStats",
    "Cause",
    "Corruption",
    "EventKind",
    "LayerGroup",
    "NativeAgent",
    "Pool",
    "PullTally",
    "PullTotals",
    "PullWatch",
    "RailShare",
    "SharedMemory",
    "TransferAgent",
    "TransferEvent",
    "TransferFaults",
    "Whole",
    "checksum_bytes",
    "checksum_memory",
    "lease_key",
    "pull_failure",
    "rank_key",
    "share_memory",
]
