"""The KV pool behind real SGLang: what the engine forgot comes back from the pool, and what is there is not pulled.

vLLM and SGLang lend prefixes to each other, too; all pairs and what can go wrong are in `test_pool_pairs.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
import pytest_asyncio
from cross_engines import Engines, Running, engines_fixture, make_pair, nightly
from struck_lenders import struck_delay_s

from baton.engines.engine import EngineDelta, EngineRequest, Leg
from baton.messages.attempts import Sampling
from baton.messages.base import WorkerAddress
from baton.messages.index import Tier
from baton.worker.shadow import ShadowMap
from tests.contract.lending_suite import check_borrowed
from tests.harness.engine_pair import collect
from tests.harness.limits import HANG_S

PAGE_TOKENS = 32
SLOT_BYTES = 4 * PAGE_TOKENS * 2 * 2 * 64 * 4
"""Four layers of 32 tokens, K and V, two heads of 64 numbers, four bytes each."""
DEVICE_TOKENS = 2048
OPTIONS = {"max_total_tokens": DEVICE_TOKENS, "kv_pool_bytes": 512 * SLOT_BYTES, "context_length": 1984}
VLLM_OPTIONS = {"num_gpu_blocks_override": 64, "max_model_len": 1984, "kv_pool_bytes": 512 * SLOT_BYTES}
NUMBERS = itertools.count()

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(700)]


@dataclass
class Turn:
    tokens: list[int]
    first: EngineDelta
    computed: int
    """Prompt tokens that the engine computed, by its own count."""


engines = engines_fixture(sglang=OPTIONS, vllm=VLLM_OPTIONS)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sglang-32", nightly("sglang-32x2")])
async def sglang(engines: Engines, request: pytest.FixtureRequest) -> Running:
    return await engines.get(request.param)


def prompt(length: int, seed: int) -> list[int]:
    return Random(seed).choices(range(10, 8000), k=length)


async def ask(
    running: Running, tokens: Sequence[int], output_tokens: int = 12, *, salt: str = "", source: Running | None = None
) -> Turn:
    before = running.engine.load().prompt_tokens_computed
    name = f"request-{next(NUMBERS)}"
    request = EngineRequest(
        request=name,
        attempt=0,
        leg=Leg.WHOLE if source is None else Leg.DECODE,
        tokens=tokens,
        sampling=Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
        cache_salt=salt,
        source=None if source is None else WorkerAddress(worker="p", generation=1, agents=source.facts.agents),
        budget_s=60.0,
        # A busy machine does not make the file late.
        computing_token_s=1.0,
    )
    deltas = [delta async for delta in running.engine.generate(request)]
    await settled(running)
    out = [token for delta in deltas for token in delta.tokens]
    return Turn(out, deltas[0], running.engine.load().prompt_tokens_computed - before)


async def settled(running: Running) -> None:
    """Wait until no KV is in use any more: copies hold theirs."""
    async with asyncio.timeout(HANG_S):
        while running.engine.load().kv_usage or running.engine.load().running:  # noqa: ASYNC110 - another process.
            await asyncio.sleep(0.02)


async def evict(running: Running) -> None:
    """Ask for prompts that need all of the device."""
    for _ in range(2):
        await ask(running, prompt(1500, 1000 + next(NUMBERS)), 1)


async def test_second_turn_after_eviction_computes_hardly_more_than_with_an_endless_cache(sglang: Running) -> None:
    question, more = prompt(700, 1), prompt(45, 2)

    async def second_turn(salt: str, *, evicted: bool) -> Turn:
        first = await ask(sglang, question, salt=salt)
        if evicted:
            await evict(sglang)
        return await ask(sglang, [*question, *first.tokens, *more], salt=salt)

    endless = await second_turn("endless", evicted=False)
    evicted = await second_turn("evicted", evicted=True)
    assert endless.first.promoted_tokens == 0
    assert evicted.first.promoted_tokens == evicted.first.cached_tokens > 600
    assert evicted.tokens == endless.tokens
    assert evicted.computed <= endless.computed + PAGE_TOKENS + 1


async def test_another_salt_finds_nothing(sglang: Running) -> None:
    tokens = prompt(320, 13)
    await ask(sglang, tokens, 1, salt="mine")
    await evict(sglang)
    assert (await ask(sglang, tokens, 1, salt="yours")).first.promoted_tokens == 0
    mine = await ask(sglang, tokens, 1, salt="mine")
    assert (mine.first.promoted_tokens, mine.computed) == (319, 1)
    assert mine.first.promoted_bytes == 10 * SLOT_BYTES, "whole pages are copied"
    assert mine.first.promotion_s > 0


async def test_device_pool_and_hand_off_serve_one_request(engines: Engines, sglang: Running) -> None:
    source = await engines.get("vllm-32")
    tokens, salt = prompt(1000, 11), "combined"
    expected = (await ask(sglang, tokens, salt="alone")).tokens
    await ask(sglang, tokens[: 20 * PAGE_TOKENS + 1], 1, salt=salt)
    await evict(sglang)
    await ask(sglang, tokens[: 8 * PAGE_TOKENS + 1], 1, salt=salt)
    name = f"request-{next(NUMBERS)}"
    prefill = EngineRequest(
        request=name,
        attempt=0,
        leg=Leg.PREFILL,
        tokens=tokens,
        sampling=Sampling(max_tokens=1),
        cache_salt=salt,
        sink_ranks=len(sglang.facts.agents),
        budget_s=60.0,
    )
    before = sglang.engine.load()
    decode = EngineRequest(
        request=name,
        attempt=0,
        leg=Leg.DECODE,
        tokens=tokens,
        sampling=Sampling(max_tokens=12, temperature=0.0, ignore_eos=True),
        cache_salt=salt,
        source=WorkerAddress(worker="p", generation=1, agents=source.facts.agents),
        budget_s=60.0,
    )

    async def drain(running: Running, request: EngineRequest) -> list[EngineDelta]:
        return [delta async for delta in running.engine.generate(request)]

    _, deltas = await asyncio.gather(drain(source, prefill), drain(sglang, decode))
    await settled(sglang)
    after = sglang.engine.load()
    assert [token for delta in deltas for token in delta.tokens] == expected
    first = deltas[0]
    assert first.promoted_tokens == 12 * PAGE_TOKENS
    assert first.transferred_tokens == 1000 - 20 * PAGE_TOKENS - 1
    assert first.cached_tokens == 20 * PAGE_TOKENS
    assert after.prompt_tokens_computed - before.prompt_tokens_computed == 1


@pytest.mark.parametrize(
    "names",
    [
        ("vllm-32", "sglang-32"),
        ("sglang-32", "vllm-32"),
        ("sglang-32", "sglang-64"),
        pytest.param(("vllm-32", "sglang-32x2"), marks=pytest.mark.nightly),
        pytest.param(("sglang-32x2", "sglang-64x2"), marks=pytest.mark.nightly),
        pytest.param(("sglang-64x2", "vllm-32"), marks=pytest.mark.nightly),
    ],
    ids="-to-".join,
)
async def test_a_prefix_that_only_another_engine_computed_is_borrowed(engines: Engines, names: tuple[str, str]) -> None:
    await check_borrowed(await make_pair(engines, *names), "from the other engine")


@pytest.mark.parametrize(
    "names", [("vllm-32", "sglang-32"), ("sglang-32", "vllm-32"), ("sglang-32", "sglang-64")], ids="-to-".join
)
async def test_a_lender_that_stops_changes_no_answer(engines: Engines, names: tuple[str, str]) -> None:
    await struck_delay_s(engines, names, signal.SIGSTOP)


@pytest.mark.nightly
@pytest.mark.parametrize("sink", ["sglang-staged-32", "sglang-staged-32x2"])
async def test_what_a_staged_hand_off_has_brought_is_promoted_later(engines: Engines, sink: str) -> None:
    pair, running = await make_pair(engines, "vllm-32", sink), await engines.get(sink)
    tokens, sampling = prompt(1000, 80), Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    prefill = pair.request(tokens, sampling, leg=Leg.PREFILL)
    decode = pair.request(tokens, sampling, leg=Leg.DECODE, name=prefill.request)
    _, handed = await asyncio.gather(collect(pair.prefill, prefill), collect(pair.decode, decode))
    await settled(running)
    await evict(running)
    again = await ask(running, tokens)
    assert again.first.promoted_tokens == 31 * PAGE_TOKENS
    assert again.tokens == handed.tokens == (await ask(running, tokens, salt="alone")).tokens


async def test_requests_under_pressure_get_the_tokens_they_get_alone(sglang: Running) -> None:
    prompts = [prompt(300, 20 + number // 2) + prompt(20, 40 + number) for number in range(8)]
    alone = [(await ask(sglang, tokens, 100, salt=f"alone {n}")).tokens for n, tokens in enumerate(prompts)]
    for _ in range(2):
        turns = await asyncio.gather(*(ask(sglang, tokens, 100) for tokens in prompts))
        assert [turn.tokens for turn in turns] == alone
    assert sglang.engine.load().pool.pinned == 0


async def test_an_aborted_promotion_leaves_nothing(sglang: Running) -> None:
    tokens = prompt(1500, 50)
    first = await ask(sglang, tokens)
    for _ in range(3):
        await evict(sglang)
        name = f"request-{next(NUMBERS)}"
        sampling = Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)
        request = EngineRequest(request=name, attempt=0, leg=Leg.WHOLE, tokens=tokens, sampling=sampling, budget_s=60.0)
        asking = asyncio.create_task(anext(sglang.engine.generate(request)))
        await asyncio.sleep(0)
        await sglang.engine.abort(name, 0)
        await asyncio.wait([asking])
        await settled(sglang)
    assert sglang.engine.load().pool.pinned == 0
    await evict(sglang)
    again = await ask(sglang, tokens)
    assert (again.tokens, again.first.promoted_tokens > 0) == (first.tokens, True)


@pytest.mark.nightly
async def test_a_small_pool_serves_what_it_has_and_its_events_tell_what(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    small = Engines(tmp_path_factory.mktemp("small"), sglang=OPTIONS | {"kv_pool_bytes": 10 * SLOT_BYTES})
    try:
        running = await small.get("sglang-64")
        tokens = prompt(700, 60)
        first = await ask(running, tokens)
        assert running.engine.load().pool.slots == 5
        assert running.engine.load().pool.dropped_blocks > 0
        await evict(running)
        second = await ask(running, tokens)
        assert second.tokens == first.tokens
        shadow = ShadowMap(model_digest=running.facts.model_digest, engine_block_tokens=64, block_tokens=32)

        def agrees() -> bool:
            for batch in running.shadow.batches[shadow.batches :]:
                shadow.apply(batch)
            return shadow.fingerprint(Tier.POOL).blocks == 2 * running.engine.load().pool.ready

        # Events come on a way of their own.
        async with asyncio.timeout(HANG_S):
            while not agrees():  # noqa: ASYNC110 - another process.
                await asyncio.sleep(0.05)
        assert shadow.ignored_blocks == 0
    finally:
        await small.close()


@pytest.mark.nightly
async def test_a_restarted_engine_finds_its_blocks_in_the_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("filed")
    file = {"kv_file": str(folder / "kv"), "kv_file_bytes": 64 * (2 * SLOT_BYTES + 4096)}
    tokens, other = prompt(700, 70), prompt(700, 71)
    engines = Engines(folder, sglang=OPTIONS | file)
    try:
        running = await engines.get("sglang-64")
        first = await ask(running, tokens, salt="tenant")
        second = await ask(running, other)
        async with asyncio.timeout(HANG_S):
            while True:
                pool = running.engine.load().pool
                if pool.file is not None and pool.file.ready == pool.ready:
                    break
                await asyncio.sleep(0.05)
    finally:
        await engines.close()
    engines = Engines(folder, sglang=OPTIONS | file)
    try:
        running = await engines.get("sglang-64")
        assert (await ask(running, tokens, salt="another")).first.promoted_tokens == 0
        again = await ask(running, tokens, salt="tenant")
        assert again.tokens == first.tokens
        assert (again.first.promoted_tokens, again.first.loaded_tokens, again.computed) == (640, 640, 60)
        pair = await make_pair(engines, "vllm-32", "sglang-64")
        sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
        prefill = pair.request(other, sampling, leg=Leg.PREFILL)
        decode = pair.request(other, sampling, leg=Leg.DECODE, name=prefill.request)
        legs = collect(pair.prefill, prefill), collect(pair.decode, replace(decode, computing_token_s=1.0))
        _, handed = await asyncio.gather(*legs)
        assert handed.tokens == second.tokens
        assert (handed.deltas[0].loaded_tokens, handed.deltas[0].transferred_tokens) == (640, 59)
        shadow = ShadowMap(model_digest=running.facts.model_digest, engine_block_tokens=64, block_tokens=32)
        async with asyncio.timeout(HANG_S):
            while shadow.fingerprint(Tier.FILE).blocks < 2 * pool.ready:
                await asyncio.sleep(0.05)
                for batch in running.shadow.batches[shadow.batches :]:
                    shadow.apply(batch)
    finally:
        await engines.close()
