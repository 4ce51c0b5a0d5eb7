"""Real engines that hand off to each other: vLLM and SGLang, each alone and both ways.

Every engine serves either leg, so four of them make all pairs, over blocks and pages of different sizes. `make test`
hands one batch of prompts over each pair, and damages one hand-off; the whole engine suite over each pair, and all
that only real KV can show, is for `make test-nightly`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest
from baton_gateway.parsing.formats import FormatName
from cross_engines import (
    GREEDY,
    PROMPT_TOKENS,
    Engines,
    RealEngineSuite,
    asleep,
    check_answers,
    corrupting,
    engines_fixture,
    make_pair,
    named_pair,
    nightly,
)
from forced_answers import check_forced_calls
from msgspec.structs import replace

from baton.engines.engine import Leg
from baton.errors import EngineFailed, InvalidRequest, ModelMismatch, TransferFailed
from baton.messages.attempts import Constraint, ConstraintKind, FinishReason, Sampling
from baton.transfer import Corruption
from tests.harness.engine_pair import Pair, changed, collect, first_delta

BFLOAT16_TOLERANCE = 0.25
"""Tolerance of a log-probability: logits of 8 to 16 are rounded to sixteenths. 120 prompts: median 0.06, most 0.18."""
PAIRS = (
    "sglang-32-to-sglang-64",
    "vllm-32-to-vllm-128",
    "vllm-128-to-sglang-32",
    "sglang-32-to-vllm-128",
)
"""Engines, each with its block or page size in tokens. All have KV pools; those with pages of one token have none."""
POOL = {"kv_pool_bytes": 1 << 26}
STAGED = (
    "vllm-staged-32-to-vllm-staged-128",
    "vllm-staged-32-to-sglang-staged-1",
    "sglang-staged-1-to-vllm-staged-32",
    "sglang-staged-1-to-sglang-staged-64",
    "vllm-32-to-sglang-staged-1",
    "sglang-staged-1-to-vllm-128",
)
"""Both sides staged, then one of them."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(700)]


engines = engines_fixture(vllm=POOL, sglang=POOL)
pair = named_pair


def over(*pairs: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", pairs, ids=str, indirect=True, scope="module")


@pytest.mark.nightly
@over(*PAIRS)
class TestSuite(RealEngineSuite):
    pass


PATTERN = "[a-f]{30}(yes|no)"
CONSTRAINED = Sampling(max_tokens=64, temperature=0.0, constraint=Constraint(kind=ConstraintKind.REGEX, text=PATTERN))


@over(*PAIRS)
async def test_a_constraint_holds_and_an_answer_continues_within_it(pair: Pair, engines: Engines) -> None:
    prompt = pair.prompt(70)
    whole = await pair.hand_off(prompt, CONSTRAINED)
    assert re.fullmatch(PATTERN, engines.text(whole.tokens))
    assert whole.last.finish is FinishReason.STOP
    for delivered in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        left = replace(CONSTRAINED, max_tokens=64 - delivered, delivered_tokens=delivered)
        rest = await pair.hand_off([*prompt, *whole.tokens[:delivered]], left)
        assert rest.tokens == whole.tokens[delivered:], delivered
    await pair.settled()


@over("vllm-128-to-sglang-32", "sglang-32-to-vllm-128")
async def test_a_forced_call_is_valid_and_continues_exactly(pair: Pair, engines: Engines) -> None:
    await check_forced_calls(pair, engines, FormatName.HERMES)
    await pair.settled()


@over("vllm-128-to-sglang-32", "sglang-32-to-vllm-128")
async def test_neither_engine_tells_a_tenant_of_anothers_prompts(pair: Pair) -> None:
    await RealEngineSuite().test_a_salt_keeps_tenants_apart(pair)


@over(*PAIRS)
async def test_an_engine_refuses_a_constraint_and_serves_on(pair: Pair) -> None:
    unknown = replace(CONSTRAINED, constraint=Constraint(kind=ConstraintKind.REGEX, text="(?=a)b"))
    with pytest.raises(InvalidRequest, match="regex"):
        await collect(pair.decode, pair.request(pair.prompt(50), unknown))
    with pytest.raises(InvalidRequest):
        await collect(pair.decode, pair.request(pair.prompt(50), replace(CONSTRAINED, delivered_tokens=3)))
    assert (await pair.hand_off(pair.prompt(50), CONSTRAINED)).last.finish is FinishReason.STOP
    await pair.settled()


@over(*PAIRS)
@pytest.mark.parametrize("at_once", [nightly(False), True])
async def test_answers_are_the_decode_engines_own_token_for_token(pair: Pair, at_once: bool) -> None:
    await check_answers(pair, at_once=at_once)


@pytest.mark.nightly
@over(*STAGED)
@pytest.mark.parametrize("at_once", [False, True])
async def test_answers_of_staged_kv(pair: Pair, at_once: bool) -> None:
    """Whichever side copies through host memory, or both; copies go by a thread of the host."""
    await check_answers(pair, at_once=at_once)


@pytest.mark.nightly
@over("sglang-1-to-vllm-llama-64")
async def test_kv_of_another_model_never_makes_a_token(pair: Pair) -> None:
    prompt = pair.prompt(200)
    prefill = pair.request(prompt, leg=Leg.PREFILL)
    await collect(pair.prefill, prefill)
    with pytest.raises(ModelMismatch, match=r"the sink has 'model=llama .* the source has 'model=qwen3 "):
        await collect(pair.decode, pair.request(prompt, leg=Leg.DECODE, name=prefill.request))
    await pair.prefill.abort(prefill.request, prefill.attempt)
    await pair.settled()


@pytest.mark.nightly
@over(
    "vllm-llama-64-to-vllm-llama-32",
    "vllm-llama-32-to-sglang-llama-1",
    "sglang-llama-1-to-vllm-llama-32",
    "sglang-llama-16-to-sglang-llama-1",
)
async def test_answers_of_another_model(pair: Pair) -> None:
    await check_answers(pair, at_once=False)
    await check_answers(pair, at_once=True)


@pytest.mark.nightly
@over("vllm-bfloat16-32-to-sglang-bfloat16-32", "sglang-bfloat16-32-to-vllm-bfloat16-32")
async def test_logprobs_in_bfloat16(pair: Pair) -> None:
    """Engines round differently in bfloat16, so answers may part; how likely a first token is, they agree on."""
    sampling = changed(GREEDY, max_tokens=1, logprobs=5)
    for tokens in PROMPT_TOKENS:
        prompt = pair.prompt(tokens)
        moved = await pair.hand_off(prompt, sampling)
        alone = await collect(pair.decode, pair.request(prompt, sampling, salt="computed here"))
        ours, theirs = (dict(answer.logprobs[0].top) for answer in (moved, alone))
        both = ours.keys() & theirs.keys()
        assert len(both) >= 3, "nearly the same tokens are likely"
        apart = {token: abs(ours[token] - theirs[token]) for token in both}
        assert max(apart.values()) < BFLOAT16_TOLERANCE, tokens


@pytest.mark.nightly
@over(*PAIRS)
async def test_logprobs_are_those_of_a_prompt_computed_here(pair: Pair) -> None:
    prompt, sampling = pair.prompt(200), changed(GREEDY, logprobs=2)
    moved = await pair.hand_off(prompt, sampling)
    alone = await collect(pair.decode, pair.request(prompt, sampling, salt="computed here"))
    for ours, theirs in zip(moved.logprobs, alone.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


@pytest.mark.nightly
@over(*PAIRS)
async def test_one_token_is_an_answer(pair: Pair) -> None:
    prompt, sampling = pair.prompt(200), changed(GREEDY, max_tokens=1)
    answer = await pair.hand_off(prompt, sampling)
    assert answer.tokens == (await collect(pair.decode, pair.request(prompt, sampling, salt="computed here"))).tokens
    assert len(answer.tokens) == 1


@pytest.mark.nightly
@over(*PAIRS)
async def test_a_stop_at_the_first_token_is_its_last(pair: Pair) -> None:
    prompt = pair.prompt(200)
    first = (await collect(pair.decode, pair.request(prompt, GREEDY, salt="computed here"))).tokens[0]
    answer = await pair.hand_off(prompt, changed(GREEDY, stop_token_ids=(first,)))
    assert answer.tokens == [first]
    assert answer.last.finish == "stop"


@over(*PAIRS)
@pytest.mark.parametrize("corruption", [Corruption.FLIP, *map(nightly, (Corruption.ZERO, Corruption.SHIFT))])
async def test_bytes_that_changed_on_the_way_never_make_a_token(pair: Pair, corruption: Corruption) -> None:
    prompt = pair.prompt(300)
    async with corrupting(pair, corruption=corruption):
        with pytest.raises(TransferFailed, match="checksum"):
            await pair.hand_off(prompt)
    await pair.settled()
    answer = await pair.hand_off(prompt)
    assert answer.last.cached_tokens == 0, "nothing of the failed pull may be cached"
    assert answer.tokens == (await collect(pair.decode, pair.request(prompt, salt="computed here"))).tokens


@pytest.mark.nightly
@over(*PAIRS)
@pytest.mark.parametrize("corruption", [Corruption.ZERO, Corruption.SHIFT])
async def test_answers_depend_on_the_kv_that_was_handed_over(pair: Pair, corruption: Corruption) -> None:
    """The control of all tests that compare answers: with KV that its source sent wrong, sums and all, they differ."""
    prompt = pair.prompt(300)
    async with corrupting(pair, corruption=corruption, before_checksum=True):
        wrong = await pair.hand_off(prompt, GREEDY)
    await pair.settled()
    assert wrong.last.transferred_tokens == len(prompt) - 1
    alone = await collect(pair.decode, pair.request(prompt, GREEDY, salt="computed here"))
    assert wrong.tokens[0] != alone.tokens[0]


@pytest.mark.nightly
@over(*PAIRS)
async def test_a_prompt_of_which_a_part_lacks_never_makes_a_token(pair: Pair) -> None:
    prompt = pair.prompt(200)
    prefill = pair.request(prompt[:100], leg=Leg.PREFILL)
    await collect(pair.prefill, prefill)
    with pytest.raises(TransferFailed):
        await collect(pair.decode, pair.request(prompt, leg=Leg.DECODE, name=prefill.request))
    await pair.prefill.abort(prefill.request, prefill.attempt)
    await pair.settled()


@pytest.mark.nightly
@over(*PAIRS)
async def test_engines_that_have_nothing_to_do_sleep(pair: Pair) -> None:
    """The scheduler of SGLang does so only if no request has left anything, not even an entry in a table."""
    await pair.hand_off(pair.prompt(1), GREEDY)
    await pair.settled()
    for engine in (pair.prefill, pair.decode):
        await asleep(engine)


@pytest.mark.nightly
async def test_a_killed_sglang_fails_its_requests_and_takes_nothing_with_it(engines: Engines) -> None:
    """Keep this last: no test uses this engine after it."""
    running = await engines.get("sglang-bfloat16-32")
    engine, worker = running.engine, psutil.Process(running.engine.pid)
    pair = await make_pair(engines, "sglang-bfloat16-32", "sglang-bfloat16-32")
    stream, _ = await first_delta(engine, pair.request(pair.prompt(60), changed(GREEDY, max_tokens=3000)))
    children = worker.children(recursive=True)
    (scheduler,) = (child for child in children if child.name().startswith("sglang::sched"))
    left_behind = [file.path for file in scheduler.memory_maps() if Path(file.path).is_relative_to("/dev/shm")]
    assert not any(map(os.path.exists, left_behind)), "SGLang ends without removing what it shares"
    scheduler.kill()
    with pytest.raises(EngineFailed):
        async for _ in stream:
            pass
    with pytest.raises(EngineFailed):
        await engine.check_health()
    assert worker.is_running(), "SGLang would have ended the process that started it"
    worker.kill()
    assert not psutil.wait_procs(children, 10)[1], "the engine outlives its worker"
