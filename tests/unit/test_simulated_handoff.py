"""Hand-offs between simulated engines: layers, preemption, leases and pulls; wrong bytes that must show."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import pytest

from baton.engines.engine import Leg
from baton.messages.attempts import FinishReason, Sampling
from baton.transfer import AgentOptions, Pool, Whole
from baton.transfer.memory import MemoryAgent
from tests.harness.simulated import open_world, prompt, whole_answer


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
