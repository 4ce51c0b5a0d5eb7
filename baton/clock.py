"""Time, passed in: services never ask the machine for it."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock. Instants are only comparable on one clock; budgets travel as durations."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary start."""
        ...

    async def sleep(self, duration_s: float) -> None: ...

    def timeout(self, duration_s: float | None) -> AbstractAsyncContextManager[object]:
        """Return a context that raises TimeoutError once `duration_s` have passed inside it."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    def timeout(self, duration_s: float | None) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(duration_s)
