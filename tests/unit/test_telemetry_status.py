"""The status endpoint over real sockets: its answers, and the input it survives."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest

from baton import config
from baton.cli.servers import free_port
from baton.errors import ConfigurationError, Unavailable
from baton.stop import Stop
from baton.telemetry import Metrics, TelemetrySettings
from baton.telemetry import status as module
from baton.telemetry.status import CONNECTIONS_MAX, HEAD_BYTES_MAX, Status, serve_status
from tests.harness.limits import HANG_S


@asynccontextmanager
async def serving(stop: Stop | None = None) -> AsyncGenerator[tuple[Status, int]]:
    port = free_port()
    async with serve_status(TelemetrySettings(status_port=port), Metrics("scheduler"), stop or Stop()) as status:
        yield status, port


async def exchange(port: int, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes and return status, headers and body of the answer; status 0: none came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(request)
        with suppress(ConnectionResetError):
            answer = await reader.read()
    finally:
        writer.close()
    if not answer:
        return 0, {}, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    return int(first.split()[1]), dict(field.split(": ", 1) for field in fields), body


async def get(port: int, path: str, *, method: str = "GET", headers: str = "") -> tuple[int, dict[str, str], bytes]:
    return await exchange(port, f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())


async def test_health_is_the_process_and_ready_is_the_service() -> None:
    async with serving() as (status, port):
        assert (await get(port, "/health"))[0] == 200
        code, _, body = await get(port, "/ready")
        assert (code, json.loads(body)) == (503, {"status": "starting", "reason": "the service is starting"})

        async def ready() -> None:
            pass

        status.check_ready = ready
        code, headers, body = await get(port, "/ready?verbose=1")
        assert (code, json.loads(body)) == (200, {"status": "ready"})
        assert headers["Content-Type"] == "application/json"


async def test_a_service_that_drains_is_not_ready() -> None:
    stop = Stop()
    async with serving(stop) as (status, port):

        async def ready() -> None:
            pass

        status.check_ready = ready
        stop.asked.set()
        code, _, body = await get(port, "/ready")
        assert (code, json.loads(body)["reason"]) == (503, "the service is draining")
        assert b"\nbaton_draining 1.0\n" in (await get(port, "/metrics"))[2]


async def test_metrics_say_whether_the_service_is_ready() -> None:
    async with serving() as (status, port):
        code, headers, body = await get(port, "/metrics")
        assert code == 200
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert b"\nbaton_ready 0.0\n" in body
        assert b'baton_build_info{service="scheduler",version="' in body

        async def ready() -> None:
            pass

        status.check_ready = ready
        accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\n"
        _, headers, body = await get(port, "/metrics", headers=accept)
        assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert b"\nbaton_ready 1.0\n" in body
        assert body.endswith(b"# EOF\n")


async def test_a_head_has_no_body() -> None:
    async with serving() as (_, port):
        code, headers, body = await get(port, "/health", method="HEAD")
        assert (code, body) == (200, b"")
        assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=no\r\n\r\n", 200),
        (b"GET /metrics\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /health SPDY/3\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 2 * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
    ],
)
async def test_what_it_does_not_understand_it_refuses(request_bytes: bytes, code: int) -> None:
    async with serving() as (_, port):
        assert (await exchange(port, request_bytes))[0] == code
        assert (await get(port, "/health"))[0] == 200


async def test_a_bug_in_a_check_is_answered_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (status, port):

        async def broken() -> None:
            raise ZeroDivisionError

        status.check_ready = broken
        assert (await get(port, "/ready"))[0] == 500
        assert (await get(port, "/health"))[0] == 200
    assert "a status request failed" in caplog.text


async def test_silent_clients_are_cut_off_and_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.2)
    async with serving() as (_, port):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
        try:
            assert (await get(port, "/health"))[0] == 0, "all places are taken by clients that say nothing"
            async with asyncio.timeout(HANG_S):
                # Until their time is up.
                while (await get(port, "/health"))[0] != 200:  # noqa: ASYNC110 - a condition beyond the socket.
                    await asyncio.sleep(0.02)
            assert all([await reader.read() == b"" for reader, _ in silent])
        finally:
            for _, writer in silent:
                writer.close()


async def test_open_connections_end_with_the_service() -> None:
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health")
        await writer.drain()
    try:
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    finally:
        writer.close()


async def test_a_port_in_use_is_named() -> None:
    async with serving() as (_, port):
        with pytest.raises(Unavailable, match=rf"port {port} \(--status-host, --status-port\).*in use"):
            async with serve_status(TelemetrySettings(status_port=port), Metrics("scheduler"), Stop()):
                pass


async def test_an_inherited_socket_serves_as_well_as_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # The parent keeps its own descriptor.
        settings = TelemetrySettings(status_fd=os.dup(listener.fileno()))
        async with serve_status(settings, Metrics("scheduler"), Stop()):
            assert (await get(listener.getsockname()[1], "/health"))[0] == 200


async def test_an_inherited_descriptor_that_is_no_socket_is_named() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(Unavailable, match=rf"descriptor {reading} \(--status-fd\).*not a socket|non-socket"):
            async with serve_status(TelemetrySettings(status_fd=reading), Metrics("scheduler"), Stop()):
                pass
    finally:
        os.close(reading)
        os.close(writing)


async def test_a_scrape_can_come_from_elsewhere() -> None:
    async with serving() as (status, port):

        async def scrape(accept: str) -> tuple[str, bytes]:
            return "text/odd", f"for {accept}".encode()

        status.scrape = scrape
        _, headers, body = await get(port, "/metrics", headers="Accept: x\r\n")
        assert (headers["Content-Type"], body) == ("text/odd", b"for x")


async def test_without_a_port_nothing_listens() -> None:
    before = asyncio.all_tasks()
    async with serve_status(TelemetrySettings(), Metrics("scheduler"), Stop()):
        assert asyncio.all_tasks() == before


def test_the_port_is_a_setting_of_every_service() -> None:
    settings = config.load(TelemetrySettings, service="scheduler", argv=("--status-port", "9464"), environ={})
    assert settings.status_port == 9464
    with pytest.raises(ConfigurationError, match="--status-port is malformed"):
        config.load(TelemetrySettings, service="scheduler", argv=("--status-port", "65536"), environ={})
