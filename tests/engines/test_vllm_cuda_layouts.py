"""vLLM's caches on a GPU, as tensors of its own shapes and strides on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from baton.connectors.vllm_kv import block_order

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 5, 2, 16, 8
SIZES = (LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM)


def layer_of(name: str, layer: int) -> Any:
    """Return a layer's cache `[blocks, heads, tokens, K and V]`, as vLLM lays it out in memory."""
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = KVCacheLayout[name]
    physical = torch.arange(torch.Size(SIZES).numel()).reshape([SIZES[axis] for axis in layout.stride_order])
    logical = [layout.stride_order.index(axis) for axis in range(len(SIZES))]
    return physical.permute(logical)[layer]


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        ("LBNHC", "NHD"),
        ("LBHNC", "HND"),
        ("BLNHC", "NHD"),
        ("BLHNC", "HND"),
        ("LHBNC", ""),
        ("BHLNC", ""),
    ],
)
def test_a_block_is_one_span_in_the_order_that_is_described(layout: str, order: str) -> None:
    cache = layer_of(layout, 1)
    assert cache.shape == SIZES[1:]
    assert block_order(cache) == order
    if order:
        block = cache[2]
        in_memory = block if order == "HND" else block.transpose(0, 1)
        first = int(in_memory.flatten()[0])
        assert in_memory.flatten().tolist() == list(range(first, first + block.numel()))


def test_latent_rows_are_one_span() -> None:
    import torch

    assert block_order(torch.zeros(BLOCKS, TOKENS, 576)) == "NHD"
    assert block_order(torch.zeros(BLOCKS, 576, TOKENS).transpose(1, 2)) == ""
