"""Items of a conversation, as clients send them and as they are stored, and the chat messages of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from baton.errors import InvalidRequest
from baton_gateway.answers import to_json
from baton_gateway.tool_bodies import CALLS_MAX, Text

ITEMS_MAX: Final = 65_536
PARTS_MAX: Final = 1024
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_SERVED: Final = ("message", "function_call", "function_call_output", "reasoning")

Id = Annotated[str, Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class TextPart(_Strict):
    """A part of a content: text, of whatever kind, or a refusal."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text

    def said(self) -> str:
        return self.text


class RefusalPart(_Strict):
    type: Literal["refusal"]
    refusal: Text

    def said(self) -> str:
        return self.refusal


def _tag(value: object, default: str) -> str:
    """Return the union member that a value is meant for. Tags are no field names, so that paths leave them out."""
    kind = cast("Mapping[str, object]", value).get("type", default) if isinstance(value, Mapping) else default
    return f"({kind})"


def _part_tag(part: object) -> str:
    return "(refusal)" if _tag(part, "") == "(refusal)" else "(text)"


def _item_tag(item: object) -> str:
    return _tag(item, "message")


Part = Annotated[
    Annotated[TextPart, Tag("(text)")] | Annotated[RefusalPart, Tag("(refusal)")], Discriminator(_part_tag)
]
Parts = Annotated[list[Part], Field(max_length=PARTS_MAX, fail_fast=True)]


class Message(_Strict):
    type: Literal["message"] = "message"
    id: Id | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts

    def stored(self, new_id: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self.id or f"msg_{new_id}",
            "status": "completed",
            "role": self.role,
            "content": [_part(text, self.role) for text in _texts(self.content)],
        }


class FunctionCall(_Strict):
    type: Literal["function_call"]
    id: Id | None = None
    call_id: Id
    name: Id
    arguments: Text

    def stored(self, new_id: str) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id or f"fc_{new_id}",
            "status": "completed",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


class FunctionCallOutput(_Strict):
    type: Literal["function_call_output"]
    id: Id | None = None
    call_id: Id
    output: Text | Parts

    def stored(self, new_id: str) -> dict[str, Any]:
        return {
            "type": "function_call_output",
            "id": self.id or f"fco_{new_id}",
            "status": "completed",
            "call_id": self.call_id,
            "output": "\n".join(_texts(self.output)),
        }


class Reasoning(_Strict):
    type: Literal["reasoning"]
    id: Id | None = None
    content: Parts | None = None
    summary: Parts | None = None

    def stored(self, new_id: str) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "id": self.id or f"rs_{new_id}",
            "summary": [{"type": "summary_text", "text": text} for text in _texts(self.summary or [])],
            "content": [{"type": "reasoning_text", "text": text} for text in _texts(self.content or [])],
        }

    def said(self) -> str:
        return "\n".join(_texts(self.content or self.summary or []))


Item = Annotated[
    Annotated[Message, Tag("(message)")]
    | Annotated[FunctionCall, Tag("(function_call)")]
    | Annotated[FunctionCallOutput, Tag("(function_call_output)")]
    | Annotated[Reasoning, Tag("(reasoning)")],
    Discriminator(_item_tag),
]
AnyItem = Message | FunctionCall | FunctionCallOutput | Reasoning
Items = Annotated[list[Item], Field(max_length=ITEMS_MAX, fail_fast=True)]


def check_kinds(items: object, where: str) -> None:
    """Raise InvalidRequest that names an item or a part of a type that is not served."""
    given = cast("list[object]", items) if isinstance(items, list) else []
    if len(given) > ITEMS_MAX:
        raise InvalidRequest(f"`{where}` has more than {ITEMS_MAX} items", param=where)
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            continue
        fields, path = cast("dict[str, object]", item), f"{where}[{index}]"
        kind = fields.get("type", "message")
        if kind not in _SERVED:
            said = f"`{path}` is an item of type {str(kind)[:40]!r}; this server takes {', '.join(_SERVED)}"
            raise InvalidRequest(said, param=path)
        for name in ("content", "output", "summary"):
            parts = fields.get(name)
            for part in cast("list[object]", parts) if isinstance(parts, list) else ():
                found = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
                if isinstance(found, str) and found not in _TEXT_PARTS:
                    said = f"`{path}.{name}` has a part of type {found[:40]!r}; this server takes text only, "
                    raise InvalidRequest(f"{said}no images, audio or files", param=f"{path}.{name}")


class Conversation:
    """Chat messages of items, and for each the item that it began with."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        """For each message, where its item stands in the request."""

    def add(self, items: Iterable[AnyItem], where: str | None) -> None:
        """Add items. `where`: the list that they stand in; None: an earlier response."""
        for index, item in enumerate(items):
            self._add(item, "previous_response_id" if where is None else f"{where}[{index}]")

    def add_text(self, role: str, text: str, where: str) -> None:
        self.messages.append({"role": role, "content": text})
        self.origins.append(where)

    def _add(self, item: AnyItem, where: str) -> None:
        match item:
            case Message(role="assistant"):
                message = self._assistant(where, but=("content", "tool_calls"))
                message["content"] = "".join(_texts(item.content))
            case Message():
                self.add_text(item.role, "\n".join(_texts(item.content)), where)
            case Reasoning():
                message = self._assistant(where, but=("reasoning_content", "content", "tool_calls"))
                message["reasoning_content"] = item.said()
            case FunctionCall():
                message = self._assistant(where)
                calls = cast("list[dict[str, Any]]", message.setdefault("tool_calls", []))
                if len(calls) == CALLS_MAX:
                    raise InvalidRequest(f"`{where}`: more than {CALLS_MAX} calls without outputs", param=where)
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case FunctionCallOutput():
                self.messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": "\n".join(_texts(item.output))}
                )
                self.origins.append(where)

    def _assistant(self, where: str, but: Sequence[str] = ()) -> dict[str, Any]:
        """Return the message of the assistant's present turn; a new one if the turn has any of these parts already."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not any(last.get(part) is not None for part in but):
            return last
        self.messages.append({"role": "assistant"})
        self.origins.append(where)
        return self.messages[-1]


def stored(given: str | Sequence[AnyItem], request: str) -> tuple[bytes, ...]:
    """Return a request's own items as they are stored, each with an id."""
    items = [Message(role="user", content=given)] if isinstance(given, str) else given
    return tuple(to_json(item.stored(f"{request}_in{index}")) for index, item in enumerate(items))


def _texts(content: str | Sequence[TextPart | RefusalPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.said() for part in content]


def _part(text: str, role: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}
