"""SGLang whose cache is smaller than the model's context: what is pulled leaves its own requests the room they need."""

from __future__ import annotations

import pytest
import pytest_asyncio
from cross_engines import Engines, engines_fixture, make_pair

from baton.messages.attempts import Sampling
from tests.harness.engine_pair import Pair

CACHE_TOKENS = 2048
OPTIONS = {"max_total_tokens": CACHE_TOKENS}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

engines = engines_fixture(sglang=OPTIONS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(engines: Engines) -> Pair:
    return await make_pair(engines, "vllm-32", "sglang-32")


async def test_an_answer_may_take_the_rest_of_the_cache(pair: Pair) -> None:
    endless = Sampling(max_tokens=10_000, temperature=0.0, ignore_eos=True)
    answer = await pair.hand_off(pair.prompt(1900), endless)
    assert len(answer.tokens) == pair.decode_facts.context_tokens_max - 1900
    assert answer.last.transferred_tokens == 1899
