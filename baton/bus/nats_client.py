"""nats-py's client with a shorter way from the socket to a handler, and from a publisher to the socket.

nats-py reads into a buffer, parses that in one task, and queues each message for the task of its subscription. Here a
`Mailbox` is that queue, and whole messages go to their receivers as they come from the socket. Everything else (long
messages that are cut, those with headers that are cut, the server's own) goes nats-py's way up to the receiver, and so
do messages that follow while it is there: the order is kept.

nats-py wakes a task of its own to write. Here messages of one turn of the event loop leave together without one, as
long as the socket takes all; otherwise nats-py's task writes them, and publishers wait for it as ever.
"""

# nats-py leaves some of its parameters without types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import ParseResult

import nats.errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.parser import AWAITING_CONTROL_LINE

log = logging.getLogger(__name__)

Receiver = Callable[[Msg], None]
"""Called for each message, in order, while the socket is read: must neither wait nor raise."""

_MESSAGE: Final = re.compile(rb"MSG (\S+) (\d+) (?:(\S+) )?(\d+)\r\n")
"""The line before a message without headers: subject, number of the subscription, reply subject, length."""
_WITH_HEADERS: Final = re.compile(rb"HMSG (\S+) (\d+) (?:(\S+) )?(\d+) (\d+)\r\n")
"""The same of a message with headers, whose length comes before that of both together."""
_HEADERS: Final = b"NATS/1.0\r\n"
"""Beginning of headers; those of the server's own messages have a status before the end of the line."""
_LINE_END: Final = b"\r\n"
_CUT_BYTES_MAX: Final = 1 << 16
"""Longest message that may arrive in parts; the parts of longer ones are joined by nats-py, which copies them once."""


class TlsNotRequired(nats.errors.Error):
    """A server whose address is `tls://` talks plain text."""


class DirectClient(Client):
    def __init__(self) -> None:
        super().__init__()
        self._receivers: dict[int, Receiver] = {}
        self._writes_soon = False

    def post(self, subject: str, payload: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> bool:
        """Write a message at the end of this turn of the event loop.

        Return False if `publish` has to: there is no connection, or the socket does not take all that it gets.
        """
        transport = self._transport
        if not (isinstance(transport, _DirectTransport) and self._status == Client.CONNECTED and transport.is_idle):
            return False
        if headers:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            block = _HEADERS + lines.encode() + _LINE_END
            line = f"HPUB {subject} {reply} {len(block)} {len(block) + len(payload)}\r\n"
            command = line.encode() + block + payload + _LINE_END
        else:
            command = f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + _LINE_END
        if self._pending_data_size + len(command) > self._max_pending_size:
            return False
        self._pending.append(command)
        self._pending_data_size += len(command)
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        if not self._writes_soon:
            self._writes_soon = True
            asyncio.get_running_loop().call_soon(self._write_pending)
        return True

    def _write_pending(self) -> None:
        self._writes_soon = False
        transport = self._transport
        # Without a connection, messages wait for the next one.
        if self._pending and self._status == Client.CONNECTED and transport is not None:
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            transport.writelines(pending)

    async def listen(self, subject: str, receiver: Receiver, *, group: str = "") -> Subscription:
        """Subscribe; the subscription outlives reconnects, and its `unsubscribe` ends it."""
        # nats-py gives the subscription this number before it sends anything.
        number = self._sid + 1
        self._receivers[number] = receiver
        try:
            return await self.subscribe(subject, queue=group)
        except BaseException:
            self._receivers.pop(number, None)
            raise

    @property
    def is_parsing(self) -> bool:
        """Whether nats-py has a part of something, and the rest is to come."""
        return bool(self._ps.buf) or self._ps.state != AWAITING_CONTROL_LINE

    def take_whole_messages(self, data: bytes) -> int:
        """Deliver the messages that `data` begins with, but for the server's own; return their length."""
        at = 0
        while True:
            headers = None
            if line := _MESSAGE.match(data, at):
                subject, number, reply, size = line.groups(b"")
                begin, end = line.end(), line.end() + int(size)
            elif line := _WITH_HEADERS.match(data, at):
                subject, number, reply, headers_size, size = line.groups(b"")
                begin, end = line.end() + int(headers_size), line.end() + int(size)
                if not data.startswith(_HEADERS, line.end()):
                    break
                headers = self._parse_header_lines(data[line.end() + len(_HEADERS) : begin])
            else:
                break
            if len(data) < end + len(_LINE_END):
                break
            self._deliver(int(number), subject, reply, data[begin:end], headers)
            at = end + len(_LINE_END)
        return at

    def _deliver(self, number: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None) -> None:
        receiver = self._receivers.get(number)
        if receiver is not None:
            # The server lets any bytes pass as a subject; an exception here would end the connection.
            receiver(Msg(self, subject.decode(errors="replace"), reply.decode(errors="replace"), data, headers))

    # ------------------------------------------------------------ in place of nats-py's own

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        try:
            parsed = await self._process_headers(headers)
        except (ValueError, IndexError) as error:
            # nats-py would stop reading from the connection.
            log.warning("a message on %r has malformed headers and is dropped: %s", subject, error)
            return
        self._deliver(sid, subject, reply, data, parsed)

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._receivers.pop(sid, None)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        server = self._current_server
        if initial_connection and server is not None and server.uri.scheme == "tls" and not info.get("tls_required"):
            # nats-py would go on without TLS, and send the credentials in plain text.
            raise TlsNotRequired("the address is tls://, and the server does not require TLS")
        await super()._process_info(info, initial_connection)

    async def _connect_to_server(self, s: Srv) -> None:
        s.last_attempt = time.monotonic()
        self._transport = _DirectTransport(self)
        await self._transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])


class _DirectTransport(TcpTransport):
    def __init__(self, client: DirectClient) -> None:
        super().__init__()
        self._client = client

    @property
    def is_idle(self) -> bool:
        """Whether the socket has taken everything, and can take more."""
        transport = self._io_writer.transport if self._io_writer is not None else None
        return transport is not None and not transport.get_write_buffer_size() and not transport.is_closing()

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        loop = asyncio.get_running_loop()
        reader = DirectReader(self._client, buffer_size)
        protocol = asyncio.StreamReaderProtocol(reader)
        connecting = loop.create_connection(lambda: protocol, uri.hostname or "", uri.port or 0)
        transport, _ = await asyncio.wait_for(connecting, connect_timeout)
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = asyncio.StreamWriter(transport, protocol, reader, loop)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        try:
            await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        except BaseException:
            # The handshake took the connection from its protocol, which is never told its end: nats-py would wait for
            # that without a limit.
            if self._io_writer is not None:
                self._io_writer.transport.abort()
                self._io_writer = None
            raise


class DirectReader(asyncio.StreamReader):
    """The bytes from the server, without the messages that are delivered at once."""

    def __init__(self, client: DirectClient, limit: int) -> None:
        super().__init__(limit)
        self._client = client
        self._cut = b""
        """Beginning of a message of which the rest has not arrived."""

    @property
    def is_empty(self) -> bool:
        return not self._buffer  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def feed_data(self, data: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.is_empty and not self._client.is_parsing:
            data = self._cut + data
            data = data[self._client.take_whole_messages(data) :]
            if data.startswith(b"MSG ") and len(data) < _CUT_BYTES_MAX:
                self._cut = data
                return
            self._cut = b""
        super().feed_data(data)
