"""Requests with an `Idempotency-Key`: the same key and body get the same answer, from any gateway.

The first such request claims the key and is answered; what it was sent is kept. Its client may leave meanwhile: the
answer is finished all the same, for a request that comes again. Others with this key wait for that answer. Errors are
not kept, and end the claim. A claim whose gateway is lost expires, so that the next request makes the answer anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import ClientGone, Conflict, InvalidRequest, StoreUnavailable
from baton_gateway.idempotency_store import AnswerStore, Claimed, Running
from baton_gateway.request_body import Part
from baton_gateway.respond import while_connected
from baton_gateway.service import Gateway

log = logging.getLogger(__name__)

HEADER: Final = "idempotency-key"
KEY_CHARS_MAX: Final = 255
ANSWER_BYTES_MAX: Final = 1 << 20
"""Longest answer that is kept; the claim of a longer one ends."""
RENEW_S: Final = 2.0
POLL_S: Final = 0.1
OK: Final = range(200, 300)


class KeyReused(InvalidRequest):
    code = "idempotency_key_reused"
    http_status = 422


class KeyInUse(Conflict):
    code = "idempotency_key_in_use"
    openai_type = "invalid_request_error"


class Answer(msgspec.Struct):
    """What a client was sent."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list[tuple[bytes, bytes]])
    body: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Answer).decode


class Once:
    """Answers one request with a key, by `app` unless the answer exists."""

    def __init__(self, gateway: Gateway, store: AnswerStore | None, app: ASGIApp) -> None:
        self._gateway = gateway
        self._clock = gateway.clock
        self._store = store
        self._app = app
        self._claim = gateway.ports.new_id()

    async def answer(
        self, take_body: Callable[[], Part], digest: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request whose body was read; `digest`: of its path and body.

        Raises InvalidRequest, KeyReused, KeyInUse and StoreUnavailable.
        """
        state = scope["state"]
        key: str = state["headers"][HEADER]
        if not 0 < len(key) <= KEY_CHARS_MAX:
            raise InvalidRequest(f"`Idempotency-Key` has 1 to {KEY_CHARS_MAX} characters", param="Idempotency-Key")
        if self._store is None:
            said = "this server keeps no answers: it has no Redis (`--redis-url`)"
            raise InvalidRequest(f"`Idempotency-Key`: {said}", param="Idempotency-Key")
        name = hashlib.sha256(f"{state['access'].tenant}\0{key}".encode()).hexdigest()
        try:
            kept = await while_connected(receive, self._wait(self._store, name, digest))
        except (ClientGone, KeyInUse, StoreUnavailable):
            # It may have claimed the key all the same, and nobody would renew the claim or answer.
            self._gateway.spawn(self._release(self._store, name))
            raise
        if kept is None:
            await self._make(self._store, name, take_body, scope, send)
            return
        answer = _decode(kept)
        headers = [*answer.headers, (b"idempotent-replayed", b"true")]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _wait(self, store: AnswerStore, name: str, digest: str) -> bytes | None:
        """Return the kept answer, or None once the key is claimed for this request."""
        try:
            async with self._clock.timeout(self._gateway.settings.deadline_s):
                while True:
                    match await store.claim(name, digest, self._claim):
                        case Claimed():
                            return None
                        case Running():
                            await self._clock.sleep(POLL_S)
                        case bytes() as kept:
                            return kept
                        case None:
                            said = "the `Idempotency-Key` was used for another body or path"
                            raise KeyReused(said, param="Idempotency-Key")
        except TimeoutError as error:
            raise KeyInUse("a request with this `Idempotency-Key` is still running", param="Idempotency-Key") from error

    async def _make(
        self, store: AnswerStore, name: str, take_body: Callable[[], Part], scope: Scope, send: Send
    ) -> None:
        """Have the answer made, whether its client stays or not, and keep it."""
        answer, parts, room_bytes, is_read = Answer(), list[bytes](), ANSWER_BYTES_MAX, False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": take_body(), "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError("a client that left was noticed")

        async def record(message: Message) -> None:
            nonlocal room_bytes
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = [(bytes(key), bytes(value)) for key, value in message.get("headers", ())]
            else:
                room_bytes -= len(body := message.get("body", b""))
                parts.append(body if room_bytes >= 0 else b"")
                if not message.get("more_body", False) and answer.status in OK and room_bytes >= 0:
                    answer.body = b"".join(parts)
                    await self._keep(store, name, answer)
            await send(message)

        renewing = asyncio.create_task(self._renew(store, name))
        try:
            # Without its extensions, the server writes nothing but what passes here.
            await self._app({**scope, "extensions": {}}, receive, record)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await self._release(store, name)

    async def _keep(self, store: AnswerStore, name: str, answer: Answer) -> None:
        try:
            await store.keep(name, self._claim, _encode(answer))
        except StoreUnavailable as error:
            log.warning("an answer is not kept for its idempotency key: %s", error)

    async def _renew(self, store: AnswerStore, name: str) -> None:
        while True:
            await self._clock.sleep(RENEW_S)
            try:
                await store.renew(name, self._claim)
            except StoreUnavailable as error:
                log.debug("the claim of an idempotency key is not renewed: %s", error)

    async def _release(self, store: AnswerStore, name: str) -> None:
        try:
            await store.release(name, self._claim)
        except StoreUnavailable as error:
            log.debug("the claim of an idempotency key expires by itself: %s", error)
