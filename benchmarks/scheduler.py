"""CPU of the scheduler's process for each request and each heartbeat: `make bench-scheduler`.

A scheduler and NATS run as processes of their own; workers, an index and a gateway are played by this one. 64 workers
send heartbeats as often as real ones, and an index that knows a quarter of them as holders answers at once. Rounds with
heartbeats only alternate with rounds in which requests arrive as well, at a steady rate: the difference is theirs.
All is counted that the process does for a request: messages, index, decision, telling others, recording it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import uuid4

import psutil

from baton import subjects
from baton.bus import Delivery, NatsBus
from baton.errors import BatonError
from baton.messages.base import Context
from baton.messages.index import Match, Matched
from baton.messages.placement import Disaggregation, Place
from benchmarks.index_world import servers, service, started
from benchmarks.placement import BLOCK_TOKENS, HEARTBEATS_PER_S, PROMPT_TOKENS, World
from benchmarks.report import Row, report

WORKERS: Final = 64
REQUESTS_PER_S: Final = 100
ROUND_S: Final = 3.0
BLOCK_ID_BYTES: Final = 16
MODES: Final = {"aggregated": Disaggregation.NEVER, "separated": Disaggregation.ALWAYS, "auto": Disaggregation.AUTO}


@dataclass(slots=True)
class Traffic:
    """All that a scheduler hears and is asked."""

    bus: NatsBus
    world: World
    blocks: bytes = field(default_factory=lambda: os.urandom(PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_ID_BYTES))
    heartbeats: int = 0
    answers: Counter[str] = field(default_factory=Counter[str])

    async def match(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, Match)
        await delivery.respond(Matched(held=dict(self.world.match().held), speculative={}))

    async def beat(self) -> None:
        """Send heartbeats of all workers in turn, for ever."""
        began_s, number = time.monotonic(), 0
        while True:
            await self.bus.publish(subjects.HEARTBEAT, self.world.heartbeat(number % WORKERS))
            number += 1
            self.heartbeats += 1
            await _until(began_s + number / (WORKERS * HEARTBEATS_PER_S))

    async def place(self) -> None:
        """Ask for a round at a steady rate, without waiting for earlier answers."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(round(ROUND_S * REQUESTS_PER_S)):
                tasks.create_task(self._ask())
                await _until(began_s + number / REQUESTS_PER_S)

    async def _ask(self) -> None:
        place = Place(
            context=Context(request=uuid4().hex, budget_s=10.0),
            model="model",
            blocks=self.blocks,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens_max=500,
            gateway="gateway",
            hold_s=5.0,
            due_in_s=2.0,
        )
        try:
            answer = type(await self.bus.request(subjects.PLACE, place, timeout_s=10.0)).__name__
        except BatonError as error:
            answer = error.code
        self.answers[answer] += 1


async def _until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))


async def measure(mode: Disaggregation, rounds: int) -> tuple[float, float, Counter[str]]:
    """Return CPU seconds for each request and each heartbeat, and the answers by kind."""
    requests_s: list[float] = []
    heartbeats_s: list[float] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats_url, _ = await stack.enter_async_context(servers(folder))
        bus = await NatsBus.connect(nats_url, name="bench")
        stack.push_async_callback(bus.close)
        traffic = Traffic(bus, World(WORKERS, mode))
        await bus.subscribe(subjects.MATCH, traffic.match, group=subjects.INDEXES)
        beating = asyncio.create_task(traffic.beat())
        stack.callback(beating.cancel)
        scheduler = service("scheduler", "baton_scheduler", folder, nats_url=nats_url, disaggregation=mode.value)
        await started(scheduler)
        stack.callback(scheduler.kill)
        assert scheduler.pid is not None
        process = psutil.Process(scheduler.pid)
        await traffic.place()  # Warms everything up.
        for _ in range(rounds):
            before_s, heartbeats = _cpu_s(process), traffic.heartbeats
            await asyncio.sleep(ROUND_S)
            heartbeats_s.append((_cpu_s(process) - before_s) / (traffic.heartbeats - heartbeats))
            before_s, heartbeats = _cpu_s(process), traffic.heartbeats
            await traffic.place()
            spent_s = _cpu_s(process) - before_s - heartbeats_s[-1] * (traffic.heartbeats - heartbeats)
            requests_s.append(spent_s / round(ROUND_S * REQUESTS_PER_S))
    return statistics.median(requests_s), statistics.median(heartbeats_s), traffic.answers


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind (default 5)")
    parser.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    arguments = parser.parse_args()
    rows: list[Row] = []
    notes = [f"{REQUESTS_PER_S} requests/s with {PROMPT_TOKENS} tokens"]
    for name in arguments.modes.split(","):
        request_s, heartbeat_s, answers = asyncio.run(measure(MODES[name], arguments.rounds))
        rows.append(Row(name=f"{WORKERS} workers, {name}: a request", unit="µs", ours=request_s * 1e6))
        rows.append(Row(name=f"{WORKERS} workers, {name}: a heartbeat", unit="µs", ours=heartbeat_s * 1e6))
        notes.append(f"{name}: {answers['Placement'] / answers.total():.0%} placed at once, the others held")
    notes.append(f"load of the machine {os.getloadavg()[1]:.1f}")
    report("scheduler", rows, notes="; ".join(notes))


if __name__ == "__main__":
    main()
