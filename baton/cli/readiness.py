"""When a worker or the gateway is ready: heard on the bus, asked over HTTP."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from baton import subjects
from baton.bus import Bus, Delivery
from baton.clock import SystemClock
from baton.messages import Goodbye, Heartbeat
from baton.node.membership import Workers

REQUEST_TIMEOUT_S = 2.0


class Roster:
    """The workers that send heartbeats, and which of their lives that is."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._workers = Workers()
        self._changed = asyncio.Condition()

    async def follow(self, bus: Bus) -> None:
        await bus.subscribe(subjects.HEARTBEAT, self._hear)

    async def _hear(self, delivery: Delivery) -> None:
        message, now_s = delivery.message, self._clock.now_s()
        self._workers.expire(now_s)
        if isinstance(message, Heartbeat | Goodbye) and self._workers.take(message, now_s):
            async with self._changed:
                self._changed.notify_all()

    def generation(self, worker: str) -> int | None:
        """Return the newest life of `worker`; None before its first heartbeat, and once it left."""
        member = self._workers.get(worker)
        return None if member is None else member.generation

    async def next_life(self, worker: str, *, after: int | None) -> None:
        """Wait for a heartbeat of `worker` with another generation than `after`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.generation(worker) not in (None, after))


async def http_status(host: str, port: int, path: str) -> tuple[int, str]:
    """Return status and body of a GET; (0, "") when nobody answers in time."""
    with suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                head, _, body = (await reader.read()).decode(errors="replace").partition("\r\n\r\n")
                return int(head.split()[1]), body
            finally:
                writer.close()
    return 0, ""
