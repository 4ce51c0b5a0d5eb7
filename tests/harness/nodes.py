"""A node for a service in the test's own process, and a context that runs the service on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from baton.bus import Bus
from baton.node.ports import system_ports
from baton.node.service import Node, Service, serve
from baton.stop import Stop
from baton.telemetry import Metrics, Tracing


def make_node(service: str, bus: Bus) -> Node:
    return Node(ports=system_ports(bus, seed=0), tracing=Tracing(service), metrics=Metrics(service))


@asynccontextmanager
async def living(service: Service, stop: Stop | None = None) -> AsyncGenerator[asyncio.Task[None]]:
    """Run a service: the block begins once it serves, and at its end it drains."""
    stop = stop or Stop()
    running = asyncio.create_task(serve(service, stop))
    try:
        while not (stop.serving or running.done()):  # noqa: ASYNC110 - it serves once a flag says so.
            await asyncio.sleep(0.001)
        if running.done():
            running.result()
        yield running
    finally:
        stop.asked.set()
        await running
