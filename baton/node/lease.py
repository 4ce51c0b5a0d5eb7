"""A lease that one of several processes holds: an entry in a bucket of the bus (see `election.py`)."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

from baton.errors import BatonError
from baton.messages.base import Lease
from baton.node.election import Election
from baton.node.ports import Ports

logger = logging.getLogger(__name__)

RENEWALS: Final = 4
"""Renewals per lease TTL."""


class KeptLease:
    def __init__(self, ports: Ports, *, bucket: str, key: str, ttl_s: float) -> None:
        self._bus = ports.bus
        self._clock = ports.clock
        self._bucket = bucket
        self._key = key
        self._ttl_s = ttl_s
        self._mine = Lease(holder=ports.new_id())
        self._election = Election(self._mine.holder, ttl_s)

    def fence(self) -> int:
        """Return the revision with which the present term began; 0 where the lease is not held."""
        return self._election.fence(self._clock.now_s())

    async def keep(self) -> None:
        """Take the lease when it is free and renew it, for ever."""
        while True:
            try:
                async with self._clock.timeout(self._ttl_s):
                    await self._step()
            except (BatonError, TimeoutError) as error:
                logger.debug("the lease %s: %s", self._key, str(error) or "no answer in time")
                self._election.failed()
            await self._clock.sleep(self._ttl_s / RENEWALS)

    async def _step(self) -> None:
        election = self._election
        if election.must_read:
            election.saw(await self._bus.get(self._bucket, self._key), self._clock.now_s())
        asked_s = self._clock.now_s()
        if (revision := election.revision_to_put(asked_s)) is not None:
            election.stored(await self._bus.put(self._bucket, self._key, self._mine, revision=revision), asked_s)

    async def release(self) -> None:
        """Give the lease up, if it is held, so that another process need not wait for its end."""
        with suppress(TimeoutError, BatonError):
            async with self._clock.timeout(self._ttl_s):
                if revision := self._election.held_revision:
                    await self._bus.delete(self._bucket, self._key, revision=revision)
