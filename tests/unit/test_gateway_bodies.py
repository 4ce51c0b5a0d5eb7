"""Validation of clients' bodies: each hostile or contradictory one is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from baton_gateway.bodies import ChatBody, CompletionBody, GenerationBody, decode_object, parse
from baton_gateway.intake import room_of
from baton_gateway.parameters import (
    EXTENSIONS_BYTES_MAX,
    EXTENSIONS_MAX,
    NEUTRAL,
    SamplingDefaults,
    constraint_of,
    extensions_of,
    limit_output,
    output_of,
    sampling_of,
)
from baton_gateway.responses.bodies import read_envelope
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.errors import BatonError, ContextLengthExceeded, InvalidRequest
from baton.messages.attempts import Sampling

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def parse_chat(**fields: object) -> ChatBody:
    return parse(ChatBody, json.dumps({**CHAT, **fields}).encode())


def parse_completion(**fields: object) -> CompletionBody:
    return parse(CompletionBody, json.dumps({**COMPLETION, **fields}).encode())


def sampling(body: GenerationBody, defaults: SamplingDefaults = NEUTRAL) -> Sampling:
    """Return the parameters as they reach a worker."""
    limited = limit_output(sampling_of(body, defaults), body.tokens_max() or 100)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(limited), type=Sampling)


def test_every_parameter_reaches_the_engine() -> None:
    body = parse_completion(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_tokens=20, min_tokens=3, seed=9, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"5": -100}, stop_token_ids=[1, 2], ignore_eos=True,
        logprobs=3, guided_regex="a+",
    )  # fmt: skip
    assert sampling(body) == Sampling(
        max_tokens=20, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=9, presence_penalty=1.0,
        frequency_penalty=-1.0, repetition_penalty=1.5, logit_bias={5: -100.0}, stop_token_ids=(1, 2), ignore_eos=True,
        min_tokens=3, logprobs=3, extensions={"guided_regex": "a+"},
    )  # fmt: skip


def test_defaults_and_explicit_nulls_are_the_same() -> None:
    nulls = dict.fromkeys(["temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "tools", "user", "foo"])
    assert sampling(parse_chat(**nulls)) == sampling(parse_chat()) == Sampling(max_tokens=100)


def test_max_completion_tokens_wins() -> None:
    assert parse_chat(max_tokens=5, max_completion_tokens=7).tokens_max() == 7
    assert parse_chat(max_tokens=5).tokens_max() == 5
    assert parse_chat().tokens_max() is None
    assert parse_completion().tokens_max() == 16


def test_metadata_is_dropped() -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True}
    assert sampling(parse_chat(**fields)).extensions == {}


@pytest.mark.parametrize(
    ("fields", "said"), [({"stop": ["a"] * 65}, "at most 64 items"), ({"stop": ""}, "at least 1 character")]
)
def test_of_several_forms_the_one_that_was_used_is_explained(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parse_chat(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"messages": [1]}, "messages[0]"), ({"tools": [None]}, "tools[0]"), ({"stream_options": 5}, "stream_options")],
)
def test_an_error_names_no_class_of_the_server(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(**fields)
    assert refused.value.detail == f"`{param}`: input should be a valid dictionary"


def test_stop_is_one_or_several() -> None:
    assert output_of(parse_chat(stop="x")).stops == ("x",)
    assert output_of(parse_chat(stop=["x", "y"])).stops == ("x", "y")
    assert output_of(parse_chat()).stops == ()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt: object, prompts: list[object]) -> None:
    assert parse_completion(prompt=prompt).prompts() == prompts


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0]"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED)
def test_what_is_not_supported_says_so(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest, match=r"not supported|text only") as caught:
        parse_chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1}, {"suffix": "x"}, {"best_of": 3}])
def test_what_completions_do_not_support(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="not supported"):
        parse_completion(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ["a" * 1024] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"5": 1, "1": 101}}, 'logit_bias["1"]'),
        ({"logit_bias": {"5": 1, "1": "high"}}, 'logit_bias["1"]'),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"-1": 1}}, 'logit_bias["-1"]'),
        ({"logit_bias": {"٣": 1}}, 'logit_bias["٣"]'),
        ({"logit_bias": {"9" * 5000: 1}}, f'logit_bias["{"9" * 40}"]'),
        ({"logit_bias": {"9" * 5000: 101}}, f'logit_bias["{"9" * 40}"]'),
        ({"min_tokens": 101}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"cache_salt": "a\0b"}, "cache_salt"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [3]}, "messages[0]"),
        ({"unknown": 10**30}, "unknown"),
    ],
)
def test_hostile_values_are_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling(parse_chat(**fields))
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert len(str(caught.value)) < 400


def nested(depth: int) -> object:
    value: object = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def test_a_parameter_of_65_levels_passes_and_one_more_does_not() -> None:
    assert sampling(parse_chat(deep=nested(65))).extensions == {"deep": nested(65)}
    with pytest.raises(InvalidRequest, match="`deep` is nested more than 65 deep") as caught:
        sampling(parse_chat(deep=nested(66)))
    assert caught.value.param == "deep"


def test_structured_output_is_no_parameter_of_an_engine() -> None:
    body = parse_chat(response_format={"type": "json_object"}, ebnf=None)
    assert extensions_of(body) == {}
    constraint = constraint_of(body)
    assert constraint is not None
    assert constraint.text == '{"type":"object"}'
    assert constraint_of(parse_chat(response_format={"type": "text"})) is None


@pytest.mark.parametrize("fields", [1, EXTENSIONS_MAX])
def test_parameters_are_bounded_in_bytes_together(fields: int) -> None:
    def filled(bytes_in_all: int) -> dict[str, str]:
        texts = [bytes_in_all // fields] * fields
        texts[-1] += bytes_in_all % fields
        return {f"x{number}": "a" * (length - len('""')) for number, length in enumerate(texts)}

    assert EXTENSIONS_BYTES_MAX >= 256 << 10
    assert sampling(parse_chat(**filled(EXTENSIONS_BYTES_MAX))).extensions == filled(EXTENSIONS_BYTES_MAX)
    with pytest.raises(InvalidRequest, match=f"longer than {EXTENSIONS_BYTES_MAX} bytes") as caught:
        sampling(parse_chat(**filled(EXTENSIONS_BYTES_MAX + 1)))
    assert caught.value.param == f"x{fields - 1}"


def test_there_are_few_unknown_parameters_with_short_names() -> None:
    with pytest.raises(InvalidRequest, match="more than 32 fields"):
        sampling(parse_chat(**{f"x{number}": 1 for number in range(EXTENSIONS_MAX + 1)}))
    with pytest.raises(InvalidRequest, match="longer than 256 characters"):
        sampling(parse_chat(**{"x" * 257: 1}))


MANY = 100_000
EXPANDING: list[dict[str, Any]] = [
    {"prompt": [""] * MANY}, {"prompt": [-1] * MANY}, {"prompt": [1] * MANY + ["a"]}, {"prompt": [[]] * MANY},
    {"prompt": [[-1] * MANY]}, {"prompt": [None] * MANY}, {"messages": [{}] * MANY}, {"messages": [{}] * 1000},
    {"messages": [{"role": "user", "content": [{}] * 1000}] * 100}, {"messages": [{"role": "user"}] * MANY},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1000}] * 100},
    {"stop": [1] * MANY}, {"stop": [""] * MANY}, {"stop_token_ids": [-1] * MANY}, {"stop_token_ids": [1] * MANY},
    {"logit_bias": {str(number): "x" for number in range(MANY)}}, {f"x{number}": 1 for number in range(MANY)},
]  # fmt: skip


@pytest.mark.parametrize("fields", EXPANDING, ids=lambda fields: next(iter(fields)))
def test_a_body_with_many_faults_costs_no_more_than_one_with_few(fields: dict[str, Any]) -> None:
    """Pydantic keeps about a kilobyte for each fault that it reports."""
    kind, required = (CompletionBody, COMPLETION) if "prompt" in fields else (ChatBody, CHAT)
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, json.dumps({**required, **fields}).encode())
    cause = caught.value.__cause__
    assert cause is None or (isinstance(cause, ValidationError) and cause.error_count() <= 8)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_content_parts_of_every_role_are_text(role: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_chat(messages=[{"role": role, "content": parts}]).messages[0].text() == "a\nb"


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "the body is empty; this endpoint takes a JSON object"),
        (b" \r\n", "the body is empty; this endpoint takes a JSON object"),
        (b'{"a":', "the body is not valid JSON: it is cut short"),
        (b'{"a":"\\ud800', "the body is not valid JSON: it is cut short"),
        (b'{"a":"\\\\ud800x', "the body is not valid JSON: it is cut short"),
        (
            b'{"a":"\\ud800"}',
            "the body is not valid JSON: invalid UTF-16 escape: `\\ud800` is half of a surrogate pair",
        ),
        (
            b'{"a":"\\uDbFf\\n"}',
            "the body is not valid JSON: invalid UTF-16 escape: `\\uDbFf` is half of a surrogate pair",
        ),
        (
            b'{"a":"\\\\\\ud800"}',
            "the body is not valid JSON: invalid UTF-16 escape: `\\ud800` is half of a surrogate pair",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("decode", [decode_object, read_envelope])
def test_a_body_that_is_no_json_says_what_is_wrong(
    decode: Callable[[bytes], object], payload: bytes, said: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(payload)
    assert caught.value.detail.endswith(said)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b'{"a":"\xff"}', "the body is not valid UTF-8"),
        (b'{"a":"\\ud800 and more text"}', "surrogate pair (byte 12)"),
        (b'{"a":"\\udc00"}', "surrogate pair (byte 12)"),
    ],
    ids=str,
)
def test_a_text_that_is_none_says_what_is_wrong(payload: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_object(payload)
    assert caught.value.detail.endswith(said)


def test_a_refusal_in_the_history_is_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "I will not."}]
    assert parse_chat(messages=[{"role": "assistant", "content": parts}]).messages[0].text() == "a\nI will not."


@pytest.mark.parametrize(
    ("role", "part", "param"),
    [
        ("user", {"type": "refusal", "refusal": "no"}, "messages[0]"),
        ("assistant", {"type": "refusal"}, "messages[0].content[0].refusal"),
        ("assistant", {"type": "refusal", "refusal": "no", "text": "no"}, "messages[0].content[0].text"),
        ("assistant", {"type": "text", "refusal": "no"}, "messages[0].content[0].text"),
        ("assistant", {"refusal": "no"}, "messages[0].content[0].type"),
    ],
    ids=str,
)
def test_malformed_refusals_are_named(role: str, part: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(messages=[{"role": role, "content": [part]}])
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", [3, [], None, ["a", 2], [1, -2], [[1], []], [[]], [[1], "a"], [1.5], [2**31], {}])
def test_hostile_prompts(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(prompt=prompt)
    assert (caught.value.param or "").startswith("prompt")


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"[]", b"3", b"null", b"{", b"\xff\xfe", b'{"model": "\xff"}', b'{"model": "\\ud800"}',
        b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e999}', b"[" * 100_000,
        b'{"a":' * 100_000, b'{"max_tokens": ' + b"9" * 10_000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_json_object(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(ChatBody, payload)


@given(payload=st.binary(max_size=64))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(CompletionBody, payload)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(
    fields=st.dictionaries(
        st.sampled_from([*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "other"]), JSON, max_size=4
    )
)
def test_any_fields_give_a_body_or_a_typed_error(fields: dict[str, Any]) -> None:
    for kind, required in ((ChatBody, CHAT), (CompletionBody, COMPLETION)):
        try:
            body = parse(kind, json.dumps({**required, **fields}).encode())
            sampling(body)
            output_of(body)
        except BatonError as error:
            assert error.http_status == 400


def test_the_context_bounds_the_output() -> None:
    assert room_of(10, 100, "prompt") == 90
    assert room_of(99, 100, "prompt") == 1
    with pytest.raises(ContextLengthExceeded, match="100 tokens in the prompt"):
        room_of(100, 100, "messages")
