"""vLLM's caches on a GPU, as tensors of its own shapes and strides on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from baton.connectors.vllm_kv import block_order, read_kv
from baton.errors import ConfigurationError
from baton.transfer import Pool

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 5, 2, 16, 8
SIZES = (LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM)


def layer_of(name: str, layer: int, cache: Any = None) -> Any:
    """Return a layer's cache `[blocks, heads, tokens, K and V]`, as vLLM lays it out in memory."""
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = KVCacheLayout[name]
    cache = torch.arange(torch.Size(SIZES).numel()) if cache is None else cache
    physical = cache.reshape([SIZES[axis] for axis in layout.stride_order])
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


# ---------------------------------------------------------------- the pool that the connector describes


def read_on_gpu(tensors: Sequence[Any], *, staged: bool = True, latent: bool = False, **layer: Any) -> Pool:
    """Describe tensors as rank 1 of 2 does whose GPU is number 1."""
    from on_device import OnDevice

    model = SimpleNamespace(
        use_mla=latent,
        get_total_num_kv_heads=lambda: 2 * HEADS,
        get_head_size=lambda: DIM,
        hf_text_config=SimpleNamespace(to_dict=lambda: {"model_type": "llama"}),
    )
    config: Any = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        cache_config=SimpleNamespace(block_size=TOKENS),
    )
    # Attention on a CPU packs K and V; what it is compiled for says nothing of a GPU.
    layers = [SimpleNamespace(**{"kv_cache_dtype": "auto", "isa": "amx", **layer}) for _ in tensors]
    return read_kv(
        [OnDevice(tensor, "cuda", 1) for tensor in tensors],  # pyright: ignore[reportArgumentType]
        layers,
        config,
        blocks=BLOCKS,
        model_digest="digest",
        tp_rank=1,
        staged=staged,
    )


def cache_of(name: str) -> list[Any]:
    import torch

    cache = torch.arange(torch.Size(SIZES).numel(), dtype=torch.int16).view(torch.float16)
    return [layer_of(name, layer, cache) for layer in range(LAYERS)]


@pytest.mark.parametrize(("name", "order"), [("LBNHC", "NHD"), ("LBHNC", "HND"), ("BLNHC", "NHD"), ("BLHNC", "HND")])
def test_a_cache_on_a_gpu_is_described_with_its_device(name: str, order: str) -> None:
    import torch

    tensors = cache_of(name)
    pool = read_on_gpu(tensors)
    assert (pool.device, pool.blocks, pool.block_tokens) == (1, BLOCKS, TOKENS)
    assert pool.block_bytes == 2 * HEADS * TOKENS * DIM * 2
    assert pool.layout == (
        f"layers={LAYERS} kv_heads={2 * HEADS} dim={DIM} dtype=float16 order={order} form=fused packing=plain "
        f"block_tokens={TOKENS} tp=1/2"
    )
    for address, tensor in zip(pool.layer_addresses, tensors, strict=True):
        for block in range(BLOCKS):
            found = ctypes.c_int16.from_address(address + block * pool.block_stride_bytes).value
            assert found == int(tensor[block, 0, 0, 0].view(torch.int16))


def test_latent_rows_on_a_gpu_are_described_with_their_device() -> None:
    import torch

    pool = read_on_gpu([torch.zeros(BLOCKS, TOKENS, 576, dtype=torch.bfloat16)] * LAYERS, latent=True)
    assert (pool.device, pool.block_bytes, pool.block_stride_bytes) == (1, TOKENS * 576 * 2, TOKENS * 576 * 2)
    assert pool.layout == (
        f"layers={LAYERS} kv_heads=1 dim=576 dtype=bfloat16 order=NHD form=latent packing=plain "
        f"block_tokens={TOKENS} tp=1/2"
    )


def test_eight_bits_on_a_gpu_come_with_their_scales() -> None:
    import torch

    cache = torch.zeros(torch.Size(SIZES).numel(), dtype=torch.uint8)
    tensors = [layer_of("LBNHC", layer, cache) for layer in range(LAYERS)]
    kept = [
        read_on_gpu(tensors, kv_cache_dtype="fp8", _k_scale_float=k_scale, _v_scale_float=0.5)
        for k_scale in (1.0, 0.25)
    ]
    assert all("dtype=float8_e4m3" in pool.layout for pool in kept)
    assert kept[0].fingerprint != kept[1].fingerprint


def test_a_cache_on_a_gpu_is_refused_where_it_cannot_be_handed_off() -> None:
    with pytest.raises(ConfigurationError, match="lies on cuda, from where KV is handed off staged only"):
        read_on_gpu(cache_of("LBNHC"), staged=False)
    for name in ("LHBNC", "BHLNC"):
        with pytest.raises(ConfigurationError, match="not one contiguous span per block and layer"):
            read_on_gpu(cache_of(name))
