"""Tensor parallelism of SGLang: its ranks act alike on hand-offs, with one or two ranks of either engine beyond."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest
from cross_engines import GREEDY, Engines, check_answers, engines_fixture, make_pair, named_pair

from baton.engines.engine import Leg
from baton.errors import EngineFailed, TransferFailed
from benchmarks.remote_engine.engine import RemoteEngine
from tests.contract.engine_suite import EngineSuite
from tests.harness.engine_pair import Pair, changed, collect, eventually, first_delta

PAIRS = (
    "sglang-1-to-sglang-64x2",
    "sglang-32x2-to-sglang-64x2",
    "sglang-64x2-to-sglang-1",
    "vllm-32x2-to-sglang-64x2",
    "sglang-64x2-to-vllm-32x2",
    "sglang-64x2-to-vllm-128",
    "vllm-128-to-sglang-64x2",
)
"""Engines with their block sizes; `x2`: with two ranks."""
pytestmark = [pytest.mark.nightly, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


engines = engines_fixture()
pair = named_pair


def over(*pairs: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", pairs, ids=str, indirect=True, scope="module")


@over(*PAIRS)
@pytest.mark.parametrize("at_once", [False, True])
async def test_answers_are_the_decode_engines_own_token_for_token(pair: Pair, at_once: bool) -> None:
    await check_answers(pair, at_once=at_once)


@over(
    "sglang-staged-32x2-to-sglang-staged-64x2",
    "vllm-staged-32x2-to-sglang-staged-64x2",
    "vllm-staged-128-to-sglang-staged-64x2",
    "sglang-staged-64x2-to-vllm-staged-128",
)
@pytest.mark.parametrize("at_once", [False, True])
async def test_answers_of_kv_that_all_ranks_stage(pair: Pair, at_once: bool) -> None:
    await check_answers(pair, at_once=at_once)


@over("sglang-32x2-to-sglang-64x2")
class TestSuite(EngineSuite):
    @pytest.mark.parametrize("endpoint", ["malformed"])
    async def test_an_unreachable_source_is_named_as_such(self, pair: Pair, endpoint: str) -> None:
        """Real engines refuse a malformed endpoint instead of connecting to it."""
        with pytest.raises(TransferFailed, match="is not an endpoint"):
            agents = ("no endpoint", "none either")
            await collect(pair.decode, pair.request(pair.prompt(50), leg=Leg.DECODE, agents=agents))
        await pair.settled()


@over("sglang-32x2-to-sglang-64x2")
async def test_all_ranks_say_the_same_of_their_kv_and_each_has_an_agent(pair: Pair) -> None:
    assert len(set(pair.prefill_facts.agents + pair.decode_facts.agents)) == 4
    assert pair.prefill_facts.kv_identity == pair.decode_facts.kv_identity
    assert pair.prefill_facts.kv_bytes_per_token == pair.decode_facts.kv_bytes_per_token == 4 * 2 * 2 * 64 * 4


@over("sglang-32x2-to-sglang-64x2")
async def test_ranks_pull_their_own_heads_only(pair: Pair) -> None:
    assert isinstance(pair.decode, RemoteEngine)
    before = [(await pair.decode.stats(rank))["pulled_bytes"] for rank in range(2)]
    answer = await pair.hand_off(pair.prompt(321), GREEDY)
    pulled = [(await pair.decode.stats(rank))["pulled_bytes"] - before[rank] for rank in range(2)]
    # 320 tokens are whole pages on both sides.
    assert pulled == [320 * pair.decode_facts.kv_bytes_per_token // 2] * 2
    assert answer.last.transferred_bytes == sum(pulled)


@over("sglang-32x2-to-sglang-64x2")
@pytest.mark.parametrize("failing", [0, 1])
async def test_a_pull_that_fails_on_one_rank_fails_on_all(pair: Pair, failing: int) -> None:
    """The other rank's bytes are late by so much that only a cancellation can end its pull in time."""
    assert isinstance(pair.prefill, RemoteEngine)
    prompt = pair.prompt(300)
    await pair.prefill.set_faults(rank=failing, corrupt_every=1)
    await pair.prefill.set_faults(rank=1 - failing, delay_s=30.0)
    asked_s = time.monotonic()
    try:
        with pytest.raises(TransferFailed, match="checksum"):
            await pair.hand_off(prompt)
        assert time.monotonic() - asked_s < 20
    finally:
        await pair.prefill.set_faults()
    await pair.settled()
    answer = await pair.hand_off(prompt)
    assert answer.last.cached_tokens == 0, "nothing of the failed pull may be cached"
    assert answer.tokens == (await collect(pair.decode, pair.request(prompt, salt="computed here"))).tokens


@over("sglang-32x2-to-sglang-64x2")
async def test_a_request_waits_for_the_last_rank(pair: Pair) -> None:
    assert isinstance(pair.prefill, RemoteEngine)
    assert isinstance(pair.decode, RemoteEngine)
    prompt = pair.prompt(300)
    await pair.prefill.set_faults(rank=1, delay_s=3.0)
    try:
        answering = asyncio.create_task(pair.hand_off(prompt, GREEDY))
        here = (await pair.decode.stats(0))["pulled_blocks"]
        while (await pair.decode.stats(0))["pulled_blocks"] == here:
            assert not answering.done()
        # The first rank has begun to receive, and the engine serves others meanwhile.
        await collect(pair.decode, pair.request(pair.prompt(40)))
        assert not answering.done(), "it began without the second rank's KV"
        answer = await answering
    finally:
        await pair.prefill.set_faults()
    assert answer.tokens == (await collect(pair.decode, pair.request(prompt, GREEDY, salt="computed here"))).tokens
    await pair.settled()


@over("sglang-32x2-to-sglang-64x2")
async def test_hand_offs_between_aborts_under_a_full_pool_leave_ranks_in_step(pair: Pair) -> None:
    """Ranks that disagreed on the order of their queues or evictions would wait for each other for ever."""

    async def aborted(after: int) -> None:
        prefill = pair.request(pair.prompt(700), leg=Leg.PREFILL)
        decode = pair.request(prefill.tokens, changed(GREEDY, max_tokens=200), leg=Leg.DECODE, name=prefill.request)
        computing = asyncio.create_task(collect(pair.prefill, prefill))
        stream = pair.decode.generate(decode)
        for _ in range(after):
            await anext(stream)
        await pair.decode.abort(decode.request, decode.attempt)
        async for _ in stream:
            pass
        await computing

    prompts = [pair.prompt(tokens) for tokens in (900, 1300, 64, 65, 1, 700, 1100, 33) * 2]
    async with asyncio.TaskGroup() as group:
        answering = [group.create_task(pair.hand_off(prompt, GREEDY)) for prompt in prompts]
        for after in range(4):
            group.create_task(aborted(after))
    await pair.settled()
    for prompt, answer in zip(prompts, (task.result() for task in answering), strict=True):
        assert answer.tokens == (await collect(pair.decode, pair.request(prompt, GREEDY, salt="again"))).tokens


async def test_a_killed_rank_ends_its_engine_and_what_waits_for_it(engines: Engines) -> None:
    """Keep this last: the engine is gone."""
    name = "sglang-64x2"
    running = await engines.get(name)
    pair = await make_pair(engines, name, name)
    engine, worker = running.engine, psutil.Process(running.engine.pid)
    stream, _ = await first_delta(engine, pair.request(pair.prompt(60), changed(GREEDY, max_tokens=3000)))
    children = worker.children(recursive=True)
    (rank,) = (child for child in children if child.name().startswith("sglang::sched") and "TP1" in child.name())
    rank.kill()
    with pytest.raises(EngineFailed):
        async for _ in stream:
            pass
    with pytest.raises(EngineFailed):
        await engine.check_health()
    assert worker.is_running(), "SGLang would have ended the process that started it"
    worker.kill()
    await eventually(lambda: not any(child.is_running() for child in children))
