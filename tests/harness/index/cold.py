"""An index with no memory to spare, a store for what is cold that can be away, and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from baton_kvindex.cold import ColdIndex
from baton_kvindex.config import IndexSettings
from baton_kvindex.durable import Journal
from baton_kvindex.follower import Follower, FollowerOptions
from baton_kvindex.freezer import Freezer
from baton_kvindex.index import split_ids
from baton_kvindex.life import Resync
from baton_kvindex.packing import Leaving
from baton_kvindex.store import StoreUnavailable

from baton.clock import ManualClock
from tests.harness.index.worker import Cache

PATH = "a prompt that is long enough"


class Elsewhere:
    """A `ColdStore` in memory, which can be away."""

    def __init__(self) -> None:
        self.branches: dict[bytes, bytes] = {}
        self.asked = 0
        self.away = False
        self.written = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def put(self, branches: Sequence[Leaving]) -> None:
        self._check()
        self.branches |= {each.name: each.packed() for each in branches}
        self.written.set()
        await self.may_end.wait()

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
        self.follower = Follower(ColdIndex, FollowerOptions(), Journal(1 << 20))
        self.freezer = Freezer(store=self.store, follower=self.follower, clock=self.clock, settings=self.settings)
        self.sequence = 0

    @property
    def index(self) -> ColdIndex:
        (index,) = self.follower.models().values()
        assert isinstance(index, ColdIndex)
        return index

    def tell(self, cache: Cache, path: str) -> None:
        self.sequence += 1
        self.follower.on_events(cache.stored(path), self.sequence, 0.0)

    def remove(self, cache: Cache, blocks: bytes) -> None:
        self.sequence += 1
        self.follower.on_events(cache.removed(blocks), self.sequence, 0.0)

    async def recall(self) -> None:
        for address, cold in self.follower.due_recalls():
            await self.freezer.recall(address, cold)

    def life(self, cache: Cache) -> Resync:
        return self.follower.lives()[cache.name].resync

    def is_true(self, cache: Cache) -> bool:
        return self.follower.fingerprint(cache.name) == cache.fingerprint()


async def cold_prompt() -> tuple[World, Cache]:
    """Return a worker of which one prompt is cold."""
    world, cache = World(), Cache()
    world.tell(cache, PATH)
    await world.freezer.make_room()
    assert (world.index.branches, world.index.footprint().blocks) == (1, 0)
    return world, cache
