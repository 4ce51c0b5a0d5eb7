"""Fields of requests: each has the effect that the table in `docs/api-fields.md` states."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from baton_gateway import constraints, fields
from baton_gateway.bodies import NAMES, ChatBody, CompletionBody, GenerationBody, parse
from baton_gateway.parameters import extensions_of, name_of
from baton_gateway.stop_strings import StopScanner
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from docs.api_fields_table import BEGIN, DOCUMENT, END, ENDPOINTS, ENGINE_FIELDS, NOTES, handling, table

BODIES: Final[dict[str, tuple[type[GenerationBody], dict[str, Any]]]] = {
    "chat": (ChatBody, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    "completions": (CompletionBody, {"model": "m", "prompt": "hi"}),
}
VALUES: Final[dict[str, Any]] = {
    # A value that each taken field accepts on its own.
    "add_generation_prompt": True, "add_special_tokens": True, "cache_salt": "s", "chat_template": "x",
    "chat_template_kwargs": {"a": 1}, "continue_final_message": False, "documents": [{"text": "t"}],
    "ebnf": 'root ::= "a"',
    "echo": True, "frequency_penalty": 1.0, "ignore_eos": True, "include_stop_str_in_output": True,
    "json_schema": {"type": "object"}, "logit_bias": {"1": 1}, "max_completion_tokens": 5, "max_tokens": 5,
    "messages": [{"role": "user", "content": "x"}], "min_p": 0.1, "min_tokens": 1, "model": "m", "n": 2,
    "no_stop_trim": True, "parallel_tool_calls": False, "presence_penalty": 1.0, "prompt": "x", "prompt_cache_key": "k",
    "reasoning_effort": "low", "regex": "a", "repetition_penalty": 1.1, "request_id": "r", "response_format":
    {"type": "json_object"}, "return_token_ids": True, "return_tokens_as_token_ids": True, "rid": "r",
    "safety_identifier": "s", "seed": 1, "session_id": "s", "skip_special_tokens": False, "stop": ["a"],
    "stop_token_ids": [1], "stream": True, "stream_options": {"include_usage": True}, "structural_tag": None,
    "structured_outputs": {"regex": "a"}, "temperature": 1, "tool_choice": "none", "tools": [], "top_k": 1,
    "top_logprobs": 0, "top_p": 0.5, "truncate_prompt_tokens": 3, "truncation_side": None, "user": "u",
    "vllm_xargs": {"a": 1},
}  # fmt: skip


def parsed(endpoint: str, **given: object) -> GenerationBody:
    kind, least = BODIES[endpoint]
    return parse(kind, json.dumps({**least, **given}).encode())


def test_the_document_has_the_table() -> None:
    written = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]
    assert written == table(), "bring docs/api-fields.md in line: python docs/api_fields_table.py"


def test_every_field_of_the_engines_servers_is_handled() -> None:
    engines: dict[str, dict[str, list[str]]] = json.loads(ENGINE_FIELDS.read_text())
    for engine, by_endpoint in engines.items():
        for endpoint, names in by_endpoint.items():
            assert [name for name in names if name not in NAMES] == [], f"{engine}, {endpoint}"
    assert set(NOTES) <= NAMES
    assert not fields.IGNORED & (fields.REFUSED.keys() | fields.ENGINE)
    assert not fields.REFUSED.keys() & fields.ENGINE


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_field_has_the_effect_that_the_table_states(name: str, endpoint: str) -> None:
    assert extensions_of(parsed(endpoint, **{name: None} if name not in BODIES[endpoint][1] else {})) == {}
    match handling(name, endpoint):
        case "taken":
            logprobs = True if endpoint == "chat" else 2
            body = parsed(endpoint, **{name: logprobs if name == "logprobs" else VALUES[name]})
            assert extensions_of(body) == ({"extra_args": {"a": 1}} if name == "vllm_xargs" else {})
            known = name in type(body).model_fields or name in constraints.FIELDS or name in fields.SESSION
            assert known
        case "ignored":
            assert extensions_of(parsed(endpoint, **{name: {"any": "thing"}})) == {}
        case "engine":
            assert extensions_of(parsed(endpoint, **{name: [1]})) == {name: [1]}
        case "refused":
            with pytest.raises(InvalidRequest, match="not supported") as refused:
                parsed(endpoint, **{name: "else"})
            assert refused.value.param == name
            assert fields.REFUSED[name].reason in refused.value.detail
            for neutral in fields.REFUSED[name].neutral:
                assert extensions_of(parsed(endpoint, **{name: neutral})) == {}
        case _:
            with pytest.raises(InvalidRequest, match="not a field of this endpoint") as refused:
                parsed(endpoint, **{name: VALUES[name] or ["x"]})
            assert refused.value.param == name


@pytest.mark.parametrize(
    ("given_name", "hint"),
    [
        ("temprature", "temperature"), ("max_token", "max_tokens"), ("maxTokens", "max_tokens"),
        ("stream_option", "stream_options"),
        ("truncate_prompt_token", "truncate_prompt_tokens"), ("Stop", "stop"), ("foo", ""), ("x" * 5000, ""), ("", ""),
    ],
)  # fmt: skip
def test_a_misspelt_field_gets_a_hint(given_name: str, hint: str) -> None:
    assert fields.hint(given_name, NAMES) == (f": did you mean `{hint}`?" if hint else "")


@pytest.mark.parametrize(
    ("given_fields", "param", "hint"),
    [
        ({"stream_options": {"include_useage": True}}, "stream_options.include_useage", "`include_usage`"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "texts": 1}]}]},
         "messages[0].content[0].texts", "`text`"),
    ],
)  # fmt: skip
def test_objects_inside_drop_nothing_silently(given_fields: dict[str, Any], param: str, hint: str) -> None:
    with pytest.raises(InvalidRequest, match="does not know this field") as refused:
        parsed("chat", **given_fields)
    assert (refused.value.param or "").endswith(param.rpartition(".")[2])
    assert hint in refused.value.detail


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncation_side": "left"}, "truncation_side"),
    ({"vllm_xargs": {}, "extra_args": {}}, "vllm_xargs"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"documents": "x"}, "documents"),
    ({"documents": [{}] * 4097}, "documents"),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages[0]"),
]


@pytest.mark.parametrize(("given_fields", "param"), FAULTS)
def test_values_that_are_none(given_fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed("chat", **given_fields)
    assert refused.value.param == param


def test_a_request_has_one_name() -> None:
    assert name_of(parsed("chat", request_id="a", rid="b")) == "a"
    assert name_of(parsed("completions", rid="b")) == "b"
    assert name_of(parsed("chat")) == ""


@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5), text=st.text("ab", max_size=12))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(stops: list[str], text: str) -> None:
    shown, stop = StopScanner(stops).feed(text)
    if stop is None:
        tails = [text[at:] for at in range(len(text) + 1)]
        assert text[len(shown) :] == next(tail for tail in tails if any(each.startswith(tail) for each in stops))
    else:
        assert not any(each in shown for each in stops)
