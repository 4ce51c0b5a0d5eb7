"""The share of blind placements while indexes are restarted, killed and stopped. Part of `make bench-index-restart`.

A placement is blind if no index answered for it, or if the index that answered did not know which worker holds its
prompt. Speculative blocks, from prompts placed there lately, do not count as known.

Two indexes, a scheduler, NATS and Redis run as processes of their own. Each worker holds a prompt and stores blocks
all the time; placements ask for these prompts at a steady rate. Meanwhile each index in turn, the writer first, is
restarted, killed (-9), and stopped with SIGSTOP for longer than the worker timeout and the lease, then continued.
The bus keeps a stopped index in its queue group and goes on asking it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from baton import subjects
from baton.bus import Bus, NatsBus
from baton.errors import BatonError
from baton.messages.base import Context
from baton.messages.placement import Disaggregation, Place, Placement
from baton.processes.child import Child
from benchmarks.index_world import BLOCK_TOKENS, CachingWorker, chain, servers, service, started

WORKERS = 4
"""One per candidate that a placement names, so the holder of the prompt is always among the candidates."""
PROMPT = "a prompt that somebody holds " * 2
PLACED_PER_S = 100
STEADY_S, AWAY_S, STOPPED_S, AFTER_S = 10.0, 1.0, 3.0, 3.0
LOG_LINES = 1_000_000
WRITES = "this index writes"
NO_LONGER, REFUSED = "no longer the index", "a late write was refused"


@dataclass
class Phase:
    """Counts of the placements requested during one kind of disturbance."""

    name: str
    placed: int = 0
    without_index: int = 0
    unknown: int = 0
    failed: int = 0
    times_s: list[float] = field(default_factory=list[float])

    @property
    def blind_share(self) -> float:
        return (self.without_index + self.unknown + self.failed) / self.placed

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.placed} placed, blind: {self.without_index} without the index, {self.unknown} with one"
            f" that did not know, {self.failed} without an answer"
        )


@dataclass
class Load:
    bus: Bus
    workers: list[CachingWorker]
    phases: list[Phase] = field(default_factory=list[Phase])

    async def run(self) -> None:
        """Place at a steady rate, without waiting for earlier placements."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while True:
                tasks.create_task(self._place(self.workers[number % len(self.workers)]))
                number += 1
                await asyncio.sleep(max(0.0, began_s + number / PLACED_PER_S - time.monotonic()))

    async def _place(self, holder: CachingWorker) -> None:
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
        phase, began_s = self.phases[-1], time.monotonic()
        phase.placed += 1
        try:
            placement = await self.bus.request(subjects.PLACE, place, timeout_s=2.0)
        except BatonError:
            placement = None
        phase.times_s.append(time.monotonic() - began_s)
        if not isinstance(placement, Placement):
            phase.failed += 1
        elif "the index did not answer" in placement.reason:
            phase.without_index += 1
        elif all(each.cached_tokens - each.speculative_tokens < tokens for each in placement.candidates):
            phase.unknown += 1

    async def store(self, worker: CachingWorker) -> None:
        while True:
            await worker.store(chain(f"{worker.name} {worker.sequence % 500}"))
            await asyncio.sleep(0.02)


async def blind_placements(folder: Path) -> list[Phase]:
    async with AsyncExitStack() as stack:
        nats_url, redis_url = await stack.enter_async_context(servers(folder))
        bus = await NatsBus.connect(nats_url, name="bench")
        stack.push_async_callback(bus.close)
        workers = [CachingWorker(f"w-{number}", bus) for number in range(WORKERS)]
        for worker in workers:
            await stack.enter_async_context(worker.living())
            await worker.store(chain(worker.name + PROMPT))
        indexes = [
            service(f"kvindex-{number}", "baton_kvindex", folder, nats_url=nats_url, redis_url=redis_url)
            for number in range(2)
        ]
        scheduler = service("scheduler", "baton_scheduler", folder, nats_url=nats_url)
        for child in (*indexes, scheduler):
            stack.push_async_callback(child.stop)
        for index in indexes:
            await started(index)
        await started(scheduler)
        load = Load(bus, workers, [Phase("before")])
        tasks = [asyncio.create_task(load.run()), *(asyncio.create_task(load.store(worker)) for worker in workers)]
        try:
            # A baseline: the effect of a busy machine alone.
            await asyncio.sleep(STEADY_S)
            load.phases.append(Phase("while indexes restart"))
            for how in (signal.SIGTERM, signal.SIGKILL):
                for writes in (True, False):
                    await _again(how, _index(indexes, writes=writes))
            for writes in (True, False):
                stopped = _index(indexes, writes=writes)
                load.phases.append(Phase(f"while the index that {'writes' if writes else 'reads'} is stopped"))
                await _stop(stopped)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return load.phases


def _index(indexes: list[Child], *, writes: bool) -> Child:
    # The newest line of the log holds.
    return next(each for each in indexes if (WRITES in _last_words(each)) is writes)


def _last_words(index: Child) -> str:
    """Return the newest log line in which an index says whether it writes."""
    lines = index.log_tail(LOG_LINES).splitlines()
    return next((line for line in reversed(lines) if WRITES in line or NO_LONGER in line or REFUSED in line), "")


async def _again(how: signal.Signals, index: Child) -> None:
    _signal(index, how)
    await asyncio.sleep(AWAY_S)
    await index.stop()
    await started(index)
    await asyncio.sleep(AFTER_S)


async def _stop(index: Child) -> None:
    _signal(index, signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    _signal(index, signal.SIGCONT)
    await asyncio.sleep(AFTER_S)


def _signal(child: Child, number: signal.Signals) -> None:
    assert child.pid is not None, f"{child.name} does not run"
    os.kill(child.pid, number)
