"""Placements while indexes are restarted and killed: how many were made blind? Part of `make bench-index-restart`.

Two indexes, a scheduler, NATS and Redis as processes of their own; workers that hold a prompt each, go on storing all
the time, and are asked for by placements at a steady rate. Meanwhile each index in turn is restarted and killed (-9),
whichever writes first. A placement is blind that was made without the index, or with one that did not know who holds
its prompt; what was placed there lately, and is only expected, does not count as known.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from msgspec import structs

from baton import subjects
from baton.errors import BatonError
from baton.messages import Context, Disaggregation, Heartbeat, Place, Placement, Role
from tests.cluster import Service
from tests.index_actors import Worker, chain, working
from tests.index_pair import WRITES, Pair, running_pair, said, until

WORKERS = 4
"""As many as a placement names candidates: who holds the prompt is always among them, chosen or not."""
PROMPT = "a prompt that somebody holds " * 2
PLACED_PER_S = 100
STEADY_S, AWAY_S, AFTER_S = 10.0, 1.0, 3.0
BLOCK_TOKENS = 32


class Decoder(Worker):
    """Never full, so that placements differ by nothing but what is known of the prompt."""

    def heartbeat(self) -> Heartbeat:
        return structs.replace(super().heartbeat(), role=Role.DECODE, running_max=10_000, kv_blocks_total=10_000_000)


@dataclass
class Load:
    pair: Pair
    workers: list[Worker]
    placed: int = 0
    without_index: int = 0
    unknown: int = 0
    failed: int = 0
    restarts: int = 0
    steady_placed: int = 0
    """Before the first restart, and how many of them were blind: what a busy machine does by itself."""
    steady_blind: int = 0
    times_s: list[float] = field(default_factory=list[float])

    @property
    def blind(self) -> int:
        return self.without_index + self.unknown + self.failed

    async def run(self) -> None:
        """Place at a steady rate, whatever becomes of the placements before."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while True:
                tasks.create_task(self._place(self.workers[number % len(self.workers)]))
                number += 1
                await asyncio.sleep(max(0.0, began_s + number / PLACED_PER_S - time.monotonic()))

    async def _place(self, holder: Worker) -> None:
        blocks = chain(holder.name + PROMPT)
        tokens = len(blocks) // 16 * BLOCK_TOKENS
        place = Place(
            context=Context(request=uuid4().hex, budget_s=2.0),
            model="tiny",
            blocks=blocks,
            prompt_tokens=tokens + 1,
            output_tokens_max=8,
            disaggregation=Disaggregation.NEVER,
        )
        began_s = time.monotonic()
        self.placed += 1
        try:
            placement = await self.pair.bus.request(subjects.PLACE, place, timeout_s=2.0)
        except BatonError:
            placement = None
        self.times_s.append(time.monotonic() - began_s)
        if not isinstance(placement, Placement):
            self.failed += 1
        elif "the index did not answer" in placement.reason:
            self.without_index += 1
        elif all(each.cached_tokens - each.coming_tokens < tokens for each in placement.candidates):
            self.unknown += 1

    async def store(self, worker: Worker) -> None:
        while True:
            await worker.store(f"{worker.name} {worker.sequence % 500}")
            await asyncio.sleep(0.02)


async def blind_placements(folder: Path) -> Load:
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(running_pair(folder))
        workers = [await stack.enter_async_context(working(pair.bus, Decoder)) for _ in range(WORKERS)]
        for worker in workers:
            worker.page_blocks = 4096
            await worker.store(worker.name + PROMPT)
        for _ in range(2):
            await pair.start()
        command = [sys.executable, "-m", "baton_scheduler", "--nats-url", pair.nats.url]
        scheduler = Service("scheduler", command, folder / "scheduler.log", dict(os.environ))
        stack.push_async_callback(scheduler.end)
        await scheduler.start()
        await until(lambda: said(scheduler, "the scheduler answers"))
        load = Load(pair, workers)
        tasks = [asyncio.create_task(load.run()), *(asyncio.create_task(load.store(worker)) for worker in workers)]
        try:
            await asyncio.sleep(STEADY_S)
            load.steady_placed, load.steady_blind = load.placed, load.blind
            for how in (signal.SIGTERM, signal.SIGKILL):
                for writes in (True, False):
                    # A log is emptied with each start, so who says it writes does.
                    load.restarts += 1
                    await _again(how, next(each for each in pair.services if said(each, WRITES) is writes))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return load


async def _again(how: signal.Signals, service: Service) -> None:
    service.signal(how)
    await asyncio.sleep(AWAY_S)
    await service.end()
    service.log.write_text("")
    await service.start()
    await until(lambda: said(service, "the index answers"))
    await asyncio.sleep(AFTER_S)
