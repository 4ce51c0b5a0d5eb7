"""A tiny DeepSeek-type model with random weights: latent attention (MLA), one dense layer and one of experts (MoE)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

VOCABULARY, HIDDEN, LAYERS, HEADS = 8192, 256, 2, 8
INTERMEDIATE, EXPERTS, EXPERT_INTERMEDIATE = 512, 4, 128
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": EXPERT_INTERMEDIATE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    # SGLang knows DeepSeek's rotation on a CPU only in its scaled form.
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def make_deepseek_model(folder: Path, *, scaled: bool = True) -> None:
    from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        attention, mlp = f"{here}.self_attn", f"{here}.mlp"
        shapes |= {
            f"{attention}.q_proj.weight": (HEADS * (NOPE + ROPE), HIDDEN),
            f"{attention}.kv_a_proj_with_mqa.weight": (LATENT + ROPE, HIDDEN),
            f"{attention}.kv_a_layernorm.weight": (LATENT,),
            f"{attention}.kv_b_proj.weight": (HEADS * (NOPE + VALUE), LATENT),
            f"{attention}.o_proj.weight": (HIDDEN, HEADS * VALUE),
            f"{here}.input_layernorm.weight": (HIDDEN,),
            f"{here}.post_attention_layernorm.weight": (HIDDEN,),
        }
        if layer == 0:
            shapes |= _mlp(mlp, INTERMEDIATE)
            continue
        shapes |= {f"{mlp}.gate.weight": (EXPERTS, HIDDEN), **_mlp(f"{mlp}.shared_experts", EXPERT_INTERMEDIATE)}
        for expert in range(EXPERTS):
            shapes |= _mlp(f"{mlp}.experts.{expert}", EXPERT_INTERMEDIATE)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    random = np.random.default_rng(0)
    weights = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else random.normal(0, 0.08, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG if scaled else CONFIG | {"rope_scaling": None}))


def _mlp(name: str, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (intermediate, HIDDEN),
        f"{name}.up_proj.weight": (intermediate, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, intermediate),
    }
