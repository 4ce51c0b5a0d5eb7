"""Identity of an engine's KV, as text: engines hand over to each other exactly if their texts are equal.

    model=qwen3 digest=5e1f… layers=4 kv_heads=2 dim=64 dtype=float32 scales=none rope=after,default,rope_theta=10000.0

Block format and number of ranks are not part of it: they belong to the layout, which can be converted
(docs/wire-layout.md). Each engine derives the text from what it has loaded, not from what it was asked to load.
Heartbeats carry it, so that workers with different texts are not paired. It is also the fingerprint of the transfer
agents' pools, which compare it once more before bytes move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Final, cast

NONE: Final = "none"
DESCRIBED: Final = "described"
VALUE_CHARACTERS_MAX: Final = 160
"""Longer values (lists of factors, one scale for each layer) are replaced by their digest."""
RENAMED_PREFIX: Final = "deepseek_"
"""vLLM and, on a CPU, SGLang rename DeepSeek's scaling (`yarn` to `deepseek_yarn`) as they load it."""
ROPE_KEYS: Final = ("rope_theta", "partial_rotary_factor")
"""RoPE parameters that count without scaling. Some libraries add further ones then, others leave them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvIdentity:
    """Identity of KV. Its text has a word for each field, `name=value`; values have no spaces."""

    model: str
    """Kind of model, as its configuration names it."""
    digest: str
    """Digest of configuration, tokenizer and weights, see `baton.blocks.model_digest`."""
    layers: int
    kv_heads: int
    """KV heads of the whole model; 1 where all heads share one latent row."""
    dim: int
    dtype: str
    scales: str = NONE
    """Scales by which 8-bit KV was divided, see `describe_scales`."""
    rope: str
    """Positional encoding, see `describe_rope`."""
    blocks: str = DESCRIBED
    """Block format where no layout can describe it; it must then be equal, too."""

    def __str__(self) -> str:
        words = ((name, str(getattr(self, name))) for name in (field.name for field in fields(self)))
        return " ".join(f"{name}={_short('_'.join(value.split()))}" for name, value in words)


def describe_rope(config: Mapping[str, object]) -> str:
    """Return how positions are encoded in K, from a model's configuration in the format of Hugging Face transformers.

    vLLM and SGLang both store K after its rotation. Versions 4 and 5 of the library name the parameters differently.
    """
    plain = {key: config[key] for key in ROPE_KEYS if config.get(key) is not None}
    parameters = plain | _mapping(config.get("rope_parameters") or config.get("rope_scaling"))
    # Some models rotate layers of different kinds differently.
    nested = {kind: each for kind, value in sorted(parameters.items()) if (each := _mapping(value))}
    if nested:
        return "after," + ";".join(f"{kind}:{_rotation(plain | each)}" for kind, each in nested.items())
    return f"after,{_rotation(parameters)}" if parameters else NONE


def describe_scales(scales: Iterable[tuple[float, float]]) -> str:
    """Return each layer's scales of K and V; just one pair where they are all equal."""
    texts = [f"{k!r}/{v!r}" for k, v in scales]
    return texts[0] if len(set(texts)) == 1 else ",".join(texts)


def differing_words(one: str, other: str) -> tuple[str, str]:
    """Return the words of each of two texts that the other lacks."""
    ones, others = one.split(), other.split()
    return (
        " ".join(word for word in ones if word not in others),
        " ".join(word for word in others if word not in ones),
    )


def _rotation(parameters: Mapping[str, object]) -> str:
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default").removeprefix(RENAMED_PREFIX)
    keys = ROPE_KEYS if kind == "default" else tuple(sorted(parameters.keys() - {"rope_type", "type"}))
    # 10000 and 10000.0 are the same, whichever of them a file has.
    values = ((key, parameters[key]) for key in keys if parameters.get(key) is not None)
    return ",".join([kind, *(f"{key}={float(value) if isinstance(value, int) else value}" for key, value in values)])


def _mapping(value: object) -> dict[str, object]:
    return dict(cast("Mapping[str, object]", value)) if isinstance(value, Mapping) else {}


def _short(value: str) -> str:
    return value if len(value) <= VALUE_CHARACTERS_MAX else blake2b(value.encode(), digest_size=16).hexdigest()
