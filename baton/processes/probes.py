"""Probes of whether a process serves, each answered at once with yes or no: over HTTP, or in a server's protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

TIMEOUT_S: Final = 2.0

Probe = Callable[[], Awaitable[bool]]


def http_probe(host: str, port: int, path: str) -> Probe:
    """Return a probe that succeeds if a GET is answered with 200."""

    async def probe() -> bool:
        return (await http_status(host, port, path))[0] == 200

    return probe


def started_probe(host: str, port: int) -> Probe:
    """Return a probe of a service's status port that succeeds once the service has started, whether ready or not."""

    async def probe() -> bool:
        status, body = await http_status(host, port, "/ready")
        return status == 200 or (status == 503 and json.loads(body)["status"] != "starting")

    return probe


async def http_status(
    host: str, port: int, path: str, *, accept: str = "*/*", timeout_s: float = TIMEOUT_S
) -> tuple[int, str]:
    """Return status and body of a GET; (0, "") if no answer comes in time."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
    with suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request.encode())
                head, _, body = (await reader.read()).decode(errors="replace").partition("\r\n\r\n")
                return int(head.split()[1]), body
            finally:
                writer.close()
    return 0, ""


def answer_probe(host: str, port: int, request: bytes, answer: bytes) -> Probe:
    """Return a probe that succeeds if a fresh connection that sends `request` receives `answer`."""

    async def probe() -> bool:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(request)
                    received = b""
                    while answer not in received and (chunk := await reader.read(4096)):
                        received += chunk
                    return answer in received
                finally:
                    writer.close()
        return False

    return probe
