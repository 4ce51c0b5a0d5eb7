"""The message bus: the protocol, and its implementations on NATS and in memory."""

from __future__ import annotations

from baton.bus.memory import BusFaults, MemoryBus, MemoryNetwork
from baton.bus.nats import NatsBus
from baton.bus.protocol import Bus, BusLimits, Delivery, Entry, Handler, Retention, Subscription

__all__ = [
    "Bus",
    "BusFaults",
    "BusLimits",
    "Delivery",
    "Entry",
    "Handler",
    "MemoryBus",
    "MemoryNetwork",
    "NatsBus",
    "Retention",
    "Subscription",
]
