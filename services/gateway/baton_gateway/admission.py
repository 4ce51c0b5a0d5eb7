"""Requests that look for a worker: one bounded first-in-first-out queue per model.

The first `tries` of a queue try for a placement at the same time, the others wait. More at once would only wait for
each other elsewhere, and be asked for again there. Once one finds all workers full, a single one tries again and
again: after a short time, jittered so that several gateways do not ask in step, or when a heartbeat shows room. Each
one that workers accept lets one more try than before, so the queue drains as fast as placements succeed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from math import inf
from typing import Final

from baton.clock import Clock
from baton.node.ports import Randomness

RETRY_MIN_S: Final = 0.02
RETRY_MAX_S: Final = 0.06
TRIES_MAX: Final = 32
"""Enough for thousands of placements per second, as one takes a few milliseconds."""


class Ticket:
    """A place in the queue. `give_turn` is called when its owner may try."""

    __slots__ = ("give_turn", "model", "trying", "waits")

    def __init__(self, model: str, give_turn: Callable[[], None]) -> None:
        self.model = model
        self.give_turn = give_turn
        self.trying = False
        self.waits = False
        """It could not try at once, or tried in vain."""


class _Queue:
    """The tickets of one model, in order. The first `tries` of them may try, from `due_at_s` on."""

    __slots__ = ("due_at_s", "tickets", "tries", "waiting")

    def __init__(self) -> None:
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.tries = TRIES_MAX
        self.due_at_s = -inf
        self.waiting = 0


class AdmissionQueue:
    def __init__(self, *, waiting_max: int, clock: Clock, random: Randomness) -> None:
        self._waiting_max = waiting_max
        self._clock = clock
        self._random = random
        self._queues: dict[str, _Queue] = {}
        self._changed = asyncio.Event()

    def waiting(self) -> dict[str, int]:
        """Return how many wait for each model, those that try in their turn included."""
        return {model: queue.waiting for model, queue in self._queues.items()}

    def enter(self, ticket: Ticket) -> bool:
        """Return whether this new request may try at once; otherwise it must `join`."""
        queue = self._queues.setdefault(ticket.model, _Queue())
        if len(queue.tickets) < queue.tries and queue.due_at_s <= self._clock.now_s():
            queue.tickets[ticket] = None
            ticket.trying = True
        return ticket.trying

    def join(self, ticket: Ticket) -> bool:
        """Wait for a turn; after a try in vain, at the same place. Returns False where the queue is full."""
        queue = self._queues.setdefault(ticket.model, _Queue())
        if not ticket.waits:
            if queue.waiting >= self._waiting_max:
                return False
            ticket.waits = True
            queue.waiting += 1
        if ticket.trying or not queue.tickets:
            ticket.trying = False
            queue.tries = 1
            queue.due_at_s = self._clock.now_s() + self._random.uniform(RETRY_MIN_S, RETRY_MAX_S)
        queue.tickets[ticket] = None
        self._changed.set()
        return True

    def leave(self, ticket: Ticket, *, accepted: bool = False) -> None:
        """Give the place up, if the ticket has one. `accepted`: workers took it, so there may be room for more."""
        queue = self._queues.get(ticket.model)
        if queue is None:
            return
        if ticket in queue.tickets:
            del queue.tickets[ticket]
            queue.waiting -= ticket.waits
            ticket.trying = ticket.waits = False
            if not queue.tickets:
                del self._queues[ticket.model]
        if accepted:
            queue.tries = min(queue.tries + 1, TRIES_MAX)
            queue.due_at_s = self._clock.now_s()
        self._changed.set()

    def note_room(self, model: str) -> None:
        """A worker of this model has a free place: let the head try now."""
        queue = self._queues.get(model)
        if queue is not None:
            queue.due_at_s = self._clock.now_s()
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
        """Let all that are due try; return when the next ones are due."""
        now_s = self._clock.now_s()
        next_at_s: float | None = None
        for queue in list(self._queues.values()):
            if queue.due_at_s > now_s:
                next_at_s = min(queue.due_at_s, next_at_s or queue.due_at_s)
                continue
            for ticket in [ticket for ticket in islice(queue.tickets, queue.tries) if not ticket.trying]:
                ticket.trying = True
                ticket.give_turn()
        return next_at_s
