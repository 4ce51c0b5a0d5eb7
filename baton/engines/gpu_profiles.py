"""Engine flags that pay on a kind of GPU, each with its source. Flags of the user win.

Only what an engine does not choose by itself: attention backends, DeepGEMM, FP8 and graphs are in `docs/gpu.md`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Flag:
    option: str
    value: object
    source: str


_SERVER: Final = (
    "vLLM 0.32, EngineArgs.get_batch_defaults: what `vllm serve` takes on this GPU. An embedded engine, as it is here, "
    "would get 2048 and 128 on every GPU"
)
_A100: Final = f"{_SERVER}. On an A100 larger batches reduce throughput: vllm-project/vllm#17885"


def _batch(tokens: int, sequences: int, source: str = _SERVER) -> tuple[Flag, ...]:
    return (Flag("max_num_batched_tokens", tokens, source), Flag("max_num_seqs", sequences, source))


VLLM_FLAGS: Final[Mapping[str, tuple[Flag, ...]]] = {
    "A100": _batch(2048, 256, _A100),
    "L4": _batch(2048, 256),
    "L40S": _batch(2048, 256),
    "H100": _batch(8192, 1024),
    "H200": _batch(8192, 1024),
    "B200": _batch(16384, 1024),
}
"""By the word that names the kind in the driver's name of a GPU, such as NVIDIA H100 80GB HBM3."""


def gpu_options(flags: Mapping[str, tuple[Flag, ...]], gpu_name: str) -> dict[str, object]:
    """Return the options for a GPU; none for a kind that is not known."""
    kinds = [word for word in re.findall(r"[A-Z0-9]+", gpu_name.upper()) if word in flags]
    return {flag.option: flag.value for kind in kinds[:1] for flag in flags[kind]}
