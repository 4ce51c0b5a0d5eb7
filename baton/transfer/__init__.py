"""Moving KV blocks between engines: the protocol, and its implementations in C++ and in memory."""

from __future__ import annotations

from baton.transfer.native import NativeAgent, share_memory
from baton.transfer.protocol import (
    KEY_BYTES,
    AgentOptions,
    AgentStats,
    Cause,
    EventKind,
    Faults,
    Pool,
    SharedMemory,
    TransferAgent,
    TransferEvent,
    lease_key,
)

__all__ = [
    "KEY_BYTES",
    "AgentOptions",
    "AgentStats",
    "Cause",
    "EventKind",
    "Faults",
    "NativeAgent",
    "Pool",
    "SharedMemory",
    "TransferAgent",
    "TransferEvent",
    "lease_key",
    "share_memory",
]
