"""SGLang's KV memory, described for the transfer agents: which tensors hold it, what a page of them means.

K and V of a layer have a tensor each, `[slots, heads, dimensions]`; the latent rows of MLA have one, `[slots, 1,
dimensions]`, the same on every rank. A page is a block. Other pools are refused, with the reason.
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from baton.errors import ConfigurationError
from baton.transfer import Pool
from baton.transfer.layout import Layout

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.memory_pool import KVCache

SERVES_WHOLE = "(engine option handoff=false serves requests whole)"


@dataclass(frozen=True, slots=True)
class SglangKv:
    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    """Layer by layer, K before V."""

    def described(self, identity: str) -> Pool:
        """Return the pool as agents take it."""
        page = self.tensors[0][: self.layout.block_tokens]
        return Pool(
            layer_addresses=tuple(tensor.data_ptr() for tensor in self.tensors),
            blocks=self.tensors[0].shape[0] // self.layout.block_tokens,
            block_bytes=page.nbytes,
            block_stride_bytes=page.nbytes,
            block_tokens=self.layout.block_tokens,
            fingerprint=identity,
            device=self.tensors[0].device.index or 0 if self.tensors[0].device.type == "cuda" else None,
            layout=str(self.layout),
        )


def kv_tensors(pool: KVCache) -> tuple[torch.Tensor, ...]:
    """Return the pool's tensors, layer by layer; none if Baton does not know this kind of pool."""
    kind: Any = pool
    if type(pool) is MHATokenToKVPool and kind.kv_cache_layout == "nhd":
        return tuple(tensor for pair in zip(kind.k_buffer, kind.v_buffer, strict=True) for tensor in pair)
    if type(pool) is MLATokenToKVPool:
        return tuple(kind.kv_buffer)
    return ()


def read_kv(pool: KVCache, *, page_tokens: int, kv_heads: int, rank: int, ranks: int, staged: bool = False) -> SglangKv:
    """Return the pool of one of so many ranks; `kv_heads` are the whole model's.

    `staged`: peers read copies in host memory, so the pool may lie on a device. Raises ConfigurationError if Baton
    cannot hand off from it.
    """
    tensors, latent = kv_tensors(pool), type(pool) is MLATokenToKVPool
    if not tensors:
        raise ConfigurationError(
            f"SGLang keeps this model's KV in a {type(pool).__name__}, which Baton cannot hand off {SERVES_WHOLE}"
        )
    first = tensors[0]
    device = first.device.type
    if device not in ("cpu", "cuda") or (device == "cuda" and not staged):
        raise ConfigurationError(
            f"the KV cache lies on {device}, from where KV is handed off with engine option kv_path=staged or gpu only"
        )
    if first.element_size() == 1:
        raise ConfigurationError(
            "KV of eight bits is handed over with its scales, which Baton does not read out of SGLang " + SERVES_WHOLE
        )
    if any(tensor.shape != first.shape for tensor in tensors):
        raise ConfigurationError(f"K and V of this model differ in size, which no layout describes {SERVES_WHOLE}")
    layout = Layout(
        layers=pool.layer_num,
        kv_heads=1 if latent else kv_heads,
        dim=first.shape[2],
        dtype=str(first.dtype).removeprefix("torch."),
        order="NHD",
        form="latent" if latent else "split",
        packing="plain",
        block_tokens=page_tokens,
        tp_rank=rank,
        tp_size=ranks,
    )
    return SglangKv(layout, tensors)
