"""The simulated engine on a clock that the test moves, with transfer agents that the test can look into."""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.connectors.place import RankPlace
from baton.connectors.pool_rank import open_file
from baton.connectors.pool_report import FileReport
from baton.engines.engine import EngineDelta, EngineFacts, EngineRequest, Leg
from baton.engines.simulated.engine import SimulatedEngine
from baton.engines.simulated.pool import MakeFile
from baton.errors import (
    AttemptFailed,
    ConfigurationError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    TransferFailed,
)
from baton.messages.attempts import FinishReason, Sampling
from baton.messages.base import WorkerAddress
from baton.pool.file import KvFile
from baton.pool.file_io import FileIo, FileJob
from baton.pool.memory import KvPool
from baton.transfer import AgentOptions, Pool, TransferEvent, Whole
from baton.transfer.memory import MemoryAgent, MemoryFabric
from tests.harness.limits import ProcessorTime

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


# ---------------------------------------------------------------- time


async def test_it_starts_with_little_work() -> None:
    async with open_world() as world:
        with ProcessorTime() as work:
            await world.engine(blocks=100_000)
        assert work.taken_s < 0.5


async def test_steps_take_the_time_that_the_model_says() -> None:
    async with open_world() as world:
        engine = await world.engine(step_fixed_s=0.25, prefill_token_s=0.0625, decode_sequence_s=0.5, speed=2)
        run = world.run(engine, prompt(30))
        await world.settle()
        # The prompt's step: (0.25 + 30 × 0.0625) / 2; then one step per token: (0.25 + 0.5) / 2.
        await world.clock.advance(1.0625 - 0.001)
        assert run.tokens == []
        await world.clock.advance(0.001)
        for tokens in range(1, 6):
            assert len(run.tokens) == tokens
            await world.clock.advance(0.375)
        await run.task


async def test_a_busy_engine_makes_others_wait_for_a_run_slot() -> None:
    async with open_world() as world:
        engine = await world.engine(running_max=1)
        first, second = world.run(engine, prompt(20)), world.run(engine, prompt(20, seed=1))
        await world.advance(2)
        assert (engine.load().running, engine.load().waiting) == (1, 1)
        assert second.tokens == []
        await world.finish(first, second)
        world.assert_empty()


async def test_the_budget_is_the_time_to_the_first_token() -> None:
    async with open_world() as world:
        engine = await world.engine()
        late, begun = (world.run(engine, prompt(20), budget_s=budget_s) for budget_s in (0.5, 1.5))
        await world.advance(0.75)
        with pytest.raises(DeadlineExceeded):
            await late.task
        await world.advance(3.5)
        assert len(begun.tokens) == 4
        await world.finish(begun)
        world.assert_empty()


# ---------------------------------------------------------------- hand-off


async def test_a_layer_moves_before_the_next_is_computed() -> None:
    async with open_world() as world:
        prefill, decode = await world.engine(), await world.engine()
        tokens = prompt(65)
        run = world.run(decode, tokens, leg=Leg.DECODE, name="r")
        held = world.run(prefill, tokens, leg=Leg.PREFILL, name="r")
        await world.settle()
        moved: list[int] = []
        for _ in range(4):
            # A quarter of the only step: one of four layers is computed now.
            await world.advance(0.25)
            moved.append(world.agents[1].stats().pulled_blocks)
        assert moved == [4, 8, 12, 16]
        await world.finish(run, held)
        assert run.tokens == await whole_answer(tokens)
        world.assert_empty()


async def test_what_prefill_had_cached_moves_before_its_first_step_ends() -> None:
    async with open_world() as world:
        prefill, decode = await world.engine(), await world.engine()
        tokens = prompt(65)
        await world.finish(world.run(prefill, tokens[:49]))
        held = world.run(prefill, tokens, leg=Leg.PREFILL, name="r")
        run = world.run(decode, tokens, leg=Leg.DECODE, name="r")
        await world.settle()
        assert world.agents[1].stats().pulled_blocks == 3 * 4
        await world.finish(held, run)
        assert run.tokens == await whole_answer(tokens)


def corrupt(pool: Pool, *, layer: int, block: int, byte: int, bit: int) -> None:
    address = pool.layer_addresses[layer] + block * pool.block_stride_bytes + byte
    ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ (1 << bit), 1)


@pytest.mark.parametrize("side", ["source", "sink"])
async def test_any_wrong_byte_in_a_handed_off_block_changes_the_answer(side: str) -> None:
    tokens = prompt(49)
    sampling = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    right = await whole_answer(tokens, sampling)
    places = random.Random(3)
    for _ in range(25):
        async with open_world() as world:
            prefill, decode = await world.engine(), await world.engine()
            held = world.run(prefill, tokens, leg=Leg.PREFILL, name="r")
            await world.advance(1.5)
            await held.task
            run = world.run(decode, tokens, sampling, leg=Leg.DECODE, name="r")
            if side == "sink":
                await world.settle()
                assert world.agents[1].stats().pulls_done == 1
            pool = world.agents[0 if side == "source" else 1].pool
            assert pool is not None
            corrupt(
                pool,
                layer=places.randrange(4),
                block=places.randrange(3),
                byte=places.randrange(pool.block_bytes),
                bit=places.randrange(8),
            )
            await world.finish(run)
            assert run.tokens[0] != right[0]


class MisdirectedAgent(MemoryAgent):
    """An agent with a bug: it writes two blocks into each other's place."""

    def pull(
        self,
        key: bytes,
        endpoint: str,
        *,
        first_token: int,
        tokens: int,
        blocks: Sequence[int],
        budget_s: float,
        whole: Whole | None = None,
    ) -> None:
        swapped = [blocks[1], blocks[0], *blocks[2:]]
        super().pull(key, endpoint, first_token=first_token, tokens=tokens, blocks=swapped, budget_s=budget_s)


async def test_blocks_in_the_wrong_place_change_the_answer() -> None:
    async with open_world() as world:
        prefill, decode = await world.engine(), await world.engine(make_agent=world.made(MisdirectedAgent))
        tokens = prompt(49)
        held = world.run(prefill, tokens, leg=Leg.PREFILL, name="r")
        run = world.run(decode, tokens, leg=Leg.DECODE, name="r")
        await world.finish(held, run)
        assert len(run.tokens) == 6
        assert run.tokens[0] != (await whole_answer(tokens))[0]


async def test_a_prefill_preempted_under_a_pull_begins_again() -> None:
    async with open_world() as world:
        prefill = await world.engine(blocks=9, step_tokens_max=9)
        decode = await world.engine()
        tokens = prompt(100)
        # The request before it grows until both do not fit.
        hog = world.run(prefill, prompt(33, seed=1), Sampling(max_tokens=40, temperature=0, ignore_eos=True))
        await world.advance(5)
        held = world.run(prefill, tokens, leg=Leg.PREFILL, name="r")
        run = world.run(decode, tokens, leg=Leg.DECODE, name="r")
        moved_before = 0
        while not prefill.load().preemptions:
            moved_before = world.agents[1].stats().pulled_blocks
            await world.advance(0.25)
        assert moved_before > 0, "the pull was under way"
        assert not held.task.done()
        assert not run.task.done()
        await world.finish(hog, held, run)
        assert world.agents[0].stats().leases_revoked >= 1
        assert run.tokens == await whole_answer(tokens)
        world.assert_empty()


async def test_preempted_requests_answer_as_if_they_had_not_been() -> None:
    sampling = Sampling(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [prompt(30, seed) for seed in range(5)]
    expected = [await whole_answer(tokens, sampling) for tokens in prompts]
    async with open_world() as world:
        engine = await world.engine(blocks=12)
        runs = [world.run(engine, tokens, sampling) for tokens in prompts]
        await world.finish(*runs)
        assert engine.load().preemptions > 0
        assert [run.tokens for run in runs] == expected
        world.assert_empty()


async def test_preempted_decodes_answer_as_if_they_had_not_been() -> None:
    sampling = Sampling(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [prompt(30, seed) for seed in range(5)]
    async with open_world() as world:
        prefill, decode = await world.engine(), await world.engine(blocks=12)
        held = [world.run(prefill, tokens, leg=Leg.PREFILL, name=f"r{n}") for n, tokens in enumerate(prompts)]
        runs = [world.run(decode, tokens, sampling, leg=Leg.DECODE, name=f"r{n}") for n, tokens in enumerate(prompts)]
        await world.finish(*held, *runs)
        assert decode.load().preemptions > 0
        assert [run.tokens for run in runs] == [await whole_answer(tokens, sampling) for tokens in prompts]
        world.assert_empty()


async def test_an_unclaimed_lease_is_freed() -> None:
    async with open_world() as world:
        prefill = await world.engine(agent=AgentOptions(unclaimed_ttl_s=10))
        held = world.run(prefill, prompt(50), leg=Leg.PREFILL)
        await world.finish(held)
        assert prefill.load().leased_blocks == 4
        await world.advance(12)
        world.assert_empty()


async def test_a_lease_that_ends_while_it_is_computed_is_finished_and_freed() -> None:
    async with open_world() as world:
        prefill = await world.engine(agent=AgentOptions(unclaimed_ttl_s=2), step_tokens_max=16)
        held = world.run(prefill, prompt(100), leg=Leg.PREFILL)
        await world.finish(held)
        assert held.deltas[-1].finish is FinishReason.LENGTH
        world.assert_empty()


async def test_a_cancelled_pull_keeps_its_blocks_until_the_agent_is_done() -> None:
    async with open_world() as world:
        await world.engine()
        decode = await world.engine()
        run = world.run(decode, prompt(50), leg=Leg.DECODE, name="r")
        await world.clock.settle()
        await decode.abort("r", 0)
        await world.clock.settle()
        await run.task
        assert run.deltas[-1].finish is FinishReason.CANCELLED
        assert decode.load().kv_usage > 0, "the agent has not said yet that it writes no more"
        await world.settle()
        world.assert_empty()


# ---------------------------------------------------------------- life


async def test_the_end_of_the_sequence_and_of_the_context() -> None:
    sampling = Sampling(max_tokens=10, temperature=0)
    async with open_world() as world:
        ending = world.run(await world.engine(eos_probability=1.0), prompt(20), sampling)
        short = world.run(await world.engine(eos_probability=0.0, context_tokens_max=23), prompt(20), sampling)
        await world.finish(ending, short)
        assert ending.tokens == [2]
        assert ending.deltas[-1].finish is FinishReason.STOP
        assert len(short.tokens) == 3
        assert short.deltas[-1].finish is FinishReason.LENGTH


async def test_an_attempt_that_is_here_already_is_refused() -> None:
    async with open_world() as world:
        engine = await world.engine()
        first, second = world.run(engine, prompt(20), name="r"), world.run(engine, prompt(20), name="r")
        await world.finish(first)
        with pytest.raises(AttemptFailed, match="here already"):
            await second.task


async def test_parameters_are_declared_checked_and_no_concern_of_prefill() -> None:
    async with open_world() as world:
        engine = await world.engine(parameters={"mode": ["fast", ["a", 1]], "any": None})
        assert world.facts[0].parameters == ("any", "mode")
        taken = Sampling(max_tokens=2, extensions={"mode": ["a", 1], "any": {"x": 1}})
        run = world.run(engine, prompt(20), taken)
        await world.finish(run)
        assert len(run.tokens) == 2
        for named, value in (("mode", "slow"), ("mood", 1)):
            refused = Sampling(max_tokens=2, extensions={named: value})
            with pytest.raises(InvalidRequest) as caught:
                engine.check_sampling(refused)
            assert caught.value.param == named
            with pytest.raises(InvalidRequest):
                await world.run(engine, prompt(20), refused).task
            first = world.run(engine, prompt(20), refused, leg=Leg.PREFILL)
            await world.advance(2)
            await first.task


async def collect_events(engine: SimulatedEngine) -> None:
    async for _ in engine.events():
        pass


async def test_close_ends_everything() -> None:
    async with open_world() as world:
        engine = await world.engine()
        run = world.run(engine, prompt(20))
        events = asyncio.create_task(collect_events(engine))
        await world.advance(0.5)
        await engine.close()
        for ended in (run.task, events, asyncio.ensure_future(engine.check_health())):
            with pytest.raises(EngineFailed):
                await ended
        with pytest.raises(EngineFailed):
            await engine.abort("r", 0)
        with pytest.raises(EngineFailed):
            engine.load()
        late = world.run(engine, prompt(20))
        with pytest.raises(EngineFailed):
            await late.task
        await engine.close()


async def test_an_engine_that_was_not_started_serves_nothing_and_can_be_closed() -> None:
    engine = SimulatedEngine("a model", options={}, agent=AgentOptions())
    with pytest.raises(EngineFailed):
        engine.load()
    await engine.close()


class BrokenAgent(MemoryAgent):
    def open_lease(
        self, key: bytes, *, tokens: int = 0, unclaimed_ttl_s: float | None = None, whole: Whole | None = None
    ) -> int:
        raise RuntimeError("out of order")


async def test_an_engine_that_dies_says_so_to_everyone() -> None:
    async with open_world() as world:
        engine = await world.engine(make_agent=world.made(BrokenAgent))
        waiting = world.run(engine, prompt(20))
        fatal = world.run(engine, prompt(20), leg=Leg.PREFILL)
        await world.advance(1)
        for run in (waiting, fatal):
            with pytest.raises(EngineFailed, match="out of order"):
                await run.task
        with pytest.raises(EngineFailed):
            await engine.check_health()


class DyingAgent(MemoryAgent):
    def poll(self) -> list[TransferEvent]:
        raise TransferFailed("its thread is gone")


async def test_an_agent_that_dies_takes_the_engine_with_it() -> None:
    async with open_world() as world:
        prefill = await world.engine(agent=AgentOptions(unclaimed_ttl_s=1))
        engine = await world.engine(make_agent=world.made(DyingAgent))
        generating = world.run(engine, prompt(20))
        world.run(prefill, prompt(40), leg=Leg.PREFILL, name="r")
        pulling = world.run(engine, prompt(40), leg=Leg.DECODE, name="r")
        await world.advance(3)
        for run in (generating, pulling):
            with pytest.raises(EngineFailed, match="its thread is gone"):
                await run.task
        with pytest.raises(EngineFailed, match="its thread is gone"):
            engine.load()


@pytest.mark.parametrize("model", ["", "/no/such/folder", "./neither"])
async def test_a_model_folder_that_is_missing_stops_the_start(model: str) -> None:
    engine = SimulatedEngine(model, options={}, agent=AgentOptions())
    with pytest.raises(ConfigurationError, match="does not exist"):
        await engine.start()


class HeldFile(FileIo):
    """A file whose reads begin when the test says so."""

    def __init__(self, file: KvFile) -> None:
        super().__init__(file)
        self.held: list[FileJob] = []

    def submit(self, job: FileJob) -> None:
        if job.writes:
            super().submit(job)
        else:
            self.held.append(job)

    def release(self) -> None:
        for job in self.held:
            super().submit(job)


async def test_a_prefix_that_the_file_brings_late_is_computed(tmp_path: Path) -> None:
    files: list[HeldFile] = []

    def make_file(path: str, budget_bytes: int, pool: KvPool, _place: RankPlace) -> HeldFile:
        files.append(HeldFile(KvFile(Path(path), pool, budget_bytes, content="test")))
        return files[-1]

    block_bytes = 32 * 512
    async with open_world() as world:
        engine = await world.engine(
            block_tokens=32,
            blocks=16,
            kv_pool_bytes=64 * block_bytes,
            kv_file=str(tmp_path / "kv"),
            kv_file_bytes=512 * (block_bytes + 4096),
            make_file=make_file,
        )
        tokens = prompt(256)

        async def until(condition: Callable[[FileReport], bool]) -> None:
            """Wait for the file's threads, which know nothing of this world's time."""
            while (file := engine.load().pool.file) is None or not condition(file):
                await world.advance(0.5, ticks=1)
                await asyncio.sleep(0.001)

        # What the pool saves before the file is scanned is not written.
        await until(lambda file: file.slots > 0)
        first = world.run(engine, tokens)
        await world.finish(first)
        await until(lambda file: file.written_blocks == 8)
        seeds = count(1)
        while engine.load().pool.evicted_blocks < 64:
            await world.finish(world.run(engine, prompt(480, next(seeds))))
        again = world.run(engine, tokens, computing_token_s=1.0)
        await world.advance(200.0, ticks=4)
        assert (engine.load().waiting, len(files[0].held)) == (1, 1), "256 tokens take 256 s to compute"
        await world.advance(60.0, ticks=4)
        await world.finish(again)
        assert again.tokens == first.tokens
        assert again.deltas[0].loaded_tokens == 0
        files[0].release()
        await until(lambda file: file.loaded_tokens == 256)
        assert (file := engine.load().pool.file) is not None
        assert file.loads_late == 1
