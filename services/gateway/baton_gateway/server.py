"""uvicorn, set up for streams: our socket, our signals, OpenAI's error shape down to malformed HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
from collections.abc import Generator
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.errors import InvalidRequest, Unavailable
from baton.stop import Stop
from baton_gateway.answers import error_body, to_json
from baton_gateway.config import Settings
from baton_gateway.door import Door
from baton_gateway.respond import ABORT_EXTENSION
from baton_gateway.service import Gateway

log = logging.getLogger(__name__)

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
    """uvicorn's server, which is told to stop and drains in steps: see `serve_until`."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    async def serve_until(self, stop: Stop, listener: socket.socket) -> None:
        """Serve; once asked to stop, turn not ready, close the listener, let what runs finish, and end the rest."""
        gateway = self._gateway
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.serve(sockets=[listener]))
            stop.serving = True
            await stop.asked.wait()
            gateway.door = Door.CLOSING
            log.info("draining: not ready any more; the listener closes in %g s", gateway.settings.drain_delay_s)
            await gateway.clock.sleep(gateway.settings.drain_delay_s)
            gateway.door = Door.CLOSED
            log.info("draining: %d answers, %g s at most", len(gateway.routes), gateway.settings.drain_s)
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._gateway.settings.drain_s, self._gateway.end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone: `Stop` has them."""
        yield


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


def make_server(app: ASGIApp, gateway: Gateway) -> Server:
    settings = gateway.settings
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
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + LAST_WORDS_S,
    )
    return Server(config, gateway)
