"""Clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from baton_gateway.attempt import Phase

from baton import subjects
from baton.bus import Delivery
from baton.errors import ClientGone
from baton.messages.attempts import Cancel
from baton.messages.workers import Role
from tests.harness.gateway.chats import CHAT, SETTINGS, TEXT, body, check_clean, open_talking_stage, stream, text_of
from tests.harness.gateway.stage import Stage, forward, open_scheduled_stage, open_stage
from tests.harness.limits import HANG_S


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_talking_stage() as opened:
        yield opened


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("at", [0, 3])
async def test_a_client_that_leaves_frees_both_workers(stage: Stage, streamed: bool, at: int) -> None:
    prefill = await stage.add("p1", Role.PREFILL)
    await forward(stage, "p1")
    decode = stage.workers["d1"]
    decode.script.stall_at = at
    async with httpx.AsyncClient(base_url=stage.base_url) as client:
        request = asyncio.create_task(
            client.post(CHAT, json=body(stream=streamed), headers={"x-baton-disaggregation": "always"})
        )
        await stage.wait_for(lambda: [len(attempt.tokens) for attempt in decode.attempts.values()] == [at])
        request.cancel()
        await asyncio.wait([request])
    await stage.wait_for(lambda: decode.got(Cancel) and prefill.got(Cancel))
    await check_clean(stage)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_after_its_next_request_is_noticed(stage: Stage, streamed: bool) -> None:
    decode = stage.workers["d1"]
    decode.script.stall_at = 3
    asked = json.dumps(body(stream=streamed)).encode()
    request = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(asked)}\r\n\r\n".encode() + asked
    _, writer = await asyncio.open_connection(*stage.base_url.removeprefix("http://").split(":"))
    writer.write(request)
    await stage.wait_for(lambda: [len(attempt.tokens) for attempt in decode.attempts.values()] == [3])
    writer.write(request)
    await asyncio.sleep(0.1)
    writer.close()
    await stage.wait_for(lambda: decode.got(Cancel))
    assert {each.reason for each in decode.got(Cancel) if isinstance(each, Cancel)} == {ClientGone.code}
    await check_clean(stage)


async def test_a_client_that_leaves_while_its_request_is_held() -> None:
    withdrawn: list[Delivery] = []

    async def note(delivery: Delivery) -> None:
        withdrawn.append(delivery)

    async with open_scheduled_stage(SETTINGS) as stage, httpx.AsyncClient(base_url=stage.base_url) as client:
        await stage.bus.subscribe(subjects.WITHDRAWALS, note)
        stage.workers["d1"].script.capacity = 0
        request = asyncio.create_task(client.post(CHAT, json=body()))
        await stage.wait_for(lambda: [d.machine.phase for d in stage.gateway.routes.all()] == [Phase.QUEUED])
        assert not withdrawn
        request.cancel()
        await asyncio.wait([request])
        await stage.wait_for(lambda: withdrawn)
        await check_clean(stage)


@asynccontextmanager
async def stalled_reader(stage: Stage, **fields: object) -> AsyncGenerator[socket.socket]:
    """A client that asks for a long stream and reads none of it."""
    host, port = stage.base_url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    with socket.socket() as stalled:
        # A small receive buffer, set before connecting, so that the kernel does not read for the client.
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        await loop.sock_connect(stalled, (host, int(port)))
        payload = json.dumps(body(stream=True, max_tokens=4000, **fields)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
        await loop.sock_sendall(stalled, head + payload)
        yield stalled


async def test_a_stalled_reader_slows_no_other_and_is_cut_off() -> None:
    settings = msgspec.structs.replace(SETTINGS, unread_tokens_max=64)
    async with open_stage(settings) as stage:
        stage.say(TEXT, ends=False)
        decode = stage.workers["d1"]
        async with stalled_reader(stage, n=24) as stalled:
            await stage.wait_for(lambda: len(decode.attempts) == 24)
            async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
                assert text_of(await stream(client, max_tokens=len(stage.answer))) == TEXT
            await stage.wait_for(lambda: not decode.attempts and not stage.gateway.routes)
            assert len(decode.got(Cancel)) == 24
            received = b""
            while part := await asyncio.get_running_loop().sock_recv(stalled, 1 << 20):
                received += part
            assert not received.endswith(b"0\r\n\r\n"), "the end of a whole answer"


async def test_a_reader_that_stalls_below_the_limit_is_cut_off_after_a_while() -> None:
    settings = msgspec.structs.replace(SETTINGS, progress_s=60.0, send_timeout_s=1.0)
    async with open_stage(settings) as stage, httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        stage.say(TEXT, ends=False)
        decode = stage.workers["d1"]
        # Far fewer tokens than may stay unread, in more bytes than the stalled client's kernel takes.
        decode.script.stall_at = 200
        async with client.stream("POST", CHAT, json=body(stream=True, max_tokens=4000)) as reading:
            async with stalled_reader(stage):
                await stage.wait_for(lambda: len(decode.attempts) == 2)
                await stage.wait_for(lambda: len(decode.attempts) == 1)
            assert reading.status_code == 200
            assert len(stage.gateway.routes) == 1, "who reads may wait for more"
        await check_clean(stage)
