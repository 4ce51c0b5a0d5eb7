"""Requests that wait for a worker: one bounded first-in-first-out queue per model.

Only the head of a queue tries for a placement, again and again: after a short time, jittered so that
several gateways do not ask in step, or when a heartbeat shows room. Once its workers have accepted,
it leaves and the next one tries at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from random import Random
from typing import Final

from baton.clock import Clock

RETRY_MIN_S: Final = 0.02
RETRY_MAX_S: Final = 0.06


class Ticket:
    """A place in the queue. `give_turn` is called when its owner may try."""

    __slots__ = ("due_at_s", "give_turn", "model")

    def __init__(self, model: str, give_turn: Callable[[], None]) -> None:
        self.model = model
        self.give_turn = give_turn
        self.due_at_s: float | None = None
        """When the owner may try again; None while it tries."""


class AdmissionQueue:
    def __init__(self, *, waiting_max: int, clock: Clock, random: Random) -> None:
        self._waiting_max = waiting_max
        self._clock = clock
        self._random = random
        self._queues: dict[str, OrderedDict[Ticket, None]] = {}
        self._changed = asyncio.Event()

    def is_waiting(self, model: str) -> bool:
        return bool(self._queues.get(model))

    def waiting(self) -> dict[str, int]:
        """Return how many wait for each model."""
        return {model: len(queue) for model, queue in self._queues.items()}

    def join(self, ticket: Ticket) -> bool:
        """Stand in the queue, or wait at its head for the next try. Returns False where the queue is full."""
        queue = self._queues.setdefault(ticket.model, OrderedDict())
        if ticket not in queue:
            if len(queue) >= self._waiting_max:
                if not queue:
                    del self._queues[ticket.model]
                return False
            queue[ticket] = None
        ticket.due_at_s = self._clock.now_s() + self._random.uniform(RETRY_MIN_S, RETRY_MAX_S)
        self._changed.set()
        return True

    def leave(self, ticket: Ticket) -> None:
        """Give the place up; the next one may try at once. Does nothing for a ticket that is not in the queue."""
        queue = self._queues.get(ticket.model)
        if queue is None or ticket not in queue:
            return
        was_head = next(iter(queue)) is ticket
        del queue[ticket]
        if not queue:
            del self._queues[ticket.model]
        elif was_head:
            next(iter(queue)).due_at_s = self._clock.now_s()
            self._changed.set()

    def note_room(self, model: str) -> None:
        """A worker of this model has a free place: let the head try now."""
        queue = self._queues.get(model)
        if queue and (head := next(iter(queue))).due_at_s is not None:
            head.due_at_s = self._clock.now_s()
            self._changed.set()

    async def run(self) -> None:
        """Give turns for ever."""
        while True:
            next_at_s = self._give_turns()
            wait_s = None if next_at_s is None else max(0.0, next_at_s - self._clock.now_s())
            self._changed.clear()
            try:
                async with self._clock.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _give_turns(self) -> float | None:
        """Let every head that is due try; return when the next one is due."""
        now_s = self._clock.now_s()
        next_at_s: float | None = None
        for queue in self._queues.values():
            head = next(iter(queue))
            if head.due_at_s is None:
                continue
            if head.due_at_s <= now_s:
                head.due_at_s = None
                head.give_turn()
            elif next_at_s is None or head.due_at_s < next_at_s:
                next_at_s = head.due_at_s
        return next_at_s
