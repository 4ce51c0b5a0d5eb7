"""Two servers that stream a fixed answer: the least that HTTP from Python costs, with FastAPI and without."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from benchmarks.gateway_engine import MODEL, PACE_S, Body, event
from benchmarks.gateway_load import HOST

Message = MutableMapping[str, Any]

TOKEN: Final = event({"content": " word"})
LAST: Final = event({}, "length") + b"data: [DONE]\n\n"
EVENT_STREAM: Final = "text/event-stream"


class Pace:
    """Lets all paced streams go on together, as an engine's steps do."""

    _step: asyncio.Event | None = None

    async def wait(self) -> None:
        if self._step is None:
            self._step = asyncio.Event()
            asyncio.get_running_loop().call_later(PACE_S, self._end)
        await self._step.wait()

    def _end(self) -> None:
        assert self._step is not None
        self._step.set()
        self._step = None


PACE: Final = Pace()


async def tokens(body: Body) -> AsyncGenerator[bytes]:
    paced = body.is_paced
    for number in range(body.tokens):
        if number:
            await (PACE.wait() if paced else asyncio.sleep(0))  # One write for each token in either case.
        yield TOKEN
    yield LAST


def fastapi_app() -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
        return {"id": MODEL}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:  # pyright: ignore[reportUnusedFunction]
        body = msgspec.json.decode(await request.body(), type=Body)
        return StreamingResponse(tokens(body), media_type=EVENT_STREAM)

    return app


async def asgi_app(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    content, more = b"", True
    while more:
        message = await receive()
        content += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", EVENT_STREAM.encode())]})
    body = msgspec.json.decode(content, type=Body) if content else Body()
    async for each in tokens(body):
        await send({"type": "http.response.body", "body": each, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def main() -> None:
    name, port = sys.argv[1:]
    app: Any = {"fastapi": fastapi_app, "asgi": lambda: asgi_app}[name]()
    uvicorn.run(app, host=HOST, port=int(port), http="httptools", loop="uvloop", lifespan="off", access_log=False)


if __name__ == "__main__":
    main()
