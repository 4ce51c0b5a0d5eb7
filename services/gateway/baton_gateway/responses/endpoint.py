"""HTTP of /v1/responses: create, retrieve, list the input, cancel, delete."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, ClientGone, InvalidRequest, StoreUnavailable
from baton_gateway.answers import SSE_DONE, sse_event, to_json
from baton_gateway.generate import Job, RequestFacts, envelope_of, prepare, prepare_here
from baton_gateway.respond import (
    ABORT_EXTENSION,
    KEEP_ALIVE,
    SSE_HEADERS,
    WRITE_EXTENSION,
    send_body,
    watching,
    while_connected,
)
from baton_gateway.responses.bodies import Envelope, ResponseContext, read_envelope
from baton_gateway.responses.events import ResponseEvents, sse_of, with_output
from baton_gateway.responses.generation import Generation
from baton_gateway.responses.service import GATHER_S, Responses
from baton_gateway.responses.store import Key, Record
from baton_gateway.service import Gateway
from baton_gateway.tracing import RequestTrace

log = logging.getLogger(__name__)

PATH: Final = "/v1/responses"
ITEMS_PAGE_MAX: Final = 100
ENVELOPE_BYTES_MAX: Final = 64 << 10
"""Longest body whose envelope is read in this process."""


class ResponseCreation:
    """Creates one response, whose request was read already."""

    def __init__(self, gateway: Gateway, responses: Responses, facts: RequestFacts, trace: RequestTrace) -> None:
        self._gateway = gateway
        self._responses = responses
        self._facts = facts
        self._trace = trace
        self._created_s = int(gateway.clock.wall_s())
        self._key = Key(facts.access.tenant, f"resp_{facts.request}")
        self._envelope = Envelope()

    async def prepare(self, payload: bytes | bytearray, receive: Receive) -> Job:
        """Return the job of a body, with its stored history. Raises what is an answer of its own."""
        gateway, facts = self._gateway, self._facts
        if len(payload) <= ENVELOPE_BYTES_MAX:
            self._envelope = read_envelope(payload)
        else:
            self._envelope = await while_connected(receive, envelope_of(gateway, payload, facts))
        context = ResponseContext(request=facts.request)
        if previous := self._envelope.previous_response_id:
            history = await self._responses.history(facts.access.tenant, previous)
            context = ResponseContext(request=facts.request, history=history)
        job = prepare_here(gateway, payload, facts, context)
        if job is None:
            job = await while_connected(receive, prepare(gateway, payload, facts, context))
        return job

    async def answer(self, job: Job, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the prepared request. Raises what is an answer of its own as long as nothing was sent."""
        responses, envelope, plan = self._responses, self._envelope, job.plan
        background = bool(envelope.background)
        assert plan.response is not None, "the intake read another kind of body"
        self._trace.accept(
            job.model, plan, request=job.request, response=self._key.response, prompt_tokens=job.prompt_tokens
        )
        events = ResponseEvents(job.request, self._head(job, envelope))
        first = events.queue() if background else []
        stored = await self._store(events, plan.response.items, envelope)
        extensions: dict[str, Any] = scope.get("extensions") or {}
        cut: Callable[[], None] = extensions.get(ABORT_EXTENSION) or (lambda: None)
        write: Callable[[bytes], bool] = extensions.get(WRITE_EXTENSION) or (lambda _part: False)
        streams, stream = bool(envelope.stream), EventStream(send)
        generation = Generation(
            self._gateway,
            job,
            events,
            self._trace,
            streams=streams,
            unread_tokens_max=self._gateway.settings.unread_tokens_max,
            gather_s=GATHER_S if background else 0.0,
            on_overflow=(lambda: None) if background else cut,
            write_now=lambda new: write(b"".join(map(sse_of, new))),
            keep_alive=None if background else stream.keep_alive,
        )
        if not background:
            await self._generate(generation, stream if streams else None, stored, scope, receive, send)
            return
        queued = with_output(events.head(), events.output())
        responses.start(self._key, generation, first, streams=streams)
        if streams:
            await send_events(responses.follow(self._key, 0), scope, receive, send)
        else:
            await _json(queued)(scope, receive, send)

    async def _generate(
        self,
        generation: Generation,
        stream: EventStream | None,
        stored: bool,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Generate a response for the client that waits for it, whole or for its stream."""
        events = generation.events

        async def take(new: list[bytes]) -> None:
            if stream is not None:
                await stream.send(new, ends=events.ended)
            else:
                await _json(with_output(events.head(), events.output()))(scope, receive, send)

        async with watching(receive, generation.cancel):
            if not stored:
                await generation.run(take)
                return
            await self._responses.run(self._key, generation, take)

    async def _store(self, events: ResponseEvents, items: tuple[bytes, ...], envelope: Envelope) -> bool:
        """Store the response before it is generated, and return whether it is stored.

        Where the client did not ask for it, a store that is away is no reason to refuse: the response says so.
        """
        if envelope.store is False or not (self._responses.stores or envelope.store or envelope.background):
            return False
        streams, previous = bool(envelope.stream), envelope.previous_response_id or ""
        try:
            await self._responses.create(self._key, events, items, previous=previous, streams=streams)
        except StoreUnavailable as error:
            if envelope.store or envelope.background:
                raise
            log.warning("response %s is not stored: %s", self._key.response, error)
            events.note_unstored()
            return False
        return True

    def _head(self, job: Job, envelope: Envelope) -> dict[str, Any]:
        """Return the response's fields but for its status and its output."""
        sampling, asked = job.plan.sampling, job.plan.response
        assert asked is not None, "the intake read another kind of body"
        return {
            "id": self._key.response,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": None,
            "model": job.model,
            "background": bool(envelope.background),
            "previous_response_id": envelope.previous_response_id,
            "store": envelope.store is not False and self._responses.stores,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            **msgspec.json.decode(asked.echo, type=dict[str, msgspec.Raw]),
        }


class EventStream:
    """Sends events. The status goes out with the first of them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send(self, events: list[bytes], *, ends: bool) -> None:
        await self.send_raw(b"".join(map(sse_of, events)) + (SSE_DONE if ends else b""), ends=ends)

    async def keep_alive(self) -> None:
        await self.send_raw(KEEP_ALIVE, ends=False)

    async def send_raw(self, body: bytes, *, ends: bool) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        await send_body(self._send, body, more=not ends)


async def send_events(pages: AsyncGenerator[list[bytes]], scope: Scope, receive: Receive, send: Send) -> None:
    """Send stored events until they end or the client leaves. Raises an error before the first event."""
    stream = EventStream(send)

    async def follow() -> None:
        try:
            async for events in pages:
                await (stream.send(events, ends=False) if events else stream.keep_alive())
            await stream.send([], ends=True)
        except BatonError as error:
            if not stream.started:
                raise
            said = {"type": "error", "code": error.code, "message": error.detail, "param": error.param}
            await stream.send_raw(b"event: error\n" + sse_event(said), ends=True)

    try:
        await while_connected(receive, follow())
    except ClientGone:
        log.debug("a client that followed a response has left")
    finally:
        await pages.aclose()


class StoredEvents(Response):
    """The events of a background response, from number `first` on."""

    def __init__(self, responses: Responses, key: Key, first: int) -> None:
        super().__init__()
        self._pages = responses.follow(key, first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_events(self._pages, scope, receive, send)


def make_router(responses: Responses) -> APIRouter:
    """Return the endpoints of stored responses."""
    router = APIRouter(prefix=PATH)

    @router.get("/{response}")
    async def retrieve(
        request: Request,
        response: str,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1, lt=1 << 53)] = -1,
    ) -> Response:
        key = _key(request, response)
        record = await responses.read(key)
        if not stream:
            return _json(_whole(record))
        if not record.keeps_events:
            said = "only the events of responses created with `background` and `stream` are kept"
            raise InvalidRequest(said, param="stream")
        return StoredEvents(responses, key, starting_after + 1)

    @router.delete("/{response}")
    async def delete(request: Request, response: str) -> Response:
        await responses.delete(_key(request, response))
        return _json(to_json({"id": response, "object": "response", "deleted": True}))

    @router.post("/{response}/cancel")
    async def cancel(request: Request, response: str) -> Response:
        return _json(_whole(await responses.cancel(_key(request, response))))

    @router.get("/{response}/input_items")
    async def input_items(
        request: Request,
        response: str,
        limit: Annotated[int, Query(ge=1, le=ITEMS_PAGE_MAX)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str = "",
    ) -> Response:
        items = await responses.items(_key(request, response))
        return _json(_page(items if order == "asc" else items[::-1], limit, after))

    return router


def _page(items: list[bytes], limit: int, after: str) -> bytes:
    """Return a page of items as JSON. Raises InvalidRequest if none has the id `after`."""
    ids = [msgspec.json.decode(item, type=_Identified).id for item in items]
    if after and after not in ids:
        raise InvalidRequest(f"`after`: the request has no item `{after[:80]}`", param="after")
    start = ids.index(after) + 1 if after else 0
    page = items[start : start + limit]
    listed = ids[start : start + limit]
    return to_json(
        {
            "object": "list",
            "data": [msgspec.Raw(item) for item in page],
            "first_id": listed[0] if listed else None,
            "last_id": listed[-1] if listed else None,
            "has_more": start + limit < len(items),
        }
    )


class _Identified(msgspec.Struct):
    id: str


def _key(request: Request, response: str) -> Key:
    return Key(request.state.access.tenant, response)


def _whole(record: Record) -> bytes:
    return with_output(record.head, record.output)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
