"""Delivery of payloads to handlers, shared by all bus implementations."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Final

import msgspec

from baton.bus.protocol import BusLimits, Delivery, DeliveryCounts, Handler
from baton.errors import BatonError, InvalidRequest, MalformedMessage, PayloadTooLarge
from baton.messages.base import ErrorReport, Refused
from baton.messages.codec import AnyMessage, decode

log = logging.getLogger(__name__)

_BURST_MESSAGES: Final = 256
"""Number of messages after which a handler that never waits yields to other tasks."""


class Arrival(msgspec.Struct, frozen=True, eq=False):
    """One payload from the server, not yet decoded: dropping it costs nothing."""

    subject: str
    payload: bytes
    respond: Callable[[AnyMessage], Awaitable[None]] | None = None
    stream_sequence: int = 0


class HandlerRunner:
    """Decodes arrivals and calls the handler, one at a time. Exceptions of the handler end here."""

    def __init__(self, handler: Handler) -> None:
        self.counts = DeliveryCounts()
        self._handler = handler
        self._running = False
        self._finished: asyncio.Future[None] | None = None
        """Made by `stop` when it waits for the running handler; `handle` runs for every message and makes none."""

    async def handle(self, arrival: Arrival) -> None:
        self._running = True
        try:
            message = decode(arrival.payload)
            self.counts.handled += 1
            await self._handler(Delivery(arrival.subject, message, arrival.stream_sequence, arrival.respond))
        except Exception as error:  # noqa: BLE001
            # The one boundary of all handlers: a failure ends one message, not the service.
            await self._refuse(arrival, error)
        finally:
            self._running = False
            if self._finished is not None and not self._finished.done():
                self._finished.set_result(None)

    async def _refuse(self, arrival: Arrival, error: Exception) -> None:
        if isinstance(error, MalformedMessage):
            self.counts.malformed += 1
            if _is_power_of_two(self.counts.malformed):
                log.warning("malformed message %d on %s: %s", self.counts.malformed, arrival.subject, error)
        elif isinstance(error, BatonError):
            log.warning("a message on %s was refused: %s", arrival.subject, error)
        else:
            log.error("the handler of %s failed on %r", arrival.subject, decode(arrival.payload), exc_info=error)
            error = BatonError(f"{type(error).__name__} in the handler of {arrival.subject}")
        if arrival.respond is not None:
            try:
                await arrival.respond(Refused(error=ErrorReport.of(error)))
            except BatonError as unsent:
                log.warning("cannot answer on %s: %s", arrival.subject, unsent)

    async def stop(self, task: asyncio.Task[None], grace_s: float) -> None:
        """End the task that calls `handle`, after the running handler or `grace_s`.

        Does not wait when called by the handler.
        """
        if asyncio.current_task() is task:
            return
        try:
            if self._running:
                self._finished = asyncio.get_running_loop().create_future()
                async with asyncio.timeout(grace_s):
                    await self._finished
        except TimeoutError:
            log.warning("a handler still runs after %.1f s and is cancelled", grace_s)
        finally:
            task.cancel()
            await asyncio.wait([task])


class Mailbox:
    """A bounded queue before a handler, and the one task that empties it."""

    def __init__(self, subject: str, handler: Handler, limits: BusLimits) -> None:
        self._subject = subject
        self._limits = limits
        self._runner = HandlerRunner(handler)
        self.counts = self._runner.counts
        self._waiting: deque[Arrival] = deque()
        self._waiting_bytes = 0
        self._closed = False
        self._filled = asyncio.Event()
        self._task = asyncio.create_task(self._empty(), name=f"bus {subject}")

    def offer(self, arrival: Arrival) -> None:
        """Queue for the handler, or drop and count: a slow handler never delays others."""
        if self._closed:
            return
        size_bytes = len(arrival.payload)
        is_full = len(self._waiting) >= self._limits.pending_messages_max
        if is_full or self._waiting_bytes + size_bytes > self._limits.pending_bytes_max:
            self._count_drop()
            return
        self._waiting_bytes += size_bytes
        self._waiting.append(arrival)
        self._filled.set()

    def _count_drop(self) -> None:
        self.counts.dropped += 1
        if _is_power_of_two(self.counts.dropped):
            log.warning("the handler of %s is too slow: %d messages dropped", self._subject, self.counts.dropped)

    async def close(self) -> None:
        """Take nothing more, and wait until queued messages are handled; does not wait when called by the handler."""
        self._closed = True
        self._filled.set()
        if asyncio.current_task() is self._task:
            self._waiting.clear()
            return
        try:
            _, late = await asyncio.wait([self._task], timeout=self._limits.handler_grace_s)
            if late:
                log.warning("the handler of %s is cancelled, %d messages wait", self._subject, len(self._waiting))
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _empty(self) -> None:
        while self._waiting or not self._closed:
            for _ in range(_BURST_MESSAGES):
                if not self._waiting:
                    break
                arrival = self._waiting.popleft()
                self._waiting_bytes -= len(arrival.payload)
                await self._runner.handle(arrival)
            else:
                await asyncio.sleep(0)
                continue
            if not self._closed:
                self._filled.clear()
                await self._filled.wait()


def _is_power_of_two(count: int) -> bool:
    """Tell which of many equal warnings to log: the first, second, fourth, eighth …"""
    return count & (count - 1) == 0


# ---------------------------------------------------------------- subjects


@lru_cache(maxsize=65536)
def check_subject(subject: str, *, wildcards: bool = False) -> None:
    """Raise InvalidRequest unless this is a subject, or, with `wildcards`, a pattern of subjects."""
    parts = subject.split(".")
    is_clean = subject.isascii() and subject.isprintable() and " " not in subject and ">" not in subject
    has_wildcards = any("*" in part for part in parts)
    if not is_clean or not all(parts) or (has_wildcards and not wildcards) or any("*" in p and p != "*" for p in parts):
        raise InvalidRequest(f"{subject!r} is not a subject of the message bus")


def check_name(name: str) -> None:
    """Raise InvalidRequest unless this can name a bucket or a key: one part of a subject."""
    check_subject(name)
    if "." in name:
        raise InvalidRequest(f"{name!r} is not a name of a bucket or of a key in one")


def check_payload(payload: bytes, bytes_max: int) -> None:
    if len(payload) > bytes_max:
        raise PayloadTooLarge(f"a message of {len(payload)} bytes is over the message bus's limit of {bytes_max} bytes")


def parent_wildcard(subject: str) -> str:
    """Return the pattern that a stream for `subject` holds: the subject and all its siblings."""
    parent, dot, _ = subject.rpartition(".")
    return f"{parent}{dot}*"


def matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))
