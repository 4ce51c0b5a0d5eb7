"""Two index processes side by side: both answer, one writes, and the other one takes over when that is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.service import SchedulerService
from msgspec import structs

from baton import subjects
from baton.bus import NatsBus
from baton.errors import BatonError
from baton.messages.base import Context
from baton.messages.placement import Disaggregation, Place, Placement
from baton.messages.workers import Heartbeat, Role
from tests.harness.index.services import WRITES, Pair, running_pair, said, until
from tests.harness.index.worker import Worker, chain, until_held, working
from tests.harness.limits import HANG_S
from tests.harness.nodes import living, make_node


@asynccontextmanager
async def storing(pair: Pair) -> AsyncGenerator[None]:
    task = asyncio.create_task(pair.store_for_ever())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with running_pair(tmp_path) as made:
        yield made


async def test_the_other_index_writes_on_when_the_writer_is_killed(pair: Pair) -> None:
    first = await pair.start()
    await until(lambda: said(first, WRITES))
    second = await pair.start()
    async with storing(pair):
        await pair.until_written(lambda blocks: len(blocks) > 10)
        assert not said(second, WRITES)
        first.signal(signal.SIGKILL)
        at = pair.worker.sequence
        await pair.until_written(lambda blocks: len(blocks) > at)
        third = await pair.start()
    await pair.assert_true()
    assert not said(third, WRITES)
    assert await second.end() == 0
    await until(lambda: said(third, WRITES))
    await until_held(pair.bus, pair.worker, chr(0x4E00), 1)
    await pair.worker.store("x")
    await pair.assert_true()


async def test_a_writer_that_slept_is_refused_by_redis(pair: Pair) -> None:
    """The old writer trusts its lease for longer than the other one waits, so only Redis can refuse it."""
    first = await pair.start("--writer-ttl-s", "60", "--write-interval-s", "0.3")
    await until(lambda: said(first, WRITES))
    second = await pair.start("--writer-ttl-s", "3")
    async with storing(pair):
        await pair.until_written(lambda blocks: len(blocks) > 20)
        first.signal(signal.SIGSTOP)
        await until(lambda: said(second, WRITES))
        first.signal(signal.SIGCONT)
        await until(lambda: said(first, "a late write was refused"))
    await pair.assert_true()
    assert [await service.end() for service in (first, second)] == [0, 0]
    await pair.start()
    await pair.assert_true()


class Decoder(Worker):
    def heartbeat(self) -> Heartbeat:
        return structs.replace(super().heartbeat(), role=Role.DECODE)


@pytest.mark.parametrize("writes", [True, False])
async def test_placements_know_what_is_held_while_one_index_stands_still(pair: Pair, *, writes: bool) -> None:
    services = [await pair.start() for _ in range(2)]
    await until(lambda: any(said(service, WRITES) for service in services))
    async with working(pair.bus, Decoder) as worker, placing(pair):
        await worker.store("held")
        for _ in range(2):
            await until_held(pair.bus, worker, "held", 4)
        place = Place(
            context=Context(request="r", budget_s=20.0),
            model="tiny",
            blocks=chain("held"),
            prompt_tokens=4 * 32 + 1,
            output_tokens_max=8,
            disaggregation=Disaggregation.NEVER,
        )
        await until_known(pair, place)
        next(service for service in services if said(service, WRITES) is writes).signal(signal.SIGSTOP)
        for _ in range(10):
            answer = await pair.bus.request(subjects.PLACE, place, timeout_s=20.0)
            assert isinstance(answer, Placement)
            assert answer.predicted.cached_tokens == 4 * 32, answer.reason


@asynccontextmanager
async def placing(pair: Pair) -> AsyncGenerator[None]:
    """A scheduler in this process, with time enough for an index on a busy machine."""
    bus = await NatsBus.connect(pair.nats.url, name="scheduler")
    service = SchedulerService(SchedulerSettings(index_timeout_s=1.0), make_node("scheduler", bus))
    async with living(service):
        yield
    await bus.close()


async def until_known(pair: Pair, place: Place) -> None:
    """Wait until the scheduler knows the worker, and both indexes know its blocks."""
    async with asyncio.timeout(HANG_S):
        known = 0
        while known < 5:
            with suppress(BatonError):
                answer = await pair.bus.request(subjects.PLACE, place, timeout_s=5.0)
                known = known + 1 if isinstance(answer, Placement) and answer.predicted.cached_tokens else 0
            await asyncio.sleep(0.05)


async def test_no_index_writes_while_nats_is_down_and_afterwards_one_does(pair: Pair) -> None:
    for _ in range(2):
        await pair.start()
    await pair.worker.store("ab")
    await until_held(pair.bus, pair.worker, "ab", 2)
    await until(lambda: any(said(service, WRITES) for service in pair.services))
    pair.nats.kill()
    await until(lambda: any(said(service, "no longer the index") for service in pair.services))
    pair.nats.start()
    await until_held(pair.bus, pair.worker, "ab", 2)
    await pair.worker.store("abc")
    await until_held(pair.bus, pair.worker, "abc", 3)
    await pair.until_written(lambda blocks: blocks == pair.worker.held)
