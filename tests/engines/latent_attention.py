"""A check that vLLM's attention over a prompt is causal for a model with latent attention (MLA): exits 0 if so.

    python latent_attention.py FOLDER      makes a tiny DeepSeek-type model there, in float32

The log-probabilities of a prompt's tokens depend on the tokens before them alone. So they stay as they are when a token
is appended; where they do not, answers of that engine say nothing about KV that was handed over.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, HIDDEN, LAYERS, HEADS, INTERMEDIATE = 512, 256, 2, 8, 512
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
TOKENS = 199
TOLERANCE = 1e-3
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
    "n_routed_experts": 4,
    "first_k_dense_replace": LAYERS,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_model(folder: Path) -> None:
    from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {
            f"{attention}.q_proj.weight": (HEADS * (NOPE + ROPE), HIDDEN),
            f"{attention}.kv_a_proj_with_mqa.weight": (LATENT + ROPE, HIDDEN),
            f"{attention}.kv_a_layernorm.weight": (LATENT,),
            f"{attention}.kv_b_proj.weight": (HEADS * (NOPE + VALUE), LATENT),
            f"{attention}.o_proj.weight": (HIDDEN, HEADS * VALUE),
            f"{mlp}.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{mlp}.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{mlp}.down_proj.weight": (HIDDEN, INTERMEDIATE),
            f"model.layers.{layer}.input_layernorm.weight": (HIDDEN,),
            f"model.layers.{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    random = np.random.default_rng(0)
    weights = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else random.normal(0, 0.08, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))


def main() -> int:
    folder = Path(sys.argv[1])
    write_model(folder)
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        enable_prefix_caching=False,
        num_gpu_blocks_override=100,
    )
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS + 1).tolist()
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    logprobs: list[list[float]] = []
    for prompt in (tokens[:-1], tokens):
        answer = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        entries = zip(prompt[1:TOKENS], answer.prompt_logprobs[1:TOKENS], strict=True)
        logprobs.append([entry[token].logprob for token, entry in entries])
    moved = np.abs(np.subtract(logprobs[0], logprobs[1]))
    unmoved = int(np.argmax(moved > TOLERANCE)) if (moved > TOLERANCE).any() else len(moved)
    print(
        f"a token appended to a prompt of {TOKENS}: the log-probabilities of the first {unmoved + 1} tokens stay as "
        f"they are, the others move by up to {moved.max():.2f}; with causal attention none moves"
    )
    return 0 if unmoved == len(moved) else 1


if __name__ == "__main__":
    # vLLM starts processes that import this file.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.exit(main())
