"""Models whose KV is kept in other ways: handed off with equal answers, or refused at the start with the reason."""

from __future__ import annotations

import re

import pytest
from cross_engines import Engines, check_answers, engines_fixture, make_pair

from baton.engines.engine import Leg
from baton.errors import ConfigurationError, ModelMismatch
from tests.harness.engine_pair import collect

HANDED_OFF = (
    # Latent rows (MLA), with experts; on every rank the same.
    "sglang-deepseek-32-to-sglang-deepseek-1",
    "sglang-deepseek-32x2-to-sglang-deepseek-1",
    "sglang-deepseek-1-to-sglang-deepseek-32x2",
    "vllm-deepseek-32-to-sglang-deepseek-1",
    "sglang-deepseek-1-to-vllm-deepseek-32",
    # Windows in some layers, of which the engines keep all tokens.
    "vllm-llamawindows-32-to-vllm-llamawindows-64",
    "vllm-gemma3-32-to-sglang-gemma3-1",
    "sglang-gemma3-1-to-vllm-gemma3-32",
    # Eight bits.
    "vllm-fp8-32-to-vllm-fp8-64",
    "vllm-scaled-32-to-vllm-scaled-64",
    # The same, through slots of host memory.
    "sglang-stageddeepseek-32-to-sglang-stageddeepseek-1",
    "vllm-stageddeepseek-32-to-sglang-stageddeepseek-1",
    "sglang-stageddeepseek-1-to-vllm-stageddeepseek-32",
    "vllm-stagedfp8-32-to-vllm-stagedfp8-64",
)
REFUSED = {
    "vllm-llamawindowsonly-32": "vLLM keeps this model's KV by SlidingWindowSpec",
    "vllm-lfm2-32": "some of this model's layers keep a state in place of KV",
    "sglang-mellum-32": "in a SWAKVPool, which Baton cannot hand off",
    "sglang-lfm2-1": "in a HybridLinearKVPool, which Baton cannot hand off",
    "sglang-fp8-32": "KV of eight bits is handed over with its scales",
}
"""What an engine says of a model that it is not started with, by name."""

pytestmark = [pytest.mark.nightly, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


# As `baton up` starts them: with a pool where they can have one.
POOL = {"kv_pool_bytes": "auto", "kv_pool_workers": 64}
engines = engines_fixture(vllm=POOL, sglang=POOL)


@pytest.mark.parametrize("names", HANDED_OFF)
async def test_answers_are_the_decode_engines_own_token_for_token(engines: Engines, names: str) -> None:
    pair = await make_pair(engines, *names.split("-to-"))
    await check_answers(pair, at_once=False)
    await check_answers(pair, at_once=True)


async def test_kv_of_other_scales_never_makes_a_token(engines: Engines) -> None:
    """Weights are equal but for the scales, and so is the type of KV: the refusal names what its bits stand for."""
    pair = await make_pair(engines, "vllm-scaled-32", "vllm-scaledotherwise-64")
    prefill = pair.request(pair.prompt(200), leg=Leg.PREFILL)
    await collect(pair.prefill, prefill)
    with pytest.raises(ModelMismatch) as refusal:
        await collect(pair.decode, pair.request(prefill.tokens, leg=Leg.DECODE, name=prefill.request))
    scales = re.findall(r"scales=(\S+)", refusal.value.detail)
    assert len(set(scales)) == 2 and "none" not in scales
    await pair.prefill.abort(prefill.request, prefill.attempt)
    await pair.settled()


@pytest.mark.parametrize("name", REFUSED)
async def test_an_engine_that_cannot_hand_off_does_not_start_and_says_why(engines: Engines, name: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        await engines.get(name)
    # vLLM's own process gives the reason, and the error refers to its log.
    text = engines.log(name) if "in the log above" in failure.value.detail else failure.value.detail
    assert REFUSED[name] in text
