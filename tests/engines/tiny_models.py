"""Tiny models of further kinds, with random weights: those whose caches engines keep in other ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from deepseek_model import make_deepseek_model

from baton.cli.tiny_model import make_tiny_model

WINDOW: Final = 64
"""Tokens of a sliding window: fewer than most prompts of the tests."""


def make_model(folder: Path, kind: str) -> None:
    """Write the model of a kind with the tiny model's tokenizer; an existing one stays."""
    make_tiny_model(folder, arch="llama" if kind.startswith("llama") else "qwen3")
    if kind in _CHANGES and not (folder / kind).exists():
        _CHANGES[kind](folder)
        (folder / kind).touch()


def _windows(folder: Path, *kinds: str) -> None:
    _configure(folder, sliding_window=WINDOW, layer_types=[f"{kind}_attention" for kind in kinds])


def _make_gemma3(folder: Path) -> None:
    """Every other layer has a window; the architecture is known to both engines."""
    hidden, heads, kv_heads, dim, intermediate, layers, vocabulary = 256, 4, 2, 64, 512, 4, 8192
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        here = f"model.layers.{layer}"
        shapes |= {
            f"{here}.self_attn.q_proj.weight": (heads * dim, hidden),
            f"{here}.self_attn.k_proj.weight": (kv_heads * dim, hidden),
            f"{here}.self_attn.v_proj.weight": (kv_heads * dim, hidden),
            f"{here}.self_attn.o_proj.weight": (hidden, heads * dim),
            f"{here}.self_attn.q_norm.weight": (dim,),
            f"{here}.self_attn.k_norm.weight": (dim,),
            f"{here}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{here}.mlp.up_proj.weight": (intermediate, hidden),
            f"{here}.mlp.down_proj.weight": (hidden, intermediate),
        }
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{here}.{norm}_layernorm.weight": (hidden,) for norm in norms}
    _write_weights(folder, shapes | {"model.norm.weight": (hidden,)})
    _replace_config(
        folder,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        query_pre_attn_scalar=dim,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_local_base_freq=10000.0,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=True,
        torch_dtype="float32",
    )


def _make_mellum(folder: Path) -> None:
    """Only its configuration: SGLang keeps its windows in a pool of their own."""
    _replace_config(
        folder,
        architectures=["MellumForCausalLM"],
        model_type="mellum",
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        max_position_embeddings=4096,
        torch_dtype="float32",
    )


def _make_lfm2(folder: Path) -> None:
    """Only its configuration: layers of short convolutions, which have a state in place of KV, between attention."""
    _replace_config(
        folder,
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=512,
        block_dim=256,
        block_ff_dim=512,
        conv_dim=256,
        conv_dim_out=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        conv_L_cache=3,
        conv_bias=False,
        layer_types=["conv", "full_attention"] * 2,
        max_position_embeddings=4096,
        norm_eps=1e-5,
        rope_theta=10000.0,
        torch_dtype="float32",
    )


def _scale_kv(folder: Path, k_scale: float, v_scale: float) -> None:
    """Have the checkpoint bring scales for KV of eight bits, others in each layer."""
    # With torch, as numpy has no bfloat16.
    import torch
    from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

    path = str(folder / "model.safetensors")
    weights: dict[str, Any] = load_file(path)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for layer in range(layers):
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            weights[f"model.layers.{layer}.self_attn.attn.{name}"] = torch.tensor(scale / 2**layer)
    save_file(weights, path, metadata={"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    _configure(
        folder,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": ["re:.*"],
            "kv_cache_scheme": scheme,
        },
    )


_CHANGES: Final[Mapping[str, Callable[[Path], None]]] = {
    "deepseek": make_deepseek_model,
    "llamawindows": lambda folder: _windows(folder, "sliding", "full", "sliding", "full"),
    "llamawindowsonly": lambda folder: _windows(folder, *["sliding"] * 4),
    "gemma3": _make_gemma3,
    "mellum": _make_mellum,
    "lfm2": _make_lfm2,
    "scaled": lambda folder: _scale_kv(folder, 0.5, 0.25),
    "scaledotherwise": lambda folder: _scale_kv(folder, 0.25, 0.5),
}


def _configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _replace_config(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def _write_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

    random = np.random.default_rng(0)
    weights = {
        # Gemma adds 1 to the weights of its norms.
        name: np.zeros(shape, np.float32) if len(shape) == 1 else random.normal(0, 0.15, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
