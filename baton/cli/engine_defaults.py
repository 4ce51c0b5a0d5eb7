"""Engine options that suit a first run on this machine; the user's own win."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TINY_BLOCKS: Final = 1024
TINY_BLOCK_TOKENS: Final = 32
TINY_STEP_TOKENS_MAX: Final = 512
CPU_CONTEXT_TOKENS_MAX: Final = 8192
"""Context limit on a CPU: long contexts of real models are slow there, and their KV takes memory a laptop needs."""
CUDA_MEMORY_SHARE: Final = 0.85
"""Share of one GPU's memory for all workers on it together."""
SIMULATED_SPEED: Final = 1.0
"""Speed of the engine that it simulates, so that tokens visibly arrive one by one."""


# The two engines' names for the same options.
_STEP_TOKENS_MAX: Final = {"vllm": "max_num_batched_tokens", "sglang": "chunked_prefill_size"}
_RUNNING_MAX: Final = {"vllm": "max_num_seqs", "sglang": "max_running_requests"}
_MEMORY_SHARE: Final = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
_CONTEXT_TOKENS_MAX: Final = {"vllm": "max_model_len", "sglang": "context_length"}
_TINY_CACHE: Final[Mapping[str, Mapping[str, object]]] = {
    "vllm": {"num_gpu_blocks_override": TINY_BLOCKS},
    "sglang": {"max_total_tokens": TINY_BLOCKS * TINY_BLOCK_TOKENS},
}


def engine_defaults(engine: str, *, device: str, tiny: bool, workers_per_gpu: int) -> dict[str, object]:
    """Return the options for each worker; `workers_per_gpu` share one GPU."""
    if engine == "simulated":
        return {"speed": SIMULATED_SPEED}
    options: dict[str, object] = {}
    if tiny:
        # float32: with random weights the best two tokens are often so close that bfloat16 decides by chance.
        options |= {"dtype": "float32", _STEP_TOKENS_MAX[engine]: TINY_STEP_TOKENS_MAX, _RUNNING_MAX[engine]: 32}
        options |= _TINY_CACHE[engine] if device == "cpu" else {}
    if device == "cuda":
        options[_MEMORY_SHARE[engine]] = round(CUDA_MEMORY_SHARE / workers_per_gpu, 3)
    return options


def context_limit(engine: str, model_config: Mapping[str, object], *, device: str) -> dict[str, object]:
    """Return an option that bounds a real model's context on a CPU; none where its own limit is lower."""
    limit = model_config.get("max_position_embeddings")
    if device != "cpu" or not isinstance(limit, int) or limit <= CPU_CONTEXT_TOKENS_MAX:
        return {}
    return {_CONTEXT_TOKENS_MAX[engine]: CPU_CONTEXT_TOKENS_MAX}


def worker_threads(device: str, *, cores: int, workers: int) -> dict[str, str]:
    """Return how many threads each worker computes with, so that together they use the machine once.

    A single worker leaves a core to the other processes, as `vllm serve` does: its threads wait for each other several
    times in a step, and where one of them has no core, all do nothing (docs/engines.md).
    """
    threads = cores // workers if workers > 1 else cores - 1
    return {"OMP_NUM_THREADS": str(max(1, threads))} if device == "cpu" else {}
