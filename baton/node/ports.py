"""The ports of a service: all that it needs from outside its own memory, as one value.

Services and workers take time, random numbers, ids and threads from their ports, never from the machine
(`make check` enforces it). So the same code runs on a real machine and on ports that give the same answers in
every run.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

from baton.bus import Bus
from baton.clock import Clock, SystemClock

Result = TypeVar("Result")
Element = TypeVar("Element")
Arguments = TypeVarTuple("Arguments")


class Randomness(Protocol):
    """The methods of `random.Random` that are used."""

    def random(self) -> float:
        """Return a number from 0 up to, but not including, 1."""
        ...

    def uniform(self, a: float, b: float) -> float: ...

    def sample(self, population: Sequence[Element], k: int) -> list[Element]: ...


class Threads(Protocol):
    """Runs functions that would block the event loop."""

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Call `function` off the event loop and return its result; cancelling the wait does not end the call."""
        ...


class SystemThreads:
    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        return await asyncio.to_thread(function, *arguments)


class InlineThreads:
    """Runs functions on the event loop, after one pass of it, so that the order is the same in every run."""

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        await asyncio.sleep(0)
        return function(*arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    bus: Bus
    clock: Clock
    random: Randomness
    new_id: Callable[[], str]
    """Returns 32 hexadecimal digits, different ones at each call."""
    threads: Threads


def new_system_id() -> str:
    return os.urandom(16).hex()


def system_ports(bus: Bus, *, seed: int | None = None) -> Ports:
    """Return the ports of this machine. `seed` repeats the random numbers, never the ids."""
    return Ports(
        bus=bus,
        clock=SystemClock(),
        random=random.Random(seed),
        new_id=new_system_id,
        threads=SystemThreads(),
    )


def deterministic_ports(bus: Bus, clock: Clock, *, seed: int) -> Ports:
    """Return ports whose answers depend on the arguments only: a `ManualClock`, a `MemoryBus` on it, and `seed`."""
    ids = random.Random(f"ids {seed}")
    return Ports(
        bus=bus,
        clock=clock,
        random=random.Random(seed),
        new_id=lambda: f"{ids.getrandbits(128):032x}",
        threads=InlineThreads(),
    )
