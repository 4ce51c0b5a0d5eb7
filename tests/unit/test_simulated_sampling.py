"""The simulated engine's knowledge of a model, and its choice of tokens."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engines.simulated.options import SimulatedOptions, parse_options
from baton.engines.simulated.sampling import (
    SimulatedModel,
    check_sampling,
    choose_token,
    is_determined,
    likeliest_token,
    read_model,
)
from baton.errors import ConfigurationError, InvalidRequest
from baton.messages.attempts import Sampling, TokenLogprob

MODEL = SimulatedModel(vocabulary=1000, printable=tuple(range(100, 1000)), eos_tokens=(2,), context_tokens_max=100)


def choose(
    digest: int = 5,
    *,
    output: tuple[int, ...] = (),
    eos_probability: float = 0.0,
    uniform: float = 0.0,
    sampling: Mapping[str, object] | None = None,
    **more: object,
) -> tuple[int, TokenLogprob | None]:
    return choose_token(
        MODEL,
        msgspec.convert({"max_tokens": 9, "temperature": 0.0, **(sampling or {}), **more}, Sampling),
        digest=digest,
        tokens=(105, *output),
        prompt_tokens=1,
        eos_probability=eos_probability,
        draw=lambda: uniform,
    )


def test_greed_takes_what_the_digest_says() -> None:
    assert choose(5)[0] == 105
    assert choose(900 + 5)[0] == 105
    assert choose(6)[0] == 106


@given(
    digest=st.integers(0, 8),
    output=st.lists(st.integers(100, 110), max_size=4),
    eos_probability=st.sampled_from([0.0, 0.5, 1.0]),
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.5]),
            "ignore_eos": st.booleans(),
            "min_tokens": st.integers(0, 3),
            "stop_token_ids": st.sampled_from([(), (105,)]),
            "logit_bias": st.sampled_from([None, {107: 5.0}]),
            "logprobs": st.sampled_from([None, 0, 2]),
            "presence_penalty": st.sampled_from([0.0, 1.0]),
            "frequency_penalty": st.sampled_from([0.0, 1.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.5]),
        },
    ),
)
def test_a_determined_choice_is_the_likeliest_token(
    digest: int, output: list[int], eos_probability: float, sampling: dict[str, object]
) -> None:
    asked = msgspec.convert({"max_tokens": 9, "temperature": 0.0, **sampling}, Sampling)
    if is_determined(MODEL, asked, eos_probability):
        chosen = choose(digest, output=tuple(output), eos_probability=eos_probability, uniform=0.999, sampling=sampling)
        assert chosen == (likeliest_token(MODEL, digest), None)


def test_plain_greed_is_determined_and_what_may_end_or_draw_is_not() -> None:
    def is_so(eos_probability: float = 0.0, **sampling: object) -> bool:
        asked = msgspec.convert({"max_tokens": 9, "temperature": 0.0, **sampling}, Sampling)
        return is_determined(MODEL, asked, eos_probability)

    assert is_so()
    assert is_so(0.5, ignore_eos=True)
    assert is_so(min_tokens=3, ignore_eos=True)
    assert not is_so(0.5)
    assert not is_so(temperature=0.5)
    assert not is_so(min_tokens=3)


def test_the_end_comes_as_often_as_asked_and_not_when_ignored() -> None:
    ends = sum(choose(digest, eos_probability=0.25)[0] == 2 for digest in range(4000))
    assert 850 < ends < 1150
    assert choose(eos_probability=1.0)[0] == 2
    assert choose(eos_probability=1.0, ignore_eos=True)[0] == 105
    assert choose(eos_probability=1.0, min_tokens=3, output=(1, 1))[0] == 105
    assert choose(eos_probability=1.0, min_tokens=3, output=(1, 1, 1))[0] == 2


def test_before_min_tokens_no_stop_token_comes_whatever_the_bias() -> None:
    stops = tuple(range(100, 160))
    token, _ = choose(min_tokens=2, stop_token_ids=stops, logit_bias={105: 100.0})
    assert token not in stops
    assert choose(min_tokens=0, stop_token_ids=stops, logit_bias={107: 100.0})[0] == 107


def test_sampling_follows_the_distribution() -> None:
    drawn = Counter(choose(uniform=step / 2000, temperature=1.0)[0] for step in range(2000))
    assert drawn[105] > drawn[106] > drawn[107] > 0
    assert math.isclose(drawn[106] / drawn[105], math.exp(-0.7), rel_tol=0.05)
    hot = Counter(choose(uniform=step / 2000, temperature=3.0)[0] for step in range(2000))
    assert hot[105] < drawn[105]


@pytest.mark.parametrize("limit", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.4}])
def test_filters_leave_only_likely_tokens(limit: dict[str, object]) -> None:
    drawn = {choose(uniform=step / 500, sampling={"temperature": 1.0, **limit})[0] for step in range(500)}
    assert drawn == {105, 106}


@given(
    digest=st.integers(0, 8),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
    sampling=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.001, 0.7, 1.0, 3.0]),
            "top_k": st.sampled_from([-1, 0, 1, 5, 30]),
            "top_p": st.floats(0.01, 1.0),
            "min_p": st.sampled_from([0.0, 0.1, 1.0]),
            "seed": st.none() | st.integers(0, 99),
            "ignore_eos": st.booleans(),
        }
    ),
)
@settings(max_examples=60)
def test_a_token_is_the_same_whether_its_logprob_is_asked_for_or_not(
    digest: int, uniform: float, sampling: dict[str, object]
) -> None:
    quick, _ = choose(digest, uniform=uniform, eos_probability=0.3, sampling=sampling)
    thorough, _ = choose(digest, uniform=uniform, eos_probability=0.3, sampling=sampling, logprobs=1)
    assert quick == thorough


def test_a_seed_decides_and_differs_by_position() -> None:
    def sequence(seed: int) -> list[int]:
        return [choose(output=(0,) * index, temperature=1.0, seed=seed, uniform=0.99)[0] for index in range(30)]

    assert sequence(3) == sequence(3)
    assert sequence(3) != sequence(4)
    assert len(set(sequence(3))) > 1


def test_penalties_and_bias_move_tokens() -> None:
    assert choose(output=(105,), presence_penalty=1.0)[0] == 106
    assert choose(output=(105,), frequency_penalty=0.2)[0] == 105
    assert choose(output=(105,) * 9, frequency_penalty=0.2)[0] == 106
    assert choose(logit_bias={106: 1.0})[0] == 106
    assert choose(logit_bias={999: 100.0})[0] == 999
    # Token 105 stands in the prompt, but its logit is 0, which no factor changes.
    assert choose(repetition_penalty=1.9)[0] == 105
    assert choose(repetition_penalty=1.9, logit_bias={105: 0.5, 106: 1.0})[0] == 106


def test_logprobs_are_of_the_model_before_penalties() -> None:
    _, plain = choose(logprobs=20)
    _, penalised = choose(logprobs=20, output=(105,), presence_penalty=2.0)
    assert plain is not None
    assert penalised is not None
    assert math.isclose(sum(math.exp(logprob) for _, logprob in plain.top), 1.0)
    assert plain.top == penalised.top
    assert plain.logprob == plain.top[0][1]
    assert penalised.logprob == plain.top[1][1]
    assert choose()[1] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"presence_penalty": 3.0},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0.0},
        {"min_tokens": 20},
        {"logprobs": 21},
        {"stop_token_ids": (1000,)},
        {"logit_bias": {5000: 1.0}},
        {"extensions": {"guided_json": "{}"}},
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(msgspec.structs.replace(Sampling(max_tokens=9), **wrong), vocabulary=1000)
    assert caught.value.param in (*wrong, "guided_json")


def test_a_model_folder_says_what_tokens_there_are(tmp_path: Path) -> None:
    vocabulary = {"<|end|>": 0, "hello": 1, "Ġworld": 2, "▁again": 3, "Ċ": 4, "é": 5, "!": 6, "Ġ": 7, "beyond": 90}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 0, "content": "<|end|>"}]})
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 50, "eos_token_id": [0, 8], "max_position_embeddings": 77})
    )
    assert read_model(tmp_path, None) == SimulatedModel(50, (1, 2, 3), (0, 8), 77)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert read_model(tmp_path, None).eos_tokens == (9,)


def test_a_unigram_vocabulary_is_read_too(tmp_path: Path) -> None:
    vocabulary = [["<unk>", 0.0], ["▁the", -2.5], ["!", -3.0], ["of", -3.5]]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 4}}))
    assert read_model(tmp_path, None).printable == (1, 3)


def test_a_model_without_a_tokenizer_still_has_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": 300}))
    model = read_model(tmp_path, None)
    assert model.printable[:2] == (256, 257)
    assert 300 not in model.printable


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_model(tmp_path, None)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"no_such_option": 1}, "no_such_option"),
        ({"blocks": 0}, "blocks"),
        ({"blocks": "many"}, "blocks"),
        ({"speed": 0}, "speed"),
        ({"step_fixed_s": -1.0}, "step_fixed_s"),
        ({"kv_bytes_per_token": 100, "layers": 3}, "kv_bytes_per_token"),
        ({"blocks": 2, "block_tokens": 16, "context_tokens_max": 33}, "context_tokens_max"),
    ],
)
def test_a_wrong_option_is_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse_options(wrong)


def test_a_step_takes_what_the_timing_says() -> None:
    options = SimulatedOptions(
        step_fixed_s=1.0, prefill_token_s=0.1, decode_sequence_s=0.01, attention_token_s=0.001, speed=2.0
    )
    assert math.isclose(options.step_s(prefill_tokens=10, decode_sequences=5, context_tokens=50), 1.05)
