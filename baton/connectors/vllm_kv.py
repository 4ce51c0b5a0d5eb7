"""vLLM's KV memory, described for the transfer agents: where its blocks lie, what is in them, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from baton.connectors.cache_layout import FLOAT8, describe_cache
from baton.errors import ConfigurationError
from baton.identity import DESCRIBED, NONE, KvIdentity, describe_rope, describe_scales
from baton.transfer import Pool

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

PLAIN = "plain"
"""Stands for an instruction set where attention packs nothing: on a GPU."""


def block_order(tensor: torch.Tensor) -> str:
    """Return how a block lies in a layer's tensor `[blocks, heads, tokens, …]`, or `[blocks, tokens, …]` of MLA.

    "HND" or "NHD"; empty: a block is not one span of memory, as in vLLM's layouts with heads outside of blocks.
    """
    block = tensor[0]
    if block.is_contiguous():
        return "HND" if tensor.dim() == 4 else "NHD"
    return "NHD" if tensor.dim() == 4 and block.transpose(0, 1).is_contiguous() else ""


def read_kv(
    tensors: Sequence[torch.Tensor],
    layers: Sequence[Any],
    config: VllmConfig,
    *,
    blocks: int,
    model_digest: str,
    tp_rank: int,
    staged: bool,
) -> Pool:
    """Return the pool of one rank. `layers`: the attention layers of these tensors.

    `staged`: peers read copies in host memory, so the cache may lie on a device. Raises ConfigurationError if Baton
    cannot hand off from it.
    """
    first = tensors[0]
    order, device = block_order(first), first.device
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not staged):
        raise ConfigurationError(
            f"the KV cache lies on {device.type}, from where KV is handed off staged only "
            "(engine option kv_path=staged or gpu; handoff=false serves requests whole)"
        )
    if not order or any(
        tensor.shape != first.shape or tensor.stride() != first.stride() or tensor.shape[0] != blocks
        for tensor in tensors
    ):
        raise ConfigurationError(
            f"the KV cache is not one contiguous span per block and layer: {tuple(first.shape)}, "
            f"strides {first.stride()}"
        )
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    block_tokens, block_bytes = config.cache_config.block_size, first[0].nbytes
    kv_heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    dim = first.shape[-1] if model.use_mla else model.get_head_size()
    isa = PLAIN if device.type == "cuda" else str(getattr(layers[0], "isa", "unknown"))
    dtype = FLOAT8.get(layers[0].kv_cache_dtype, str(first.dtype).removeprefix("torch."))
    layout = describe_cache(
        layers=len(tensors),
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        isa=isa,
        order=order,
        latent=model.use_mla,
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        tp_rank=tp_rank,
        tp_size=ranks,
    )
    text_config = model.hf_text_config.to_dict()
    scales = ((layer._k_scale_float, layer._v_scale_float) for layer in layers)
    identity = KvIdentity(
        model=str(text_config.get("model_type")),
        digest=model_digest,
        layers=len(tensors),
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        scales=describe_scales(scales) if first.element_size() == 1 else NONE,
        rope=describe_rope(text_config),
        blocks=DESCRIBED if layout else f"{'x'.join(map(str, first.shape[1:]))},order={order},inner={isa},tp={ranks}",
    )
    return Pool(
        layer_addresses=tuple(tensor.data_ptr() for tensor in tensors),
        blocks=blocks,
        block_bytes=block_bytes,
        block_stride_bytes=first.stride(0) * first.element_size(),
        block_tokens=block_tokens,
        fingerprint=str(identity),
        device=device.index or 0 if device.type == "cuda" else None,
        layout="" if layout is None else str(layout),
    )
