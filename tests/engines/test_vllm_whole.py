"""One vLLM engine serving requests whole: parameters, caching, ends of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_pair import Pair, greedy, prompt
from engine_process import Answer, EngineError, EngineProcess


def whole(pair: Pair, ids: list[int], sampling: dict[str, Any], **fields: Any) -> Answer:
    return pair.decode.send("generate", request=pair.name(), leg="whole", tokens=ids, sampling=sampling, **fields)


def test_facts_name_the_engine_and_its_agent(pair: Pair) -> None:
    facts = pair.decode.facts
    assert facts["engine"].startswith("vllm ")
    assert facts["block_tokens"] == 32
    assert facts["kv_blocks"] == 200
    assert facts["context_tokens_max"] == 4096
    # 4 layers, K and V, 2 heads of 64, 4 bytes each.
    assert facts["kv_bytes_per_token"] == 4 * 2 * 2 * 64 * 4
    assert facts["model_digest"] == pair.prefill.facts["model_digest"]
    assert facts["agents"] != pair.prefill.facts["agents"]


def test_one_delta_per_step_and_the_last_one_finishes(pair: Pair) -> None:
    answer = whole(pair, prompt(50, seed=60), greedy(6))
    assert len(answer.tokens()) == 6
    assert [delta["finish"] for delta in answer.deltas][-1] == "length"
    assert all(delta["finish"] is None for delta in answer.deltas[:-1])


def test_cached_tokens_are_counted_and_salts_keep_tenants_apart(pair: Pair) -> None:
    ids = prompt(100, seed=61)
    for salt, cached in (("", 0), ("", 96), ("tenant", 0), ("tenant", 96)):
        answer = whole(pair, ids, greedy(2), cache_salt=salt)
        answer.wait()
        assert answer.last["cached_tokens"] == cached, salt


def test_stop_token_ends_the_output_and_stands_in_it(pair: Pair) -> None:
    ids = prompt(70, seed=62)
    free = whole(pair, ids, greedy(20)).tokens()
    stopped = whole(pair, ids, {**greedy(20), "stop_token_ids": [free[5]]})
    assert stopped.tokens() == free[: free.index(free[5]) + 1]
    assert stopped.last["finish"] == "stop"


def test_logprobs_name_the_token_and_its_rivals(pair: Pair) -> None:
    answer = whole(pair, prompt(70, seed=63), {**greedy(3), "logprobs": 2})
    tokens = answer.tokens()
    rows = [row for delta in answer.deltas for row in delta["logprobs"]]
    assert len(rows) == 3
    for token, row in zip(tokens, rows, strict=True):
        assert [len(row["top"]), row["top"][0]] == [2, [token, row["logprob"]]]
        assert row["top"][0][1] >= row["top"][1][1]


def test_sampled_token_outside_the_top_is_not_among_the_rivals(pair: Pair) -> None:
    sampling = {"max_tokens": 8, "temperature": 2.0, "seed": 3, "logprobs": 1, "ignore_eos": True}
    answer = whole(pair, prompt(70, seed=64), sampling)
    tokens = answer.tokens()
    rows = [row for delta in answer.deltas for row in delta["logprobs"]]
    assert all(len(row["top"]) == 1 for row in rows)
    assert any(row["top"][0][0] != token for token, row in zip(tokens, rows, strict=True))


def test_seed_repeats_itself(pair: Pair) -> None:
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    ids = prompt(40, seed=65)
    assert whole(pair, ids, sampling).tokens() == whole(pair, ids, sampling).tokens()


def test_extension_reaches_the_engine(pair: Pair) -> None:
    sampling = {**greedy(10), "extensions": {"allowed_token_ids": [70, 71]}}
    assert set(whole(pair, prompt(40, seed=66), sampling).tokens()) <= {70, 71}


@pytest.mark.parametrize(
    ("ids", "sampling", "code", "says"),
    [
        ([], {}, "invalid_request", "empty"),
        ([5] * 4096, {}, "context_length_exceeded", "4096"),
        ([8192], {}, "invalid_request", "8192"),
        ([5], {"temperature": -1.0}, "invalid_request", "temperature"),
        ([5], {"top_p": 0.0}, "invalid_request", "top_p"),
        ([5], {"logprobs": 1000}, "invalid_request", "logprobs"),
        ([5], {"extensions": {"no_such": 1}}, "invalid_request", "no_such"),
        ([5], {"extensions": {"allowed_token_ids": "all"}}, "invalid_request", "allowed_token_ids"),
        ([5], {"extensions": {"extra_args": {"kv_transfer_params": {}}}}, "invalid_request", "kv_transfer_params"),
    ],
)
def test_what_the_engine_refuses_is_named(
    pair: Pair, ids: list[int], sampling: dict[str, Any], code: str, says: str
) -> None:
    with pytest.raises(EngineError, match=says) as refusal:
        whole(pair, ids, {"max_tokens": 4, **sampling}).wait()
    assert refusal.value.code == code
    assert len(whole(pair, [5, 6], greedy(2)).tokens()) == 2, "the engine serves on"


def test_budget_ends_a_request(pair: Pair) -> None:
    with pytest.raises(EngineError) as failure:
        whole(pair, prompt(3000, seed=67), greedy(8), budget_s=0.001).wait()
    assert failure.value.code == "deadline_exceeded"


def test_same_attempt_twice_is_refused(pair: Pair) -> None:
    first = pair.decode.send("generate", request="twice", leg="whole", tokens=prompt(40, seed=68), sampling=greedy(500))
    assert first.next_delta() is not None
    with pytest.raises(EngineError, match="already here"):
        pair.decode.send("generate", request="twice", leg="whole", tokens=[5], sampling=greedy(1)).wait()
    pair.decode.ask("abort", request="twice")
    first.wait()
    assert first.last["finish"] == "cancelled"


def test_model_that_does_not_load_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no-such"}')
    settings: dict[str, Any] = {"model": str(tmp_path), "role": "decode", "options": {}}
    engine = EngineProcess(settings, tmp_path)
    try:
        with pytest.raises(EngineError) as failure:
            engine.wait_started()
    finally:
        engine.close()
    assert failure.value.code == "configuration_error"
    assert str(tmp_path) in failure.value.detail
    assert "\n" not in failure.value.detail
    assert "no-such" in failure.value.detail, "the sentence leaves out the reason"
