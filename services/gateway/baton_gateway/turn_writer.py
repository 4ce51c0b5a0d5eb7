"""Writes parts of streamed bodies: all parts of one turn of the event loop in one system call per connection."""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class TurnWriter:
    """Parts of this turn, by response. A part leaves before all that is sent through ASGI by a task that wakes up after
    it: the event loop calls in order."""

    def __init__(self) -> None:
        self._parts: dict[RequestResponseCycle, list[bytes]] = {}

    def write(
        self, call_soon: Callable[[Callable[[], None]], object], cycle: RequestResponseCycle, part: bytes
    ) -> bool:
        """Write a part of a body of unknown length. Return False if the connection takes nothing at the moment.

        `call_soon` is that of the event loop.
        """
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        parts = self._parts.get(cycle)
        if parts is not None:
            parts.append(part)
            return True
        if not self._parts:
            call_soon(self._flush)
        self._parts[cycle] = [part]
        return True

    def _flush(self) -> None:
        responses, self._parts = self._parts, {}
        for cycle, parts in responses.items():
            # Writing to a connection that was cut in this turn would raise, and lose the parts of the others.
            if not (cycle.response_complete or cycle.transport.is_closing()):
                chunk = b"".join(parts)
                cycle.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
