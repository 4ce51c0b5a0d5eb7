"""Bodies of Anthropic's Messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta, Struct

from baton.errors import InvalidRequest
from baton_gateway.bodies import STOPS_MAX

MESSAGES_MAX: Final = 65_536
BLOCKS_MAX: Final = 4096
"""Most blocks in one message."""
DROPPED: Final = frozenset(
    {"cache_control", "diagnostics", "inference_geo", "service_tier", "speed", "user_profile_id", "workspace_id"}
)
"""Fields that change no token: prefixes are cached without being asked for, and there is one tier and one region."""

Id = Annotated[str, Meta(min_length=1, max_length=256)]
TokenCount = Annotated[int, Meta(ge=1, lt=1 << 31)]


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Thinking that only Anthropic can read."""

    data: str = ""


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: Id
    name: Id
    input: dict[str, Any]


class ToolResultBlock(Struct, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: Id
    content: str | Annotated[list[TextBlock], Meta(max_length=BLOCKS_MAX)] | None = None
    is_error: bool | None = None


Texts = str | Annotated[list[TextBlock], Meta(max_length=BLOCKS_MAX)]


class UserMessage(Struct, frozen=True, tag_field="role", tag="user"):
    content: str | Annotated[list[TextBlock | ToolResultBlock], Meta(max_length=BLOCKS_MAX)]


class AssistantMessage(Struct, frozen=True, tag_field="role", tag="assistant"):
    content: (
        str
        | Annotated[list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock], Meta(max_length=BLOCKS_MAX)]
    )


class SystemMessage(Struct, frozen=True, tag_field="role", tag="system"):
    content: Texts


class OfferedTool(Struct, frozen=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class AutoChoice(Struct, frozen=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, frozen=True, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(Struct, frozen=True, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, frozen=True, tag_field="type", tag="none"):
    disable_parallel_tool_use: bool | None = None


class ThinkingEnabled(Struct, frozen=True, tag_field="type", tag="enabled"):
    budget_tokens: TokenCount


class ThinkingAdaptive(Struct, frozen=True, tag_field="type", tag="adaptive"):
    pass


class ThinkingDisabled(Struct, frozen=True, tag_field="type", tag="disabled"):
    pass


class Metadata(Struct, frozen=True):
    user_id: Annotated[str, Meta(max_length=256)] | None = None


class JsonFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class MessagesBody(Struct, frozen=True, kw_only=True):
    """Body of both endpoints. Fields not named here are engine parameters, as in chats."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    messages: Annotated[
        list[UserMessage | AssistantMessage | SystemMessage], Meta(min_length=1, max_length=MESSAGES_MAX)
    ]
    max_tokens: TokenCount | None = None
    """Only counting takes a body without it."""
    system: Texts | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=STOPS_MAX)] | None
    ) = None
    tools: list[OfferedTool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None


def body_of(fields: Mapping[str, object]) -> MessagesBody:
    """Return the body. Raises InvalidRequest that names the field and its fault."""
    _refuse_tools_of_anthropic(fields.get("tools"))
    try:
        return msgspec.convert(fields, MessagesBody)
    except msgspec.ValidationError as error:
        raise _explained(error) from error


def _refuse_tools_of_anthropic(tools: object) -> None:
    for index, tool in enumerate(cast("list[object]", tools) if isinstance(tools, list) else ()):
        kind = cast("dict[str, object]", tool).get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            where = f"tools[{index}].type"
            said = f"`{where}`: this server runs no tools of its own, such as {str(kind)[:80]!r}"
            raise InvalidRequest(said, param=where)


_FAULT: Final = re.compile(r"(?P<fault>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)


def _explained(error: msgspec.ValidationError) -> InvalidRequest:
    match = _FAULT.fullmatch(str(error))
    assert match is not None
    fault, path = match["fault"], (match["path"] or "body").replace("[...]", "")
    if path.endswith(".type") and ".content" in path:
        fault += (
            ": a user's message has text and tool results, an assistant's text, thinking and tool use; "
            "no images, documents or server tools"
        )
    return InvalidRequest(f"`{path}`: {fault[0].lower()}{fault[1:]}", param=path)
