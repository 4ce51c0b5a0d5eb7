"""uvicorn, set up for streams: our own socket and signals, and the API's error format even for malformed HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import re
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from functools import partial
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.errors import InvalidRequest, Unavailable
from baton_gateway.answers import to_json
from baton_gateway.anthropic import errors as anthropic
from baton_gateway.config import Settings
from baton_gateway.drain_state import DrainState
from baton_gateway.openai_answers import error_body
from baton_gateway.respond import ABORT_EXTENSION, WRITE_EXTENSION
from baton_gateway.service import Gateway
from baton_gateway.turn_writer import TurnTransport, TurnWriter, make_unchunked, write_parts

log = logging.getLogger(__name__)

LAST_WORDS_S: Final = 2
FIRST_REQUEST_S: Final = 0.1
BACKLOG: Final = 4096
"""Connections that the kernel accepts in advance."""
UPGRADE_FIELD: Final = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
HEAD_BYTES_MAX: Final = 64 << 10
"""Longest request line and headers together: twice what proxies let through."""
UNREAD_BYTES_MAX: Final = 256 << 10
"""Rest of a body that is received after its answer, so that the connection serves the next request, too."""
LEAVING_S: Final = 0.5
"""Time that a client has to read an answer to a longer body, as in Go's `net/http`. The connection is not closed at
once: data that nobody has read would reset it, and some clients would lose the answer."""


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with bounds on a request's head and an extension that lets a response cut it off."""

    writer: TurnWriter
    head_read_s = 30.0
    _head_timer: asyncio.TimerHandle | None = None
    """Timer that runs from the start of a connection or request to the end of the request's head."""
    _head_bytes = 0
    _unfinished: deque[RequestResponseCycle]
    """Requests that are not answered yet, in their order: a client may send the next ones before its answer."""
    _unread_bytes = 0
    """Bytes of the present request's body that came after the answer to it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._unfinished = deque[RequestResponseCycle]()
        wrapped = TurnTransport(cast("asyncio.Transport", transport), self.writer, self.loop.call_soon)
        super().connection_made(wrapped)
        self._await_head(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting_head()
        super().connection_lost(exc)
        # uvicorn tells the newest request only. One that came before it is being answered.
        while self._unfinished:
            cycle = self._unfinished.popleft()
            cycle.disconnected = True
            cycle.message_event.set()
            extensions: dict[str, Any] = cycle.scope["extensions"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
            extensions.clear()  # As in `_end_response`.

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None or not self._is_reading_body():
            # Decline offers to upgrade, such as HTTP/2's by Java's client: the parser would take the body for what
            # follows the upgrade.
            data = UPGRADE_FIELD.sub(b"\r\nignored:", data)
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is None:
            self._head_bytes = 0
        elif self._head_bytes > HEAD_BYTES_MAX:
            self._refuse_long_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head(self.head_read_s, self._give_up_head)
        scope: dict[str, Any] = self.scope  # pyright: ignore[reportAssignmentType]
        scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}

    def on_headers_complete(self) -> None:
        self._stop_awaiting_head()
        # What has come may hold a part of the body, too.
        if self._head_bytes > HEAD_BYTES_MAX and self._head_length_bytes() > HEAD_BYTES_MAX:
            self._refuse_long_head()
            raise ValueError("the head is too long")  # Ends the parsing.
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            # uvicorn stops reading until the answer before it ends, and would not notice that the client leaves. It
            # stops again at one more request, or once this one's body is long.
            self.flow.resume_reading()
        self._unfinished.append(self.cycle)
        scope: dict[str, Any] = self.scope  # pyright: ignore[reportAssignmentType]
        # Bound to this request's cycle: the next request may arrive before this one is answered.
        extensions: dict[str, Any] = scope["extensions"]
        extensions[WRITE_EXTENSION] = partial(write_parts, self.cycle)
        self.cycle.on_response = partial(self._end_response, extensions)
        if scope["http_version"] < "1.1":
            make_unchunked(self.cycle)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            before_bytes = self._unread_bytes
            self._unread_bytes += len(body)
            if before_bytes <= UNREAD_BYTES_MAX < self._unread_bytes:
                self._leave()

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        self._head_bytes = 0  # Bytes after the end of this request begin the next one.
        super().on_message_complete()

    def _end_response(self, extensions: dict[str, Any]) -> None:
        extensions.clear()  # One of them holds the cycle, which holds them: the garbage collector would have to look.
        if self._unfinished:  # Answers end in the order of their requests.
            self._unfinished.popleft()
        self.on_response_complete()

    def _leave(self) -> None:
        """Receive no more; end the connection once the client had time to read its answer."""
        self.transport.pause_reading()
        self.transport.write_eof()
        self.loop.call_later(LEAVING_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", "this is not a valid HTTP request")

    def _await_head(self, timeout_s: float, give_up: Callable[[], None]) -> None:
        self._stop_awaiting_head()
        self._head_timer = self.loop.call_later(timeout_s, give_up)

    def _stop_awaiting_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up_head(self) -> None:
        if self._is_answering():
            # The late head belongs to the next request; the one being answered must not suffer.
            self._await_head(self.head_read_s, self._give_up_head)
        else:
            self._refuse("408 Request Timeout", f"the request's head did not arrive within {self.head_read_s:g} s")

    def _is_answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def _is_reading_body(self) -> bool:
        return self._is_answering() and self.cycle.more_body

    def _head_length_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def _refuse_long_head(self) -> None:
        self._refuse("431 Request Header Fields Too Large", f"the headers exceed {HEAD_BYTES_MAX} bytes")

    def _refuse(self, status: str, detail: str) -> None:
        """Answer input that is no valid request, unless another request is to be answered; end the connection."""
        is_body = self._is_reading_body() and not (self.cycle.response_started or self.pipeline)
        if is_body or not self._is_answering():
            error = InvalidRequest(detail)
            # Of a head that is cut short, the path is known if the request line has come.
            path = self.url.partition(b"?")[0].decode("latin-1")
            body = to_json(anthropic.error_body(error) if anthropic.is_messages(path) else error_body(error))
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """Runs the gateway: joins the bus first, then serves the listener with uvicorn; drains in steps."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, listener: socket.socket) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._listener = listener
        self._answering: asyncio.Task[None]
        self._listening = asyncio.Event()
        self.check_ready = gateway.check_ready

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        gateway = self._gateway
        async with gateway.running():
            where = self._listener.getsockname()
            log.info("gateway %s listens on %s port %d", gateway.links.gateway, where[0], where[1])
            # Connections wait meanwhile, or go to others that share the port: a gateway that knows no worker yet would
            # answer that the model does not exist.
            await gateway.clock.sleep(gateway.settings.learn_s)
            async with asyncio.TaskGroup() as tasks:
                self._answering = tasks.create_task(self.serve(sockets=[self._listener]))
                await self._listening.wait()
                yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()

    async def drain(self) -> None:
        """Turn not ready, close the listener, let running answers finish, and end the rest."""
        gateway, settings = self._gateway, self._gateway.settings
        gateway.drain_state = DrainState.CLOSING
        log.info("draining: not ready any more; the listener closes in %g s", settings.drain_delay_s)
        await gateway.clock.sleep(settings.drain_delay_s)
        for server in self.servers:
            server.close()
        # Connections that were just accepted still bring their first request, and it is served.
        await gateway.clock.sleep(FIRST_REQUEST_S)
        gateway.drain_state = DrainState.CLOSED
        log.info("draining: %d answers, %g s at most", len(gateway.routes), settings.drain_s)
        self.should_exit = True
        try:
            async with gateway.clock.timeout(settings.drain_s):
                await asyncio.wait({self._answering, *gateway.background})
        except TimeoutError:
            gateway.end_requests()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone: `Stop` handles them."""
        yield


def listen(settings: Settings) -> socket.socket:
    """Return the socket to serve. Raises Unavailable with one sentence that names the flag.

    Of processes that share a port, one that has just begun gets no connections: it listens once it serves.
    """
    backlog = None if settings.reuse_port else BACKLOG
    listener = _bind(settings, settings.port, shared=settings.reuse_port, backlog=backlog)
    # Connections inherit this option. Only the kernel knows whether a client takes the data in its buffers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(settings.send_timeout_s * 1000))
    listener.setblocking(False)
    return listener


def reserve(settings: Settings) -> socket.socket:
    """Return a socket that keeps the port for processes that share it, and gets no connections itself.

    Raises as `listen`.
    """
    with listen(settings) as alone:  # Another program that shares its port would not be noticed below.
        port = alone.getsockname()[1]
    return _bind(settings, port, shared=True, backlog=None)


def _bind(settings: Settings, port: int, *, shared: bool, backlog: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that say they are TCP; without it a small answer takes 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    try:
        bound.bind((settings.host, port))
        if backlog is not None:
            bound.listen(backlog)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(f"port {port} is in use: choose another one with --port") from error
        where = f"{settings.host}, port {port}"
        raise Unavailable(f"cannot listen on {where} (--host, --port): {error.strerror or error}") from error
    return bound


def _is_logged(record: logging.LogRecord) -> bool:
    """Return whether a record of uvicorn's is logged: clients can send any number of malformed requests."""
    return record.msg != "Invalid HTTP request received."


def make_server(app: ASGIApp, gateway: Gateway, listener: socket.socket) -> Server:
    settings = gateway.settings

    class OurProtocol(Protocol):
        writer = TurnWriter()
        head_read_s = settings.body_read_s

    logging.getLogger("uvicorn.error").addFilter(_is_logged)
    config = uvicorn.Config(
        app,
        http=OurProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_s,
        # Only clients that do not even read the error are left by then; their connections are cut.
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + LAST_WORDS_S,
    )
    return Server(config, gateway, listener)
