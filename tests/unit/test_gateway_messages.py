"""Anthropic's Messages: bodies as chats, answers as blocks, errors."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from baton_gateway.answers import AnswerHead, WholeChoice, usage_of
from baton_gateway.anthropic.conversion import parse_count, parse_messages
from baton_gateway.anthropic.errors import error_body, status_of
from baton_gateway.anthropic.events import MessageEvents
from baton_gateway.choice import Piece, ToolCall
from baton_gateway.idempotency import KeyInUse
from baton_gateway.order import Outcome
from baton_gateway.parameters import constraint_of
from baton_gateway.parsing.formats import FormatName, ParsingOptions
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NoWorkers,
    Overloaded,
    PayloadTooLarge,
    RateLimited,
    RequestStopped,
    Unauthenticated,
)
from baton.messages.attempts import FinishReason
from tests.harness.gateway.samples import form_of

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
HI: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> dict[str, Any]:
    body = parse_messages(json.dumps({**HI, **fields}).encode())
    return body.model_dump(exclude_none=True)


# ---------------------------------------------------------------- bodies


def test_fields_as_those_of_a_chat() -> None:
    assert chat(
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        stop_sequences=["x"],
        temperature=0,
        top_k=3,
        top_p=0.5,
        stream=True,
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        service_tier="auto",
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    ) == {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hi"}],
        "stop": ["x"],
        "temperature": 0,
        "top_k": 3,
        "top_p": 0.5,
        "stream": True,
        "user": "u",
        "chat_template_kwargs": {"enable_thinking": True, "thinking": True},
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }


CHOICES: list[tuple[dict[str, Any], object]] = [
    ({"type": "any"}, "required"),
    ({"type": "none"}, "none"),
    ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_choices_of_tools(choice: dict[str, Any], expected: object) -> None:
    assert chat(tools=[TOOL], tool_choice=choice)["tool_choice"] == expected


def test_an_empty_system_prompt_is_none() -> None:
    for system in ("", [], [{"type": "text", "text": ""}]):
        assert chat(system=system)["messages"] == HI["messages"]
    turns: list[Any] = [{"role": "system", "content": []}, {"role": "user", "content": []}]
    assert chat(messages=turns)["messages"] == [{"role": "user", "content": ""}]


NO = [{"type": "text", "text": "no"}]


def test_turns_with_tools_and_thinking() -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "é"}},
                {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "ok"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    called = [
        {"id": number, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for number, arguments in (("t1", '{"x":"é"}'), ("t2", "{}"))
    ]
    assert chat(messages=turns)["messages"] == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": called},
        {"role": "tool", "tool_call_id": "t1", "content": "ok"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "and?"},
    ]


def test_an_answer_that_the_request_begins_is_continued() -> None:
    fields = chat(messages=[*HI["messages"], {"role": "assistant", "content": "The"}])
    assert (fields["add_generation_prompt"], fields["continue_final_message"]) == (False, True)


def test_a_schema_of_the_output_is_a_constraint() -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    body = parse_messages(json.dumps({**HI, "output_config": {"format": form, "effort": "low"}}).encode())
    constraint = constraint_of(body)
    assert constraint is not None
    assert json.loads(constraint.text) == form["schema"]
    assert body.reasoning_effort == "low"


def test_counting_needs_no_bound() -> None:
    body = {name: value for name, value in HI.items() if name != "max_tokens"}
    assert parse_count(json.dumps(body).encode()).max_tokens is None
    with pytest.raises(InvalidRequest, match="required") as refused:
        parse_messages(json.dumps(body).encode())
    assert refused.value.param == "max_tokens"


def turn(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
BLOCK = "messages[0].content[0].type"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (turn(IMAGE), BLOCK, "'image'"),
    (turn({"type": "document", "source": {}}), BLOCK, "'document'"),
    (
        turn({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}),
        "messages[0].content[0].content[0].type",
        "'image'",
    ),
    ({"messages": []}, "messages", "length"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "'robot'"),
    (turn({"type": "tool_use", "id": "a", "name": "f", "input": {}}), BLOCK, "'tool_use': a user's message has text"),
    (turn({"type": "tool_use", "id": "a", "name": "f", "input": {}}, role="assistant"), "messages[0]", "results"),
    ({"max_tokens": 0}, "max_tokens", "1"),
    ({"max_tokens": "5"}, "max_tokens", "int"),
    ({"temperature": 3}, "temperature", "2"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "web_search_20250305"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "match"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "another tool"),
    (
        {"tools": [{**TOOL, "input_schema": {"type": "string"}}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema.type",
        "object",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "requires a call, and there are no `tools`"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences", "64"),
    ({"thinking": {"type": "enabled"}}, "thinking", "budget_tokens"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "'xml'"),
    ({"n": 2}, "n", "chats"),
    ({"logprobs": True}, "logprobs", "chats"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED, ids=range(len(REFUSED)))
def test_bodies_that_are_refused(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert said in refused.value.detail


# ---------------------------------------------------------------- answers

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é\\n"}}\n</tool_call>'
PARTS = st.lists(
    st.sampled_from(["", " ", "\n", "Hm. ", "naïve 😀", CALL, "<tool_call>\n{no}\n</tool_call>"]), max_size=8
)


def pieces_of(text: str, cuts: list[int], *, thinks: bool) -> list[Piece]:
    """Return an answer's pieces, as `ParsedText` makes them."""
    parser = form_of(FormatName.HERMES).parser(ParsingOptions(prefix="<think>" if thinks else "", tools=True))
    parsed = [parser.feed(text[begin:end]) for begin, end in pairwise([0, *cuts, len(text)])]
    parsed.append(parser.finish())
    pieces: list[Piece] = []
    calls = 0
    for each in parsed:
        made = tuple(
            ToolCall(calls + at, f"c{calls + at}", call.name, call.arguments) for at, call in enumerate(each.calls)
        )
        calls += len(made)
        pieces.append(Piece(text=each.content, reasoning=each.reasoning, calls=made, calls_at=each.calls_at))
    return [piece for piece in pieces if piece.is_shown]


def events_in(stream: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream's events make: a client that knows the order of events, and nothing else."""
    (start, ping), rest = events[:2], events[2:]
    assert ping == {"type": "ping"}
    message, texts = start["message"], list[str]()
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"]) == len(texts)
                message["content"].append(event["content_block"])
                texts.append("")
            case "content_block_delta":
                assert event["index"] == len(texts) - 1
                kind, value = event["delta"].values()
                if kind == "signature_delta":
                    message["content"][-1]["signature"] = value
                else:
                    texts[-1] += value
            case "content_block_stop":
                block = message["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(texts[-1])
                else:
                    block[block["type"]] = texts[-1]
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
            case other:
                assert other == "message_stop"
                assert event is rest[-1]
    return message


@given(PARTS, st.booleans(), st.booleans(), st.data())
def test_streamed_equals_whole_however_it_was_cut(
    parts: list[str], thinks: bool, stopped: bool, data: st.DataObject
) -> None:
    text = ("Let me see.\n</think>\n\n" if thinks else "") + "".join(parts)
    head = AnswerHead(request="r", model="m", created_s=0)
    outcome = Outcome(FinishReason.STOP, 7, 2, text.count('"f"'), "END" if stopped else "")
    usage = usage_of(10, 7, 2)
    messages: list[dict[str, Any]] = []
    for _ in range(2):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces = pieces_of(text, cuts, thinks=thinks)
        events, collected = MessageEvents(head, 10), WholeChoice()
        stream = events.opening(0) + b"".join(events.piece(0, piece) for piece in pieces)
        messages.append(folded(events_in(stream + events.closing(0, outcome) + events.end(usage))))
        for piece in pieces:
            collected.add(piece)
        messages.append(json.loads(MessageEvents(head, 10).whole([collected], [outcome], usage)))
    assert all(message == messages[0] for message in messages)
    reason = "tool_use" if outcome.calls else "stop_sequence" if stopped else "end_turn"
    assert messages[0]["stop_reason"] == reason
    assert messages[0]["usage"] == {
        "input_tokens": 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 7,
    }
    assert all(block.get("text", "x").strip() for block in messages[0]["content"])


# ---------------------------------------------------------------- errors

ERRORS: list[tuple[BatonError, int, str]] = [
    (InvalidRequest("x"), 400, "invalid_request_error"),
    (Unauthenticated("x"), 401, "authentication_error"),
    (Forbidden("x"), 403, "permission_error"),
    (ModelNotFound("x"), 404, "not_found_error"),
    (KeyInUse("x"), 409, "invalid_request_error"),
    (PayloadTooLarge("x"), 413, "request_too_large"),
    (RequestStopped("x"), 422, "invalid_request_error"),
    (RateLimited("x"), 429, "rate_limit_error"),
    (Overloaded("x"), 529, "overloaded_error"),
    (NoWorkers("x"), 529, "overloaded_error"),
    (DeadlineExceeded("x"), 504, "timeout_error"),
    (EngineFailed("x"), 500, "api_error"),
    (BatonError("x"), 500, "api_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS, ids=[kind + str(status) for _, status, kind in ERRORS])
def test_errors_in_anthropics_form(error: BatonError, status: int, kind: str) -> None:
    assert status_of(error) == status
    assert error_body(error, "r") == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "r"}
