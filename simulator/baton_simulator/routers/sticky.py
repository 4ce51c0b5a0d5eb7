"""Sticky: a conversation stays on its workers."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from random import Random

from baton_simulator.routers.events_ignored import EventsIgnored
from baton_simulator.routers.in_flight import decoding, prefilling
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec

KEY_BLOCKS = 2
"""Leading blocks that stand for the conversation where the trace names none."""


class Sticky(EventsIgnored):
    """Rendezvous hashing of the session, as `src/policies/rendezvous_hash.rs` of vllm-router 0.1.17.

    Differences: vllm-router hashes with MurmurHash, so its workers are others; and without a session it hashes the
    whole body, where the first two blocks keep a conversation together here. There is nothing to configure.
    """

    def __init__(self, workers: Sequence[WorkerSpec], options: None, random: Random) -> None:
        del options, random
        self._decode = decoding(workers)
        self._prefill = prefilling(workers)

    def route(self, arrival: Arrival, now_s: float) -> Route:
        key = arrival.session or " ".join(map(str, arrival.blocks[:KEY_BLOCKS])) or arrival.id
        return Route(highest(key, self._decode), highest(key, self._prefill) if self._prefill else None)


def highest(key: str, workers: Sequence[str]) -> str:
    """Return the worker with the highest hash for the key."""
    return max(workers, key=lambda worker: blake2b(f"{key}:{worker}".encode(), digest_size=8).digest())
