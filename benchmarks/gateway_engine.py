"""An OpenAI-compatible engine that takes no time, behind a peer's router: each token is ready in the next loop turn."""

from __future__ import annotations

import asyncio
import sys
import zlib
from typing import Any, Final, cast

import httptools
import msgspec
import uvloop

from benchmarks.gateway_load import HOST, PACED, WORDS

MODEL: Final = "model"
PACE_S: Final = 0.005
"""Time between two tokens of an answer that is paced: 12,800 tokens per second with 64 streams."""


class Body(msgspec.Struct):
    """Parts of a request that matter here."""

    messages: list[dict[str, Any]] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False

    @property
    def tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 1

    @property
    def is_paced(self) -> bool:
        """Whether the prompt asks for a token each `PACE_S`."""
        return bool(self.messages) and str(self.messages[0]["content"]).startswith(PACED)


def event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    """Return one event of an answer."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    chunk = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST: Final = HEAD + chunked(event({"role": "assistant", "content": ""})) + chunked(event({"content": " word"}))
NEXT: Final = [chunked(event({"content": f" {word}"})) for word in WORDS]
"""Tokens in turn: LiteLLM ends an answer that repeats itself."""
LAST: Final = chunked(event({}, "length")) + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Streams:
    """Answers under way with the same pace; each step adds one token to each."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._left: dict[Connection, int] = {}
        """Tokens still to come."""
        self._stepping = False

    def start(self, connection: Connection, tokens: int) -> None:
        connection.write(FIRST if tokens > 1 else FIRST + LAST)
        if tokens > 1:
            self._left[connection] = tokens - 1
            if not self._stepping:
                self._next_step()

    def end(self, connection: Connection) -> None:
        self._left.pop(connection, None)

    def _next_step(self) -> None:
        self._stepping = True
        loop = asyncio.get_running_loop()
        if self._pace_s:
            loop.call_later(self._pace_s, self._step)
        else:
            loop.call_soon(self._step)

    def _step(self) -> None:
        for connection, left in list(self._left.items()):
            if connection.is_writable:
                token = NEXT[left % len(NEXT)]
                connection.write(token if left > 1 else token + LAST)
                if left > 1:
                    self._left[connection] = left - 1
                else:
                    del self._left[connection]
        self._stepping = False
        if self._left:
            self._next_step()


class Engine:
    def __init__(self) -> None:
        self._streams = {False: Streams(0.0), True: Streams(PACE_S)}

    def start(self, connection: Connection, body: Body) -> None:
        self._streams[body.is_paced].start(connection, body.tokens)

    def end(self, connection: Connection) -> None:
        for streams in self._streams.values():
            streams.end(connection)


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.write = self._transport.write
        self._parser: Any = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.end(self)

    def on_message_begin(self) -> None:
        self._path = self._content = b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._content += body

    def on_message_complete(self) -> None:
        if not self._content:
            known = {"model_path": MODEL, "served_model_name": MODEL, "data": [{"id": MODEL, "object": "model"}]}
            self._answer({**known, "object": "list", "tp_size": 1, "dp_size": 1})
            return
        body = msgspec.json.decode(self._content, type=Body)
        if self._path.endswith(b"/render"):
            # vllm-router asks for a prompt's tokens: a word is one here.
            words = [word for message in body.messages for word in str(message["content"]).split()]
            self._answer({"token_ids": [zlib.crc32(word.encode()) & 0xFFFF for word in words]})
        elif body.stream:
            self._engine.start(self, body)
        else:
            message = {"role": "assistant", "content": " word"}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            head = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": MODEL}
            self._answer({**head, "choices": [choice], "usage": usage})

    def _answer(self, content: dict[str, Any]) -> None:
        body = msgspec.json.encode(content)
        self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )


async def serve(port: int) -> None:
    engine = Engine()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
