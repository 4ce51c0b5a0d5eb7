"""Writes the index to Redis in the background, while this index holds the writer's lease."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from functools import partial
from typing import Final

from baton import subjects
from baton.errors import BatonError, StoreUnavailable
from baton.node.lease import KeptLease
from baton.node.ports import Ports
from baton_kvindex.config import IndexSettings
from baton_kvindex.reconciler import Reconciler
from baton_kvindex.spill import Spill
from baton_kvindex.store import Store, StoreEmptied, StoreFenced

logger = logging.getLogger(__name__)

LAST_WRITE_S: Final = 2.0
JOURNAL_KEPT_S: Final = 10.0
"""Time for which changes are kept while another index writes: more than that one is behind when it is lost."""


class Writer:
    def __init__(
        self, *, ports: Ports, store: Store, reconciler: Reconciler, spill: Spill, settings: IndexSettings
    ) -> None:
        self._clock = ports.clock
        self._store = store
        self._reconciler = reconciler
        self._spill = spill
        self._settings = settings
        # Indexes with different Redis prefixes have leases of their own.
        key = re.sub(r"[^A-Za-z0-9_-]", "-", settings.redis_prefix)
        self._lease = KeptLease(ports, bucket=subjects.INDEX_BUCKET, key=key, ttl_s=settings.writer_ttl_s)
        self._claimed = 0
        """Fence with which this index writes; 0: another index may have written since it last did."""
        self._failing = False

    @property
    def is_writing(self) -> bool:
        """Whether this index is the one that writes."""
        return bool(self._claimed)

    @property
    def is_failing(self) -> bool:
        """Whether this index is to write and its last write failed."""
        return self._failing

    async def run(self) -> None:
        """Write until cancelled; then write the newest state, and release the lease."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lease.keep())
                tasks.create_task(self._write_behind())
        finally:
            fence = self._claimed or self._lease.fence()
            # If Redis or NATS is down, the next start catches up from the workers.
            with suppress(TimeoutError, BatonError):
                async with self._clock.timeout(LAST_WRITE_S):
                    while fence and self._reconciler.journal and await self._write(fence):
                        pass
                    await self._lease.release()

    # ------------------------------------------------------------ writing

    async def _write_behind(self) -> None:
        """Write the changes every `write_interval_s`. While Redis is down, they wait in the bounded journal."""
        rotated_s = self._clock.now_s()
        while True:
            await self._clock.sleep(self._settings.write_retry_s if self._failing else self._settings.write_interval_s)
            fence = self._lease.fence()
            if fence:
                self._failing = not await self._write(fence)
                continue
            if self._claimed:
                logger.warning("no longer the index that writes")
                self._claimed = 0
            self._failing = False
            if self._clock.now_s() - rotated_s >= JOURNAL_KEPT_S:
                rotated_s = self._clock.now_s()
                self._reconciler.journal.rotate()

    async def _write(self, fence: int) -> bool:
        """Write all changes that wait; return whether the store takes writes."""
        try:
            if fence != self._claimed or not self._reconciler.journal.is_complete:
                # Only what differs from the previous writer's state is written.
                self._reconciler.go_on_from(await self._store.claim(fence))
                self._claimed = fence
                logger.info("this index writes")
            if self._reconciler.journal:
                await self._write_batch(fence)
        except StoreFenced:
            if not self._failing:
                logger.warning("a late write was refused: another index writes")
            self._claimed = 0
            return False
        except StoreEmptied:
            logger.warning("Redis lost what was written: writing the whole index again")
            self._claimed = 0
        except StoreUnavailable as error:
            if not self._failing:
                logger.warning("serving from memory, writes wait: %s", error)
            return False
        if self._failing:
            logger.info("Redis takes writes again")
        return True

    async def _write_batch(self, fence: int) -> None:
        # A worker is dumped from memory, so all its cold branches are reloaded first.
        for worker in self._reconciler.journal.whole_workers():
            await self._spill.until_here(partial(self._reconciler.dump, worker))
        batch = await self._spill.until_here(self._reconciler.take_batch)
        written = False
        try:
            await self._store.write(batch, fence)
            written = True
        finally:
            if not written:
                self._reconciler.journal.give_back(batch)
