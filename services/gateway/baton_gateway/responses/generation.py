"""One response being generated: the job's pieces in, the response's events out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.errors import BatonError, ClientGone, StoreUnavailable
from baton_gateway.choice import Piece
from baton_gateway.generate import Job, Production
from baton_gateway.order import Outcome
from baton_gateway.outlet import Ending, Outlet
from baton_gateway.responses.events import ResponseEvents, Usage, merged
from baton_gateway.service import Gateway
from baton_gateway.tracing import RequestTrace

Take = Callable[[list[bytes]], Awaitable[None]]


class Generation:
    def __init__(
        self,
        gateway: Gateway,
        job: Job,
        events: ResponseEvents,
        trace: RequestTrace,
        *,
        streams: bool,
        unread_tokens_max: int | None,
        gather_s: float = 0.0,
        on_overflow: Callable[[], None] = lambda: None,
        write_now: Callable[[list[bytes]], bool] = lambda _events: False,
        keep_alive: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`streams`: events are passed on as they come, `gather_s` worth of them at a time; else all at the end.

        `write_now`: writes events after the first ones at once, without a task switch; False if it cannot now.
        `keep_alive`: called when a stream is silent for as long as it may be.
        """
        self.events = events
        self._gateway = gateway
        self._job = job
        self._trace = trace
        self._streams = streams
        self._gather_s = gather_s
        self._write_now = write_now
        self._keep_alive = keep_alive
        self._silent = False
        self._unwritten: list[bytes] = []
        self._is_shown = False
        """Whether the client of a stream receives events of its first piece."""
        limit = unread_tokens_max if streams else None
        self._outlet = Outlet(limit, on_overflow, self._take_now, on_ended=trace.note_produced)
        self._production = Production(gateway, job, self._outlet)
        self._cancelled = False

    def cancel(self) -> None:
        """End the response; what was generated stays its output."""
        self._cancelled = True
        self._production.abort(ClientGone("the response was cancelled"))

    async def run(self, take: Take) -> None:
        """Generate the response, and pass its events to `take`, in order.

        Raises the error of a response that failed before it had an event. If `take` raises, the workers are told.
        """
        failure: BatonError | None = None
        async with asyncio.TaskGroup() as group:
            self._production.start(group)
            try:
                await self._pass_on(take)
            except BatonError as error:
                failure = error
            finally:
                self._production.abort(ClientGone("the response was given up"))
        if failure is not None:
            raise failure

    async def _pass_on(self, take: Take) -> None:
        while not self.events.ended:
            items = await (self._next(take) if self._streams else self._outlet.take_whole(1))
            unwritten, self._unwritten = self._unwritten, []
            if events := unwritten + self._render([item for _, item in items]):
                if self._streams:
                    self._production.note_shown(0)
                    self._is_shown = True
                await take(events)
            if self._gather_s and not self.events.ended:
                await self._gateway.clock.sleep(self._gather_s)

    async def _next(self, take: Take) -> list[tuple[int, Piece | Ending]]:
        """Wait for items. A stream that is silent meanwhile begins, or is kept alive."""
        keep_alive_s = self._gateway.settings.stream_keep_alive_s if self._keep_alive else 0.0
        while True:
            self._silent = True
            try:
                async with self._gateway.clock.timeout(keep_alive_s or None):
                    return await self._outlet.take()
            except TimeoutError:
                # Pieces that were written at once did not come here.
                if self._silent and self.events.number == 0:
                    await take(self.events.begin())
                elif self._silent and self._keep_alive is not None:
                    await self._keep_alive()

    def _take_now(self, _choice: int, piece: Piece) -> bool:
        """Write a piece's events at once. What cannot be written now goes before those of the next piece."""
        # A stream that began in silence has events, but nothing of the answer, which may still start over.
        if self._gather_s or self._unwritten or not self._is_shown:
            return False
        self._silent = False
        events = self.events.feed(piece)
        if events and not self._write_now(events):
            self._unwritten = events
        return True

    def _render(self, items: list[Piece | Ending]) -> list[bytes]:
        begun = self.events.number > 0
        pieces = [item for item in items if isinstance(item, Piece)]
        result = next((item.result for item in items if isinstance(item, Ending)), None)
        if isinstance(result, Exception):
            self._trace.fail(result)
            result.__traceback__ = None
            if not (begun or self._cancelled):
                raise result
        begins = not begun and (result is not None or any(piece.is_shown for piece in pieces))
        events = self.events.begin() if begins else []
        for piece in merged(pieces):
            events += self.events.feed(piece)
        match result:
            case Outcome():
                events += self._complete(result)
            case Exception() if self._cancelled:
                events += self.events.cancel()
            case ClientGone() if self._gather_s:
                events += self.events.fail(StoreUnavailable("more of the response waits for Redis than is kept"))
            case BatonError():
                events += self.events.fail(result)
            case _:
                pass
        return events

    def _complete(self, outcome: Outcome) -> list[bytes]:
        usage = Usage(
            input_tokens=self._job.prompt_tokens,
            output_tokens=outcome.completion_tokens,
            cached_tokens=outcome.cached_tokens,
            reasoning_tokens=outcome.reasoning_tokens or 0,
        )
        self._trace.finish(
            [outcome.finish_reason], output_tokens=usage.output_tokens, cached_tokens=usage.cached_tokens
        )
        return self.events.complete(outcome.reason, usage, int(self._gateway.clock.wall_s()))
