"""Multi-head latent attention and experts: a tiny DeepSeek-type model's rows go from one vLLM to another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import started_pair
from engine_pair import Pair, prompt
from engine_process import EngineError

from baton.cli.tiny_model import LATENT_DIM, LATENT_LAYERS, ROPE_DIM, make_tiny_model

BLOCK = 16
"""The only size that vLLM's kernel for latent attention on CPUs without AMX knows."""


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("models") / "deepseek"
    make_tiny_model(folder, arch="deepseek")
    with started_pair(folder, tmp_path_factory, max_model_len=2048) as pair:
        yield pair
        pair.settled()


def test_what_the_engines_say_of_their_rows(latent: Pair) -> None:
    words = latent.prefill.facts["kv_identity"].split()
    for word in ("model=deepseek_v2", f"dim={LATENT_DIM + ROPE_DIM}", "kv_heads=1", "blocks=described"):
        assert word in words
    assert latent.prefill.facts["block_tokens"] == BLOCK
    assert latent.prefill.facts["kv_bytes_per_token"] == LATENT_LAYERS * (LATENT_DIM + ROPE_DIM) * 4


@pytest.mark.parametrize("tokens", [1, 33, 200, 1500])
def test_output_equals_the_decode_engines_own_and_only_the_last_token_is_computed(latent: Pair, tokens: int) -> None:
    ids = prompt(tokens, seed=tokens)
    before = latent.decode.ask("load")
    output, last = latent.disaggregated(ids, 24)
    after = latent.decode.ask("load")
    assert output == latent.aggregated(ids, 24)
    assert after["prompt_tokens_computed"] - before["prompt_tokens_computed"] == 1
    assert after["prompt_tokens_pulled"] - before["prompt_tokens_pulled"] == tokens - 1
    block_bytes = BLOCK * latent.decode.facts["kv_bytes_per_token"]
    assert last["transferred_bytes"] == -(-(tokens - 1) // BLOCK) * block_bytes


def test_engines_of_another_model_are_refused_with_both_named(latent: Pair, engines: Pair) -> None:
    ids, name = prompt(100, seed=1), latent.name()
    mixed = Pair(engines.prefill, latent.decode)
    prefill = mixed.send_prefill(name, ids)
    with pytest.raises(EngineError) as failure:
        mixed.send_decode(name, ids, 4).wait()
    assert failure.value.code == "model_mismatch"
    for word in (
        "the sink has 'model=deepseek_v2",
        "the source has 'model=qwen3",
        "kv_heads=1 dim=576",
        "kv_heads=2 dim=64",
    ):
        assert word in failure.value.detail
    prefill.wait()
    assert mixed.decode.ask("transfers")["pulls"]["failed"] == {"model": 1}
    engines.prefill.ask("abort", request=name)
    mixed.settled()
