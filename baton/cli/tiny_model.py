"""A tiny language model with random weights, made locally: for the demo and the tests, no download.

Shape: 4 layers, hidden size 256, 8 heads over 2 KV heads of 64, 8,192 tokens: 12 MB in bfloat16. The
tokenizer is a byte-level BPE trained on Python's own standard library, with a ChatML template. The model's
output is noise, but always the same noise: weights come from a fixed seed.

    python -m baton.cli.tiny_model DIR [--arch qwen3|llama] [--dtype bfloat16|float32]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Arch = Literal["qwen3", "llama"]
Dtype = Literal["bfloat16", "float32"]

LAYERS: Final = 4
HIDDEN: Final = 256
INTERMEDIATE: Final = 768
HEADS: Final = 8
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
VOCABULARY: Final = 8192
CONTEXT_TOKENS_MAX: Final = 8192
WEIGHT_DEVIATION: Final = 0.15
"""Standard deviation of the weights: wide enough that greedy decoding does not repeat one token."""

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, _, END_ID = range(3)
CHAT_TEMPLATE: Final = """\
{%- if tools %}<|im_start|>system
<tools>{{ tools | tojson }}</tools>
A call: <tool_call>{"name": "…", "arguments": {…}}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TRAINING_FILES_MAX: Final = 40


def make_tiny_model(folder: Path, *, arch: Arch = "qwen3", dtype: Dtype = "bfloat16", seed: int = 0) -> None:
    """Write the model into `folder` in Hugging Face's layout; an existing model is left as it is.

    The folder appears whole or not at all, so two starts at the same time are safe.
    """
    if (folder / "config.json").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_tokenizer(unfinished)
        _write_weights(unfinished / "model.safetensors", arch, dtype, seed)
        _write_json(unfinished / "config.json", _config(arch, dtype))
        _write_json(unfinished / "generation_config.json", {"eos_token_id": END_ID, "pad_token_id": PAD_ID})
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            # Someone else finished first, or an empty folder stands there already.
            if not (folder / "config.json").is_file():
                shutil.copytree(unfinished, folder, dirs_exist_ok=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [str(path) for path in sorted(library.glob("*.py"))[:TRAINING_FILES_MAX]]
    tokenizer.train(texts, trainer)
    # Not by its own `save`, whose failures have no type: a full disk is an expected one.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[END_ID],
            "pad_token": SPECIAL_TOKENS[PAD_ID],
            "additional_special_tokens": list(SPECIAL_TOKENS),
            "model_max_length": CONTEXT_TOKENS_MAX,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _config(arch: Arch, dtype: Dtype) -> dict[str, object]:
    return {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[arch]],
        "model_type": arch,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _weight_shapes(arch: Arch) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every weight's name and shape, in a fixed order; the output head is tied to the embedding."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        if arch == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,)
            yield f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)


def _write_weights(path: Path, arch: Arch, dtype: Dtype, seed: int) -> None:
    """Write the weights as safetensors: header length (uint64 LE), JSON header, then the tensors end to end."""
    random = np.random.default_rng(seed)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in _weight_shapes(arch):
        # One-dimensional weights are norms: ones, as every trained model starts with.
        values = np.ones(shape, np.float32)
        if len(shape) > 1:
            values = random.standard_normal(shape, np.float32) * np.float32(WEIGHT_DEVIATION)
        start = len(data)
        data += values.tobytes() if dtype == "float32" else _bfloat16_bytes(values)
        header[name] = {
            "dtype": "F32" if dtype == "float32" else "BF16",
            "shape": shape,
            "data_offsets": [start, len(data)],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # So that the tensors begin at a multiple of eight bytes.
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def _bfloat16_bytes(values: NDArray[np.float32]) -> bytes:
    """Round to bfloat16, ties to even; numpy has no such type. `values` must be finite."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def main() -> int:
    parser = argparse.ArgumentParser(prog="baton.cli.tiny_model", description="Make a tiny model with random weights.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write it; left alone if a model is there")
    parser.add_argument("--arch", choices=("qwen3", "llama"), default="qwen3", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights; default: %(default)s")
    arguments = parser.parse_args()
    make_tiny_model(arguments.folder, arch=arguments.arch, dtype=arguments.dtype, seed=arguments.seed)
    print(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
