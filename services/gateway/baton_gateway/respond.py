"""Response to one generation request, streamed or whole, with a watch for a client that disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.clock import Timer
from baton.errors import BatonError, ClientGone
from baton_gateway.answers import Events, WholeChoice, usage_of
from baton_gateway.choice import Piece
from baton_gateway.generate import Job, Production
from baton_gateway.guard import error_response
from baton_gateway.order import Outcome
from baton_gateway.outlet import Ending, Outlet, TextWriter, text_writer
from baton_gateway.service import Gateway
from baton_gateway.tracing import RequestTrace

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Otherwise proxies such as nginx would buffer the stream.
    (b"x-accel-buffering", b"no"),
]
Result = TypeVar("Result")

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip; proxies see that the stream lives."""
ABORT_EXTENSION = "baton.abort"
"""ASGI extension of our server: a function that cuts the connection."""
WRITE_EXTENSION = "baton.write"
"""ASGI extension of our server: a function that writes parts of a begun body, or returns False if it cannot now."""


class AnswerResponse:
    """Runs a job and sends its answer. An error before the first token is a plain HTTP error."""

    def __init__(self, gateway: Gateway, job: Job, events: Events, trace: RequestTrace, *, stream: bool) -> None:
        self._gateway = gateway
        self._job = job
        self._trace = trace
        self._stream = stream
        self._events = events
        self._opened: set[int] = set()
        """Choices of which a stream has sent the beginning."""
        self._silent = False
        """Whether nothing was written since this was last looked at."""
        self._comment_due = False
        """Whether the stream has been silent for as long as it may be."""
        self._timer: Timer | None = None
        self._write_now: Callable[..., bool] | None = None
        self._outcomes: dict[int, Outcome] = {}
        self._failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions: dict[str, Any] = scope.get("extensions") or {}
        cut: Callable[[], None] = extensions.get(ABORT_EXTENSION) or (lambda: None)
        if self._stream:
            self._write_now = extensions.get(WRITE_EXTENSION)
            unread_tokens_max, pass_on = self._gateway.settings.unread_tokens_max, self._pass_on
            outlet = Outlet(unread_tokens_max, cut, pass_on, on_ended=self._trace.note_produced)
        else:
            outlet = Outlet(None, on_ended=self._trace.note_produced)
        production = Production(self._gateway, self._job, outlet)
        gone = "the client disconnected"
        async with asyncio.TaskGroup() as group, watching(receive, lambda: production.abort(ClientGone(gone))):
            production.start(group)
            try:
                if self._stream:
                    self._look_later(outlet)
                    await self._send_stream(outlet, production, scope, receive, send)
                else:
                    await self._send_whole(outlet, production, scope, receive, send)
            finally:
                production.abort(ClientGone("the answer was given up"))
                if self._timer is not None:
                    self._timer.cancel()
                if self._failure is not None:
                    # The error is kept by frames that its traceback keeps: a cycle that would hold the whole request
                    # until the next full collection, which comes after some 16,000 streams.
                    self._failure.__traceback__ = None
        if len(self._outcomes) == len(self._job.orders):
            usage = self._usage()
            self._trace.finish(
                [outcome.finish_reason for outcome in self._outcomes.values()],
                output_tokens=usage["completion_tokens"],
                cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            )

    # ------------------------------------------------------------ whole

    async def _send_whole(
        self, outlet: Outlet, production: Production, scope: Scope, receive: Receive, send: Send
    ) -> None:
        choices = [WholeChoice() for _ in self._job.orders]
        # Until all choices have ended, pieces stay in the outlet, where a choice that starts over takes them back.
        for choice, item in await outlet.take_whole(len(choices)):
            if isinstance(item, Ending):
                try:
                    self._note_ending(choice, item)
                except ClientGone:
                    return  # The client is gone.
                except BatonError as error:
                    await error_response(error, scope)(scope, receive, send)
                    return
                continue
            choices[choice].add(item)
        outcomes = [self._outcomes[choice] for choice in range(len(choices))]
        answer = Response(self._events.whole(choices, outcomes, self._usage()), media_type="application/json")
        answer.raw_headers += self._routing(production)
        await answer(scope, receive, send)

    # ------------------------------------------------------------ streamed

    async def _send_stream(
        self, outlet: Outlet, production: Production, scope: Scope, receive: Receive, send: Send
    ) -> None:
        choices, started = len(self._job.orders), False
        while len(self._outcomes) < choices:
            events: list[bytes] = []
            try:
                items, before = await outlet.take(), frozenset(self._opened)
                for choice, item in items:
                    self._render(choice, item, events)
                for choice in self._opened - before:
                    production.note_shown(choice, self._text_writer(outlet, choice))
            except ClientGone:
                return
            except BatonError as error:
                if not started:
                    await error_response(error, scope)(scope, receive, send)
                    return
                # The status line is already sent.
                events.append(self._events.failure(error))
                await send_body(send, b"".join(events), more=False)
                return
            if not events:
                if not self._comment_due:
                    continue
                events.append(KEEP_ALIVE)
            if not started:
                headers = SSE_HEADERS + self._routing(production)
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                started = True
            self._silent = self._comment_due = False
            if is_last := len(self._outcomes) == choices:
                events.append(self._events.end(self._usage()))
            # One write carries all events since the previous one.
            await send_body(send, b"".join(events), more=not is_last)

    def _look_later(self, outlet: Outlet) -> None:
        half_s = self._gateway.settings.stream_keep_alive_s / 2
        if half_s:
            self._timer = self._gateway.clock.call_later(half_s, partial(self._look, outlet))

    def _look(self, outlet: Outlet) -> None:
        """Wake the stream's reader if nothing was written for as long as that may be.

        Pieces that are passed on set no timer, so it is looked twice whether there were any.
        """
        if self._silent and not outlet.wrote_texts:
            self._comment_due = True
            outlet.wake_reader()
        self._silent, outlet.wrote_texts = True, False
        self._look_later(outlet)

    def _routing(self, production: Production) -> list[tuple[bytes, bytes]]:
        """Return headers that name the workers of each choice, if the operator allows it."""
        routes = production.routes() if self._gateway.settings.routing_headers else []
        placed = [route for route in routes if route is not None]
        prefills = ", ".join(route.prefill.worker if route.prefill else "-" for route in placed)
        decodes = ", ".join(route.decode.worker for route in placed)
        return [(b"x-baton-prefill", prefills.encode()), (b"x-baton-decode", decodes.encode())] if placed else []

    def _text_writer(self, outlet: Outlet, choice: int) -> TextWriter | None:
        around = self._events.around(choice)
        return None if around is None or self._write_now is None else text_writer(outlet, around, self._write_now)

    def _pass_on(self, choice: int, piece: Piece) -> bool:
        """Write a piece to the client at once, if its choice has begun and the connection takes it."""
        write_now = self._write_now
        if write_now is None or choice not in self._opened:
            return False
        self._silent = False
        if not (piece.text or piece.is_shown):
            return True
        # Asked before: an event is made once, since it may depend on those before it.
        return write_now(b"") and write_now(self._events.piece(choice, piece))

    def _render(self, choice: int, item: Piece | Ending, events: list[bytes]) -> None:
        """Append the events of one item. Raises the error of a choice that failed."""
        if isinstance(item, Ending):
            outcome = self._note_ending(choice, item)
            self._open(choice, events)
            events.append(self._events.closing(choice, outcome))
            return
        if not item.is_shown:
            return
        self._open(choice, events)
        events.append(self._events.piece(choice, item))

    def _open(self, choice: int, events: list[bytes]) -> None:
        if choice not in self._opened:
            self._opened.add(choice)
            events.append(self._events.opening(choice))

    def _note_ending(self, choice: int, ending: Ending) -> Outcome:
        """Return the outcome. Raises the error that ended the choice, if it failed."""
        if isinstance(ending.result, Exception):
            self._trace.fail(ending.result)
            self._failure = ending.result
            raise ending.result
        self._outcomes[choice] = ending.result
        return ending.result

    def _usage(self) -> dict[str, Any]:
        outcomes = [self._outcomes[choice] for choice in range(len(self._job.orders))]
        # Choices of one prompt find each other's blocks cached, so the minimum is what was cached before the request.
        per_prompt = self._job.choices_per_prompt
        groups = [outcomes[start : start + per_prompt] for start in range(0, len(outcomes), per_prompt)]
        cached = sum(min(outcome.cached_tokens for outcome in group) for group in groups)
        completion = sum(outcome.completion_tokens for outcome in outcomes)
        reasoning = [outcome.reasoning_tokens for outcome in outcomes if outcome.reasoning_tokens is not None]
        return usage_of(self._job.prompt_tokens, completion, cached, sum(reasoning) if reasoning else None)


@asynccontextmanager
async def watching(receive: Receive, on_gone: Callable[[], None]) -> AsyncGenerator[None]:
    """Call `on_gone` if the client disconnects inside this context."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def while_connected(receive: Receive, work: Coroutine[object, object, Result]) -> Result:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientGone."""
    working = asyncio.create_task(work)
    gone = False

    def on_gone() -> None:
        nonlocal gone
        gone = working.cancel()  # noqa: F821 - it is deleted at the end only.

    try:
        async with watching(receive, on_gone):
            await asyncio.wait((working,))
            if gone:
                raise ClientGone("the client disconnected before it was answered")
            return await working
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        # The traceback of its error leads back to this frame: without this, the request's body would stay until the
        # next garbage collection, which would then free it in one go.
        del working


async def send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
