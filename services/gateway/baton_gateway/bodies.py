"""Validated bodies of OpenAI's requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from baton.errors import InvalidRequest
from baton.messages.attempts import Constraint, ConstraintKind
from baton_gateway import constraints, fields
from baton_gateway.body_checks import (
    LOGIT_BIAS_MAX,
    MESSAGES_MAX,
    PROMPTS_MAX,
    check_counts,
    check_messages,
    explain,
    explain_json,
)
from baton_gateway.tool_bodies import (
    CalledTools,
    Text,
    Tool,
    ToolChoice,
    Tools,
    check_enforceable,
    check_tools,
    offered_tools,
    required_tools,
)

COMPLETION_TOKENS_DEFAULT: Final = 16
"""OpenAI's default of `max_tokens` on /v1/completions; a chat's default is the rest of the context."""
STOPS_MAX: Final = 64
STOPS_CHARS_MAX: Final = 4096
"""Length of all stop strings together, for each of which the end of every piece of text is searched."""
REQUEST_NAME: Final = r"[A-Za-z0-9._:/+=@-]{1,128}"
"""Name that a client may give a request."""
DOCUMENTS_MAX: Final = 4096
TOKENS_MAX: Final = 1 << 31
SEED_MAX: Final = (1 << 63) - 1

KNOWN_EXTRA: Final = fields.IGNORED.union(fields.SESSION, constraints.FIELDS)
"""Fields that no model below has, and that no engine gets."""

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
ModelName = Annotated[str, Field(min_length=1, max_length=512)]
TokenId = Annotated[int, Field(ge=0, lt=TOKENS_MAX)]
TokenCount = Annotated[int, Field(ge=1, lt=TOKENS_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RequestName = Annotated[str, Field(pattern=rf"^{REQUEST_NAME}$")]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(BaseModel):
    """Fields that chat and completions share. Fields not named here are engine parameters."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=TOKENS_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=TOKENS_MAX)] | None = None
    # Lists fail fast: otherwise pydantic would keep a kilobyte for each wrong element.
    stop: StopString | Annotated[list[StopString], Field(max_length=STOPS_MAX, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """SGLang's name for `include_stop_str_in_output`."""
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-SEED_MAX, le=SEED_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=LOGIT_BIAS_MAX)] | None
    ) = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")] | None = None

    request_id: RequestName | None = None
    rid: RequestName | None = None
    """SGLang's name for `request_id`."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=TOKENS_MAX)] | None = None
    """Prompt tokens to keep; -1: all but one of the context."""
    truncation_side: Literal["left", "right"] | None = None
    """Side that `truncate_prompt_tokens` cuts off."""
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise InvalidRequest for faults that the types of the fields do not tell."""
        if isinstance(self.stop, list) and sum(map(len, self.stop)) > STOPS_CHARS_MAX:
            raise InvalidRequest(f"`stop` has more than {STOPS_CHARS_MAX} characters together", param="stop")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("`truncate_prompt_tokens` keeps no token", param="truncate_prompt_tokens")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequest("`truncation_side` needs `truncate_prompt_tokens`", param="truncation_side")
        if self.vllm_xargs is not None and "extra_args" in (self.model_extra or {}):
            raise InvalidRequest("`vllm_xargs` and `extra_args` are the same: give one of them", param="vllm_xargs")

    def alternatives(self) -> int | None:
        """Return the number of alternatives reported per token; None: no log-probabilities."""
        raise NotImplementedError

    def prompt_count(self) -> int:
        raise NotImplementedError

    def explicit_tokens_max(self) -> int | None:
        """Return the bound on the output that the request names."""
        return self.max_tokens

    def tokens_max(self) -> int | None:
        """Return the bound on the output, with the endpoint's default."""
        return self.explicit_tokens_max()


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: Text
    cache_control: Any = None
    """Ignored: the engine's cache keeps all prompts."""
    prompt_cache_breakpoint: Any = None
    """Ignored, likewise."""

    def said(self) -> str:
        return self.text


class RefusalPart(BaseModel):
    """A refusal in an assistant's message. Templates know no refusals: it is text to them, as in vLLM."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["refusal"]
    refusal: Text

    def said(self) -> str:
        return self.refusal


def _part_tag(part: object) -> str:
    """Return the union member that a part is meant for. Tags are no field names, so that paths leave them out."""
    is_refusal = isinstance(part, dict) and cast("dict[str, object]", part).get("type") == "refusal"
    return "(refusal)" if is_refusal else "(text)"


Part = Annotated[
    Annotated[TextPart, Tag("(text)")] | Annotated[RefusalPart, Tag("(refusal)")], Discriminator(_part_tag)
]


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Field(max_length=1024, fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: CalledTools | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """vLLM's name for `reasoning_content`."""

    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.said() for part in self.content)
        return self.content or ""


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[str, Field(min_length=1, max_length=256 << 10)] | None = None
    """Template in place of the model's own, where the operator permits it."""
    documents: Annotated[list[dict[str, Any]], Field(max_length=DOCUMENTS_MAX)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        super().check()
        check_tools(self.tools or (), self.tool_choice)
        for index, message in enumerate(self.messages):
            if message.tool_calls and message.role != "assistant":
                where = f"messages[{index}].tool_calls"
                raise InvalidRequest(f"`{where}`: only the assistant calls tools", param=where)

    def active_tools(self) -> list[Tool]:
        """Return the tools that the model is told of."""
        return list(offered_tools(self.tools or (), self.tool_choice))

    def required_tools(self) -> Sequence[Tool]:
        """Return the tools of which the answer must call one; none if it need not."""
        return required_tools(self.tools or (), self.tool_choice)

    def check_constrained_tools(self, constraint: Constraint | None) -> None:
        """Raise InvalidRequest if this constraint and the tools cannot both be enforced."""
        if constraint is None or not (tools := self.active_tools()):
            return
        if constraint.kind is not ConstraintKind.JSON:
            said = "beside `tools`, an answer can be constrained to JSON only: leave out one of both"
            raise InvalidRequest(said, param="tools")
        check_enforceable(tools, {tool.function.name for tool in tools})

    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt_count(self) -> int:
        return 1

    def explicit_tokens_max(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody):
    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Text], Field(min_length=1, max_length=PROMPTS_MAX, fail_fast=True)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]],
            Field(min_length=1, max_length=PROMPTS_MAX, fail_fast=True),
        ]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            reason = fields.REFUSED["prompt_logprobs"].reason
            raise InvalidRequest(f"`echo` with `logprobs` is not supported by this server: {reason}", param="echo")

    def alternatives(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [cast("list[int]", self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)

    def prompt_count(self) -> int:
        return len(self.prompts())

    def tokens_max(self) -> int | None:
        return self.max_tokens or COMPLETION_TOKENS_DEFAULT


Body = TypeVar("Body", bound=GenerationBody)
Validated = TypeVar("Validated", bound=BaseModel)
NAMES: Final = frozenset(
    {*ChatBody.model_fields, *CompletionBody.model_fields, *KNOWN_EXTRA, *fields.REFUSED, *fields.ENGINE}
)
"""All fields that this server knows."""


def _elsewhere(kind: type[GenerationBody]) -> set[str]:
    """Return the fields that only the other one of chats and completions has; other endpoints say it themselves."""
    if kind not in (ChatBody, CompletionBody):
        return set()
    return {*ChatBody.model_fields, *CompletionBody.model_fields}.difference(kind.model_fields)


def decode_object(payload: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in `payload`. Raises InvalidRequest if there is none."""
    try:
        raw = msgspec.json.decode(payload)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise explain_json(payload, error) from error
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object")
    return cast("dict[str, Any]", raw)


def validate(kind: type[Validated], given: dict[str, Any]) -> Validated:
    """Return a body of this kind. Raises InvalidRequest that names the field and its fault."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise explain(error) from error


def parse(kind: type[Body], payload: bytes | bytearray) -> Body:
    """Return the body in `payload`. Raises InvalidRequest that names the field and its fault."""
    return parse_fields(kind, decode_object(payload))


def parse_fields(kind: type[Body], given: dict[str, Any]) -> Body:
    """Return the body of these fields. Raises InvalidRequest that names the field and its fault."""
    check_counts(given)
    fields.refuse(given, kind.model_fields.keys(), _elsewhere(kind))
    check_messages(given.get("messages"))
    body = validate(kind, given)
    body.check()
    return body
