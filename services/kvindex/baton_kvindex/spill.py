"""Keeps the index within its memory: spills idle branches to Redis, and reloads what is cold and needed.

Redis is asked only where memory cannot answer: a prompt that ends in memory is answered from there, one that goes on in
Redis has one round trip and `cold_timeout_s` for it. Events of a worker that touch what is cold
wait, in order, while those of others go on. While Redis is away nothing leaves; after `cold_patience_s` what is cold is
given up, and the workers that held it are read anew. Memory stays within its bound whatever Redis does: what cannot
leave, and what is cold beyond half of the memory in stubs, is forgotten, the idlest first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from baton.messages.base import WorkerAddress
from baton.node.ports import Ports
from baton_kvindex.cold import BLOCK_BYTES, Cold, ColdIndex
from baton_kvindex.config import IndexSettings
from baton_kvindex.index import ID_BYTES
from baton_kvindex.packing import EvictedBranch
from baton_kvindex.reconciler import LocalMatch, Reconciler
from baton_kvindex.store import ColdStore, StoreUnavailable

logger = logging.getLogger(__name__)

PASS_S: Final = 0.2
"""Time between two looks at what memory takes."""
TICK_S: Final = 1.0
RETRY_S: Final = 0.1
SPARE: Final = 0.05
"""Share of the memory that is made free when there is too little: then it need not be looked for each time."""
EVICTION_PASSES: Final = 4
"""Eviction passes: each evicted branch leaves a stub, so one pass can free too little."""
PAGE_BLOCKS: Final = 1024
"""Blocks that are written at a time, or one branch."""
DROPPED_MAX: Final = 8
"""Branches dropped at a time: Redis looks at each of their blocks, and answers nothing else meanwhile."""
STUBS_SHARE: Final = 0.5
"""Share of the memory for stubs of what is cold: the rest is for what is hot."""
MEMORY_BYTES_MIN: Final = 1 << 21
"""Memory for less than which nothing is forgotten: this much an index takes in any case."""

Result = TypeVar("Result")


class Spill:
    def __init__(
        self, *, ports: Ports, store: ColdStore | None, reconciler: Reconciler, settings: IndexSettings
    ) -> None:
        self._store = store
        self._reconciler = reconciler
        self._clock = ports.clock
        self._threads = ports.threads
        self._settings = settings
        self._failing_since_s: float | None = None
        self._elsewhere: set[ColdIndex] = set()
        """Indexes of which something may be in Redis, those of models without workers included."""
        self.reloads = 0

    @property
    def is_reachable(self) -> bool:
        """Whether what is cold could be read when that was last tried."""
        return self._failing_since_s is None

    async def run(self) -> None:
        """Keep memory within its bound, until cancelled."""
        if self._store is None:
            return
        ticked_s = self._clock.now_s()
        while True:
            await self._clock.sleep(PASS_S)
            if self._clock.now_s() - ticked_s >= TICK_S:
                ticked_s = self._clock.now_s()
                for index in self._indexes():
                    index.tick()
            await self.make_room()

    async def close(self) -> None:
        """Forget all that is cold."""
        if self._store is not None:
            await self._store.close()

    async def make_room(self) -> None:
        """Move what has been idle for longest to Redis, if memory is full."""
        if self._store is None:
            return
        try:
            # Before anything is written, which would make what was lost look present.
            if any(index.branches for index in self._indexes()) and not await self._store.keep():
                self._give_up("Redis was emptied of what was cold")
            for index in {*self._elsewhere, *self._indexes()}:
                await self._drop_garbage(self._store, index)
                if not index.branches:
                    self._elsewhere.discard(index)
            bytes_max = self._settings.memory_bytes_max
            for _ in range(EVICTION_PASSES):
                excess = self._used_bytes() - bytes_max
                if excess <= 0 or not await self._free(self._store, excess + int(bytes_max * SPARE)):
                    break
        except StoreUnavailable as error:
            self._on_failure(error)
        else:
            self._failing_since_s = None
        await self._forget()

    async def complete(self, local: LocalMatch, model_digest: str, blocks: bytes) -> dict[str, int]:
        """Return the leading blocks that each worker holds, of what is cold as well if it comes in time."""
        if local.cold is None or not self.is_reachable:
            return local.held
        with suppress(TimeoutError):
            async with self._clock.timeout(self._settings.cold_timeout_s):
                await self.fetch(local.cold)
        return self._reconciler.match(model_digest, blocks).held

    async def until_here(self, call: Callable[[], Result]) -> Result:
        """Return what a call returns, once nothing that it needs is cold; it raises `Cold` before it changes anything.

        What is fetched is there when the call is made: nothing else runs in between.
        """
        while True:
            try:
                return call()
            except Cold as cold:
                await self._fetch_surely(cold)

    async def fetch(self, cold: Cold) -> bool:
        """Bring the branches of some blocks back; return whether they are here now, if there are any."""
        index = cold.index
        if self._store is None or not index.branches:
            return True
        evictions = index.evictions
        try:
            found = await self._store.find(cold.blocks)
        except StoreUnavailable as error:
            self._on_failure(error)
            return False
        self._failing_since_s = None
        self.reloads += 1
        if not index.reload(found, cold.blocks, evictions):
            self._give_up("Redis lost some of what was cold")
        return True

    async def reload(self, address: WorkerAddress, cold: Cold) -> None:
        """Fetch what events of a worker need, and let it go on."""
        await self._fetch_surely(cold)
        self._reconciler.on_reloaded(address)

    async def _fetch_surely(self, cold: Cold) -> None:
        while not await self.fetch(cold):
            await self._clock.sleep(RETRY_S)

    def _indexes(self) -> list[ColdIndex]:
        return self._reconciler.cold_indexes()

    def _used_bytes(self) -> int:
        return sum(index.used_bytes for index in self._indexes())

    async def _free(self, store: ColdStore, excess_bytes: int) -> bool:
        """Move about so much to Redis; return whether anything left."""
        # What takes most gives most.
        index = max(self._indexes(), key=lambda each: each.used_bytes)
        until_bytes, evictions = index.used_bytes - excess_bytes, index.evictions
        page: list[EvictedBranch] = []
        for first in await self._threads.run(partial(index.idlest, excess_bytes // BLOCK_BYTES + 1)):
            page += index.pack(first)
            if sum(len(branch.blocks) for branch in page) < PAGE_BLOCKS * ID_BYTES:
                continue
            await self._evict(store, index, page)
            page = []
            if index.used_bytes <= until_bytes:
                return True
        await self._evict(store, index, page)
        return index.evictions > evictions

    async def _forget(self) -> None:
        """Forget what memory has no room for even so: too many stubs, and what cannot leave or is too little for it."""
        bytes_max = max(self._settings.memory_bytes_max, MEMORY_BYTES_MIN)
        spare_bytes = int(bytes_max * SPARE)
        excess = sum(index.stubs_bytes for index in self._indexes()) - int(bytes_max * STUBS_SHARE)
        if excess > 0:
            max(self._indexes(), key=lambda each: each.stubs_bytes).forget_stubs(excess + spare_bytes)
        excess = self._used_bytes() - bytes_max
        if excess > 0:
            index = max(self._indexes(), key=lambda each: each.used_bytes)
            until_bytes = index.used_bytes - excess - spare_bytes
            for first in await self._threads.run(partial(index.idlest, (excess + spare_bytes) // BLOCK_BYTES + 1)):
                if index.used_bytes <= until_bytes:
                    return
                index.forget_behind(first)
                await self._clock.sleep(0)

    async def _evict(self, store: ColdStore, index: ColdIndex, page: list[EvictedBranch]) -> None:
        self._elsewhere.add(index)
        await store.put(page)
        index.garbage += [branch.name for branch in page if not index.evict(branch)]

    async def _drop_garbage(self, store: ColdStore, index: ColdIndex) -> None:
        while index.garbage:
            names = index.garbage[:DROPPED_MAX]
            await store.drop(names)
            del index.garbage[: len(names)]

    def _on_failure(self, error: StoreUnavailable) -> None:
        now_s = self._clock.now_s()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
            logger.warning("what is cold cannot be reached: %s", error)
        elif now_s - self._failing_since_s >= self._settings.cold_patience_s:
            self._give_up("what is cold could not be reached for too long")

    def _give_up(self, why: str) -> None:
        if workers := self._reconciler.forget_cold():
            logger.warning("%s: %d workers are read anew", why, workers)
