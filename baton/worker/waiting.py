"""Starts waiting attempts once they have room; a pair on both workers or on neither (see `ledger.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from baton import subjects
from baton.bus import Bus
from baton.clock import Clock
from baton.engines.engine import Engine
from baton.errors import BatonError
from baton.messages.attempts import Accepted, AttemptState, Busy, Join
from baton.messages.base import Context, WorkerAddress
from baton.worker.attempt import Attempt, Key
from baton.worker.ledger import JOIN_TIMEOUT_S, Ledger

NOT_STARTED: Final = frozenset({AttemptState.WAITING, AttemptState.RESERVED})
LOOK_S: Final = 0.005
"""Interval of looks for room that the engine does not report: leases that it has given up."""


class WaitingAttempts:
    """Waiting attempts of one worker, and how to start each."""

    def __init__(self, *, bus: Bus, clock: Clock, engine: Engine, ledger: Ledger, address: WorkerAddress) -> None:
        self._bus = bus
        self._clock = clock
        self._engine = engine
        self._ledger = ledger
        self._address = address
        self._starts: dict[Key, Callable[[], None]] = {}
        self._changed = asyncio.Event()

    def add(self, attempt: Attempt, start: Callable[[], None]) -> None:
        """Call `start` once the attempt is to enter the engine, if it still is by then."""
        self._starts[attempt.key] = start
        self._changed.set()

    def look(self) -> None:
        """Look for room, since an attempt has ended."""
        self._changed.set()

    async def run(self) -> None:
        """Start what has room, for ever."""
        async with asyncio.TaskGroup() as joins:
            while True:
                with suppress(TimeoutError):
                    async with self._clock.timeout(LOOK_S if self._starts else None):
                        await self._changed.wait()
                self._changed.clear()
                if not self._starts:
                    continue
                self._ledger.settle(self._engine.load().leased)
                for attempt in self._ledger.begin(self._clock.now_s()):
                    if attempt.partner:
                        joins.create_task(self._ask_partner(attempt))
                    else:
                        self._start(attempt.key)
                waiting = {attempt.key for attempt in self._ledger if attempt.state in NOT_STARTED}
                self._starts = {key: start for key, start in self._starts.items() if key in waiting}

    def answer(self, join: Join) -> Accepted | Busy:
        """Start an attempt whose other leg is reserved, or say that there is no room for it."""
        key = (join.context.request, join.context.attempt)
        if self._ledger.join(key, self._clock.now_s()) is None:
            return Busy(
                worker=self._address.worker, reason="full", detail="the attempt has no room here, or is unknown"
            )
        self._start(key)
        return Accepted(worker=self._address.worker, generation=self._address.generation)

    async def _ask_partner(self, attempt: Attempt) -> None:
        request, number = attempt.key
        join = Join(context=Context(request=request, attempt=number, budget_s=JOIN_TIMEOUT_S))
        try:
            answer = await self._bus.request(subjects.task(attempt.partner), join, timeout_s=JOIN_TIMEOUT_S)
        except BatonError:
            answer = None
        if not isinstance(answer, Accepted):
            self._ledger.fall_back(attempt.key, self._clock.now_s())
        elif self._ledger.joined(attempt.key, self._clock.now_s()):
            self._start(attempt.key)

    def _start(self, key: Key) -> None:
        if (start := self._starts.pop(key, None)) is not None:
            start()
