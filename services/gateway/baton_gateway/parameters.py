"""Validated bodies translated into Baton's terms: sampling, constraint, output, extensions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import msgspec

from baton.errors import InvalidRequest
from baton.messages.attempts import Constraint, Sampling
from baton_gateway import constraints, fields
from baton_gateway.bodies import KNOWN_EXTRA, TOKENS_MAX, GenerationBody
from baton_gateway.body_checks import key_path
from baton_gateway.json_schema import is_within_depth
from baton_gateway.parsing.formats import ParsingOptions

EXTENSION_DEPTH_MAX: Final = 65
EXTENSIONS_BYTES_MAX: Final = (256 + 16) << 10
"""Total length, as JSON, of all fields that this server does not know."""
EXTENSIONS_MAX: Final = 32
NAME_CHARS_MAX: Final = 256
_TRACED: Final = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


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


def constraint_of(body: GenerationBody) -> Constraint | None:
    """Return the constraint on the answer. Raises InvalidRequest for a malformed one."""
    return constraints.constraint_of(body.model_extra or {})


def constraint_field_of(body: GenerationBody) -> str:
    """Return the path of the field that states the constraint; the body has one."""
    return constraints.field_of(body.model_extra or {})


def extensions_of(body: GenerationBody) -> dict[str, object]:
    """Return the parameters that Baton does not know, for the engine to judge."""
    extra = body.model_extra or {}
    extensions = {
        name: cast("object", value) for name, value in extra.items() if value is not None and name not in KNOWN_EXTRA
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


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    for token in bias:
        # `isdigit` alone also takes digits of other scripts.
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            said = f"`logit_bias` maps token ids, and {token[:40]!r} is none"
            raise InvalidRequest(said, param=f"logit_bias{key_path(token)}")
    return {int(token): value for token, value in bias.items()}
