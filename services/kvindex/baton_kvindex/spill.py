"""Keeps the index within its memory: spills idle branches to Redis, and reloads cold branches that are needed.

A prompt whose match ends in memory is answered without Redis; one that continues in cold branches gets one round trip
to Redis, within `cold_timeout_s`. Events of a worker that need cold blocks wait, in order, while those of other workers
go on. While Redis is away nothing is spilled; after `cold_patience_s` all cold blocks are given up, and the workers
that held them are resynced. Memory stays within its bound in any case: branches that cannot be spilled, and cold ones
whose stubs exceed half of the memory, are forgotten, the idlest first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from baton.errors import StoreUnavailable
from baton.messages.base import WorkerAddress
from baton.node.ports import Ports
from baton_kvindex.cold import BLOCK_BYTES, Cold, ColdIndex
from baton_kvindex.config import IndexSettings
from baton_kvindex.index import ID_BYTES
from baton_kvindex.packing import EvictedBranch
from baton_kvindex.reconciler import LocalMatch, Reconciler
from baton_kvindex.store import ColdStore

logger = logging.getLogger(__name__)

PASS_S: Final = 0.2
"""Time between two checks of the memory in use."""
TICK_S: Final = 1.0
RETRY_S: Final = 0.1
SPARE: Final = 0.05
"""Share of the memory that is freed beyond the need, so that not every check has to free some."""
EVICTION_PASSES: Final = 4
"""Eviction passes: each evicted branch leaves a stub, so one pass can free too little."""
PAGE_BLOCKS: Final = 1024
"""Blocks that are written at a time; at least one branch."""
DROPPED_MAX: Final = 8
"""Most branches dropped at a time: Redis visits each of their blocks, and answers nothing else meanwhile."""
STUBS_SHARE: Final = 0.5
"""Share of the memory for stubs of cold branches; the rest is for hot blocks."""
MEMORY_BYTES_MIN: Final = 1 << 21
"""Memory that an index needs in any case: below it, nothing is forgotten."""

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
        """Indexes that may have branches in Redis, those of models without workers included."""
        self.reloads = 0

    @property
    def is_reachable(self) -> bool:
        """Whether the last access to Redis succeeded."""
        return self._failing_since_s is None

    async def run(self) -> None:
        """Keep memory within its bound until cancelled."""
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
        """Delete all cold branches."""
        if self._store is not None:
            await self._store.close()

    async def make_room(self) -> None:
        """Spill the idlest branches to Redis if memory is full."""
        if self._store is None:
            return
        try:
            # Checked before a write, after which an emptied Redis would no longer look empty.
            if any(index.branches for index in self._indexes()) and not await self._store.keep():
                self._give_up("Redis lost all cold blocks")
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

    async def complete(self, local: LocalMatch, model_digest: str, blocks: bytes) -> LocalMatch:
        """Return the leading blocks of each worker, cold ones included if they are reloaded in time."""
        if local.cold is None or not self.is_reachable:
            return local
        with suppress(TimeoutError):
            async with self._clock.timeout(self._settings.cold_timeout_s):
                await self.fetch(local.cold)
        return self._reconciler.match(model_digest, blocks)

    async def until_here(self, call: Callable[[], Result]) -> Result:
        """Repeat a call, with a reload after each `Cold` that it raises, until it returns; return its result.

        The call must raise `Cold` before it changes anything. Nothing else runs between a reload and the next call.
        """
        while True:
            try:
                return call()
            except Cold as cold:
                await self._fetch_surely(cold)

    async def fetch(self, cold: Cold) -> bool:
        """Reload the branches of some blocks; return False if Redis could not be read."""
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
            self._give_up("Redis lost some of the cold blocks")
        return True

    async def reload(self, address: WorkerAddress, cold: Cold) -> None:
        """Reload the blocks that a worker's events need, and let the worker continue."""
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
        """Spill about this much memory to Redis; return whether any branch was evicted."""
        # The largest index has the most to spill.
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
        """Forget what still exceeds the memory: stubs beyond their share, and branches that cannot be spilled."""
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
        try:
            await store.put(page)
        except StoreUnavailable:
            # They may have been written, in whole or in part, and the next attempt has names of its own.
            index.garbage += [branch.name for branch in page]
            raise
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
            logger.warning("cold blocks cannot be reached: %s", error)
        elif now_s - self._failing_since_s >= self._settings.cold_patience_s:
            self._give_up("cold blocks could not be reached for too long")

    def _give_up(self, why: str) -> None:
        if workers := self._reconciler.forget_cold():
            logger.warning("%s: resyncing %d workers", why, workers)
