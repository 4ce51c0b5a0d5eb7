"""SGLang whose cache is smaller than the model's context: what is pulled leaves its own requests the room they need."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
from cross_engines import Engines, asleep, engines_fixture, make_pair

from baton.engines.engine import Leg
from baton.messages.attempts import FinishReason, Sampling
from tests.harness.engine_pair import Pair, collect, eventually
from tests.harness.limits import HANG_S

CACHE_TOKENS = 2048
OPTIONS = {
    "max_total_tokens": CACHE_TOKENS,
    "chunked_prefill_size": 128,
    # Requests are admitted as if their answers were short.
    "schedule_conservativeness": 0.1,
}
SHORT = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)

pytestmark = [pytest.mark.nightly, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

engines = engines_fixture(sglang=OPTIONS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(engines: Engines) -> Pair:
    return await make_pair(engines, "vllm-32", "sglang-32")


async def test_an_answer_may_take_the_rest_of_the_cache(pair: Pair) -> None:
    endless = Sampling(max_tokens=10_000, temperature=0.0, ignore_eos=True)
    answer = await pair.hand_off(pair.prompt(1900), endless)
    assert len(answer.tokens) == pair.decode_facts.context_tokens_max - 1900
    assert answer.last.transferred_tokens == 1899


async def test_an_answer_that_the_context_ends_may_have_asked_for_more(pair: Pair) -> None:
    longer = Sampling(max_tokens=200, min_tokens=100, temperature=0.0)
    answer = await collect(pair.decode, pair.request(pair.prompt(1900), longer))
    assert len(answer.tokens) == pair.decode_facts.context_tokens_max - 1900


async def test_a_prompt_that_is_half_computed_has_room_for_the_rest(pair: Pair) -> None:
    prefill = pair.request(pair.prompt(900), SHORT, leg=Leg.PREFILL)
    decode = pair.request(prefill.tokens, SHORT, leg=Leg.DECODE, name=prefill.request)
    await collect(pair.prefill, prefill)
    before = pair.decode.load().prompt_tokens_computed
    computing = asyncio.create_task(collect(pair.decode, pair.request(pair.prompt(1500), SHORT)))
    await eventually(lambda: pair.decode.load().prompt_tokens_computed > before)
    answers = await asyncio.gather(computing, collect(pair.decode, decode))
    assert [len(answer.tokens) for answer in answers] == [12, 12]


async def test_a_retracted_request_and_one_whose_kv_is_here_do_not_wait_for_each_other(pair: Pair) -> None:
    lasting = Sampling(max_tokens=1000, min_tokens=1000, temperature=0.0)
    before = pair.decode.load().preemptions
    running = [asyncio.create_task(collect(pair.decode, pair.request(pair.prompt(300), lasting))) for _ in range(2)]
    await eventually(lambda: pair.decode.load().preemptions > before, timeout_s=HANG_S)
    async with asyncio.timeout(2 * HANG_S):
        answers = await asyncio.gather(pair.hand_off(pair.prompt(800), SHORT), *running)
    assert len(answers[0].tokens) == 12


async def test_an_answer_has_room_to_grow_beside_kv_that_is_long_in_coming(pair: Pair) -> None:
    lasting = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)
    before = pair.decode.load().prompt_tokens_computed
    running = asyncio.create_task(collect(pair.decode, pair.request(pair.prompt(900), lasting)))
    await eventually(lambda: pair.decode.load().prompt_tokens_computed >= before + 900)
    prefill = pair.request(pair.prompt(900), SHORT, leg=Leg.PREFILL)
    decode = pair.request(prefill.tokens, SHORT, leg=Leg.DECODE, name=prefill.request, budget_s=4 * HANG_S)
    pulling = asyncio.create_task(collect(pair.decode, decode))
    assert len((await running).tokens) == 400
    await collect(pair.prefill, prefill)
    assert len((await pulling).tokens) == 12


async def test_an_answer_that_outgrows_the_cache_leaves_nothing(pair: Pair) -> None:
    lasting = Sampling(max_tokens=1000, min_tokens=1000, temperature=0.0)
    before = pair.decode.load().prompt_tokens_pulled
    running = asyncio.create_task(pair.hand_off(pair.prompt(900), lasting))
    await eventually(lambda: pair.decode.load().prompt_tokens_pulled > before)
    # Nothing but SGLang's estimate of an answer keeps a lease from taking the rest of the cache.
    leased = pair.request(pair.prompt(900), SHORT, leg=Leg.PREFILL)
    await collect(pair.decode, leased)
    answer = await running
    assert (answer.last.finish, len(answer.tokens) < 1000) == (FinishReason.CANCELLED, True)
    await pair.decode.abort(leased.request, leased.attempt)
    await pair.settled()
    await asleep(pair.decode)
