"""The simulated engine's vocabulary, and the choice of a token from what the KV cache says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, cast

import msgspec

from baton.engines.simulated.kv import MASK, mix_word
from baton.errors import ConfigurationError, InvalidRequest
from baton.messages.attempts import Sampling, TokenLogprob

VOCABULARY_DEFAULT: Final = 8192
CONTEXT_TOKENS_DEFAULT: Final = 8192
LOGPROBS_MAX: Final = 20
_CANDIDATES: Final = LOGPROBS_MAX
_STEP_LOGIT: Final = -0.7
"""Logit step between candidates: each is about half as likely as the one before."""
_FLOOR_LOGIT: Final = -40.0
"""Logit of every token that is no candidate."""
_SPECIAL_DEFAULT: Final = 256
"""Lowest id used without a tokenizer: bytes and control tokens lie below it."""
_SPACE_MARKS: Final = str.maketrans("", "", "Ġ▁")
_DRAW: Final = 0xA24BAED4963EE407


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model's vocabulary and the length of its context, all that the simulated engine knows of it."""

    vocabulary: int
    printable: tuple[int, ...]
    """Ids that decode to printable text, from which outputs are made."""
    eos_tokens: tuple[int, ...]
    context_tokens_max: int


def read_model(folder: Path | None, vocabulary: int | None) -> SimulatedModel:
    """Return what config.json and tokenizer.json say. Raises ConfigurationError for a folder without a model."""
    if folder is None:
        size = vocabulary or VOCABULARY_DEFAULT
        first = min(_SPECIAL_DEFAULT, size // 2)
        return SimulatedModel(size, tuple(range(first, size)), (2,), CONTEXT_TOKENS_DEFAULT)
    outer = _read_object(folder / "config.json")
    inner = outer.get("text_config")
    config = cast("dict[str, object]", inner) if isinstance(inner, dict) else outer
    size = vocabulary or _whole(config.get("vocab_size")) or VOCABULARY_DEFAULT
    eos = _ids(config.get("eos_token_id"))
    if (folder / "generation_config.json").is_file():
        eos = _ids(_read_object(folder / "generation_config.json").get("eos_token_id")) or eos
    printable = _printable_ids(folder / "tokenizer.json", size) if (folder / "tokenizer.json").is_file() else ()
    if not printable:
        printable = tuple(token for token in range(min(_SPECIAL_DEFAULT, size // 2), size) if token not in eos)
    return SimulatedModel(size, printable, eos, _whole(config.get("max_position_embeddings")) or CONTEXT_TOKENS_DEFAULT)


def _read_object(path: Path) -> dict[str, object]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"the model's {path.name} cannot be read: {error}", param="model") from error


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _ids(value: object) -> tuple[int, ...]:
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    return tuple(token for token in listed if isinstance(token, int) and not isinstance(token, bool))


def _printable_ids(path: Path, size: int) -> tuple[int, ...]:
    """Return ids whose text is printable ASCII, with or without the mark that stands for a space."""
    tokenizer = _read_object(path)
    model = tokenizer.get("model")
    vocabulary = cast("dict[str, object]", model).get("vocab") if isinstance(model, dict) else None
    added = cast("list[dict[str, object]]", tokenizer.get("added_tokens") or [])
    special = {entry.get("id") for entry in added}
    pairs: list[tuple[str, int]] = []
    if isinstance(vocabulary, dict):
        pairs = [(text, cast("int", token)) for text, token in cast("dict[str, object]", vocabulary).items()]
    elif isinstance(vocabulary, list):
        # A Unigram vocabulary lists (text, score) in the order of the ids.
        entries = cast("list[Sequence[object]]", vocabulary)
        pairs = [(str(entry[0]), token) for token, entry in enumerate(entries)]
    return tuple(sorted(token for text, token in pairs if token < size and token not in special and _is_word(text)))


def _is_word(text: str) -> bool:
    bare = text.translate(_SPACE_MARKS)
    return bool(bare) and bare.isascii() and bare.isalnum()


def check_sampling(
    sampling: Sampling, vocabulary: int, parameters: Mapping[str, Sequence[object] | None] | None = None
) -> None:
    """Raise InvalidRequest, naming the parameter, if the engine does not support the request.

    `parameters`: the extensions that it accepts, each with its values; None: any.
    """

    def refuse(name: str, needs: str) -> None:
        raise InvalidRequest(f"{name} {needs}, not {getattr(sampling, name)!r}", param=name)

    if sampling.constraint is not None:
        raise InvalidRequest("the simulated engine constrains no output", param=sampling.constraint.kind.parameter)
    taken = parameters or {}
    for name, value in sampling.extensions.items():
        if name not in taken:
            raise InvalidRequest(f"the simulated engine has no parameter {name!r}", param=name)
        values = taken[name]
        if values is not None and value not in values:
            raise InvalidRequest(f"{name} must be one of {list(values)}", param=name)
    if sampling.max_tokens < 1:
        refuse("max_tokens", "must be at least 1")
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            refuse(name, "must be a finite number")
    if sampling.temperature < 0:
        refuse("temperature", "must be at least 0")
    if not 0 < sampling.top_p <= 1:
        refuse("top_p", "must be above 0 and at most 1")
    if sampling.top_k < -1:
        refuse("top_k", "must be at least 1, or 0 for all tokens")
    if not 0 <= sampling.min_p <= 1:
        refuse("min_p", "must be between 0 and 1")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(sampling, name) <= 2:
            refuse(name, "must be between -2 and 2")
    if sampling.repetition_penalty <= 0:
        refuse("repetition_penalty", "must be above 0")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        refuse("min_tokens", "must be between 0 and max_tokens")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= LOGPROBS_MAX:
        refuse("logprobs", f"must be between 0 and {LOGPROBS_MAX}")
    for name, tokens in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias or ())):
        if any(not 0 <= token < vocabulary for token in tokens):
            refuse(name, f"must name tokens of the vocabulary of {vocabulary}")


def stop_tokens(model: SimulatedModel, sampling: Sampling) -> frozenset[int]:
    """Return the tokens that end an output."""
    return frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else model.eos_tokens))


def is_determined(model: SimulatedModel, sampling: Sampling, eos_probability: float) -> bool:
    """Tell whether `choose_token` always returns `likeliest_token`, and no log-probability."""
    may_end = eos_probability and model.eos_tokens and not sampling.ignore_eos
    may_forbid = sampling.min_tokens and stop_tokens(model, sampling)
    return not (sampling.temperature or may_end or may_forbid) and _is_plain(sampling)


def likeliest_token(model: SimulatedModel, digest: int) -> int:
    return model.printable[digest % len(model.printable)]


def choose_token(
    model: SimulatedModel,
    sampling: Sampling,
    *,
    digest: int,
    tokens: Sequence[int],
    prompt_tokens: int,
    eos_probability: float,
    draw: Callable[[], float],
) -> tuple[int, TokenLogprob | None]:
    """Return the next token, which follows from the KV's digest, and its log-probability if asked for.

    `tokens` are prompt and output. `draw` gives a uniform number in [0, 1) where neither greed nor a seed decides.
    """
    output_tokens = len(tokens) - prompt_tokens
    forbidden = stop_tokens(model, sampling) if output_tokens < sampling.min_tokens else frozenset[int]()
    uniform = 0.0
    if sampling.temperature:
        uniform = draw() if sampling.seed is None else mix_word(sampling.seed * _DRAW + output_tokens) / (MASK + 1)
    if sampling.ignore_eos:
        eos_probability = 0.0
    if _is_plain(sampling) and not forbidden and not _is_eos(model, digest, eos_probability):
        return _plain_token(model, sampling, digest, uniform), None
    ranked = _candidates(model, digest, eos_probability, forbidden)
    logits = _adjusted(sampling, ranked, tokens, prompt_tokens, forbidden)
    token = _draw_from(sampling, logits, uniform) if sampling.temperature else max(logits, key=logits.__getitem__)
    if sampling.logprobs is None:
        return token, None
    # As in vLLM, log-probabilities are the model's own: before penalties, bias and temperature.
    total = math.log(sum(math.exp(_STEP_LOGIT * rank) for rank in range(len(ranked))))
    logprobs = {candidate: _STEP_LOGIT * rank - total for rank, candidate in enumerate(ranked)}
    top = tuple((candidate, logprobs[candidate]) for candidate in ranked[: sampling.logprobs])
    return token, TokenLogprob(logprob=logprobs.get(token, _FLOOR_LOGIT), top=top)


def _is_plain(sampling: Sampling) -> bool:
    """Tell whether a choice depends on the candidates' ranks alone, and nothing is asked for but the token."""
    return (
        not sampling.logit_bias
        and sampling.logprobs is None
        and sampling.repetition_penalty == 1.0
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
    )


def _plain_token(model: SimulatedModel, sampling: Sampling, digest: int, uniform: float) -> int:
    """Choose without making the list of candidates: in time that does not depend on their number."""
    size = len(model.printable)
    rank = 0
    if sampling.temperature:
        weights = _plain_weights(
            min(_CANDIDATES, size), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        )
        rank = _draw_rank(weights, uniform)
    return model.printable[(digest + rank) % size]


def _is_eos(model: SimulatedModel, digest: int, eos_probability: float) -> bool:
    if not eos_probability or not model.eos_tokens:
        return False
    return mix_word(digest ^ _DRAW) < eos_probability * (MASK + 1)


def _candidates(model: SimulatedModel, digest: int, eos_probability: float, forbidden: frozenset[int]) -> list[int]:
    """Return the likely next tokens, the likeliest first."""
    first = digest % len(model.printable)
    count = min(_CANDIDATES, len(model.printable))
    ranked = [model.printable[(first + rank) % len(model.printable)] for rank in range(count)]
    if _is_eos(model, digest, eos_probability):
        ranked = [model.eos_tokens[0], *(token for token in ranked if token != model.eos_tokens[0])]
    if not forbidden:
        return ranked
    allowed = [token for token in ranked if token not in forbidden]
    # A request may name every candidate as a stop token; then any other token will do.
    return allowed or [token for token in range(model.vocabulary) if token not in forbidden][:1] or ranked


def _adjusted(
    sampling: Sampling, ranked: Sequence[int], tokens: Sequence[int], prompt_tokens: int, forbidden: frozenset[int]
) -> Mapping[int, float]:
    """Return the candidates' logits after bias and penalties, as OpenAI and vLLM define them."""
    logits = {token: _STEP_LOGIT * rank for rank, token in enumerate(ranked)}
    for token, bias in (sampling.logit_bias or {}).items():
        if token not in forbidden:
            logits[token] = logits.get(token, _FLOOR_LOGIT) + bias
    if sampling.repetition_penalty != 1.0:
        for token in logits.keys() & {*tokens}:
            # A penalty makes a token less likely whatever the sign of its logit.
            penalised = logits[token] <= 0
            logits[token] *= sampling.repetition_penalty if penalised else 1 / sampling.repetition_penalty
    if sampling.presence_penalty or sampling.frequency_penalty:
        seen = Counter(tokens[prompt_tokens:])
        for token in logits.keys() & seen.keys():
            logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * seen[token]
    return logits


def _draw_from(sampling: Sampling, logits: Mapping[int, float], uniform: float) -> int:
    ordered = sorted(logits, key=lambda token: (-logits[token], token))
    ranked = [logits[token] for token in ordered]
    weights = _kept_weights(ranked, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return ordered[_draw_rank(weights, uniform)]


@lru_cache(maxsize=256)
def _plain_weights(count: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Sequence[float]:
    return _kept_weights([_STEP_LOGIT * rank for rank in range(count)], temperature, top_k, top_p, min_p)


def _kept_weights(
    logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> Sequence[float]:
    """Return the weights, largest first, of the candidates among which to draw; `logits` are in that order."""
    # As in vLLM, a temperature below this one would lose the numbers' precision.
    temperature = max(temperature, 0.01)
    considered = logits[:top_k] if top_k > 0 else logits
    weights = [math.exp((logit - logits[0]) / temperature) for logit in considered]
    total = sum(weights)
    kept, kept_weight = 0, 0.0
    while kept < len(weights) and (kept == 0 or kept_weight < top_p * total):
        if weights[kept] < min_p:
            break
        kept_weight += weights[kept]
        kept += 1
    return weights[: max(kept, 1)]


def _draw_rank(weights: Sequence[float], uniform: float) -> int:
    threshold = uniform * sum(weights)
    for rank, weight in enumerate(weights):
        threshold -= weight
        if threshold < 0:
            return rank
    return len(weights) - 1
