"""The ports of a real machine and the deterministic ones behave alike, and the latter repeat themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from baton.bus import MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.node.ports import Ports, deterministic_ports, system_ports


def make_deterministic(seed: int = 1) -> Ports:
    clock = ManualClock()
    return deterministic_ports(MemoryBus(MemoryNetwork(clock=clock)), clock, seed=seed)


def make_system(seed: int | None = None) -> Ports:
    return system_ports(MemoryBus(MemoryNetwork()), seed=seed)


both = pytest.mark.parametrize("make", [make_system, make_deterministic])


@both
def test_ids_are_32_hexadecimal_digits_and_differ(make: Callable[[], Ports]) -> None:
    ports = make()
    ids = [ports.new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(len(each) == 32 and set(each) <= set("0123456789abcdef") for each in ids)


@both
async def test_threads_return_and_raise_what_the_function_does(make: Callable[[], Ports]) -> None:
    ports = make()
    assert await ports.threads.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await ports.threads.run(lambda: 1 // 0)


@both
async def test_the_event_loop_runs_on_beside_a_thread(make: Callable[[], Ports]) -> None:
    passes: list[str] = []

    async def look_on() -> None:
        passes.append("loop")

    other = asyncio.create_task(look_on())
    await make().threads.run(lambda: passes.append("thread"))
    await other
    assert "loop" in passes


async def test_functions_leave_the_event_loop_on_a_real_machine_only() -> None:
    assert await make_system().threads.run(threading.get_ident) != threading.get_ident()
    assert await make_deterministic().threads.run(threading.get_ident) == threading.get_ident()


def test_deterministic_ports_repeat_themselves() -> None:
    def drawn(ports: Ports) -> list[object]:
        return [ports.random.random(), ports.random.uniform(1, 2), ports.random.sample(range(9), 2), ports.new_id()]

    assert drawn(make_deterministic(1)) == drawn(make_deterministic(1))
    assert drawn(make_deterministic(1)) != drawn(make_deterministic(2))


def test_a_seed_repeats_random_numbers_and_never_ids() -> None:
    """Two schedulers of one seed are two all the same."""
    first, second = make_system(3), make_system(3)
    assert first.random.random() == second.random.random()
    assert first.new_id() != second.new_id()
