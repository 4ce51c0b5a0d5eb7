"""The system's clock and the manual one, which behaves alike and moves only on request."""

from __future__ import annotations

import asyncio

import pytest

from baton.clock import Clock, ManualClock, SystemClock


async def test_the_manual_clock_wakes_sleepers_in_order_of_their_due_time() -> None:
    clock = ManualClock()
    woken: list[tuple[str, float]] = []

    async def sleep(name: str, duration_s: float) -> None:
        await clock.sleep(duration_s)
        woken.append((name, clock.now_s()))

    async with asyncio.TaskGroup() as group:
        for name, duration_s in (("c", 3.0), ("a", 1.0), ("b1", 2.0), ("b2", 2.0), ("late", 10.0)):
            group.create_task(sleep(name, duration_s))
        await clock.settle()
        assert woken == []
        await clock.advance(5.0)
        assert woken == [("a", 1.0), ("b1", 2.0), ("b2", 2.0), ("c", 3.0)]
        assert clock.now_s() == 5.0
        await clock.advance(5.0)
    assert woken[-1] == ("late", 10.0)


async def test_the_time_of_day_moves_with_the_manual_clock() -> None:
    clock = ManualClock(5.0, wall_start_s=1000.0)
    await clock.advance(2.5)
    assert (clock.now_s(), clock.wall_s()) == (7.5, 1002.5)


async def test_timers_that_a_woken_task_starts_fire_in_the_same_advance() -> None:
    clock = ManualClock()
    ticks: list[float] = []

    async def tick() -> None:
        for _ in range(4):
            await clock.sleep(0.25)
            ticks.append(clock.now_s())

    async with asyncio.TaskGroup() as group:
        group.create_task(tick())
        await clock.advance(1.0)
    assert ticks == [0.25, 0.5, 0.75, 1.0]


async def test_a_manual_timeout_fires_at_its_instant_and_not_before() -> None:
    clock = ManualClock()
    ended_s: list[float] = []

    async def wait() -> None:
        with pytest.raises(TimeoutError):
            async with clock.timeout(2.0):
                await asyncio.Event().wait()
        ended_s.append(clock.now_s())

    async with asyncio.TaskGroup() as group:
        group.create_task(wait())
        await clock.advance(1.9)
        assert ended_s == []
        await clock.advance(1.0)
    assert ended_s == [2.0]


@pytest.mark.parametrize("make_clock", [SystemClock, ManualClock])
async def test_what_ends_in_time_is_not_disturbed(make_clock: type[SystemClock] | type[ManualClock]) -> None:
    clock: Clock = make_clock()
    async with clock.timeout(0.01):
        await asyncio.sleep(0)
    async with clock.timeout(None):
        await asyncio.sleep(0)
    if isinstance(clock, ManualClock):
        await clock.advance(1.0)
    else:
        await clock.sleep(0.03)
    assert asyncio.current_task() is not None


@pytest.mark.parametrize("make_clock", [SystemClock, ManualClock])
@pytest.mark.parametrize("duration_s", [0.0, -1.0])
async def test_a_spent_timeout_ends_the_first_wait(
    make_clock: type[SystemClock] | type[ManualClock], duration_s: float
) -> None:
    with pytest.raises(TimeoutError):
        async with make_clock().timeout(duration_s):
            await asyncio.Event().wait()


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(1.0))
    await clock.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await clock.advance(2.0)
    assert clock.now_s() == 2.0


async def test_a_cancel_inside_a_manual_timeout_stays_a_cancel() -> None:
    clock = ManualClock()

    async def wait() -> None:
        async with clock.timeout(1.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await clock.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timer_of_the_manual_clock_fires_once_unless_it_is_cancelled() -> None:
    clock, fired = ManualClock(), list[float]()
    clock.call_later(2.0, lambda: fired.append(clock.now_s()))
    clock.call_later(1.0, lambda: fired.append(-1.0)).cancel()
    await clock.advance(1.9)
    assert fired == []
    await clock.advance(10.0)
    assert fired == [2.0]


async def test_a_timer_of_the_system_clock_fires_unless_it_is_cancelled() -> None:
    clock, fired = SystemClock(), asyncio.Event()
    clock.call_later(0.0, pytest.fail).cancel()
    clock.call_later(0.01, fired.set)
    await asyncio.wait_for(fired.wait(), 5.0)
