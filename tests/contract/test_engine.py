"""The simulated engine against the engine suite, over the native and the in-memory transfer agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.connectors.pool_report import FileReport
from baton.engines.engine import Leg
from baton.engines.simulated.engine import SimulatedEngine
from baton.errors import ConfigurationError, ModelMismatch, TransferFailed
from baton.messages.index import Tier
from baton.transfer import AgentOptions, Cause, Corruption, NativeAgent, TransferAgent, TransferFaults
from baton.transfer.memory import MemoryFabric
from baton.worker.shadow import ShadowMap
from tests.contract.engine_suite import EngineSuite
from tests.contract.lending_suite import LendingSuite
from tests.harness.engine_pair import GREEDY, Answer, Pair, changed, collect, eventually, shadowed
from tests.harness.limits import HANG_S

MakeAgent = Callable[[AgentOptions], TransferAgent]
AGENT = AgentOptions(connect_timeout_s=HANG_S)


@pytest.fixture(params=["native", pytest.param("memory", marks=pytest.mark.nightly)])
def make_agent(request: pytest.FixtureRequest) -> MakeAgent:
    return MemoryFabric().agent if request.param == "memory" else NativeAgent


@asynccontextmanager
async def open_pair(
    make_agent: MakeAgent,
    *,
    prefill_agent: AgentOptions = AGENT,
    decode_agent: AgentOptions = AGENT,
    prefill_options: Mapping[str, object] | None = None,
    decode_options: Mapping[str, object] | None = None,
) -> AsyncGenerator[Pair]:
    options: dict[str, object] = {"step_tokens_max": 512}
    prefill = SimulatedEngine(
        "a model", options={**options, **(prefill_options or {})}, agent=prefill_agent, make_agent=make_agent
    )
    decode = SimulatedEngine(
        "a model", options={**options, **(decode_options or {})}, agent=decode_agent, make_agent=make_agent
    )
    gone = make_agent(AGENT)
    gone.close()
    try:
        yield Pair(
            prefill, decode, await prefill.start(), await decode.start(), vocabulary=8192, dead_agent=gone.endpoint
        )
    finally:
        await prefill.close()
        await decode.close()


class TestSimulated(EngineSuite):
    @pytest.fixture
    async def pair(self, make_agent: MakeAgent) -> AsyncGenerator[Pair]:
        async with open_pair(make_agent) as pair, shadowed(pair):
            yield pair


@pytest.mark.parametrize("corruption", Corruption)
async def test_a_corrupted_transfer_is_noticed(make_agent: MakeAgent, corruption: Corruption) -> None:
    faulty = AgentOptions(faults=TransferFaults(corrupt_every=1, corruption=corruption))
    async with open_pair(make_agent, prefill_agent=faulty) as pair:
        with pytest.raises(TransferFailed, match="checksum"):
            await pair.hand_off(pair.prompt(100))
        await pair.settled()


async def test_without_checksums_a_corrupted_transfer_gives_another_answer(make_agent: MakeAgent) -> None:
    """The control of all equality tests: answers differ if the agent misses a wrong byte."""
    faulty = AgentOptions(faults=TransferFaults(corrupt_every=3), checksum=False)
    async with open_pair(make_agent, prefill_agent=faulty, decode_agent=AgentOptions(checksum=False)) as pair:
        prompt = pair.prompt(300)
        wrong = await pair.hand_off(prompt)
        right = await collect(pair.prefill, pair.request(prompt))
        assert len(wrong.tokens) == len(right.tokens)
        assert wrong.tokens[0] != right.tokens[0]


@pytest.mark.parametrize("block_tokens", [8, 128])
async def test_engines_with_blocks_of_different_size_hand_over(make_agent: MakeAgent, block_tokens: int) -> None:
    async with open_pair(make_agent, decode_options={"block_tokens": block_tokens}) as pair:
        for tokens in (300, 77):
            prompt = pair.prompt(tokens)
            answer = await pair.hand_off(prompt)
            assert answer.tokens == (await collect(pair.prefill, pair.request(prompt))).tokens
            assert answer.last.transferred_tokens == tokens - 1
        await pair.settled()


async def test_engines_that_do_not_fit_refuse_each_other(make_agent: MakeAgent) -> None:
    async with open_pair(make_agent, decode_options={"layers": 2}) as pair:
        with pytest.raises(ModelMismatch, match=r"the sink has 'layers=2 dim=64', the source has 'layers=4 dim=32'"):
            await pair.hand_off(pair.prompt(100))
        assert pair.decode.transfers().pulls.failed == {Cause.MODEL: 1}
        request = pair.request(pair.prompt(20))
        assert len((await collect(pair.decode, request)).tokens) == request.sampling.max_tokens


async def test_a_delayed_transfer_delays_no_other_request(make_agent: MakeAgent) -> None:
    async with open_pair(make_agent, prefill_agent=AgentOptions(faults=TransferFaults(delay_s=1.0))) as pair:
        prompt = pair.prompt(100)
        prefill = pair.request(prompt, leg=Leg.PREFILL)
        await collect(pair.prefill, prefill)
        delayed = asyncio.create_task(collect(pair.decode, pair.request(prompt, leg=Leg.DECODE, name=prefill.request)))
        for _ in range(5):
            await collect(pair.decode, pair.request(pair.prompt(30)))
        assert not delayed.done()
        assert (await delayed).last.transferred_tokens == 99


async def test_a_lease_that_expires_is_freed_and_its_late_sink_is_told(make_agent: MakeAgent) -> None:
    async with open_pair(make_agent, prefill_agent=AgentOptions(unclaimed_ttl_s=0.2)) as pair:
        prompt = pair.prompt(100)
        prefill = pair.request(prompt, leg=Leg.PREFILL)
        await collect(pair.prefill, prefill)
        await pair.settled()
        with pytest.raises(TransferFailed, match="expired"):
            await collect(pair.decode, pair.request(prompt, leg=Leg.DECODE, name=prefill.request))


BLOCK_BYTES = 32 * 512
POOL_BYTES = 300 * BLOCK_BYTES


FILE_BYTES = 4096 + 500 * (4096 + BLOCK_BYTES)
PATIENT_S = 1.0
"""Time that computing a token is said to take: a busy machine does not make the file late."""


@asynccontextmanager
async def open_pools(
    make_agent: MakeAgent, *, folder: Path | None = None, **decode_options: int
) -> AsyncGenerator[Pair]:
    """Start a pair with KV pools, and with files under them where there is a `folder`."""
    files: list[dict[str, object]] = [
        {"kv_file": str(folder / name), "kv_file_bytes": FILE_BYTES} if folder else {} for name in ("prefill", "decode")
    ]
    options: list[dict[str, object]] = [{"kv_pool_bytes": POOL_BYTES} | file for file in files]
    async with (
        open_pair(make_agent, prefill_options=options[0], decode_options=options[1] | decode_options) as pair,
        shadowed(pair),
    ):
        if folder:
            # What the pool saves before the file is scanned is not written.
            await eventually(lambda: pair.decode.load().pool.file is not None)
        yield pair


class TestSimulatedWithPoolAndFile(EngineSuite):
    @pytest.fixture
    async def pair(self, tmp_path: Path) -> AsyncGenerator[Pair]:
        async with open_pools(NativeAgent, folder=tmp_path) as pair:
            yield pair


class TestSimulatedLoans(LendingSuite):
    @pytest.fixture(params=[("native", 32), ("memory", 64)], ids=str)
    async def pair(self, request: pytest.FixtureRequest) -> AsyncGenerator[Pair]:
        agent, block_tokens = request.param
        async with open_pools(
            NativeAgent if agent == "native" else MemoryFabric().agent, block_tokens=block_tokens
        ) as pair:
            yield pair


async def test_the_pool_has_what_the_device_evicted(make_agent: MakeAgent) -> None:
    # 64 blocks on the device; two prompts of 1,500 tokens need all of them.
    async with open_pools(make_agent, blocks=64) as pair:
        tokens, more = pair.prompt(700), pair.prompt(45)
        first = await collect(pair.decode, pair.request(tokens))
        expected = await collect(pair.prefill, pair.request([*tokens, *first.tokens, *more]))
        for _ in range(2):
            await collect(pair.decode, pair.request(pair.prompt(1500)))
        computed = (await pair.settled())[1].prompt_tokens_computed
        second = await collect(pair.decode, pair.request([*tokens, *first.tokens, *more]))
        load = (await pair.settled())[1]
        assert second.tokens == expected.tokens
        assert second.deltas[0].promoted_tokens == second.deltas[0].cached_tokens == 704
        assert load.prompt_tokens_computed - computed == 700 + 12 + 45 - 704
        assert load.prompt_tokens_promoted == load.pool.promoted_tokens == 704
        assert load.pool.pinned == 0


async def test_device_pool_and_hand_off_serve_one_request(make_agent: MakeAgent) -> None:
    async with open_pools(make_agent, blocks=64) as pair:
        tokens = pair.prompt(1000)
        expected = await collect(pair.prefill, pair.request(tokens, salt="alone"))
        await collect(pair.decode, pair.request(tokens[:641]))
        for _ in range(2):
            await collect(pair.decode, pair.request(pair.prompt(1500)))
        await collect(pair.decode, pair.request(tokens[:257], changed(GREEDY, max_tokens=1)))
        await pair.settled()
        answer = await pair.hand_off(tokens)
        first = answer.deltas[0]
        assert answer.tokens == expected.tokens
        assert (first.cached_tokens, first.promoted_tokens, first.transferred_tokens) == (640, 384, 359)
        await pair.settled()


def file_of(pair: Pair) -> FileReport:
    return pair.decode.load().pool.file or FileReport()


async def written(pair: Pair) -> None:
    """Wait until the decode engine's file has all that its pool has, and its events have told so."""
    await pair.settled()
    await eventually(lambda: pair.decode.load().pool.ready == file_of(pair).ready == told(pair, Tier.FILE))


def told(pair: Pair, tier: Tier) -> int:
    """Return how many blocks of a tier the decode engine's events have told of."""
    facts = pair.decode_facts
    shadow = ShadowMap(model_digest=facts.model_digest, engine_block_tokens=facts.block_tokens, block_tokens=32)
    for batch in pair.decode_shadow.batches:
        shadow.apply(batch)
    assert not shadow.ignored_blocks
    return shadow.fingerprint(tier).blocks


async def test_a_restarted_engine_answers_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "decode"
    async with open_pools(NativeAgent, folder=tmp_path) as pair:
        prompts = [pair.prompt(700) for _ in range(3)]
        before: list[Answer] = []
        for tokens in prompts:
            before.append(await collect(pair.decode, pair.request(tokens, salt="tenant")))
            await written(pair)
        blocks = file_of(pair).ready
    slot_bytes = 4096 + BLOCK_BYTES
    starts = [4096 + slot_bytes * (blocks // 3 * number + 3) for number in range(3)]
    with file.open("r+b") as disk:
        disk.seek(starts[1] + 4096 + 1234)
        byte = disk.read(1)[0]
        disk.seek(starts[1] + 4096 + 1234)
        disk.write(bytes([byte ^ 1]))
        # Of the third prompt's fourth block, the second half was not written.
        disk.seek(starts[2] + slot_bytes // 2)
        disk.write(bytes(slot_bytes // 2))
    async with open_pools(NativeAgent, folder=tmp_path) as pair:
        await eventually(lambda: told(pair, Tier.FILE) == blocks)
        assert told(pair, Tier.POOL) == 0
        for tokens, expected, promoted_tokens in zip(prompts, before, (672, 96, 96), strict=True):
            request = replace(pair.request(tokens, salt="tenant"), computing_token_s=PATIENT_S)
            again = await collect(pair.decode, request)
            first = again.deltas[0]
            assert again.tokens == expected.tokens
            assert first.loaded_tokens == first.promoted_tokens == first.cached_tokens == promoted_tokens
        stranger = await collect(pair.decode, pair.request(prompts[0], salt="another tenant"))
        assert stranger.deltas[0].cached_tokens == 0
        await written(pair)
        assert file_of(pair).failed_blocks == 2
        assert pair.decode.load().pool.pinned == 0


async def test_the_file_has_what_the_pool_evicted(tmp_path: Path) -> None:
    """A decode leg reads what the file has, and pulls the rest."""
    async with open_pools(NativeAgent, folder=tmp_path, blocks=64, kv_pool_bytes=96 * BLOCK_BYTES) as pair:
        tokens = pair.prompt(1000)
        expected = await collect(pair.prefill, pair.request(tokens, salt="alone"))
        await collect(pair.decode, pair.request(tokens[:641]))
        await written(pair)
        while pair.decode.load().pool.evicted_blocks < 96:
            await collect(pair.decode, pair.request(pair.prompt(1500)))
            await pair.settled()
        answer = await pair.hand_off(tokens)
        first = answer.deltas[0]
        assert answer.tokens == expected.tokens
        assert first.loaded_tokens > 0
        assert (first.cached_tokens, first.transferred_tokens) == (640, 359)


@pytest.mark.parametrize(("block_tokens", "has_pool"), [(32, True), (16, False)])
async def test_a_pool_of_no_stated_size_is_there_where_it_can_be(
    caplog: pytest.LogCaptureFixture, block_tokens: int, has_pool: bool
) -> None:
    options = {"block_tokens": block_tokens, "kv_pool_bytes": "auto", "kv_pool_workers": 4096}
    engine = SimulatedEngine("a model", options=options, agent=AGENT)
    facts = await engine.start()
    await engine.close()
    assert (facts.pool_blocks > 0, len(facts.pool_agents)) == (has_pool, has_pool)
    assert ("this engine runs without a KV pool" in caplog.text) == (not has_pool)


async def test_blocks_that_a_pool_cannot_store_stop_the_start() -> None:
    engine = SimulatedEngine("a model", options={"block_tokens": 16, "kv_pool_bytes": POOL_BYTES}, agent=AGENT)
    with pytest.raises(ConfigurationError, match="multiple of 32 tokens, not of 16"):
        await engine.start()
    await engine.close()
