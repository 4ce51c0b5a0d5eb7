"""Hand-offs of real vLLM from cache to cache, over the stand-ins for GPUs and adapters: tokens equal one engine's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_pair import Pair, check_several_at_once, prompt, started_pair
from engine_process import EngineError, until
from test_vllm_staged import SMALL, STAGED, Gpu, begun, is_free, saved_blocks

from tests.contract.fake_library import FakeGpu, FakeVerbs

CONNECTORS = {"cuda-ipc": "gpu_peers:NearConnector", "gpudirect": "gpu_peers:FarConnector"}
GPU_PEERS: dict[str, Any] = {**STAGED, **SMALL["vllm"], "kv_path": "gpu"}
PROMPT_TOKENS = 700
BLOCK_TOKENS = 32
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module", params=list(CONNECTORS))
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engines(backend: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    os.environ["BATON_TEST_GPU"] = FakeGpu.compiled()
    os.environ["BATON_TEST_VERBS"] = FakeVerbs(tmp_path_factory.mktemp("adapters")).library
    options: dict[str, Any] = {**GPU_PEERS, "connector": CONNECTORS[backend]}
    with started_pair(tiny_model, tmp_path_factory, **options) as pair:
        yield pair


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    yield engines
    for engine in (engines.prefill, engines.decode):
        Gpu(engine).heal()
    engines.settled()


def backends(pair: Pair) -> list[str]:
    return list(pair.decode.ask("transfers")["pulls"]["done"])


def test_kv_goes_from_cache_to_cache(pair: Pair, backend: str) -> None:
    for tokens in (33, 200, 1500):
        ids = prompt(tokens, seed=tokens)
        before = pair.decode.ask("load")
        output, last = pair.disaggregated(ids, 24)
        after = pair.decode.ask("load")
        assert output == pair.aggregated(ids, 24)
        assert after["prompt_tokens_computed"] - before["prompt_tokens_computed"] == 1
        assert last["transferred_tokens"] == tokens - 1
    assert backends(pair) == [backend], "metrics and traces name the way"
    assert pair.prefill.ask("stats")["pulls_failed"] == 0


def test_several_prompts_at_once(pair: Pair) -> None:
    check_several_at_once(pair)


def test_what_is_pulled_is_history_on_both_sides(pair: Pair) -> None:
    ids = prompt(PROMPT_TOKENS, seed=6)
    before = [saved_blocks(engine) for engine in (pair.prefill, pair.decode)]
    first, _ = pair.disaggregated(ids, 2)
    pair.settled()
    after = [saved_blocks(engine) for engine in (pair.prefill, pair.decode)]
    assert [new - old for old, new in zip(before, after, strict=True)] == [PROMPT_TOKENS // BLOCK_TOKENS] * 2
    for engine in (pair.prefill, pair.decode):
        engine.ask("preempt")
    again, last = pair.disaggregated(ids, 16)
    expected = pair.aggregated(ids, 16)
    assert (first, again) == (expected[:2], expected)
    assert last["transferred_tokens"] == PROMPT_TOKENS - 1 - PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


def test_blocks_stay_leased_until_the_pull_has_ended(pair: Pair) -> None:
    ids, sink = prompt(PROMPT_TOKENS, seed=7), Gpu(pair.decode)
    sink.set(hold=1)
    prefill, decode = begun(pair, ids)
    prefill.wait()
    until(lambda: pair.decode.ask("stats")["pulls"] == 1)
    assert not is_free(pair.prefill)
    sink.set(hold=0)
    assert decode.tokens() == pair.aggregated(ids, 16)
    until(lambda: is_free(pair.prefill))


def test_a_cache_that_cannot_be_reached_is_staged_by_name(pair: Pair) -> None:
    ids = prompt(PROMPT_TOKENS, seed=8)
    for engine in (pair.prefill, pair.decode):
        Gpu(engine).set(no_map=1, no_flush=1)
    before = pair.prefill.ask("stats")["fallbacks"]
    name = pair.name()
    # The other way round, for which no connection exists yet: decode computes, prefill pulls.
    decode = pair.decode.send(
        "generate", request=name, leg="prefill", tokens=ids, sampling={"max_tokens": 1}, sink_ranks=1
    )
    prefill = pair.prefill.send(
        "generate",
        request=name,
        leg="decode",
        tokens=ids,
        agents=pair.decode.facts["agents"],
        sampling={"max_tokens": 16, "temperature": 0.0, "ignore_eos": True},
    )
    output = prefill.tokens()
    decode.wait()
    assert output == pair.aggregated(ids, 16)
    assert pair.prefill.ask("stats")["fallbacks"] == before + 1
    assert list(pair.prefill.ask("transfers")["pulls"]["done"]) == ["direct+staged"]


def test_a_post_before_the_streams_work_has_ended_is_caught(pair: Pair) -> None:
    """A planted fault."""
    ids, source = prompt(PROMPT_TOKENS, seed=9), Gpu(pair.prefill)
    source.plant("early")
    prefill, decode = begun(pair, ids)
    with pytest.raises(EngineError):
        decode.tokens()
    prefill.wait()
    source.heal()
    ids = prompt(PROMPT_TOKENS, seed=10)
    assert pair.disaggregated(ids, 16)[0] == pair.aggregated(ids, 16)
