"""Options, environment and Python of real engines that a benchmark or a test starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final, Literal

EngineName = Literal["vllm", "sglang"]
Device = Literal["cpu", "cuda"]

ROOT: Final = Path(__file__).resolve().parents[2]

_OPTIONS: Final[dict[EngineName, dict[str, Any]]] = {
    "vllm": {
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 256,
        "block_size": 32,
    },
    "sglang": {
        "context_length": 4096,
        "max_running_requests": 16,
        "chunked_prefill_size": 512,
        "max_total_tokens": 8192,
        "page_size": 32,
    },
}
_MODELS: Final = ("qwen3", "llama", "deepseek_v2", "gemma3_causal", "mellum", "lfm2")
_RANKS_OPTION: Final[dict[EngineName, str]] = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}
_BLOCK_OPTION: Final[dict[EngineName, str]] = {"vllm": "block_size", "sglang": "page_size"}


def engine_options(
    engine: EngineName, *, block_tokens: int = 32, dtype: str = "float32", ranks: int = 1
) -> dict[str, Any]:
    """Return an engine's options. float32 because with bf16 random weights give near-ties that any reordering flips."""
    return {**_OPTIONS[engine], "dtype": dtype, _BLOCK_OPTION[engine]: block_tokens, _RANKS_OPTION[engine]: ranks}


def engine_environ(engine: EngineName, device: Device = "cpu") -> dict[str, str]:
    """Return the environment of an engine; it stops SGLang from importing every model it knows."""
    if engine != "sglang":
        return dict(os.environ)
    environment = Path(str(engine_python(engine, device))).parents[1]
    models = environment.glob("lib/python3.*/site-packages/sglang/srt/models/*.py")
    unused = (path.stem for path in models if path.stem not in _MODELS)
    return {**os.environ, "SGLANG_DISABLED_MODEL_ARCHS": ",".join(unused)}


def engine_python(engine: EngineName, device: Device = "cpu") -> str | None:
    """Return the Python that has an engine: this one or the engine's own; None if the engine is not installed."""
    own = f".venv-{engine}" if device == "cpu" else f".venv-{engine}-cuda"
    for folder in (Path(sys.prefix), ROOT / own):
        if list(folder.glob(f"lib/python3.*/site-packages/{engine}")):
            return str(folder / "bin" / "python")
    return None
