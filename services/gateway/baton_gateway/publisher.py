"""Publisher of messages that need no answer, with a task of its own: posting never waits and never fails."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final

from baton.bus import Bus
from baton.clock import Clock
from baton.errors import BatonError
from baton.messages.codec import AnyMessage

log = logging.getLogger(__name__)

MESSAGES_MAX: Final = 65536
"""Bound on queued messages. Beyond it the oldest are dropped; timers and digests make up for lost messages."""


class Publisher:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._messages: deque[tuple[str, AnyMessage]] = deque(maxlen=MESSAGES_MAX)
        self._posted = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def post(self, subject: str, message: AnyMessage) -> None:
        self._messages.append((subject, message))
        self._empty.clear()
        self._posted.set()

    async def run(self) -> None:
        """Send posted messages in order, for ever."""
        while True:
            await self._posted.wait()
            while self._messages:
                subject, message = self._messages.popleft()
                try:
                    await self._bus.publish(subject, message)
                except BatonError as error:
                    log.warning("a message on %s was lost: %s", subject, error)
            self._posted.clear()
            self._empty.set()

    async def drain(self, clock: Clock, timeout_s: float) -> None:
        """Wait until all posted messages are sent, for at most `timeout_s`."""
        try:
            async with clock.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            log.warning("%d messages were not sent", len(self._messages))
