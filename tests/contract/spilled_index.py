"""Tree and Redis with so little memory that each call spills everything and the next call reloads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from uuid import uuid4

from baton_kvindex.cold import Cold, ColdIndex
from baton_kvindex.index import Run, Tier
from baton_kvindex.store import ColdStore, RedisStore

from baton.clock import SystemClock
from tests.harness.servers import start_redis

Result = TypeVar("Result")


class SpilledIndex(ColdIndex):
    """The service's own index and store, called in sequence instead of concurrently."""

    runner: asyncio.Runner
    stores: RedisStore

    def __init__(self, *, counts_copies: bool = False) -> None:
        assert not counts_copies, "kvindex follows workers that count themselves"
        super().__init__(stub_bytes=0)
        self._store: ColdStore = self.stores.cold(uuid4().hex)

    def store(self, worker: str, parent: bytes, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
        return self._call(lambda: super(SpilledIndex, self).store(worker, parent, blocks, tier))

    def remove(self, worker: str, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
        return self._call(lambda: super(SpilledIndex, self).remove(worker, blocks, tier))

    def clear(self, worker: str) -> int:
        return self._call(lambda: super(SpilledIndex, self).clear(worker))

    def dump(self, worker: str, tier: Tier = Tier.DEVICE) -> list[Run]:
        return self._call(lambda: super(SpilledIndex, self).dump(worker, tier))

    def load(self, worker: str, runs: Sequence[Run], tier: Tier = Tier.DEVICE) -> None:
        self._call(lambda: super(SpilledIndex, self).load(worker, runs, tier))

    def match(self, blocks: bytes, tier: Tier = Tier.DEVICE) -> dict[str, int]:
        return self._call(lambda: self._match(blocks, tier))

    def match_tiers(self, blocks: bytes) -> dict[str, tuple[int, int, int]]:
        device, pool, file = (self.match(blocks, tier) for tier in Tier)
        return {worker: (device.get(worker, 0), pool.get(worker, 0), reach) for worker, reach in file.items()}

    def _match(self, blocks: bytes, tier: Tier) -> dict[str, int]:
        held = super().match(blocks, tier)
        if behind := self.behind(blocks, max(held.values(), default=0)):
            raise Cold(self, behind)
        return held

    def _call(self, call: Callable[[], Result]) -> Result:
        while True:
            try:
                result = call()
                break
            except Cold as cold:
                found = self.runner.run(self._store.find(cold.blocks))
                assert self.reload(found, cold.blocks, self.evictions)
        self._evict()
        return result

    def _evict(self) -> None:
        while firsts := self.idlest(1 << 30):
            evicted = [evicted for first in firsts for evicted in self.pack(first)]
            self.runner.run(self._store.put(evicted))
            assert all(self.evict(each) for each in evicted)
        if len(self.garbage) > 50:
            self.runner.run(self._store.drop(self.garbage))
            self.garbage.clear()
        assert (self.footprint().blocks, self.footprint().ghosts) == (0, 0), "nothing is in memory"


@contextmanager
def spilled_indexes() -> Generator[None]:
    """Give every index made inside the block a Redis."""
    with start_redis() as server, asyncio.Runner() as runner:
        SpilledIndex.runner = runner
        SpilledIndex.stores = RedisStore(server.url, clock=SystemClock(), prefix="contract", timeout_s=5.0)
        yield
        runner.run(SpilledIndex.stores.close())
