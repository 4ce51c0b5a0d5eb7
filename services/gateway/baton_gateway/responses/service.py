"""The responses of one gateway: those that it generates, and those that it reads from the store."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from baton.errors import BatonError, Conflict, DeadlineExceeded, InvalidRequest, StoreUnavailable, Unavailable
from baton_gateway.responses.events import ResponseEvents, Status
from baton_gateway.responses.generation import Generation
from baton_gateway.responses.store import LEASE_S, Key, NewRecord, Record, ResponseStore
from baton_gateway.service import Gateway

log = logging.getLogger(__name__)

GATHER_S: Final = 0.05
"""Time for which the events of a background response gather before they are stored."""
POLL_S: Final = 0.1
KEEP_S: Final = 0.25
"""Time between two renewals of the lease, which also bring the cancellations."""
RETRY_S: Final = 0.5
CANCEL_WAIT_S: Final = LEASE_S + 5.0
"""Longest wait for a response to end: by then its owner has answered or is lost."""
TURNS_MAX: Final = 1024

Result = TypeVar("Result")


class ResponseNotFound(InvalidRequest):
    code = "response_not_found"
    http_status = 404


class PreviousNotFound(InvalidRequest):
    code = "previous_response_not_found"


class ResponseRunning(Conflict):
    code = "response_running"
    openai_type = "invalid_request_error"


class ResponseEnded(Conflict):
    """The stored response was ended elsewhere, or is gone."""

    code = "response_ended"


class Responses:
    """`store`: None where there is none; then nothing is stored, and what needs it is refused."""

    def __init__(self, gateway: Gateway, store: ResponseStore | None) -> None:
        self._gateway = gateway
        self._clock = gateway.clock
        self._owner = gateway.links.gateway
        self._store = store
        self._running: dict[Key, Generation] = {}
        self._keeps = False

    @property
    def stores(self) -> bool:
        return self._store is not None

    # ------------------------------------------------------------ generating

    async def create(
        self, key: Key, events: ResponseEvents, items: tuple[bytes, ...], *, previous: str, streams: bool
    ) -> None:
        """Store a response before this gateway generates it; `streams`: its client wants events.

        Raises StoreUnavailable.
        """
        background = events.status is Status.QUEUED
        record = NewRecord(
            owner=self._owner,
            previous=previous,
            background=background,
            keeps_events=background and streams,
            head=events.head(),
            items=items,
        )
        await self._known().create(key, record)

    async def run(self, key: Key, generation: Generation, take: Callable[[list[bytes]], Awaitable[None]]) -> None:
        """Generate a stored response for a client that waits for it. Its end is stored before `take` gets it.

        One that has no end, as it failed before its first event, is deleted.
        """
        events = generation.events

        async def take_stored(new: list[bytes]) -> None:
            if events.ended:
                await self._finish_soon(key, events)
            await take(new)

        self._enter(key, generation)
        try:
            await generation.run(take_stored)
        finally:
            del self._running[key]
            if not events.ended:
                self._gateway.spawn(self._discard(key))

    def start(self, key: Key, generation: Generation, first: list[bytes], *, streams: bool) -> None:
        """Generate a stored response in the background; `first`: its first events."""
        self._enter(key, generation)
        self._gateway.spawn(self._run_in_background(key, generation, first, streams=streams))

    async def _run_in_background(self, key: Key, generation: Generation, first: list[bytes], *, streams: bool) -> None:
        events, stored = generation.events, 0

        async def take(new: list[bytes]) -> None:
            nonlocal stored
            kept = new if streams else []
            await self._write(key, stored, kept, events)
            stored += len(kept)

        try:
            await take([*first, *events.begin()])
            await generation.run(take)
        except ResponseEnded:
            log.info("response %s was ended or deleted elsewhere", key.response)
        except Exception:  # The boundary of this request.
            log.exception("response %s failed unexpectedly", key.response)
            failed = events.fail(BatonError("the server failed unexpectedly; its log has the details"))
            with suppress(ResponseEnded):
                await self._write(key, stored, failed if streams else [], events)
        finally:
            del self._running[key]

    async def _finish_soon(self, key: Key, events: ResponseEvents) -> None:
        """Store the end of a response; while the store is away, in the background."""
        try:
            await self._known().finish(key, 0, [], events.head(), events.output())
        except StoreUnavailable as error:
            log.warning("the end of response %s waits for the store: %s", key.response, error)
            self._gateway.spawn(self._finish(key, events))

    async def _finish(self, key: Key, events: ResponseEvents) -> None:
        store, head, output = self._known(), events.head(), events.output()
        await self._retried(lambda: store.finish(key, 0, [], head, output))

    async def _write(self, key: Key, first: int, new: list[bytes], events: ResponseEvents) -> None:
        """Store events, however long it takes. Raises ResponseEnded."""
        store = self._known()
        if events.ended:
            head, output = events.head(), events.output()
            written = await self._retried(lambda: store.finish(key, first, new, head, output))
        else:
            # Between its beginning and its end, a response's head stays as it is.
            head = b"" if first else events.head()
            written = await self._retried(lambda: store.append(key, first, new, head))
        if not written:
            raise ResponseEnded(f"the response `{key.response}` was ended or deleted elsewhere")

    async def _retried(self, write: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of `write`, which is repeated while the store is away."""
        while True:
            try:
                return await write()
            except StoreUnavailable:
                await self._clock.sleep(RETRY_S)

    def _enter(self, key: Key, generation: Generation) -> None:
        self._running[key] = generation
        if not self._keeps:
            self._keeps = True
            self._gateway.spawn(self._keep())

    async def _keep(self) -> None:
        """Renew the lease and cancel what others ask for, until nothing is running."""
        store, cancelled = self._known(), list[Key]()
        try:
            while self._running:
                try:
                    # The store asks until it is told, since its answer may have been lost.
                    cancelled = await store.renew(self._owner, cancelled)
                    for key in cancelled:
                        if (generation := self._running.get(key)) is not None:
                            generation.cancel()
                except StoreUnavailable as error:
                    log.debug("the lease of running responses is not renewed: %s", error)
                await self._clock.sleep(KEEP_S)
        finally:
            self._keeps = False

    # ------------------------------------------------------------ reading

    async def history(self, tenant: str, previous: str) -> bytes:
        """Return the items of a conversation up to and with a response, as a JSON array.

        Raises InvalidRequest if it is not stored, or still being generated, and StoreUnavailable.
        """
        store, turns, room_bytes = self._known(), list[bytes](), self._gateway.settings.body_bytes_max
        param, count, asked = "previous_response_id", 0, previous
        while previous:
            turn = await store.turn(Key(tenant, previous))
            if turn is None:
                said = f"the response `{previous[:80]}` is not stored (any more)"
                if count:
                    said = f"{said}, and `{asked[:80]}` continues it: send the whole conversation as `input`"
                raise PreviousNotFound(said, param=param)
            if turn.running:
                await self.read(Key(tenant, previous))
                raise ResponseRunning(f"the response `{previous[:80]}` is still being generated", param=param)
            turns += filter(None, (turn.output[1:-1], *reversed(turn.items)))
            room_bytes -= len(turn.output) + sum(map(len, turn.items))
            count += 1
            if count > TURNS_MAX or room_bytes < 0:
                raise InvalidRequest("the conversation is longer than this server takes: begin a new one", param=param)
            previous = turn.previous
        return b"[%b]" % b",".join(reversed(turns))

    async def read(self, key: Key) -> Record:
        """Return a response; one whose gateway is lost has failed. Raises ResponseNotFound."""
        store = self._known()
        while True:
            record = await store.read(key)
            if record is None:
                raise _not_found(key)
            if not (record.running and record.owner_lost):
                return record
            await self._lose(key, record)

    async def _lose(self, key: Key, record: Record) -> None:
        head = msgspec.json.decode(record.head, type=dict[str, Any])
        events = ResponseEvents("", head, first=record.events)
        last = events.fail(Unavailable("the gateway that generated this response was lost"))
        if await self._known().lose(key, record.events, last if record.keeps_events else [], events.head()):
            log.warning("response %s of gateway %s, which is lost, has failed", key.response, record.owner)

    async def items(self, key: Key) -> list[bytes]:
        items = await self._known().items(key)
        if items is None:
            raise _not_found(key)
        return items

    async def follow(self, key: Key, first: int) -> AsyncGenerator[list[bytes]]:
        """Yield the stored events of a response from number `first` on, as they come, until its end.

        An empty list is yielded when it is silent for as long as a stream may be.
        """
        store, keep_alive_s = self._known(), self._gateway.settings.stream_keep_alive_s
        heard_at_s = self._clock.now_s()
        while True:
            page = await store.events(key, first)
            if page is None:
                raise _not_found(key)
            if page.events:
                heard_at_s = self._clock.now_s()
                yield list(page.events)
                first += len(page.events)
            elif not page.running:
                return
            elif page.owner_lost:
                await self.read(key)
            else:
                if keep_alive_s and self._clock.now_s() >= heard_at_s + keep_alive_s:
                    heard_at_s = self._clock.now_s()
                    yield []
                await self._clock.sleep(POLL_S)

    async def cancel(self, key: Key) -> Record:
        """Cancel a background response and return it. Raises ResponseNotFound, InvalidRequest, DeadlineExceeded."""
        record = await self.read(key)
        if not record.background:
            raise InvalidRequest("only a response with `background` can be cancelled")
        if not record.running:
            if status_of(record) is not Status.CANCELLED:
                raise InvalidRequest(f"the response is {status_of(record)}: there is nothing to cancel")
            return record
        try:
            async with self._clock.timeout(CANCEL_WAIT_S):
                await self._known().ask_cancel(key, record.owner)
                while (record := await self.read(key)).running:
                    await self._clock.sleep(POLL_S)
        except TimeoutError as error:
            raise DeadlineExceeded("the response was not cancelled in time: try again") from error
        return record

    async def delete(self, key: Key) -> None:
        """Delete a response; one that is being generated is cancelled. Raises ResponseNotFound."""
        record = await self._known().read(key)
        if record is None:
            raise _not_found(key)
        if record.running:
            await self._known().ask_cancel(key, record.owner)
        # What it returns is not asked: where the client of Redis repeats the call, nothing is left the second time.
        await self._known().delete(key)

    async def _discard(self, key: Key) -> None:
        try:
            await self._known().delete(key)
        except StoreUnavailable as error:
            log.warning("response %s is not deleted: %s", key.response, error)

    def _known(self) -> ResponseStore:
        if self._store is None:
            raise InvalidRequest("this server stores no responses: it has no Redis (`--redis-url`)", param="store")
        return self._store


class _Head(msgspec.Struct):
    status: Status


def status_of(record: Record) -> Status:
    return msgspec.json.decode(record.head, type=_Head).status


def _not_found(key: Key) -> ResponseNotFound:
    return ResponseNotFound(f"the response `{key.response[:80]}` is not stored (any more)")
