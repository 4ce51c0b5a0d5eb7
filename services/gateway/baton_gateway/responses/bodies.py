"""Bodies of requests to /v1/responses, and the chats that they ask for. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from baton.errors import BatonError, InvalidRequest
from baton_gateway.bodies import ChatBody, GenerationBody, TokenCount, parse
from baton_gateway.body_checks import explain, explain_json
from baton_gateway.responses.items import AnyItem, Conversation, Items, check_kinds, stored
from baton_gateway.tool_bodies import TOOLS_MAX, Text

REFUSED: Final[Mapping[str, str]] = {
    "conversation": "continue a response by `previous_response_id`",
    "prompt": "this server keeps no prompts",
    "context_management": "nothing is compacted here; `truncation` can be `auto`",
    "moderation": "nothing is moderated here",
    "image": "this server answers with text",
    "access_programs": "this server has none",
}
"""Fields of OpenAI's API that are refused, and what to know instead."""
_OF_CHATS: Final[Mapping[str, str]] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
    "n": "",
    "return_token_ids": "",
    "return_tokens_as_token_ids": "",
}
"""Fields of chats, and their names here."""
_NAMES: Final = (
    (re.compile(r"^messages\[(\d+)\](\.content|\.tool_calls(\[\d+\](\.function)?)?)?"), ""),
    (re.compile(r"^messages"), "input"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
)
INCLUDED: Final = ("message.output_text.logprobs", "reasoning.encrypted_content")
LOGPROBS: Final = INCLUDED[0]
_ECHOED: Final = (
    "instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user",
)  # fmt: skip

Short = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Short], Field(max_length=16)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class FunctionTool(BaseModel):
    """A function that the model may call. Chats have one level more around it."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    name: str
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def of_chats(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}

    def echo(self) -> dict[str, Any]:
        return self.model_dump()


class TextFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def of_chats(self) -> dict[str, Any]:
        """Return the `response_format` of chats."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, self.type: self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})}

    def echo(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True) if self.type == "json_schema" else {"type": self.type}


class TextConfig(_Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Models cannot be told another one."""


class ReasoningConfig(_Strict):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Changes nothing: reasoning is given in full."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Earlier name of `summary`."""


class NamedTool(_Strict):
    type: Literal["function"]
    name: str


class AllowedTools(_Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=TOOLS_MAX)]


def _choice_tag(choice: object) -> str:
    """Return the union member that a choice is meant for. Tags are no field names, so that paths leave them out."""
    if isinstance(choice, Mapping):
        return "(some)" if cast("Mapping[str, object]", choice).get("type") == "allowed_tools" else "(one)"
    return "(word)"


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(word)")]
    | Annotated[NamedTool, Tag("(one)")]
    | Annotated[AllowedTools, Tag("(some)")],
    Discriminator(_choice_tag),
]


class ResponsesBody(GenerationBody):
    """Body of POST /v1/responses. Other fields are those of chats, or engine parameters."""

    input: Text | Items
    instructions: Text | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    background: bool | None = None
    store: bool | None = None
    max_output_tokens: TokenCount | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Changes nothing: it bounds built-in tools, and there are none."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Short], Field(max_length=32)] | None = None
    metadata: Metadata | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_unserved(cls, fields: dict[str, Any]) -> dict[str, Any]:
        _check_served(fields)
        return fields

    def of_chats(self) -> dict[str, Any]:
        """Return the fields of a chat but for its messages."""
        fields = {name: getattr(self, name) for name in self.model_fields_set if name in GenerationBody.model_fields}
        fields |= self.model_extra or {}
        fields.pop("stream_options", None)
        fields["parallel_tool_calls"] = self.parallel_tool_calls
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["response_format"] = self.text_format.of_chats()
        fields["reasoning_effort"] = self.reasoning and self.reasoning.effort
        fields |= {name: getattr(self, name) for name in ("user", "safety_identifier", "prompt_cache_key")}
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        choice, tools = self.tool_choice, self.tools or []
        if isinstance(choice, AllowedTools):
            allowed = {tool.name for tool in choice.tools}
            tools, choice = [tool for tool in tools if tool.name in allowed], choice.mode
        if isinstance(choice, NamedTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        fields |= {"tools": [tool.of_chats() for tool in tools], "tool_choice": choice}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def text_format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat(type="text")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def check(self) -> None:
        for name in self.include or ():
            if name not in INCLUDED:
                said = f"`include` can have {' and '.join(f'`{each}`' for each in INCLUDED)}, not {name[:80]!r}"
                raise InvalidRequest(said, param="include")
        if (options := self.stream_options) is not None:
            if not self.stream:
                raise InvalidRequest("`stream_options` needs `stream` to be true", param="stream_options")
            for name in ("include_usage", "continuous_usage_stats"):
                if getattr(options, name) is not None:
                    where = f"stream_options.{name}"
                    said = f"`{where}` is a field of chats: here the last event has the usage"
                    raise InvalidRequest(said, param=where)
        if self.background and self.store is False:
            raise InvalidRequest("`background` needs `store`: its answer is read from there", param="store")

    def echo(self) -> dict[str, Any]:
        """Return the fields of a response that repeat the request."""
        choice, reasoning = self.tool_choice or "auto", self.reasoning or ReasoningConfig()
        return {
            **{name: getattr(self, name) for name in _ECHOED},
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": reasoning.model_dump(),
            "service_tier": "default",
            "text": {"format": self.text_format.echo(), "verbosity": "medium"},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.echo() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
        }


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a body that decide where a response is kept; the rest is read in an intake process."""

    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None


class ResponseContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a request for a response needs beside its body."""

    request: str
    history: bytes = b"[]"
    """Items before the request's own, oldest first, as a JSON array."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a request that its response repeats and keeps."""

    echo: bytes
    """Fields of the response that repeat the request: a JSON object."""
    items: tuple[bytes, ...]
    """The request's own items, as they are stored."""


_decode_envelope = msgspec.json.Decoder(Envelope).decode
_history = TypeAdapter[Any](Items)


def read_envelope(payload: bytes | bytearray) -> Envelope:
    """Return the envelope of a body. Raises InvalidRequest for a body that is no JSON object."""
    try:
        return _decode_envelope(payload)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$.")
        if not path:
            raise InvalidRequest("the body must be a JSON object") from error
        param = path.rstrip("`")
        raise InvalidRequest(f"`{param}`: {said[0].lower()}{said[1:]}", param=param) from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise explain_json(payload, error) from error


def _items_of(history: bytes) -> Sequence[AnyItem]:
    """Return the items before a request. Raises InvalidRequest for those that no request could send.

    A model may have called a function by a name that is too long, and together they may be too many.
    """
    try:
        return _history.validate_json(history)
    except ValidationError as error:
        fault = explain(error).detail
        said = f"`previous_response_id`: its conversation cannot be continued by its id; of its items, {fault}"
        raise InvalidRequest(said, param="previous_response_id") from error


class ResponseRequest:
    """A request for a response, read from its body."""

    def __init__(self, payload: bytes | bytearray, context: ResponseContext) -> None:
        """Raises InvalidRequest that names the field and its fault."""
        self._body = body = parse(ResponsesBody, payload)
        self._conversation = conversation = Conversation()
        if body.instructions is not None:
            conversation.add_text("system", body.instructions, "instructions")
        self._first = len(conversation.messages)
        conversation.add(_items_of(context.history), None)
        if isinstance(body.input, str):
            conversation.add_text("user", body.input, "input")
        else:
            conversation.add(body.input, "input")
        self.asked = Asked(echo=_encoded(body.echo()), items=stored(body.input, context.request))
        self.truncates = body.truncation == "auto"

    def chat(self) -> ChatBody:
        """Return the chat that is asked for. Raises InvalidRequest."""
        fields = {**self._body.of_chats(), "messages": self._conversation.messages}
        return parse(ChatBody, _encoded(fields))

    def shorten(self, body: ChatBody, fits: Callable[[ChatBody], bool]) -> ChatBody:
        """Return the chat without its oldest turns, as few as it takes to fit; the last turn always stays."""
        messages = body.messages
        starts = [at for at in range(self._first, len(messages)) if messages[at].role == "user"]

        def without(turns: int) -> ChatBody:
            kept = [each for each in messages[: starts[turns]] if each.role in ("system", "developer")]
            return body.model_copy(update={"messages": [*kept, *messages[starts[turns] :]]})

        if fits(body) or not starts:
            return body
        low, high = 0, len(starts) - 1
        while low < high:
            middle = (low + high) // 2
            if fits(without(middle)):
                high = middle
            else:
                low = middle + 1
        return without(low)

    @contextmanager
    def naming(self) -> Generator[None]:
        """Raise errors that name the fields of this API, not those of chats."""
        try:
            yield
        except BatonError as error:
            error.param = self.name_of(error.param) if error.param else None
            error.detail = re.sub(r"`([^`]*)`", lambda found: f"`{self.name_of(found[1])}`", error.detail)
            error.args = (error.detail,)
            raise

    def name_of(self, path: str) -> str:
        """Return the path that a chat's field has in this API."""
        for pattern, replacement in _NAMES:
            if found := pattern.match(path):
                if replacement:
                    return found.expand(replacement) + path[found.end() :]
                # Within a text that the client wrote, an error may repeat what looks like the path of a message.
                if int(found[1]) < len(origins := self._conversation.origins):
                    return origins[int(found[1])] + path[found.end() :]
        return path


def _encoded(fields: Mapping[str, Any]) -> bytes:
    """Return fields of a body as JSON. Raises InvalidRequest for numbers that are too long and too deep a nesting."""
    try:
        return msgspec.json.encode(fields)
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the body cannot be passed on: {error}") from error


def _check_served(fields: Mapping[str, Any]) -> None:
    """Raise InvalidRequest that names what this server does not have."""
    for name, instead in REFUSED.items():
        if fields.get(name) is not None:
            raise InvalidRequest(f"`{name}` is not supported by this server: {instead}", param=name)
    for name, here in _OF_CHATS.items():
        if fields.get(name) is not None:
            said = f": here it is `{here}`" if here else ""
            raise InvalidRequest(f"`{name}` is a field of chats{said}", param=name)
    check_kinds(fields.get("input"), "input")
    tools: object = fields.get("tools")
    for index, tool in enumerate(cast("list[object]", tools) if isinstance(tools, list) else ()):
        kind = cast("Mapping[str, object]", tool).get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind != "function":
            where = f"tools[{index}]"
            said = f"`{where}` is a tool of type {kind[:40]!r}; this server has no built-in tools, only functions"
            raise InvalidRequest(said, param=where)
