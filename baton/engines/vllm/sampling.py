"""Converts sampling parameters to vLLM's form, and its log-probabilities to Baton's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from baton.engines.refusals import sentence_of
from baton.engines.vllm.grammar import DELIVERED_PARAMETER
from baton.errors import InvalidRequest
from baton.messages.attempts import Constraint, ConstraintKind, Sampling, TokenLogprob

_NOT_EXTENSIONS: Final = frozenset(
    {
        "n",  # The gateway sends one request per choice.
        "stop",  # Stop strings are text, which only the gateway handles.
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "detokenize",
        "output_kind",
        "output_text_buffer_length",
        "stream_interval",
        "flat_logprobs",
        "prompt_logprobs",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "skip_clone",
        "structured_outputs",  # `Sampling.constraint`.
        "trace_decode_token_ids",  # Replays a given output.
        *Sampling.__struct_fields__,
    }
)

EXTENSIONS: Final = frozenset(
    name for name in SamplingParams.__struct_fields__ if name not in _NOT_EXTENSIONS and not name.startswith("_")
)

PARAMETERS: Final = EXTENSIONS.union(kind.parameter for kind in ConstraintKind)
"""`Sampling.parameters` that the engine takes."""

_OWN_EXTRA: Final = ("kv_transfer_params", DELIVERED_PARAMETER)


def prefill_params(kv_transfer: Mapping[str, object]) -> SamplingParams:
    """Return parameters for computing a prompt: one token, which is discarded."""
    return _strictly({"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}, kv_transfer)


def sampling_params(sampling: Sampling, kv_transfer: Mapping[str, object] | None = None) -> SamplingParams:
    """Return vLLM's form of `sampling`. Raises InvalidRequest naming what vLLM refuses or does not know."""
    for name in sampling.extensions:
        if name not in EXTENSIONS:
            raise InvalidRequest(f"the engine has no parameter {name!r}", param=name)
    fields = msgspec.structs.asdict(sampling)
    extensions = fields.pop("extensions")
    constraint, delivered_tokens = fields.pop("constraint"), fields.pop("delivered_tokens")
    fields["stop_token_ids"] = list(sampling.stop_token_ids)
    params = _strictly({**fields, **extensions}, kv_transfer)
    if constraint is not None:
        params.structured_outputs = _structured_outputs(constraint)
        if delivered_tokens:
            params.extra_args = {**(params.extra_args or {}), DELIVERED_PARAMETER: delivered_tokens}
    return params


def _structured_outputs(constraint: Constraint) -> StructuredOutputsParams:
    fields: dict[str, Any] = {constraint.kind.value: constraint.text}
    return StructuredOutputsParams(**fields)


def _strictly(fields: dict[str, object], kv_transfer: Mapping[str, object] | None) -> SamplingParams:
    extra = fields.get("extra_args")
    for name in _OWN_EXTRA:
        if isinstance(extra, dict) and name in extra:
            # A client that sets these could read another request's KV.
            raise InvalidRequest(f"extra_args.{name} is Baton's own", param="extra_args")
    if kv_transfer is not None:
        fields["extra_args"] = {**(extra if isinstance(extra, dict) else {}), "kv_transfer_params": dict(kv_transfer)}
    try:
        params = msgspec.convert(fields, SamplingParams)
    except (VLLMClientError, msgspec.ValidationError, ValueError, TypeError) as error:
        raise InvalidRequest(f"the engine refuses these parameters: {sentence_of(error)}") from error
    params.detokenize = False
    params.output_kind = RequestOutputKind.DELTA
    return params


def token_logprobs(
    tokens: Sequence[int], rows: Sequence[Mapping[int, Logprob]], alternatives: int
) -> tuple[TokenLogprob, ...]:
    """Return one entry per token. vLLM's rows hold the sampled token and the most likely ones, with ranks from 1."""
    entries: list[TokenLogprob] = []
    for token, row in zip(tokens, rows, strict=True):
        ranked = sorted((entry.rank or 0, other, entry.logprob) for other, entry in row.items())
        top = tuple((other, logprob) for rank, other, logprob in ranked if rank <= alternatives)
        entries.append(TokenLogprob(logprob=row[token].logprob, top=top))
    return tuple(entries)
