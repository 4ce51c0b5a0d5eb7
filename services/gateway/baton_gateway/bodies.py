"""The bodies of OpenAI's requests, validated, and what they ask for in Baton's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.errors import InvalidRequest
from baton.messages import Sampling

COMPLETION_TOKENS_DEFAULT: Final = 16
"""OpenAI's default of `max_tokens` on /v1/completions; a chat's default is the rest of the context."""
EXTENSION_DEPTH_MAX: Final = 8
EXTENSION_BYTES_MAX: Final = 16 << 10
TOKENS_MAX: Final = 1 << 31
SEED_MAX: Final = (1 << 63) - 1

_DROPPED: Final = frozenset(
    {
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "user",
    }
)  # fmt: skip
"""Fields that describe a request to its operator and change no token."""

Text = Annotated[str, Field(max_length=16 << 20)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=TOKENS_MAX)]
TokenCount = Annotated[int, Field(ge=1, lt=TOKENS_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(BaseModel):
    """What chat and completions have in common. Fields that are not named are engine parameters."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=TOKENS_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=TOKENS_MAX)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-SEED_MAX, le=SEED_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")] | None = None

    def alternatives(self) -> int | None:
        """Return how many alternatives are reported beside each token; None: no log-probabilities."""
        raise NotImplementedError

    def tokens_max(self) -> int | None:
        return self.max_tokens


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=65536)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def tokens_max(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody):
    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=128)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=128)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def alternatives(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [cast("list[int]", self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)

    def tokens_max(self) -> int | None:
        return self.max_tokens or COMPLETION_TOKENS_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How tokens become text; the engine knows nothing of it."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    logprobs: bool = False


Body = TypeVar("Body", bound=GenerationBody)


def parse(kind: type[Body], payload: bytes) -> Body:
    """Return the body in `payload`. Raises InvalidRequest that names the field and what is wrong with it."""
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
    fields = cast("dict[str, Any]", raw)
    _refuse_unsupported(fields)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explain(error) from error


def sampling_of(body: GenerationBody, max_tokens: int) -> Sampling:
    """Return what the engine is told. Raises InvalidRequest for parameters that contradict each other."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"`min_tokens` is {min_tokens}, above `max_tokens` of {max_tokens}", param="min_tokens")
    return Sampling(
        max_tokens=max_tokens,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=_given(body.min_p, 0.0),
        seed=body.seed,
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        logprobs=body.alternatives(),
        extensions=_extensions(body),
    )


def output_of(body: GenerationBody) -> OutputOptions:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return OutputOptions(
        stops=stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        logprobs=body.alternatives() is not None,
    )


def check_depth(value: object, name: str, depth_max: int = EXTENSION_DEPTH_MAX) -> None:
    """Raise InvalidRequest where `value` is nested more than `depth_max` deep."""
    if depth_max < 0:
        raise InvalidRequest(f"`{name}` is nested too deeply", param=name)
    if isinstance(value, dict):
        for inner in cast("dict[str, object]", value).values():
            check_depth(inner, name, depth_max - 1)
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            check_depth(inner, name, depth_max - 1)


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


def _extensions(body: GenerationBody) -> dict[str, object]:
    """Return the parameters that Baton does not know, for the engine to judge."""
    extra = body.model_extra or {}
    extensions = {
        name: cast("object", value) for name, value in extra.items() if value is not None and name not in _DROPPED
    }
    for name, value in extensions.items():
        check_depth(value, name)
        try:
            encoded = msgspec.msgpack.encode(value)
        except (OverflowError, ValueError, TypeError) as error:
            raise InvalidRequest(f"`{name[:80]}` cannot be passed on: {error}", param=name[:80]) from error
        if len(encoded) + len(name) > EXTENSION_BYTES_MAX:
            raise InvalidRequest(f"`{name[:80]}` is longer than {EXTENSION_BYTES_MAX} bytes", param=name[:80])
    if len(extensions) > 32:
        raise InvalidRequest("the body has more than 32 fields that this server does not know")
    return extensions


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    """Raise InvalidRequest for what OpenAI offers and Baton does not; take out what asks for nothing."""
    allowed: dict[str, tuple[object, ...]] = {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "web_search_options": (None,),
        "suffix": (None, ""),
        "echo": (None, False),
        "best_of": (None, 1, fields.get("n")),
        "use_beam_search": (None, False),
    }
    for name, values in allowed.items():
        if fields.pop(name, None) not in values:
            raise InvalidRequest(f"`{name}` is not supported by this server", param=name)
    messages = fields.get("messages")
    for index, message in enumerate(cast("list[object]", messages) if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _refuse_unsupported_message(cast("dict[str, Any]", message), f"messages[{index}]")


def _refuse_unsupported_message(message: Mapping[str, Any], where: str) -> None:
    if message.get("role") in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise InvalidRequest(f"`{where}` uses tools, which are not supported by this server", param=where)
    content = message.get("content")
    for part in cast("list[object]", content) if isinstance(content, list) else ():
        kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise InvalidRequest(
                f"`{where}.content` has a part of type {kind[:40]!r}; this server takes text only, "
                "no images, audio or files",
                param=where,
            )


def _explain(error: ValidationError) -> InvalidRequest:
    """Return the most telling of pydantic's complaints; of a union it reports one per member."""
    complaints = error.errors(include_url=False, include_context=False, include_input=False)
    deepest = max(len(complaint["loc"]) for complaint in complaints)
    # The member that is of the right type says what else is wrong.
    first = min(complaints, key=lambda e: (deepest - len(e["loc"]), e["type"].endswith("_type")))
    param = ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part.isidentifier():
            # Pydantic names union members in the path, such as `constrained-str`: no field of the body.
            param += f".{part}" if param else part
    param = param.removesuffix(".str").removesuffix(".int") or "body"
    return InvalidRequest(f"`{param}`: {first['msg'][0].lower()}{first['msg'][1:]}", param=param)
