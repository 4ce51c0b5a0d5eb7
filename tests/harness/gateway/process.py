"""A gateway as a process of its own, between clients over HTTP and actors on a real NATS server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress

import httpx

from baton.bus import NatsBus
from baton.cli.servers import free_port
from baton.clock import SystemClock
from tests.harness.fork_server import forked
from tests.harness.gateway.actors import Actors
from tests.harness.limits import HANG_S

TEXT = "the quick brown fox jumps over the lazy dog. "


async def spawn(*flags: str, environ: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton_gateway", *flags,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=environ,
    )  # fmt: skip


@asynccontextmanager
async def gateway(
    nats_url: str, *flags: str, output: list[bytes] | None = None
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """Run a gateway; yields the process and its base URL. Its output is added to `output`."""
    port = free_port()
    process = await spawn("--nats-url", nats_url, "--port", str(port), *flags, environ=forked(os.environ))
    output = [] if output is None else output

    async def read(stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        async for line in stream:
            output.append(line)

    async with asyncio.TaskGroup() as group:
        group.create_task(read(process.stdout))
        group.create_task(read(process.stderr))
        try:
            yield process, f"http://127.0.0.1:{port}"
        except BaseException:
            print(b"".join(output).decode())
            raise
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def actors(nats_url: str) -> AsyncGenerator[Actors]:
    bus = await NatsBus.connect(nats_url, name="actors")
    try:
        cast = Actors(bus, SystemClock())
        async with cast.acting():
            await cast.add("d1")
            cast.say(TEXT)
            yield cast
    finally:
        await bus.close()


async def wait_ready(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(HANG_S):
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def until_refused(url: str) -> None:
    """Wait until the gateway takes no new connections."""
    with suppress(httpx.NetworkError, httpx.RemoteProtocolError):
        while True:
            async with httpx.AsyncClient(base_url=url, verify=False, timeout=HANG_S) as client:
                await client.get("/health")
            await asyncio.sleep(0.01)
