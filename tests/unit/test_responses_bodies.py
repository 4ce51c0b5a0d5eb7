"""Bodies of /v1/responses: the chats that they become, and what is said of those that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from baton_gateway.bodies import ChatBody
from baton_gateway.parameters import sampling_of
from baton_gateway.responses.bodies import ResponseContext, ResponseRequest, read_envelope
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}
REASONING: dict[str, Any] = {
    "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}],
}  # fmt: skip
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT: dict[str, Any] = {
    "type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "ok"}],
}  # fmt: skip
MESSAGES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.text()}
)
ITEM: st.SearchStrategy[dict[str, Any]] = MESSAGES | st.sampled_from([REASONING, CALL, OUTPUT])
ITEMS = st.lists(ITEM, min_size=1, max_size=8)


def request(history: list[Any] | None = None, **fields: Any) -> ResponseRequest:
    body = json.dumps({"model": "m", "input": "hi", **fields}).encode()
    read_envelope(body)
    return ResponseRequest(body, ResponseContext(request="r", history=json.dumps(history or []).encode()))


def chat(history: list[Any] | None = None, **fields: Any) -> ChatBody:
    made = request(history, **fields)
    with made.naming():
        return made.chat()


@given(ITEMS, ITEMS)
def test_a_stored_conversation_is_the_one_that_is_sent_whole(before: list[Any], after: list[Any]) -> None:
    stored = [json.loads(item) for item in request(input=before).asked.items]
    assert len({item["id"] for item in stored}) == len(stored)
    continued, whole = chat(stored, input=after), chat(input=[*before, *after])
    assert continued.messages == whole.messages
    assert chat(input=stored).messages == chat(input=before).messages


@pytest.mark.parametrize("path", ["tool_calls", "tool_calls[0]", "tool_calls[0].function"])
def test_an_error_about_calls_names_their_item(path: str) -> None:
    made = request(input=[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}])
    with pytest.raises(InvalidRequest, match=r"`input\[0\]`: no") as refused, made.naming():
        raise InvalidRequest(f"`messages[0].{path}`: no", param=f"messages[0].{path}")
    assert refused.value.param == "input[0]"


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"'])
def test_a_body_that_is_no_object_is_called_so_as_on_other_endpoints(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^the body must be a JSON object$") as refused:
        read_envelope(body)
    assert refused.value.param is None


@given(ITEMS, st.integers(0, 40))
def test_truncation_leaves_out_as_few_turns_as_it_takes(items: list[Any], room: int) -> None:
    made = request(input=items, instructions="brief")
    whole = made.chat()

    def fits(body: ChatBody) -> bool:
        return sum(len(message.text()) + 4 for message in body.messages) <= room

    shortened = made.shorten(whole, fits)
    turns = [at for at, message in enumerate(whole.messages) if message.role == "user"]
    choices = [whole.messages, *([whole.messages[0], *whole.messages[at:]] for at in turns)]
    fitting = [each for each in choices if fits(whole.model_copy(update={"messages": each}))]
    assert shortened.messages == (fitting or choices[-1:])[0]


def test_the_parts_of_an_assistants_turn_become_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    said: dict[str, Any] = {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    }
    output = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    messages = chat(input=[USER, reasoning, said, call, {**call, "call_id": "d"}, output, said]).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
    turn = messages[1]
    assert (turn.reasoning_content, turn.text(), len(turn.tool_calls or [])) == ("hm", "I look.", 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": None, "reasoning": None, "tools": None, "tool_choice": None, "include": None, "metadata": None},
        {"text": {"format": None, "verbosity": None}, "reasoning": {"effort": None, "summary": None}},
        {"input": [{"type": "reasoning", "id": None, "summary": None, "content": None}, USER]},
    ],
)
def test_null_stands_for_what_is_left_out(fields: dict[str, Any]) -> None:
    said = [{"type": "reasoning"}, USER] if "input" in fields else "hi"
    assert chat(**fields) == chat(input=said)
    assert request(**fields).asked == request(input=said).asked


def test_allowed_tools_are_the_ones_that_the_model_sees() -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "ab"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}
    body = chat(tools=tools, tool_choice=allowed)
    assert [tool.function.name for tool in body.active_tools()] == ["b"]
    assert body.tool_choice == "auto"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"[]", None),
        (b"{", None),
        (b'{"store": 1}', "store"),
        (b'{"background": "x"}', "background"),
        (b'{"previous_response_id": 5}', "previous_response_id"),
        (b'{"model":"m","input":"x","previous_response_id":""}', "previous_response_id"),
        (b'{"input": ' + b"[" * 5000 + b"]" * 5000 + b"}", None),
        (b'{"model":"m","input":"\xff"}', None),
        (b'{"model":"m","input":"\\ud800"}', None),
        (b'{"model":"m","input":"x","top_k":1' + b"0" * 40 + b"}", None),
        (b'{"model":"m","input":"x","other":1' + b"0" * 40 + b"}", None),
        (b'{"model":"m","input":"x","other":' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}", None),
        (b'{"model":"m","input":"x","max_tokens":5}', "max_tokens"),
        (b'{"model":"m","input":"x","stream_options":{}}', "stream_options"),
        (
            b'{"model":"m","input":"x","stream":true,"stream_options":{"include_usage":true}}',
            "stream_options.include_usage",
        ),
        (b'{"model":"m","input":"x","text":{"format":{"type":"text","nme":"x"}}}', "text.format.nme"),
        (b'{"model":"m","input":[{"role":"robot","content":"x"}]}', "input[0].role"),
        (b'{"model":"m","input":[{"type":"message","role":"user"}]}', "input[0].content"),
        (b'{"model":"m","input":[{"type":"reasoning","content":[{"type":"image"}]}]}', "input[0].content"),
        (b'{"model":"m","input":[' + b"{}," * 65536 + b"{}]}", "input"),
    ],
    ids=range(20),
)
def test_bad_bodies_are_invalid_requests(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_envelope(body)
        made = ResponseRequest(body, ResponseContext(request="r"))
        with made.naming():
            sampling_of(made.chat())
    assert param is None or refused.value.param == param


@pytest.mark.parametrize("name", ["`messages[9]`", "x`messages[9].content`y"])
def test_what_a_client_wrote_is_not_taken_for_a_path(name: str) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    with pytest.raises(InvalidRequest, match="which is none of `tools`"):
        chat(tools=tools, tool_choice={"type": "function", "name": name})


@pytest.mark.parametrize("fields", [{"name": "f" * 257}, {"call_id": ""}])
def test_a_conversation_with_what_no_request_could_send_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=rf"`\[1\]\.{next(iter(fields))}`: string should have") as refused:
        chat([USER, {**CALL, **fields}])
    assert refused.value.param == "previous_response_id"
