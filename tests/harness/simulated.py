"""Simulated engines on a clock that the test moves, with transfer agents that the test can look into."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from baton.clock import ManualClock
from baton.connectors.pool_rank import open_file
from baton.engines.engine import EngineDelta, EngineFacts, EngineRequest, Leg
from baton.engines.simulated.engine import SimulatedEngine
from baton.engines.simulated.pool import MakeFile
from baton.messages.attempts import Sampling
from baton.messages.base import WorkerAddress
from baton.transfer import AgentOptions
from baton.transfer.memory import MemoryAgent, MemoryFabric

# One second per step, whatever is in it: an instant says which step it is.
SECONDS = {"step_fixed_s": 1.0, "prefill_token_s": 0.0, "decode_sequence_s": 0.0, "attention_token_s": 0.0, "speed": 1}
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(300, 8192) for _ in range(tokens)]


@dataclass
class Run:
    """One attempt, read by a task as its tokens come."""

    task: asyncio.Task[None]
    deltas: list[EngineDelta] = field(default_factory=list[EngineDelta])

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]


class World:
    """Engines on one manual clock and one memory fabric; neither advances by itself."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fabric = MemoryFabric(now_s=self.clock.now_s, threaded=False)
        self.agents: list[MemoryAgent] = []
        self.engines: list[SimulatedEngine] = []
        self.facts: list[EngineFacts] = []
        self._numbers = 0

    async def engine(
        self,
        *,
        make_agent: Callable[[AgentOptions], MemoryAgent] | None = None,
        agent: AgentOptions | None = None,
        make_file: MakeFile = open_file,
        **options: object,
    ) -> SimulatedEngine:
        def make(agent_options: AgentOptions) -> MemoryAgent:
            self.agents.append((make_agent or self.fabric.agent)(agent_options))
            return self.agents[-1]

        engine = SimulatedEngine(
            "a model",
            options={**SECONDS, "block_tokens": 16, **options},
            agent=agent or AgentOptions(unclaimed_ttl_s=1000, lease_ttl_s=1000, wanted_timeout_s=1000),
            clock=self.clock,
            make_agent=make,
            make_file=make_file,
        )
        self.engines.append(engine)
        self.facts.append(await engine.start())
        return engine

    def made(self, kind: type[MemoryAgent]) -> Callable[[AgentOptions], MemoryAgent]:
        """Return what makes agents of another kind on this world's fabric."""
        return partial(kind, self.fabric)

    def run(
        self,
        engine: SimulatedEngine,
        tokens: Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        leg: Leg = Leg.WHOLE,
        name: str | None = None,
        budget_s: float = 1000.0,
        computing_token_s: float = 0.0,
    ) -> Run:
        self._numbers += 1
        source = WorkerAddress(worker="p", generation=1, agents=self.facts[0].agents)
        request = EngineRequest(
            request=name or f"request {self._numbers}",
            attempt=0,
            leg=leg,
            tokens=tokens,
            sampling=sampling,
            source=source if leg is Leg.DECODE else None,
            budget_s=budget_s,
            computing_token_s=computing_token_s,
        )

        async def read() -> None:
            async for delta in engine.generate(request):
                run.deltas.append(delta)

        run = Run(asyncio.create_task(read()))
        return run

    async def advance(self, duration_s: float, *, ticks: int | None = None) -> None:
        """Move time in small steps, and let agents move bytes at each."""
        ticks = ticks or max(1, round(duration_s * 4))
        for _ in range(ticks):
            await self.clock.advance(duration_s / ticks)
            self.fabric.step()
            await self.clock.settle()

    async def finish(self, *runs: Run, limit_s: float = 400.0) -> None:
        """Move time until all runs have ended."""
        while not all(run.task.done() for run in runs):
            assert limit_s > 0, "a run does not end"
            limit_s -= 0.5
            await self.advance(0.5, ticks=1)
        for run in runs:
            await run.task

    async def settle(self) -> None:
        await self.clock.settle()
        self.fabric.step()
        await self.clock.settle()

    def assert_empty(self) -> None:
        for engine in self.engines:
            load = engine.load()
            assert (load.kv_usage, load.running, load.waiting, load.leased_blocks) == (0, 0, 0, 0)


@asynccontextmanager
async def open_world() -> AsyncGenerator[World]:
    world = World()
    before = asyncio.all_tasks()
    try:
        yield world
    finally:
        for engine in world.engines:
            await engine.close()
    leftover = asyncio.all_tasks() - before
    assert not leftover, f"tasks are left after close: {leftover}"


async def whole_answer(tokens: Sequence[int], sampling: Sampling = GREEDY) -> list[int]:
    """Return what an engine of its own answers."""
    async with open_world() as world:
        run = world.run(await world.engine(), tokens, sampling)
        await world.finish(run)
        return run.tokens
