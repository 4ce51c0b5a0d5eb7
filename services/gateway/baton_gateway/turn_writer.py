"""Transports that write all data of one turn of the event loop in one system call per connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

log = logging.getLogger(__name__)

HELD_BYTES_MAX: Final = 64 << 10
"""Data held for a connection; more is written at once, so that the transport can tell when its socket is full."""


class TurnWriter:
    """The connections that were written to in this turn."""

    def __init__(self) -> None:
        self._transports: list[TurnTransport] = []

    def add(self, transport: TurnTransport) -> None:
        if not self._transports:
            transport.call_soon(self._flush)
        self._transports.append(transport)

    def _flush(self) -> None:
        transports, self._transports = self._transports, []
        for transport in transports:
            try:
                transport.flush()
            except Exception:  # The others' data leaves all the same.
                log.exception("writing to a connection")
                transport.abort()


class TurnTransport(asyncio.Transport):
    """A connection's transport. Data leaves in the order of the calls, at the end of the turn or before the end of the
    connection."""

    def __init__(
        self, transport: asyncio.Transport, writer: TurnWriter, call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        """Wrap `transport`. `call_soon` is that of the event loop."""
        super().__init__()
        self.call_soon = call_soon
        self._transport = transport
        self._writer = writer
        self._parts: list[bytes] = []
        self._held_bytes = 0

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._parts:
            self._writer.add(self)
        self._parts.append(bytes(data))
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        parts, self._parts, self._held_bytes = self._parts, [], 0
        # Writing to a connection that was cut in this turn would raise, and lose the data of the others.
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


def write_parts(cycle: RequestResponseCycle, *parts: bytes) -> bool:
    """Write parts of a body of unknown length. Return False if the connection takes nothing at the moment."""
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    for part in parts:
        if part:  # An empty one would end the body.
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
    return True


def make_unchunked(cycle: RequestResponseCycle) -> None:
    """Have a body of unknown length sent as it is: HTTP/1.0 has no chunks, and ends it with the connection."""
    send = cycle.send

    async def send_part(message: ASGISendEvent) -> None:
        # uvicorn compares each part with the length that is left.
        cycle.expected_content_length = len(message["body"]) if message["type"] == "http.response.body" else 0
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = send_part
