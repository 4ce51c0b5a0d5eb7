"""A service's status over HTTP, apart from its work: `/health`, `/ready` and `/metrics`.

A minimal HTTP server: one request per connection, GET and HEAD, no body. Whatever a client sends or does
not send, it gets a status or a closed connection, and costs no more than a slot for a few seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

from baton.errors import BatonError, Unavailable
from baton.stop import Stop
from baton.telemetry.metrics import Metrics
from baton.telemetry.settings import TelemetrySettings

log = logging.getLogger(__name__)

HEAD_BYTES_MAX: Final = 8192
REQUEST_S: Final = 5.0
"""Time limit of a connection, from its start to its end."""
CONNECTIONS_MAX: Final = 32

Check = Callable[[], Awaitable[None]]
Scrape = Callable[[str], Awaitable[tuple[str, bytes]]]
"""Returns content type and text of the metrics, for the header `Accept` of a scrape."""
_Answer = tuple[HTTPStatus, str, bytes]


class Status:
    """Answers of a service's status port. The service sets `check_ready` once there is something to check."""

    def __init__(self, metrics: Metrics, stop: Stop) -> None:
        self.check_ready: Check = _starting
        """Check that raises BatonError, a sentence, unless the service can do its work now."""
        self.scrape: Scrape = self._render
        self._metrics = metrics
        self._stop = stop
        self._connections: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a new connection; beyond the limit it is closed at once."""
        if len(self._connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="status")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                head, body = await self._respond(reader)
                writer.write(head + body)
                writer.write_eof()
                # Closing with unread bytes would reset the connection, and the client might lose the answer.
                while await reader.read(HEAD_BYTES_MAX):
                    pass
        except (OSError, TimeoutError):
            pass  # The client is gone or too slow: no answer can reach it.
        finally:
            writer.transport.abort()

    async def _respond(self, reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        """Read one request and return the head and the body of the answer."""
        method = "GET"
        try:
            method, path, headers = _parse(await reader.readuntil(b"\r\n\r\n"))
            status, kind, body = await self._answer(method, path, headers.get("accept", ""))
        except asyncio.LimitOverrunError:
            status, kind, body = _text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except (asyncio.IncompleteReadError, ValueError):
            status, kind, body = _text(HTTPStatus.BAD_REQUEST)
        except Exception:  # The one boundary of a status request: a bug in a check or a metric ends nothing else.
            log.exception("a status request failed")
            status, kind, body = _text(HTTPStatus.INTERNAL_SERVER_ERROR)
        allow = "Allow: GET, HEAD\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            f"{allow}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode(), b"" if method == "HEAD" else body

    async def _answer(self, method: str, path: str, accept: str) -> _Answer:
        if path not in ("/health", "/ready", "/metrics"):
            return _text(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED)
        if path == "/health":
            return _json(HTTPStatus.OK, {"status": "alive"})
        reason = ""
        try:
            if self._stop.asked.is_set():
                raise Unavailable("the service is draining")
            await self.check_ready()
        except BatonError as error:
            reason = str(error)
        if path == "/metrics":
            self._metrics.ready, self._metrics.draining = not reason, self._stop.asked.is_set()
            kind, body = await self.scrape(accept)
            return HTTPStatus.OK, kind, body
        if reason:
            status = "not ready" if self._stop.serving else "starting"
            return _json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": status, "reason": reason})
        return _json(HTTPStatus.OK, {"status": "ready"})

    async def _render(self, accept: str) -> tuple[str, bytes]:
        return self._metrics.render(accept)


@asynccontextmanager
async def serve_status(settings: TelemetrySettings, metrics: Metrics, stop: Stop) -> AsyncGenerator[Status]:
    """Serve the status of this process inside this context, if `status_port` or `status_fd` is set.

    Raises Unavailable, one sentence that names the flag, if that is impossible.
    """
    status = Status(metrics, stop)
    host, port, inherited = settings.status_host, settings.status_port, settings.status_fd
    if port is None and inherited is None:
        yield status
        return
    try:
        if inherited is None:
            server = await asyncio.start_server(status.accept, host, port, limit=HEAD_BYTES_MAX)
        else:
            server = await asyncio.start_server(
                status.accept, sock=socket.socket(fileno=inherited), limit=HEAD_BYTES_MAX
            )
    except OSError as error:
        where, flags = f"{host}, port {port}", "--status-host, --status-port"
        if inherited is not None:
            where, flags = f"descriptor {inherited}", "--status-fd"
        raise Unavailable(f"status cannot be served on {where} ({flags}): {error.strerror or error}") from error
    watching = asyncio.create_task(metrics.watch_loop(), name="event loop lag")
    try:
        if inherited is None:
            log.info("status is served on %s port %d", host, server.sockets[0].getsockname()[1])
        yield status
    finally:
        watching.cancel()
        server.close()
        await status.close()
        await server.wait_closed()


async def _starting() -> None:
    raise Unavailable("the service is starting")


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return method, path and headers, by lower-case names. Raises ValueError for what is no HTTP/1 request."""
    request, *fields = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, version = request.split(" ")
    if not version.startswith("HTTP/1.") or not target.startswith("/"):
        raise ValueError("no HTTP/1 request")
    headers: dict[str, str] = {}
    for field in fields:
        name, colon, value = field.partition(":")
        if not colon or not name or name != name.strip():
            raise ValueError("no HTTP header")
        headers[name.lower()] = value.strip()
    return method, target.partition("?")[0], headers


def _text(status: HTTPStatus) -> _Answer:
    return status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode()


def _json(status: HTTPStatus, content: dict[str, str]) -> _Answer:
    return status, "application/json", json.dumps(content).encode()
