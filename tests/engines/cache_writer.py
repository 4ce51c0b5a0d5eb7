"""Fill KV blocks with vLLM's own CPU operators and write them to a file, beside what went in.

    python cache_writer.py OUT.npz            with the kernels that vLLM takes on this processor
    python cache_writer.py OUT.npz LIBRARY    with those of one of its other builds

Its AMX build's operators that write caches use no AMX instruction, so they run on any AVX-512 processor.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

HEADS, TOKENS = 2, 70
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor(np.random.default_rng((seed, *shape)).standard_normal(shape, dtype=np.float32))


def slots(blocks: list[int], block_tokens: int) -> torch.Tensor:
    return torch.tensor([blocks[t // block_tokens] * block_tokens + t % block_tokens for t in range(TOKENS)])


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.contiguous().view(torch.uint8).numpy()


def attention(isa: str, dtype: str, block_tokens: int, dim: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a description of the writes, and the cache with the K and V written to it."""
    blocks = [3, 0, 1][: -(-TOKENS // block_tokens)]
    float8 = dtype.startswith("float8")
    k, v = (randn(TOKENS, HEADS, dim, seed=seed).to(DTYPES["bfloat16" if float8 else dtype]) for seed in (1, 2))
    cache = torch.zeros(4, HEADS, block_tokens, 2 * dim, dtype=torch.uint8 if float8 else k.dtype)
    # As vllm/v1/attention/backends/cpu_attn.py, `do_kv_cache_update`, takes the cache apart.
    halves = cache.view(4, HEADS, 2 * block_tokens, dim).chunk(2, dim=2)
    kind = dtype.replace("float8", "fp8") if float8 else "auto"
    write = torch.ops._C.cpu_attn_reshape_and_cache
    write(k, v, *halves, slots(blocks, block_tokens), isa, 1.0, 1.0, kind)
    return {"isa": isa, "dtype": dtype, "block_tokens": block_tokens, "dim": dim, "blocks": blocks}, [cache, k, v]


def latent(block_tokens: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    blocks = [2, 0, 3, 1, 4][: -(-TOKENS // block_tokens)]
    rows, rope = randn(TOKENS, 512).bfloat16(), randn(TOKENS, 64).bfloat16()
    cache = torch.zeros(5, block_tokens, 576, dtype=torch.bfloat16)
    torch.ops._C.concat_and_cache_mla_cpu(rows, rope, cache, slots(blocks, block_tokens))
    written = torch.cat([rows, rope], dim=1)
    return {"isa": "", "dtype": "bfloat16", "block_tokens": block_tokens, "dim": 576, "blocks": blocks}, [
        cache,
        written,
        written,
    ]


def main() -> None:
    if len(sys.argv) > 2:
        torch.ops.load_library(sys.argv[2])  # pyright: ignore[reportUnknownMemberType]
        cases = [attention("amx", "bfloat16", block_tokens, 64) for block_tokens in (32, 128)]
        cases += [latent(16), latent(32)]
        cases += [attention(isa, "float8_e4m3", 32, 64) for isa in ("vec", "amx")]
    else:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        cases = [attention("vec", dtype, block_tokens, 64) for dtype in DTYPES for block_tokens in (32, 128)]
        # Heads that 32 does not divide.
        cases += [attention("vec16", dtype, 32, 80) for dtype in DTYPES]
    arrays = {
        f"{number}.{name}": raw(tensor)
        for number, (_, tensors) in enumerate(cases)
        for name, tensor in zip(("cache", "k", "v"), tensors, strict=True)
    }
    arrays["cases"] = np.array(json.dumps([case for case, _ in cases]))
    np.savez(sys.argv[1], allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
