"""Source side of a `GpuAgent`: leases that are offered as they are and staged, until their sink chooses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from baton.errors import TransferFailed
from baton.pool.staging import StagedAgent, Stream
from baton.transfer import Cause, EventKind, NativeAgent, TransferEvent, Whole

_log = logging.getLogger(__name__)


class Way(StrEnum):
    DIRECT = "direct"
    """A peer's GPU, or its adapter, reads the cache."""
    STAGED = "staged"


@dataclass(slots=True)
class Offer:
    generation: int = 0
    open: bool = False
    agents: dict[Way, int] = field(default_factory=dict[Way, int])
    """Generation of the lease of each agent that offers it."""
    way: Way | None = None
    """Way that the sink has chosen."""


class Offers:
    """Not thread-safe: the agent's lock is held in every call."""

    def __init__(
        self, direct: NativeAgent, staged: StagedAgent, stream: Stream, tell: Callable[[TransferEvent], None]
    ) -> None:
        self._direct = direct
        self._staged = staged
        self._stream = stream
        self._tell = tell
        self._offers: dict[bytes, Offer] = {}
        self._told_failure = False
        self.revoked = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._offers)

    def open(self, key: bytes, *, tokens: int, unclaimed_ttl_s: float | None, whole: Whole | None) -> int:
        offer = self._offers.get(key, Offer())
        ways = [Way.STAGED, Way.DIRECT] if offer.way is None else [offer.way]
        if whole is not None:
            # Several ranks of a peer read these blocks: each converts its heads from what is staged.
            ways = [Way.STAGED]
        offer.agents = {
            way: self._agent(way).open_lease(key, tokens=tokens, unclaimed_ttl_s=unclaimed_ttl_s, whole=whole)
            for way in ways
        }
        offer.generation = max(offer.generation + 1, *offer.agents.values())
        offer.open = True
        self._offers[key] = offer
        return offer.generation

    def extend(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        for way, current in self._current(key, generation).items():
            self._agent(way).extend_lease(key, current, blocks)

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        agents = self._current(key, generation)
        if Way.DIRECT in agents:
            self._post_direct(key, agents[Way.DIRECT], layer, tokens)
        if Way.STAGED in agents:
            self._staged.post_ready(key, agents[Way.STAGED], layer, tokens)

    def complete(self, key: bytes, generation: int, tokens: int) -> None:
        for way, current in self._current(key, generation).items():
            self._agent(way).complete_lease(key, current, tokens)

    def revoke(self, key: bytes, *, final: bool) -> None:
        offer = self._offers.get(key)
        if offer is None:
            if final:
                # It may come before its lease.
                for way in Way:
                    self._agent(way).revoke_lease(key, final=True)
            return
        for way in offer.agents:
            self._agent(way).revoke_lease(key, final=final)
        self.revoked += final or offer.open
        offer.open = False
        if final:
            del self._offers[key]
            self._tell(TransferEvent(kind=EventKind.LEASE_ENDED, key=key, cause=Cause.REVOKED))

    def take(self, way: Way, event: TransferEvent) -> None:
        """Take an event of a lease of one agent; what ends because it was taken back here is not told again."""
        offer = self._offers.get(event.key)
        if offer is None or way not in offer.agents:
            return
        match event.kind:
            case EventKind.LEASE_ASKED:
                offer.way = way
                self._withdraw(event.key, offer, way)
            case EventKind.LEASE_RELEASED | EventKind.LEASE_ENDED:
                del self._offers[event.key]
                self._withdraw(event.key, offer, way)
                self.expired += event.cause is Cause.EXPIRED
                self._tell(event)
            case _:
                self._tell(event)

    def _withdraw(self, key: bytes, offer: Offer, keeps: Way) -> None:
        """Leave the sink one way only."""
        for way in set(offer.agents) - {keeps}:
            del offer.agents[way]
            self._agent(way).revoke_lease(key, final=True)

    def _post_direct(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        stream = self._stream()
        if stream is None:
            self._direct.post_ready(key, generation, layer, tokens)
            return
        try:
            self._direct.post_ready_after(key, generation, layer, tokens, stream=stream)
        except (TransferFailed, ValueError) as failure:
            offer = self._offers[key]
            if offer.way is Way.DIRECT:
                raise
            # Peers learn the reason by the handshake, and take the other way.
            if not self._told_failure:
                _log.warning("peers' GPUs cannot read this cache, so it is staged: %s", failure)
                self._told_failure = True
            self._withdraw(key, offer, Way.STAGED)

    def _agent(self, way: Way) -> NativeAgent | StagedAgent:
        return self._direct if way is Way.DIRECT else self._staged

    def _current(self, key: bytes, generation: int) -> dict[Way, int]:
        offer = self._offers.get(key)
        return dict(offer.agents) if offer is not None and offer.open and offer.generation == generation else {}
