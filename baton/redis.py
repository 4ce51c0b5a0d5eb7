"""Connection to Redis: each answer has a deadline, and all that goes wrong is one error."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.clock import Clock
from baton.errors import ConfigurationError, StoreUnavailable

CONNECTIONS_MAX: Final = 32
"""Connections of one process; further commands wait for one, within their deadline."""

Answer = TypeVar("Answer")


class RedisConnection:
    """Connects at the first command, and again after Redis was away."""

    def __init__(self, url: str, *, clock: Clock, timeout_s: float) -> None:
        # No timeouts in the client: with them it sends under `asyncio.wait_for`, which in Python 3.11 loses a
        # cancellation that comes as the sending ends. `answer` takes their place.
        # One retry, for a connection that Redis closed while it was idle; callers handle all other failures.
        try:
            pool = redis.BlockingConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType]
                url,
                max_connections=CONNECTIONS_MAX,
                timeout=None,
                socket_timeout=None,
                socket_connect_timeout=None,
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as error:
            raise ConfigurationError(f"redis_url is no address of Redis: {error}", param="redis_url") from error
        self.client = redis.Redis.from_pool(pool)
        """Makes commands. Await them by `answer` only."""
        self._clock = clock
        self._timeout_s = timeout_s

    async def answer(self, command: Awaitable[Answer]) -> Answer:
        """Return the answer to a command of `client`. Raises StoreUnavailable."""
        try:
            async with self._clock.timeout(self._timeout_s):
                return await command
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis does not serve: {str(error) or 'no answer in time'}") from error

    async def close(self) -> None:
        await self.client.aclose()


@asynccontextmanager
async def connected(url: str, *, clock: Clock, timeout_s: float) -> AsyncGenerator[RedisConnection | None]:
    """Provide a connection; None for an empty URL."""
    connection = RedisConnection(url, clock=clock, timeout_s=timeout_s) if url else None
    try:
        yield connection
    finally:
        if connection is not None:
            await connection.close()
