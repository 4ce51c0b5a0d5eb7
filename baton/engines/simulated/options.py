"""Settings of the simulated engine, and its timing model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.engines.options import check_kv_file
from baton.errors import ConfigurationError
from baton.messages.base import PARAMETERS_MAX, ParameterName

WORD_BYTES = 8

Count = Annotated[int, Meta(ge=1)]
Duration = Annotated[float, Meta(ge=0)]


class SimulatedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that `--engine-options` may hold for the simulated engine.

    The timing is the usual linear cost model of a step; its defaults are of the order of an 8 billion
    parameter model on one small GPU, run ten times faster so that tests are quick.
    """

    blocks: Count = 1024
    block_tokens: Count = 32
    running_max: Count = 64
    step_tokens_max: Count = 2048
    """Token budget of one step, over all requests in it."""
    layers: Count = 4
    kv_bytes_per_token: Annotated[int, Meta(ge=8)] = 512
    """KV bytes of one token over all layers; a multiple of 8 × layers."""
    context_tokens_max: Count | None = None
    """Context limit. Default: the model's, from config.json, bounded by what the blocks can hold."""
    vocabulary: Annotated[int, Meta(ge=64)] | None = None
    """Size of the vocabulary. Default: the model's; 8192 without a model."""
    eos_probability: Annotated[float, Meta(ge=0, le=1)] = 0.004
    """Share of contexts after which the end of the sequence is the most likely token."""
    parameters: Annotated[dict[ParameterName, tuple[object, ...] | None], Meta(max_length=PARAMETERS_MAX)] = {}
    """Extension parameters that the engine accepts and ignores: name → accepted values; null: any."""
    kv_pool_bytes: Annotated[int, Meta(ge=0)] | Literal["auto"] = 0
    """Size of the KV pool (`docs/kv-pool.md`); 0: none."""
    kv_pool_workers: Count = 1
    """Workers that share this host's memory where the size is `auto`."""
    kv_file: str = ""
    """Path of the file under it; empty: none."""
    kv_file_bytes: Annotated[int, Meta(ge=0)] = 0
    seed: int | None = None
    """Seed of everything random: unseeded sampling and the root of the block hashes. Default: fresh each start."""

    step_fixed_s: Duration = 0.02
    prefill_token_s: Duration = 0.0002
    decode_sequence_s: Duration = 0.0002
    attention_token_s: Duration = 1e-7
    """Seconds per token of context that a step's requests attend to."""
    speed: Annotated[float, Meta(gt=0)] = 10.0
    """Divisor of all durations."""

    @property
    def layer_words(self) -> int:
        """64-bit words of one token's KV in one layer."""
        return self.kv_bytes_per_token // (self.layers * WORD_BYTES)

    def step_s(self, *, prefill_tokens: int, decode_sequences: int, context_tokens: int) -> float:
        """Return the duration of a step that computes and attends to this much."""
        return (
            self.step_fixed_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_sequence_s * decode_sequences
            + self.attention_token_s * context_tokens
        ) / self.speed


def parse_options(options: Mapping[str, object]) -> SimulatedOptions:
    """Return the settings in `options`. Raises ConfigurationError, naming the key that is wrong."""
    unknown = sorted(set(options) - set(SimulatedOptions.__struct_fields__))
    if unknown:
        known = ", ".join(SimulatedOptions.__struct_fields__)
        raise ConfigurationError(f"the simulated engine has no option {unknown[0]!r}; it has {known}", param=unknown[0])
    try:
        parsed = msgspec.convert(dict(options), type=SimulatedOptions)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"an option of the simulated engine is malformed: {error}") from error
    check_kv_file(parsed.kv_file, parsed.kv_file_bytes, bool(parsed.kv_pool_bytes))
    if parsed.kv_bytes_per_token % (parsed.layers * WORD_BYTES):
        raise ConfigurationError(
            f"kv_bytes_per_token = {parsed.kv_bytes_per_token} is no multiple of {WORD_BYTES} bytes × "
            f"{parsed.layers} layers",
            param="kv_bytes_per_token",
        )
    capacity_tokens = parsed.blocks * parsed.block_tokens
    if parsed.context_tokens_max is not None and parsed.context_tokens_max > capacity_tokens:
        raise ConfigurationError(
            f"context_tokens_max = {parsed.context_tokens_max} is more than the {capacity_tokens} tokens that "
            f"{parsed.blocks} blocks of {parsed.block_tokens} can hold",
            param="context_tokens_max",
        )
    return parsed
