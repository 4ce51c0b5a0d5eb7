"""Validated bodies of OpenAI's requests, and their translation into Baton's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.errors import InvalidRequest
from baton.messages.attempts import Constraint, ConstraintKind, Sampling
from baton_gateway import constraints, fields
from baton_gateway.body_checks import LOGIT_BIAS_MAX, MESSAGES_MAX, PROMPTS_MAX, check_counts, check_messages, explain
from baton_gateway.json_schema import is_within_depth
from baton_gateway.parsing.formats import ParsingOptions
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
EXTENSION_DEPTH_MAX: Final = 65
EXTENSIONS_BYTES_MAX: Final = (256 + 16) << 10
"""Total length, as JSON, of all fields that this server does not know."""
EXTENSIONS_MAX: Final = 32
NAME_CHARS_MAX: Final = 256
STOPS_MAX: Final = 64
STOPS_CHARS_MAX: Final = 4096
"""Length of all stop strings together, for each of which the end of every piece of text is searched."""
REQUEST_NAME: Final = r"[A-Za-z0-9._:/+=@-]{1,128}"
"""Name that a client may give a request."""
DOCUMENTS_MAX: Final = 4096
TOKENS_MAX: Final = 1 << 31
SEED_MAX: Final = (1 << 63) - 1

_KNOWN_EXTRA: Final = fields.IGNORED.union(fields.SESSION, constraints.FIELDS)
"""Fields that no model below has, and that no engine gets."""
_TRACED: Final = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")

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


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: CalledTools | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for parameters that a request leaves out, under their names in requests."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


NEUTRAL: Final = SamplingDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Options for turning tokens into text; the engine does not see them."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    logprobs: bool = False
    token_ids: bool = False
    counts: bool = False
    """Whether each piece says how many tokens its choice has had."""
    parsing: ParsingOptions | None = None
    """None: the text is the answer's content as it is."""

    @property
    def is_detailed(self) -> bool:
        """Whether pieces have more than text."""
        return self.logprobs or self.token_ids or self.counts


Body = TypeVar("Body", bound=GenerationBody)
Validated = TypeVar("Validated", bound=BaseModel)
NAMES: Final = frozenset(
    {*ChatBody.model_fields, *CompletionBody.model_fields, *_KNOWN_EXTRA, *fields.REFUSED, *fields.ENGINE}
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
    except UnicodeDecodeError as error:
        raise InvalidRequest("the body is not valid UTF-8") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
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


def sampling_of(body: GenerationBody, defaults: SamplingDefaults = NEUTRAL) -> Sampling:
    """Return the engine's sampling parameters. Raises InvalidRequest for parameters that contradict each other.

    `max_tokens` is the request's bound; `limit_output` lowers it to the room in the context.
    """
    sampling = Sampling(
        max_tokens=TOKENS_MAX - 1,
        temperature=_given(body.temperature, defaults.temperature),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=max(0, defaults.top_k if body.top_k is None else body.top_k),
        min_p=_given(body.min_p, defaults.min_p),
        seed=body.seed,
        presence_penalty=_given(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(body.logit_bias),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=body.alternatives(),
        extensions=dict(pack_bounded(extensions_of(body))),
    )
    return limit_output(sampling, body.tokens_max() or defaults.max_tokens or sampling.max_tokens)


def limit_output(sampling: Sampling, max_tokens: int) -> Sampling:
    """Return `sampling` with this bound. Raises InvalidRequest if `min_tokens` is above it."""
    if sampling.min_tokens > max_tokens:
        said = f"`min_tokens` is {sampling.min_tokens}, above `max_tokens` of {max_tokens}"
        raise InvalidRequest(said, param="min_tokens")
    return msgspec.structs.replace(sampling, max_tokens=max_tokens)


def asked_of(body: GenerationBody) -> dict[str, int | float]:
    """Return the request's parameters for traces, under the names of OpenTelemetry's `gen_ai.request`."""
    asked: dict[str, int | float | None] = {name: getattr(body, name) for name in _TRACED}
    asked["max_tokens"] = body.tokens_max()
    asked["choice.count"] = None if body.n == 1 else body.n
    return {name: value for name, value in asked.items() if value is not None}


def name_of(body: GenerationBody) -> str:
    """Return the client's name of the request; empty if the body has none."""
    return body.request_id or body.rid or ""


def session_of(body: GenerationBody) -> str:
    """Return what the body says of the conversation that it belongs to; empty if nothing."""
    extra = body.model_extra or {}
    return next((value for name in fields.SESSION if isinstance(value := extra.get(name), str) and value), "")


def output_of(body: GenerationBody, parsing: ParsingOptions | None = None) -> OutputOptions:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return OutputOptions(
        stops=stops,
        include_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        skip_special=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        logprobs=body.alternatives() is not None,
        token_ids=bool(body.return_token_ids),
        counts=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        parsing=parsing,
    )


def pack_bounded(values: Mapping[str, object]) -> dict[str, msgspec.Raw]:
    """Return each value in msgpack. Raises InvalidRequest if all together are too long, or one is nested too deeply."""
    packed: dict[str, msgspec.Raw] = {}
    room_bytes = EXTENSIONS_BYTES_MAX
    for name, value in values.items():
        try:
            packed[name] = msgspec.Raw(msgspec.msgpack.encode(value))
            room_bytes -= len(msgspec.json.encode(value))
        except (OverflowError, ValueError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"`{name[:80]}` cannot be passed on: {error}", param=name[:80]) from error
        if room_bytes < 0:
            said = f"with `{name[:80]}`, the parameters are longer than {EXTENSIONS_BYTES_MAX} bytes"
            raise InvalidRequest(said, param=name[:80])
        if not is_within_depth(value, EXTENSION_DEPTH_MAX):
            said = f"`{name[:80]}` is nested more than {EXTENSION_DEPTH_MAX} deep"
            raise InvalidRequest(said, param=name[:80])
    return packed


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    for token in bias:
        # `isdigit` alone also takes digits of other scripts.
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise InvalidRequest(f"`logit_bias` maps token ids, and {token[:40]!r} is none", param="logit_bias")
    return {int(token): value for token, value in bias.items()}


def constraint_of(body: GenerationBody) -> Constraint | None:
    """Return the constraint on the answer. Raises InvalidRequest for a malformed one."""
    return constraints.constraint_of(body.model_extra or {})


def extensions_of(body: GenerationBody) -> dict[str, object]:
    """Return the parameters that Baton does not know, for the engine to judge."""
    extra = body.model_extra or {}
    extensions = {
        name: cast("object", value) for name, value in extra.items() if value is not None and name not in _KNOWN_EXTRA
    }
    if body.vllm_xargs is not None:
        extensions["extra_args"] = body.vllm_xargs
    if len(extensions) > EXTENSIONS_MAX:
        raise InvalidRequest(f"the body has more than {EXTENSIONS_MAX} fields that this server does not know")
    if long := [name for name in extensions if len(name) > NAME_CHARS_MAX]:
        raise InvalidRequest(
            f"the name `{long[0][:80]}…` is longer than {NAME_CHARS_MAX} characters", param=long[0][:80]
        )
    return extensions
