"""An index with too little memory, a cold store that can be unavailable, and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from baton_kvindex.cold import ColdIndex
from baton_kvindex.config import IndexSettings
from baton_kvindex.durable import Journal
from baton_kvindex.index import split_ids
from baton_kvindex.indexed_worker import SyncState
from baton_kvindex.packing import EvictedBranch
from baton_kvindex.reconciler import Reconciler
from baton_kvindex.spill import Spill

from baton.bus import MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.errors import StoreUnavailable
from baton.node.ports import deterministic_ports
from tests.harness.index.worker import MODEL, Cache

PATH = "a prompt that is long enough"


class Elsewhere:
    """A `ColdStore` in memory that can be made unavailable."""

    def __init__(self) -> None:
        self.branches: dict[bytes, bytes] = {}
        self.asked = 0
        self.away = False
        self.loses_answers = False
        """Whether it writes branches and cannot say so."""
        self.written = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def put(self, branches: Sequence[EvictedBranch]) -> None:
        self._check()
        self.branches |= {each.name: each.packed() for each in branches}
        self.written.set()
        await self.may_end.wait()
        if self.loses_answers:
            raise StoreUnavailable("no answer in time")

    async def find(self, blocks: bytes) -> Mapping[bytes, bytes]:
        self.asked += 1
        self._check()
        ids = split_ids(blocks)
        return {name: packed for name, packed in self.branches.items() if any(each in packed for each in ids)}

    async def drop(self, names: Sequence[bytes]) -> None:
        self._check()
        for name in names:
            self.branches.pop(name, None)

    async def keep(self) -> bool:
        self._check()
        return bool(self.branches)

    async def close(self) -> None:
        self.branches.clear()

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("away")


class World:
    def __init__(self, memory_bytes_max: int = 1) -> None:
        self.store = Elsewhere()
        self.clock = ManualClock()
        self.settings = IndexSettings(memory_bytes_max=memory_bytes_max)
        self.reconciler = Reconciler(ColdIndex, IndexSettings(), Journal(1 << 20))
        self.spill = self.make_spill(self.settings)
        self.sequence = 0

    def make_spill(self, settings: IndexSettings) -> Spill:
        ports = deterministic_ports(MemoryBus(MemoryNetwork()), self.clock, seed=0)
        return Spill(ports=ports, store=self.store, reconciler=self.reconciler, settings=settings)

    @property
    def index(self) -> ColdIndex:
        (index,) = self.reconciler.models().values()
        assert isinstance(index, ColdIndex)
        return index

    def tell(self, cache: Cache, path: str) -> None:
        self.sequence += 1
        self.reconciler.on_events(cache.stored(path), self.sequence, 0.0)

    def remove(self, cache: Cache, blocks: bytes) -> None:
        self.sequence += 1
        self.reconciler.on_events(cache.removed(blocks), self.sequence, 0.0)

    async def reload(self) -> None:
        for address, cold in self.reconciler.due_reloads():
            await self.spill.reload(address, cold)

    async def match(self, blocks: bytes) -> dict[str, int]:
        """Return each worker's leading blocks of a prompt, cold branches included."""
        return (await self.spill.complete(self.reconciler.match(MODEL, blocks), MODEL, blocks)).held

    def state(self, cache: Cache) -> SyncState:
        return self.reconciler.workers()[cache.name].state

    def is_true(self, cache: Cache) -> bool:
        return self.reconciler.fingerprint(cache.name) == cache.fingerprint()


async def cold_prompt() -> tuple[World, Cache]:
    """Return a world and one of its workers, which has one cold prompt."""
    world, cache = World(), Cache()
    world.tell(cache, PATH)
    await world.spill.make_room()
    assert (world.index.branches, world.index.footprint().blocks) == (1, 0)
    return world, cache
