"""A check that vLLM's attention over a prompt is causal for a model with latent attention (MLA): exits 0 if so.

    python latent_attention.py [--unscaled] FOLDER      makes a tiny DeepSeek-type model there, in float32

`--unscaled`: without a scaled rotation, which vLLM 0.32 computes wrongly on a CPU.

The log-probabilities of a prompt's tokens depend on the tokens before them alone. So they stay as they are when a token
is appended; where they do not, answers of that engine say nothing about KV that was handed over.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from deepseek_model import VOCABULARY, make_deepseek_model

TOKENS = 199
TOLERANCE = 1e-3


def main() -> int:
    *flags, folder = sys.argv[1:]
    make_deepseek_model(Path(folder), scaled=flags != ["--unscaled"])
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        folder,
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
