"""Workers without an engine, behind a peer's router: each answers a request when it is told to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from baton_simulator.routers.protocol import Role

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

HOST = "127.0.0.1"
MODEL = "model"


class Exchange:
    """One request as the workers see it."""

    def __init__(self) -> None:
        self.reached: asyncio.Queue[tuple[Role, str]] = asyncio.Queue()
        """(role, worker), as the request arrives."""
        self.first = asyncio.Event()
        """The first token may exist."""
        self.last = asyncio.Event()
        """The last token may exist."""


class Backends:
    """One HTTP server on a port per worker. Requests are told apart by their prompts."""

    def __init__(self, roles: Sequence[tuple[str, Role]]) -> None:
        self._sockets = [_listen() for _ in roles]
        self._workers: dict[int, tuple[Role, str]] = {
            each.getsockname()[1]: (role, name) for each, (name, role) in zip(self._sockets, roles, strict=True)
        }
        self.exchanges: dict[str, Exchange] = {}
        """By the text of the prompt."""

    def urls(self, role: Role) -> list[str]:
        return [f"http://{HOST}:{port}" for port, (each, _) in self._workers.items() if each == role]

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[None]:
        config = uvicorn.Config(
            self._answer, http="httptools", log_level="error", lifespan="off", ws="none", interface="asgi3"
        )
        server = uvicorn.Server(config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=self._sockets))
            try:
                yield
            finally:
                server.should_exit = server.force_exit = True

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            known = {"model_path": MODEL, "served_model_name": MODEL, "data": [{"id": MODEL, "object": "model"}]}
            await _send_json(send, known)
            return
        content = b""
        while True:
            message = await receive()
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(content)
        prompt = body["prompt"] if isinstance(body["prompt"], str) else "".join(map(chr, body["prompt"]))
        exchange = self.exchanges[prompt]
        role, name = self._workers[scope["server"][1]]
        exchange.reached.put_nowait((role, name))
        await exchange.first.wait()
        if role == "prefill":
            choice = {"index": 0, "text": " ", "finish_reason": "length"}
            await _send_json(send, {"id": "x", "choices": [choice], "kv_transfer_params": {"remote_engine_id": name}})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        choice = {"index": 0, "text": " ", "finish_reason": None}
        chunk = {"id": "x", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice]}
        await send({"type": "http.response.body", "body": _event(json.dumps(chunk)), "more_body": True})
        await exchange.last.wait()
        await send({"type": "http.response.body", "body": _event("[DONE]")})


def _listen() -> socket.socket:
    listener = socket.socket()
    listener.bind((HOST, 0))
    return listener


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


async def _send_json(send: Send, body: object) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
