"""SGLang's KV pools as if they lay on a GPU, described by the connector: run with SGLang's Python, prints JSON.

The pools are SGLang's own classes, without what their constructors allocate; their tensors are a CPU's.
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from on_device import OnDevice
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from baton.connectors.sglang_kv import read_kv
from baton.errors import ConfigurationError

LAYERS, PAGES, PAGE_TOKENS = 2, 3, 32


def tensors(heads: int, dim: int) -> list[OnDevice]:
    shape = (PAGES * PAGE_TOKENS, heads, dim)
    return [OnDevice(torch.zeros(shape, dtype=torch.bfloat16), "cuda", 1) for _ in range(LAYERS)]


def described(pool: Any, *, staged: bool) -> dict[str, Any]:
    try:
        kv = read_kv(pool, page_tokens=PAGE_TOKENS, kv_heads=8, rank=1, ranks=2, staged=staged)
    except ConfigurationError as refusal:
        return {"refusal": refusal.detail}
    addresses = [tensor.data_ptr() for tensor in kv.tensors]
    pool = kv.described("identity")
    fields = asdict(pool)
    fields.pop("region")
    return {**fields, "in_order": list(pool.layer_addresses) == addresses, "layer_addresses": len(addresses)}


def main() -> None:
    heads = object.__new__(MHATokenToKVPool)
    heads.layer_num, heads.kv_cache_layout = LAYERS, "nhd"
    heads.k_buffer, heads.v_buffer = tensors(4, 64), tensors(4, 64)
    latent = object.__new__(MLATokenToKVPool)
    latent.layer_num, latent.kv_buffer = LAYERS, tensors(1, 576)
    cases = {"heads": heads, "latent": latent}
    staged = {name: described(pool, staged=True) for name, pool in cases.items()}
    print(json.dumps({**staged, "direct": described(heads, staged=False)}))


if __name__ == "__main__":
    main()
