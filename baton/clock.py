"""Clocks, passed to services as a value: no service reads the machine's time itself."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol

LATE_S: Final = 0.05
"""Lateness of a timer that shows a pause of this process: what arrived meanwhile is not read yet, so a deadline that
passed then is looked at again so much later. Event loops run timers that are due before they read from sockets."""


class Timer(Protocol):
    def cancel(self) -> object: ...


class Clock(Protocol):
    """A monotonic clock, with the time of day beside it.

    Instants are only comparable on one clock; budgets travel as durations.
    """

    def now_s(self) -> float:
        """Return seconds since an arbitrary start."""
        ...

    def wall_s(self) -> float:
        """Return seconds since 1970. They jump when the machine's time is set: never measure with them."""
        ...

    async def sleep(self, duration_s: float) -> None: ...

    def timeout(self, duration_s: float | None) -> AbstractAsyncContextManager[object]:
        """Return a context that raises TimeoutError once `duration_s` have passed inside it."""
        ...

    def call_later(self, duration_s: float, fire: Callable[[], None]) -> Timer:
        """Call `fire` from the event loop after `duration_s`, unless the timer is cancelled before."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    def timeout(self, duration_s: float | None) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(duration_s)

    def call_later(self, duration_s: float, fire: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(duration_s, fire)


_SETTLE_ROUNDS: Final = 64
"""Passes of the event loop after each timer: the longest chain of tasks that one timer may start."""
_IDLE_ROUNDS: Final = 4
"""Passes in a row with nothing else to run, after which nothing will: also what another thread has just ended."""


@dataclass(order=True, slots=True)
class _Timer:
    due_s: float
    order: int
    fire: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class ManualClock:
    """A clock that stands still until `advance` moves it. Timers fire by due time, then by age."""

    def __init__(self, start_s: float = 0.0, *, wall_start_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._wall_ahead_s = wall_start_s - start_s
        self._timers: list[_Timer] = []
        self._timers_made = 0

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s + self._wall_ahead_s

    async def sleep(self, duration_s: float) -> None:
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        timer = self.call_later(duration_s, lambda: None if woken.done() else woken.set_result(None))
        try:
            await woken
        finally:
            timer.cancel()

    def timeout(self, duration_s: float | None) -> AbstractAsyncContextManager[object]:
        return _ManualTimeout(self.call_later, duration_s)

    async def advance(self, duration_s: float) -> None:
        """Move time on. Each timer on the way fires at its own instant; tasks it wakes run before the next timer.

        Timers that these tasks start fire too, if they fall due within `duration_s`.
        """
        end_s = self._now_s + duration_s
        await self.settle()
        while self._timers and self._timers[0].due_s <= end_s:
            timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self._now_s = timer.due_s
                timer.fire()
                await self.settle()
        self._now_s = end_s

    async def settle(self) -> None:
        """Let every task that can run do so, without moving time."""
        # What asyncio's own loop is about to run; it has no public name. Other loops pass all rounds.
        ready = getattr(asyncio.get_running_loop(), "_ready", (None,))
        idle = 0
        for _ in range(_SETTLE_ROUNDS):
            await asyncio.sleep(0)
            idle = 0 if ready else idle + 1
            if idle == _IDLE_ROUNDS:
                return

    def call_later(self, duration_s: float, fire: Callable[[], None]) -> Timer:
        self._timers_made += 1
        timer = _Timer(self._now_s + duration_s, self._timers_made, fire)
        heapq.heappush(self._timers, timer)
        return timer


class _ManualTimeout:
    """`asyncio.timeout` with its deadline kept by a ManualClock."""

    def __init__(self, start_timer: Callable[[float, Callable[[], None]], Timer], duration_s: float | None) -> None:
        self._start_timer = start_timer
        self._duration_s = duration_s
        self._timer: Timer | None = None
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> _ManualTimeout:
        await self._scope.__aenter__()
        if self._duration_s is not None and self._duration_s <= 0:
            self._expire()
        elif self._duration_s is not None:
            self._timer = self._start_timer(self._duration_s, self._expire)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._timer is not None:
            self._timer.cancel()
        return await self._scope.__aexit__(kind, error, trace)

    def _expire(self) -> None:
        # An instant in the past makes asyncio.timeout cancel its task in the next pass of the loop.
        self._scope.reschedule(asyncio.get_running_loop().time())
