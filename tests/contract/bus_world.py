"""The buses and messages of the bus suites."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from nats.aio.client import Client

from baton.bus import Bus, BusLimits, Delivery, MemoryBus, MemoryNetwork, NatsBus
from baton.messages.attempts import TokenChunk
from baton.messages.base import Context
from baton.messages.codec import AnyMessage
from baton.messages.workers import GatewayBeat
from tests.harness.limits import HANG_S
from tests.harness.servers import Server

NOT_A_MESSAGE = b"\xc1 no message"


@dataclass
class World:
    """A server to which tests open buses, and raw access to it."""

    open: Callable[..., Awaitable[Bus]]
    send_raw: Callable[[str, bytes], Awaitable[None]]
    request_raw: Callable[[str, bytes], Awaitable[bytes]]


def memory_world(stack: AsyncExitStack) -> World:
    network = MemoryNetwork()
    stack.push_async_callback(network.close)
    raw = MemoryBus(network)

    async def open_bus(limits: BusLimits | None = None) -> Bus:
        bus = MemoryBus(network, limits=limits)
        stack.push_async_callback(bus.close)
        return bus

    async def send_raw(subject: str, payload: bytes) -> None:
        raw.publish_payload(subject, payload)

    async def request_raw(subject: str, payload: bytes) -> bytes:
        return await raw.request_payload(subject, payload, timeout_s=10)

    return World(open_bus, send_raw, request_raw)


async def nats_world(stack: AsyncExitStack, server: Server) -> World:
    raw = Client()
    await raw.connect(server.url)
    stack.push_async_callback(_close_raw, raw)

    async def open_bus(limits: BusLimits | None = None) -> Bus:
        bus = await NatsBus.connect(server.url, name="test", limits=limits)
        stack.push_async_callback(bus.close)
        return bus

    async def send_raw(subject: str, payload: bytes) -> None:
        await raw.publish(subject, payload)
        await raw.flush()

    async def request_raw(subject: str, payload: bytes) -> bytes:
        return (await raw.request(subject, payload, timeout=10)).data

    return World(open_bus, send_raw, request_raw)


async def _close_raw(raw: Client) -> None:
    await raw.close()
    await asyncio.sleep(0.01)


class Inbox:
    """A handler that records its deliveries."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []

    async def __call__(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    @property
    def labels(self) -> list[str]:
        return [label_of(delivery.message) for delivery in self.deliveries]

    async def wait(self, count: int, *, timeout_s: float = HANG_S) -> list[str]:
        await eventually(lambda: len(self.deliveries) >= count, timeout_s=timeout_s)
        return self.labels


def message(label: object) -> GatewayBeat:
    return GatewayBeat(gateway=str(label))


def label_of(received: AnyMessage) -> str:
    assert isinstance(received, GatewayBeat)
    return received.gateway


def sized(payload_bytes: int) -> TokenChunk:
    return TokenChunk(context=Context(request="r", budget_s=1), offset=0, tokens=bytes(payload_bytes))


async def echo(delivery: Delivery) -> None:
    await delivery.respond(delivery.message)


async def eventually(condition: Callable[[], bool], *, timeout_s: float = HANG_S) -> None:
    """Wait for an effect of another connection that raises no event."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
