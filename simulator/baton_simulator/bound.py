"""What no policy can much exceed: an infinite cache that all workers share, and the least loaded worker every time."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from baton_simulator.cache import PrefixCache
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec, WorkerState
from baton_simulator.steps import MockerSteps

SHARE_S: Final = 1.0
"""Cost of a worker's whole memory in use: its steps are slower."""
LACK_S: Final = 10.0
"""Cost of as much memory lacking as a worker has: requests wait for it."""


class SharedCache(PrefixCache):
    """A worker's memory beside a cache that holds every prompt that any worker ever began. Pulls cost nothing."""

    __slots__ = ("_seen",)

    def __init__(self, *, in_use_max: int, seen: set[int]) -> None:
        super().__init__(in_use_max=in_use_max, blocks_max=in_use_max)
        self._seen = seen

    def match(self, blocks: Sequence[int]) -> int:
        seen = self._seen
        return next((count for count, block in enumerate(blocks) if block not in seen), len(blocks))

    def admit(self, blocks: Sequence[int], private: int) -> tuple[int, list[int]]:
        held = self.match(blocks)
        super().admit(blocks, private)
        self._seen.update(blocks)
        return held, []


class _Load:
    """One worker's work."""

    __slots__ = ("cache", "prefill_s")

    def __init__(self, spec: WorkerSpec) -> None:
        # Its limit is never asked for: more may be placed than runs at the same time.
        self.cache = PrefixCache(in_use_max=spec.kv_blocks_total, blocks_max=1 << 60)
        self.prefill_s = 0.0


class LeastWork:
    """Routes to the worker with the least work, which it knows exactly: prompts to compute, and memory."""

    def __init__(self, workers: Sequence[WorkerSpec], random: Random) -> None:
        self._spec = workers[0]
        self._prefills = {spec.name: _Load(spec) for spec in workers if spec.role == "prefill"}
        self._decodes = {spec.name: _Load(spec) for spec in workers if spec.role != "prefill"}
        self._random = random
        self._model = MockerSteps()
        self._seen: set[int] = set()
        self._routes: dict[str, tuple[Route, float]] = {}

    def route(self, arrival: Arrival, now_s: float) -> Route:
        held = next((n for n, block in enumerate(arrival.blocks) if block not in self._seen), len(arrival.blocks))
        self._seen.update(arrival.blocks)
        prefill_s = self._model.prompt_s(held * self._spec.block_tokens, arrival.prompt_tokens)
        decode = min(
            self._decodes, key=lambda name: (self._cost_s(self._decodes[name], arrival), self._random.random())
        )
        prefill = None
        if self._prefills:
            prefill = min(self._prefills, key=lambda name: (self._prefills[name].prefill_s, self._random.random()))
        route = Route(decode, prefill)
        self._routes[arrival.id] = route, prefill_s
        self._computing(route).prefill_s += prefill_s
        self._decodes[route.decode].cache.admit(arrival.blocks, 1)
        return route

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        route, prefill_s = self._routes[arrival.id]
        self._computing(route).prefill_s -= prefill_s

    def ended(self, arrival: Arrival, now_s: float) -> None:
        route, _ = self._routes.pop(arrival.id)
        self._decodes[route.decode].cache.release(arrival.blocks, 1)

    def cached(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None: ...

    def beat(self, state: WorkerState, now_s: float) -> None: ...

    def _least(self, costs_s: dict[str, float]) -> str | None:
        return min(costs_s, key=lambda name: (costs_s[name], self._random.random()), default=None)

    def _computing(self, route: Route) -> _Load:
        return self._prefills[route.prefill] if route.prefill else self._decodes[route.decode]

    def _cost_s(self, load: _Load, arrival: Arrival) -> float:
        share = (load.cache.in_use + 1 + load.cache.added(arrival.blocks)) / self._spec.kv_blocks_total
        return load.prefill_s + SHARE_S * share + LACK_S * max(share - 1, 0.0)
