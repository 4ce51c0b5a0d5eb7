"""Scheduler and index as the processes that users run, over real NATS and Redis, killed and paused."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from baton_scheduler.config import SchedulerSettings

from baton import subjects
from baton.bus import NatsBus
from baton.errors import BatonError
from baton.messages.base import Context
from baton.messages.index import BlocksStored, KvEvents
from baton.messages.placement import Disaggregation, Place, Placement
from baton.messages.workers import Role
from tests.harness.fork_server import forked
from tests.harness.heartbeats import heartbeat
from tests.harness.limits import HANG_S
from tests.harness.servers import start_nats, start_redis

# Python processes start slowly on a busy machine, and these tests start several.

BLOCKS = os.urandom(16 * 8)


@asynccontextmanager
async def process(folder: Path, module: str, *flags: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A service process; it must end by itself on SIGTERM unless the test killed it."""
    log_path = folder / f"{module}-{uuid4().hex[:4]}.log"
    with log_path.open("wb") as log:
        started = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *flags, stdout=log, stderr=log, env=forked(os.environ)
        )
    try:
        async with asyncio.timeout(HANG_S):
            while started.returncode is None:
                await asyncio.sleep(0.05)
                if b" answers" in await asyncio.to_thread(log_path.read_bytes):
                    break
        yield started
        if started.returncode is None:
            started.terminate()
            async with asyncio.timeout(HANG_S):
                assert await started.wait() == 0, log_path.read_text()
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


@dataclass
class Plane:
    """A control plane on a server of its own, so that it does not place on workers of other tests."""

    bus: NatsBus
    nats_url: str
    redis_url: str
    folder: Path

    def index(self) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
        return process(self.folder, "baton_kvindex", "--nats-url", self.nats_url, "--redis-url", self.redis_url)

    def scheduler(self) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
        return process(self.folder, "baton_scheduler", "--nats-url", self.nats_url)


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    with start_nats() as nats, start_redis() as redis:
        bus = await NatsBus.connect(nats.url, name="test")
        roomy: dict[str, Any] = {"running_max": 1000, "kv_blocks_total": 100_000}
        workers = [
            *(heartbeat(name, Role.PREFILL, **roomy, events_sequence=int(name == "p2")) for name in ("p1", "p2", "p3")),
            heartbeat("d1", Role.DECODE, **roomy),
        ]

        async def beat() -> None:
            while True:
                for each in workers:
                    await bus.publish(subjects.HEARTBEAT, each)
                await asyncio.sleep(0.1)

        held = KvEvents(
            worker="p2",
            generation=1,
            model_digest="digest",
            sequence=1,
            events=(BlocksStored(parent=b"", blocks=BLOCKS),),
        )
        await bus.append(subjects.KV_STREAM, subjects.kv_events("p2"), held, message_id="p2/1/1")
        beating = asyncio.create_task(beat())
        yield Plane(bus, nats.url, redis.url, tmp_path)
        beating.cancel()
        await asyncio.wait([beating])
        await bus.close()


async def ask(bus: NatsBus, request: str = "r") -> Placement | None:
    """Return a placement, or None while no scheduler answers with one."""
    answer = await answer_to(bus, request)
    return answer if isinstance(answer, Placement) else None


async def answer_to(bus: NatsBus, request: str) -> object:
    """Return what a scheduler says to a request, or why none answers."""
    message = Place(
        context=Context(request=request, budget_s=10.0),
        model="tiny",
        blocks=BLOCKS,
        prompt_tokens=300,
        output_tokens_max=4,
        disaggregation=Disaggregation.ALWAYS,
    )
    try:
        return await bus.request(subjects.PLACE, message, timeout_s=10.0)
    except BatonError as error:
        return error


async def ask_until(bus: NatsBus, *, indexed: bool, within_s: float = 15.0) -> Placement:
    """Ask until a placement was made with (or without) the index."""
    async with asyncio.timeout(within_s):
        while True:
            placement = await ask(bus, uuid4().hex)
            if placement is not None and ("index did not answer" not in placement.reason) == indexed:
                return placement
            await asyncio.sleep(0.05)


def cached(placement: Placement) -> dict[str, int]:
    """Return the blocks of each prefill worker known to the scheduler. Its choice also depends on earlier placements
    and their speculative blocks."""
    return {each.prefill: each.cached_tokens - each.speculative_tokens for each in placement.candidates}


KNOWN = {"p1": 0, "p2": 256, "p3": 0}
UNKNOWN = dict.fromkeys(KNOWN, 0)


async def test_a_held_prefix_steers_the_placement(plane: Plane) -> None:
    async with plane.index(), plane.scheduler():
        steered = await ask_until(plane.bus, indexed=True)
        assert steered.prefill is not None
        assert (steered.prefill.worker, steered.predicted.cached_tokens) == ("p2", 256)


async def test_placements_use_the_index_after_crashes_and_pauses_of_index_and_scheduler(plane: Plane) -> None:
    async with plane.scheduler() as scheduler:
        async with plane.index() as index:
            assert cached(await ask_until(plane.bus, indexed=True)) == KNOWN
            index.send_signal(signal.SIGSTOP)
            await asyncio.sleep(2.0)
            assert cached(await ask_until(plane.bus, indexed=False)) == UNKNOWN
            index.send_signal(signal.SIGCONT)
            # No worker answers queries here, so an index that took its own pause for theirs would have lost them.
            assert cached(await ask_until(plane.bus, indexed=True)) == KNOWN
            index.kill()
            await index.wait()
            assert cached(await ask_until(plane.bus, indexed=False)) == UNKNOWN
        async with plane.index():
            # This comes from Redis and the stream.
            assert cached(await ask_until(plane.bus, indexed=True)) == KNOWN
            async with plane.scheduler():
                scheduler.kill()
                await scheduler.wait()
                assert cached(await ask_until(plane.bus, indexed=True)) == KNOWN


async def test_a_place_goes_to_one_of_several_schedulers_and_indexes(plane: Plane) -> None:
    async with plane.scheduler(), plane.scheduler(), plane.index(), plane.index():
        await ask_until(plane.bus, indexed=True)
        # A burst fills p2's queue, so others take part: what counts is that all are placed, most with the index. Of a
        # machine that stands still for a moment another one is asked. No burst is larger than what one scheduler places
        # at a time, for NATS may give one of them all of it.
        burst = SchedulerSettings().placements_max
        async with asyncio.timeout(HANG_S):
            hinted = 0
            while hinted <= burst // 2:
                answers = await asyncio.gather(*(answer_to(plane.bus, uuid4().hex) for _ in range(burst)))
                placements = [answer for answer in answers if isinstance(answer, Placement)]
                assert [answer for answer in answers if not isinstance(answer, Placement)] == []
                hinted = sum("index did not answer" not in placement.reason for placement in placements)


@pytest.mark.parametrize("module", ["baton_scheduler", "baton_kvindex"])
async def test_a_wrong_setting_ends_the_start_in_one_sentence(module: str) -> None:
    for flags, named in ((("--nonsense", "1"), b"nonsense"), (("--lost-after-s", "-1"), b"lost-after-s")):
        started = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *flags, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await started.communicate()
        assert started.returncode == 2
        assert named in errors
        assert len(errors.strip().splitlines()) == 1, errors.decode()
