"""Admission queue: requests that look for a worker, first in, first out, one bounded queue per model.

The first `tries` requests of a queue try for a placement concurrently; the others wait. More concurrent tries would
only queue at the schedulers and be resent there. When a request finds all workers full, `tries` drops to one: the head
of the queue retries after a short back-off, jittered so that several gateways do not ask in step, or when a heartbeat
shows room. Each accepted request raises `tries` by one, so the queue drains as fast as placements succeed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from math import inf
from typing import Final

from baton.clock import Clock
from baton.node.ports import Randomness

RETRY_MIN_S: Final = 0.02
RETRY_MAX_S: Final = 0.06
TRIES_MAX: Final = 32
"""Concurrent tries: enough for thousands of placements per second, as one takes a few milliseconds."""


class Ticket:
    """A place in the queue. The queue calls `give_turn` when the owner may try."""

    __slots__ = ("give_turn", "model", "trying", "waits")

    def __init__(self, model: str, give_turn: Callable[[], None]) -> None:
        self.model = model
        self.give_turn = give_turn
        self.trying = False
        self.waits = False
        """Whether the owner could not try at once, or tried without success."""


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
        """Return the number of waiting requests per model, including those that are trying in their turn."""
        return {model: queue.waiting for model, queue in self._queues.items()}

    def enter(self, ticket: Ticket) -> bool:
        """Return whether this new request may try at once; otherwise it must `join`."""
        queue = self._queues.setdefault(ticket.model, _Queue())
        if len(queue.tickets) < queue.tries and queue.due_at_s <= self._clock.now_s():
            queue.tickets[ticket] = None
            ticket.trying = True
        return ticket.trying

    def join(self, ticket: Ticket) -> bool:
        """Wait for a turn; a ticket whose try failed keeps its place. Return False if the queue is full."""
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
        """Give up the ticket's place, if it has one. `accepted`: workers took it, so there may be more room."""
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
        """Let the head of the queue try now: a worker of this model has a free slot."""
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
            with suppress(TimeoutError):
                async with self._clock.timeout(wait_s):
                    await self._changed.wait()

    def _give_turns(self) -> float | None:
        """Give a turn to every ticket that is due; return when the next ones are due."""
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
