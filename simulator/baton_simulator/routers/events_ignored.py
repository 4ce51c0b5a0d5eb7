"""The events of a replay, for routers that have no use for some of them."""

from __future__ import annotations

from collections.abc import Sequence

from baton_simulator.routers.protocol import Arrival, WorkerState


class EventsIgnored:
    """Does nothing at any event of the router protocol. A router overrides those that its peer hears of."""

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        pass

    def ended(self, arrival: Arrival, now_s: float) -> None:
        pass

    def cached(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        pass

    def beat(self, state: WorkerState, now_s: float) -> None:
        pass
