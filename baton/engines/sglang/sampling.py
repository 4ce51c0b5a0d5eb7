"""Converts sampling parameters to SGLang's form, and its log-probabilities to Baton's."""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from sglang.srt.sampling.sampling_params import SamplingParams

from baton.engines.refusals import sentence_of
from baton.errors import InvalidRequest
from baton.messages.attempts import ConstraintKind, Sampling, TokenLogprob

CONSTRAINTS: Final = {
    ConstraintKind.JSON: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "ebnf",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
}
"""SGLang's parameter for each kind of constraint."""
PARAMETERS: Final = frozenset(kind.parameter for kind in CONSTRAINTS)
"""`Sampling.parameters` that the engine takes if SGLang has a back end for grammars."""


def prefill_params() -> dict[str, object]:
    """Return parameters for computing a prompt: one token, which is discarded."""
    return {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}


def sampling_params(sampling: Sampling, vocabulary: int, *, grammars: bool) -> dict[str, object]:
    """Return SGLang's form of `sampling`. Raises InvalidRequest naming what SGLang refuses or does not know."""
    for name in sampling.parameters:
        if not grammars or name not in PARAMETERS:
            raise InvalidRequest(f"the engine has no parameter {name!r}", param=name)
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {sampling.max_tokens}", param="max_tokens")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= vocabulary:
        raise InvalidRequest(f"logprobs is 0 to {vocabulary}, not {sampling.logprobs}", param="logprobs")
    fields: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": {str(token): bias for token, bias in (sampling.logit_bias or {}).items()} or None,
        "sampling_seed": None if sampling.seed is None else sampling.seed % (1 << 63),
        # The gateway turns tokens into text: SGLang leaves them as they are.
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if (constraint := sampling.constraint) is not None:
        fields[CONSTRAINTS[constraint.kind]] = constraint.text
    try:
        params = SamplingParams(**fields)  # pyright: ignore[reportArgumentType]
        params.verify(vocabulary)
    except (ValueError, TypeError) as error:
        sentence = sentence_of(error)
        raise InvalidRequest(f"the engine refuses these parameters: {sentence}") from error
    return fields


def refusal_of(finish: Mapping[str, Any]) -> InvalidRequest | None:
    """Return the error for a request that SGLang's scheduler refused, from its finish; None: it did not refuse it."""
    if finish.get("status_code") != HTTPStatus.BAD_REQUEST:
        return None
    sentence = sentence_of(finish.get("message"))
    return InvalidRequest(f"the engine refuses the request: {sentence}")


def token_logprobs(meta: Mapping[str, Any], alternatives: int) -> tuple[TokenLogprob, ...]:
    """Return one entry per token of a step. SGLang's are (log-probability, token, text), the likeliest apart."""
    sampled: Sequence[tuple[float, int, None]] = meta["output_token_logprobs"]
    tops: Sequence[Sequence[tuple[float, int, None]]] = meta.get("output_top_logprobs") or [()] * len(sampled)
    return tuple(
        TokenLogprob(logprob=logprob, top=tuple((token, value) for value, token, _ in (top or ())[:alternatives]))
        for (logprob, _token, _), top in zip(sampled, tops, strict=True)
    )
