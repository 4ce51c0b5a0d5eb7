"""The simulated engine on a clock that the test moves, with transfer agents that the test can look into."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from baton.connectors.place import RankPlace
from baton.connectors.pool_report import FileReport
from baton.engines.engine import Leg
from baton.engines.simulated.engine import SimulatedEngine
from baton.errors import (
    AttemptFailed,
    ConfigurationError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    TransferFailed,
)
from baton.messages.attempts import FinishReason, Sampling
from baton.pool.file import KvFile
from baton.pool.file_io import FileIo, FileJob
from baton.pool.memory import KvPool
from baton.transfer import AgentOptions, TransferEvent, Whole
from baton.transfer.memory import MemoryAgent
from tests.harness.limits import ProcessorTime
from tests.harness.simulated import open_world, prompt


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
