"""Streamed answers past the request's task: written by our server's extension, the same bytes as through ASGI."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import struct
from random import Random
from typing import Any, Final

import httpx
import msgspec
import pytest
from baton_gateway.api import make_app
from baton_gateway.config import Settings
from baton_gateway.driver import AnswerDriver
from baton_gateway.respond import WRITE_EXTENSION
from baton_gateway.server import listen, make_server
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from baton.messages.attempts import Acknowledge, Cancel, DecodeTask, Frame
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import Stage, open_stage
from tests.harness.limits import HANG_S
from tests.harness.nodes import living

TCP_INFO_BYTES: Final = 192
DATA_SEGMENTS_IN_AT: Final = 152
"""Offset of `tcpi_data_segs_in` in Linux's `struct tcp_info`: the segments with data that were received."""
TEXT = "the quick brown fox jumps over the lazy dog, 你好世界 😀 done."


async def streamed(
    stage: Stage, *, extended: bool, takes: int = 1 << 30, random: Random | None = None
) -> tuple[bytes, int]:
    """Call the application as a server would, with or without our extension, which writes `takes` parts at most.

    `random`: draws when the extension writes nothing. Return the body, and how many of its parts the extension wrote.
    """
    body = json.dumps({"model": MODEL, "prompt": "hi", "stream": True, "temperature": 0}).encode()
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    parts: list[bytes] = []
    written = 0

    async def receive() -> Message:
        if requests:
            return requests.pop()
        return await asyncio.Future[Message]()

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    def write(*new: bytes) -> bool:
        nonlocal written
        if written < takes and (random is None or random.random() < 0.8):
            written += len(new)
            parts.extend(new)
            return True
        return False

    extensions = {WRITE_EXTENSION: write} if extended else {}
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await make_app(stage.gateway)({**scope, "extensions": extensions}, receive, send)
    return b"".join(parts), written


def shown(body: bytes) -> list[str]:
    """Return the events without what differs from request to request."""
    return [re.sub(r'"id":"[^"]*"|"created":\d+', "", event) for event in body.decode().split("\n\n")]


async def test_the_extension_writes_the_bytes_that_asgi_would_send() -> None:
    async with open_stage() as stage:
        stage.say(TEXT)
        stage.workers["d1"].script.interval_s = 0.001  # One event in each turn of the loop.
        plain, _ = await streamed(stage, extended=False)
        quick, written = await streamed(stage, extended=True)
        interrupted, some = await streamed(stage, extended=True, takes=3)
    assert shown(quick) == shown(interrupted) == shown(plain)
    assert written > 10
    assert some == 3
    assert plain.endswith(b"data: [DONE]\n\n")


class Network:
    """Loses, repeats, delays and forges frames on their way from a worker."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._late: list[Frame] = []

    def __call__(self, frames: list[Frame]) -> list[Frame]:
        (frame,) = frames
        late, self._late = self._late, []
        match self._random.randrange(8):
            case 0:
                return late
            case 1:
                return [frame, *late, frame]
            case 2:
                self._late = [frame]
                return late
            case 3:
                foreign = msgspec.structs.replace(frame, attempt=frame.attempt + 1, index=frame.index, finish=None)
                return [foreign, *late, frame]
            case _:
                return [*late, frame]


@pytest.mark.parametrize("seed", range(3))
async def test_frames_of_several_tokens_give_an_event_for_each_whatever_the_network_does(seed: int) -> None:
    random = Random(seed)
    settings = Settings(port=0, resend_s=0.02)
    async with open_stage(settings) as stage:
        stage.say(TEXT * 4)
        script = stage.workers["d1"].script
        script.interval_s = 0.001
        whole, _ = await streamed(stage, extended=False)
        script.tokens_per_frame = random.randint(2, 4)
        for extended in (False, True):
            script.twist = Network(seed)
            body, written = await streamed(stage, extended=extended, random=random)
            assert shown(body) == shown(whole), "the same events as of one token in each frame"
            assert bool(written) == extended


async def test_an_answer_that_its_client_gave_up_leaves_nothing_to_collect() -> None:
    """Streams live long enough to be old, and old cycles wait for a full collection."""
    gc.collect()
    gc.disable()
    try:
        async with open_stage() as stage:
            stage.say(TEXT)
            stage.workers["d1"].script.interval_s = 0.05
            body = {"model": MODEL, "prompt": "hi", "stream": True}
            async with (
                httpx.AsyncClient(base_url=stage.base_url) as client,
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                await anext(response.aiter_lines())
                assert left(AnswerDriver)
            await stage.wait_for(lambda: not stage.workers["d1"].attempts)
            await stage.wait_for(lambda: not left(AnswerDriver, RequestResponseCycle))
    finally:
        gc.enable()


async def test_answers_on_a_kept_connection_leave_nothing_to_collect() -> None:
    gc.collect()
    gc.disable()
    try:
        async with open_stage() as stage, httpx.AsyncClient(base_url=stage.base_url) as client:
            for path in ("/v1/completions", "/v1/completions", "/v1/models"):
                body = None if path.endswith("models") else {"model": MODEL, "prompt": "hi", "stream": True}
                answer = await client.request("POST" if body else "GET", path, json=body)
                assert answer.status_code == 200
            await stage.wait_for(lambda: len(left(AnswerDriver, RequestResponseCycle)) <= 1)
    finally:
        gc.enable()


def left(*kinds: type[object]) -> list[object]:
    return [each for each in gc.get_objects() if type(each) in kinds]


async def test_a_part_belongs_to_the_response_of_its_request() -> None:
    """Two requests at once on one connection: the second response begins after the first has ended."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        write, name = scope["extensions"][WRITE_EXTENSION], scope["path"].encode()
        assert not write(b"too early")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert write(name + b" one,")
        assert write(name + b" two,")
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": name + b" end", "more_body": False})
        assert not write(b"too late")

    settings = Settings(port=0, learn_s=0.0)
    stage = Stage(settings)
    async with stage.standing():
        with listen(settings) as listener:
            server = make_server(app, stage.gateway, listener)
            async with living(server):
                await stage.wait_for(lambda: server.started)
                host, port = listener.getsockname()
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\nGET /b HTTP/1.1\r\nhost: x\r\n\r\n")
                got = await asyncio.wait_for(reader.readuntil(b"/b end\r\n0\r\n\r\n"), HANG_S)
                writer.close()
                async with httpx.AsyncClient() as client:
                    whole = await client.get(f"http://{host}:{port}/c")
    assert [b"7\r\n%b one,\r\n7\r\n%b two,\r\n" % (name, name) in got for name in (b"/a", b"/b")] == [True, True]
    assert whole.text == "/c one,/c two,/c end"


async def test_an_answer_ends_with_its_connection_though_the_next_request_has_come() -> None:
    async with open_stage() as stage:
        stage.say(TEXT * 4)
        worker = stage.workers["d1"]
        worker.script.interval_s = 0.01
        body = json.dumps({"model": MODEL, "prompt": "hi", "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection(*stage.base_url.removeprefix("http://").split(":"))
        writer.write((head + body) * 2)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        await stage.wait_for(lambda: worker.got(Cancel) or worker.got(Acknowledge))
        assert not worker.got(Acknowledge)
        assert len(worker.got(DecodeTask)) == 1


async def test_head_and_events_of_one_frame_are_one_write() -> None:
    async with open_stage() as stage:
        stage.say("ok")
        stage.workers["d1"].script.tokens_per_frame = 100
        body = json.dumps({"model": MODEL, "prompt": "hi", "stream": True, "temperature": 0}).encode()
        host, port = stage.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        got = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), HANG_S)
        info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        writer.close()
    assert re.findall(rb'"text":"(\w*)"', got) == [b"o", b"k", b""], "an event for each token"
    assert struct.unpack_from("I", info, DATA_SEGMENTS_IN_AT) == (1,)


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_no_chunks(stream: bool) -> None:
    asked = json.dumps({"model": MODEL, "prompt": "hi", "stream": stream, "max_tokens": 500}).encode()
    head = f"POST /v1/completions HTTP/%s\r\nhost: x\r\nconnection: %s\r\ncontent-length: {len(asked)}\r\n\r\n"
    async with open_stage() as stage:
        stage.say(TEXT)
        received: list[tuple[bytes, bytes]] = []
        for version, connection in (("1.0", "keep-alive"), ("1.1", "close")):
            reader, writer = await asyncio.open_connection(*stage.base_url.removeprefix("http://").split(":"))
            writer.write((head % (version, connection)).encode() + asked)
            answer = await reader.read()
            writer.close()
            lines, _, body = answer.partition(b"\r\n\r\n")
            received.append((lines.lower(), body))
    (plain_head, plain), (chunked_head, chunked) = received
    assert b"\r\nconnection: close" in plain_head
    assert b"transfer-encoding" not in plain_head
    assert (b"transfer-encoding: chunked" in chunked_head, b"content-length" in plain_head) == (stream, not stream)
    if stream:
        chunked = b"".join(re.split(rb"(?:^|\r\n)[0-9a-f]+\r\n", chunked)).removesuffix(b"\r\n")
    assert shown(plain) == shown(chunked)
