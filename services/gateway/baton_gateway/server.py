"""uvicorn, set up for streams: our socket, our signals, OpenAI's error shape down to malformed HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Generator
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.errors import InvalidRequest, Unavailable
from baton_gateway.answers import error_body, to_json
from baton_gateway.config import Settings
from baton_gateway.respond import ABORT_EXTENSION

LAST_WORDS_S: Final = 2


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which also lets a response cut its connection."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # pyright: ignore[reportAssignmentType]
        scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}

    def send_400_response(self, msg: str) -> None:
        body = to_json(error_body(InvalidRequest("this is not a valid HTTP request")))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server; once `drain_s` of a shutdown have passed, `on_drained` ends what still runs."""

    def __init__(self, config: uvicorn.Config, *, drain_s: float, on_drained: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._on_drained = on_drained

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._on_drained)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop on a signal and leave with status 0; uvicorn's own way dies of it, before the workers are told."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def listen(settings: Settings) -> socket.socket:
    """Return the listening socket. Raises Unavailable, one sentence that names the flag."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that say they are TCP; without it a small answer takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        where = f"{settings.host}, port {settings.port}"
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(f"port {settings.port} is in use: choose another one with --port") from error
        raise Unavailable(f"cannot listen on {where} (--host, --port): {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def make_server(app: ASGIApp, settings: Settings, on_drained: Callable[[], None]) -> Server:
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=4096,
        timeout_keep_alive=settings.keep_alive_s,
        # Only clients that do not even read the error are left by then; their connections are cut.
        timeout_graceful_shutdown=settings.drain_s + LAST_WORDS_S,
    )
    return Server(config, drain_s=settings.drain_s, on_drained=on_drained)
