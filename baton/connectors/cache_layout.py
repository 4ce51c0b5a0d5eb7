"""Layout of vLLM's KV cache, in the terms of `baton.transfer.layout`: see docs/wire-layout.md."""

from __future__ import annotations

from typing import Final

from baton.transfer.layout import Layout

PACKINGS: Final = {"vec": "vec", "vec16": "vec", "amx": "amx", "plain": "plain"}
"""Packing by the instruction set that a layer's attention was compiled for; "plain" on a GPU."""
DTYPES: Final = frozenset({"float32", "bfloat16", "float16", "float8_e4m3"})
FLOAT8: Final = {"fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3"}
"""Type by vLLM's name: it keeps such caches as plain bytes. `baton.identity` compares their scales."""


def describe_cache(
    *,
    layers: int,
    kv_heads: int,
    dim: int,
    dtype: str,
    isa: str,
    order: str,
    latent: bool,
    block_tokens: int,
    block_bytes: int,
    tp_rank: int,
    tp_size: int,
) -> Layout | None:
    """Return the layout; None if it cannot be described: then only identical caches exchange blocks."""
    packing = "plain" if latent else PACKINGS.get(isa)
    if packing is None or dtype not in DTYPES:
        return None
    try:
        layout = Layout(
            layers=layers,
            kv_heads=1 if latent else kv_heads,
            dim=dim,
            dtype=dtype,
            order="NHD" if latent else order,
            form="latent" if latent else "fused",
            packing=packing,
            block_tokens=block_tokens,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
    except ValueError:
        return None
    # Padding, K and V of different widths and anything else unforeseen show in the size.
    return layout if layout.block_bytes == block_bytes else None
