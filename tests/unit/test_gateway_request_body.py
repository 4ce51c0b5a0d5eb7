"""Bodies of requests: joined from parts, and bounded, each one and all together."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
from baton_gateway.request_body import SMALL_BYTES, BodyReader
from baton_gateway.tenants.tenant import Access
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from baton.clock import SystemClock
from baton.errors import ClientGone, InvalidRequest, Overloaded, PayloadTooLarge

BODY_BYTES_MAX = 3 * SMALL_BYTES
BODIES_BYTES_MAX = 4 * SMALL_BYTES


def reader(timeout_s: float = 5.0) -> BodyReader:
    return BodyReader(
        SystemClock(), body_bytes_max=BODY_BYTES_MAX, bodies_bytes_max=BODIES_BYTES_MAX, timeout_s=timeout_s
    )


def request(parts: Sequence[bytes], *, ends: str = "", tenant: str = "", **headers: str) -> Request:
    """Return a request whose body comes in these parts; it ends then, or the client leaves (`gone`) or waits."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if not ends:
        messages[-1]["more_body"] = False
    elif ends == "gone":
        messages.append({"type": "http.disconnect"})
    messages.reverse()

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return Request({"type": "http", "state": {"headers": headers, "access": Access(tenant=tenant)}}, receive)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_a_body_is_its_parts(parts: list[bytes]) -> None:
    digest = hashlib.sha256()
    body = asyncio.run(reader().read(request(parts), digest.update))
    assert body == b"".join(parts)
    assert digest.digest() == hashlib.sha256(b"".join(parts)).digest()


async def test_long_bodies_share_their_bytes_until_they_are_released() -> None:
    bodies, half, anyone = reader(), b"x" * SMALL_BYTES, request([b""])
    first = await bodies.read(request([half, half]))
    second = await bodies.read(request([half, half]))
    assert bodies.shares.held_bytes == BODIES_BYTES_MAX
    with pytest.raises(Overloaded):
        await bodies.read(request([half, b"x"]))
    small = await bodies.read(request([half[:-1], b"x"]))
    assert len(small) == SMALL_BYTES, "a short body is always received"
    assert bodies.shares.held_bytes == BODIES_BYTES_MAX
    for body in (small, first):
        bodies.release(anyone, body)
    bodies.release(anyone, await bodies.read(request([half, half])))
    bodies.release(anyone, second)
    assert bodies.shares.held_bytes == 0


async def test_a_tenant_with_many_long_bodies_leaves_room_for_another() -> None:
    bodies, half = reader(), b"x" * SMALL_BYTES
    long = [half, half]
    greedy, other = request(long, tenant="greedy"), request(long, tenant="other")
    first = await bodies.read(greedy)
    with pytest.raises(Overloaded):
        await bodies.read(request(long, tenant="greedy"))
    await bodies.read(other)
    bodies.release(greedy, first)
    assert len(await bodies.read(request(long, tenant="greedy"))) == 2 * SMALL_BYTES


@pytest.mark.parametrize(
    ("parts", "ends", "headers", "error"),
    [
        (3, "gone", {}, ClientGone),
        (3, "never", {}, InvalidRequest),
        (4, "", {}, PayloadTooLarge),
        (1, "", {"content-length": str(BODY_BYTES_MAX + 1)}, PayloadTooLarge),
        (1, "", {"content-encoding": "gzip"}, InvalidRequest),
    ],
)
async def test_a_body_that_is_not_received_holds_nothing(
    parts: int, ends: str, headers: dict[str, str], error: type[Exception]
) -> None:
    bodies = reader(timeout_s=0.05)
    asked = request([b"x" * SMALL_BYTES] * parts, ends=ends)
    asked.scope["state"]["headers"] = headers
    with pytest.raises(error):
        await bodies.read(asked)
    assert bodies.shares.held_bytes == 0
