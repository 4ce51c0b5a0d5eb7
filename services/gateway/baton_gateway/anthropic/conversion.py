"""Messages as chats: the gateway serves both on one path. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from baton.errors import InvalidRequest
from baton_gateway.anthropic.bodies import (
    DROPPED,
    AnyChoice,
    AssistantMessage,
    MessagesBody,
    NoChoice,
    SystemMessage,
    TextBlock,
    Texts,
    ThinkingBlock,
    ThinkingDisabled,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
    body_of,
)
from baton_gateway.bodies import ChatBody, decode_object, parse_fields

ENGINE_FIELDS: Final = frozenset(
    {
        "cache_salt", "frequency_penalty", "ignore_eos", "logit_bias", "min_p", "min_tokens", "presence_penalty",
        "repetition_penalty", "seed", "skip_special_tokens", "stop_token_ids",
    }
)  # fmt: skip
"""Fields of chats that are engine parameters, and leave the form of an answer as it is."""
THINKING_VARIABLES: Final = ("enable_thinking", "thinking")
"""Variables by which chat templates switch reasoning on or off."""
ERROR_PREFIX: Final = "Error: "
"""Prefix of a tool's result that is an error: chats have no other mark of it."""
_PATHS: Final = ((".function.parameters", ".input_schema"), (".function", ""))


def parse_messages(payload: bytes | bytearray) -> ChatBody:
    """Return a body of Messages as a chat. Raises InvalidRequest that names the field and its fault."""
    return _chat(payload, counts=False)


def parse_count(payload: bytes | bytearray) -> ChatBody:
    """Return a body whose tokens are to be counted as a chat. Raises as `parse_messages`."""
    return _chat(payload, counts=True)


def _chat(payload: bytes | bytearray, *, counts: bool) -> ChatBody:
    fields = decode_object(payload)
    body = body_of(fields)
    if body.max_tokens is None and not counts:
        raise InvalidRequest("`max_tokens` is required", param="max_tokens")
    known = MessagesBody.__struct_fields__
    others = {name: value for name, value in fields.items() if name not in known and name not in DROPPED}
    if foreign := next((name for name in others if name in ChatBody.model_fields and name not in ENGINE_FIELDS), None):
        raise InvalidRequest(f"`{foreign}` is a field of chats: Messages do not have it", param=foreign)
    try:
        return parse_fields(ChatBody, {**others, **chat_fields(body)})
    except InvalidRequest as error:
        raise _renamed(error) from error


def chat_fields(body: MessagesBody) -> dict[str, Any]:
    """Return the fields of a chat that asks for the same."""
    messages = list(_messages(body))
    if not messages:
        raise InvalidRequest("`messages` say nothing: a system message without text is none", param="messages")
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_tokens,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences or None,
        "user": body.metadata and body.metadata.user_id,
        **_tool_fields(body),
    }
    if body.thinking is not None:
        is_on = not isinstance(body.thinking, ThinkingDisabled)
        fields["chat_template_kwargs"] = dict.fromkeys(THINKING_VARIABLES, is_on)
    if (config := body.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            named = {"name": "answer", "schema": config.format.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
    last = body.messages[-1]
    if isinstance(last, AssistantMessage):
        if "tool_calls" in messages[-1]:
            where = f"messages[{len(body.messages) - 1}]"
            raise InvalidRequest(f"`{where}` uses tools: their results have to follow", param=where)
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    return {name: value for name, value in fields.items() if value is not None}


def _tool_fields(body: MessagesBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": _given(
                    name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
                ),
            }
            for tool in body.tools
        ]
    if (choice := body.tool_choice) is not None:
        match choice:
            case ToolChoice(name=name):
                fields["tool_choice"] = {"type": "function", "function": {"name": name}}
            case AnyChoice():
                fields["tool_choice"] = "required"
            case NoChoice():
                fields["tool_choice"] = "none"
            case _:
                fields["tool_choice"] = "auto"
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _messages(body: MessagesBody) -> Iterator[dict[str, Any]]:
    if system := _text(body.system):
        yield {"role": "system", "content": system}
    for message in body.messages:
        match message:
            case SystemMessage():
                if system := _text(message.content):
                    yield {"role": "system", "content": system}
            case AssistantMessage():
                yield _assistant(message)
            case UserMessage():
                yield from _user(message)


def _user(message: UserMessage) -> Iterator[dict[str, Any]]:
    """Yield a user's blocks in their order: each result of a tool is a message of its own."""
    if isinstance(message.content, str):
        yield {"role": "user", "content": message.content}
        return
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": _text(texts)}
            texts = []
        yield _result(block)
    if texts or not message.content:
        yield {"role": "user", "content": _text(texts)}


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = _text(block.content)
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": ERROR_PREFIX + text if block.is_error else text,
    }


def _assistant(message: AssistantMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    blocks = message.content
    said: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
    }
    if thinking := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        said["reasoning_content"] = thinking
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]:
        said["tool_calls"] = calls
    return said


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text(content: Texts | None) -> str:
    if isinstance(content, list):
        return "\n".join(block.text for block in content)
    return content or ""


def _given(**fields: object) -> Mapping[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """Return the error with the names that fields have in Messages."""
    detail, param = error.detail, error.param
    for chat, ours in _PATHS:
        detail = detail.replace(f"]{chat}", f"]{ours}")
        param = param and param.replace(f"]{chat}", f"]{ours}")
    return InvalidRequest(detail, param=param)
