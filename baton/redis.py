"""Connection to Redis: each answer has a deadline, and all that goes wrong is one error."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.clock import Clock
from baton.errors import ConfigurationError, StoreUnavailable

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 32
"""Connections of one process; further commands wait for one, within their deadline."""

RETRY_AFTER_S: Final = 1.0

_QUOTED: Final = " of pipeline caused error: "
"""Text in redis-py's error of a pipeline, between the command with its arguments and the reason."""

Answer = TypeVar("Answer")


class RedisConnection:
    """Connects at the first command, and again after Redis was away."""

    def __init__(self, url: str, *, clock: Clock, timeout_s: float) -> None:
        # No timeouts in the client: with them it sends under `asyncio.wait_for`, which in Python 3.11 loses a
        # cancellation that comes as the sending ends. `answer` takes their place.
        # One retry, for a connection that Redis closed while it was idle; callers handle all other failures. One that
        # breaks before the answer is such a failure, too, so a command may be carried out twice.
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
        self._is_cause_logged = False
        """Whether the log has why Redis does not serve, since it last did."""

    async def answer(self, command: Awaitable[Answer], *, said: str = "") -> Answer:
        """Return the answer to a command of `client`. Raises StoreUnavailable.

        `said`: the error's text where clients get it; the cause, which may name Redis's address, goes to the log.
        """
        try:
            async with self._clock.timeout(self._timeout_s):
                answer = await command
        except (RedisError, OSError) as error:
            cause = f"Redis does not serve: {_reason(error) or 'no answer in time'}"
            if not said:
                raise StoreUnavailable(cause) from error
            if not self._is_cause_logged:
                log.warning("%s", cause)
            self._is_cause_logged = True
            raise StoreUnavailable(said, retry_after_s=RETRY_AFTER_S) from error
        self._is_cause_logged = False
        return answer

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


def _reason(error: Exception) -> str:
    """Return why a command failed, without its arguments: they are data, which no log may have, and may be binary."""
    _, is_quoted, reason = str(error).rpartition(_QUOTED)
    return reason.strip("(),'\"") if is_quoted else reason
