"""Access to the tenants' store that notices when it is away, says so once, and goes on by itself."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from baton.clock import Clock
from baton.errors import StoreUnavailable
from baton_gateway.tenants.store import TenantStore

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""Time between two questions to a store that is away; other requests do not wait for it meanwhile."""

Answer = TypeVar("Answer")


class WatchedStore:
    """A store behind a watch. `consequence` says in the log what its absence means."""

    def __init__(self, store: TenantStore, clock: Clock, consequence: str) -> None:
        self._store = store
        self._clock = clock
        self._consequence = consequence
        self._error: StoreUnavailable | None = None
        self._retry_at_s = 0.0

    @property
    def is_away(self) -> bool:
        return self._error is not None

    async def ask(self, command: Callable[[TenantStore], Awaitable[Answer]]) -> Answer:
        """Return the answer to a command. Raises StoreUnavailable, at once if the store was away just now."""
        if self._error is not None:
            if self._clock.now_s() < self._retry_at_s:
                raise StoreUnavailable(self._error.detail)
            self._retry_at_s = self._clock.now_s() + RETRY_S
        try:
            answer = await command(self._store)
        except StoreUnavailable as error:
            if self._error is None:
                log.warning("%s; %s", error, self._consequence)
            self._error = error
            self._retry_at_s = self._clock.now_s() + RETRY_S
            raise
        if self._error is not None:
            self._error = None
            log.warning("Redis serves again: API keys are read and limits enforced")
        return answer
