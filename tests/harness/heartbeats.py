"""A worker's heartbeat with plausible figures."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.messages.base import WorkerAddress
from baton.messages.workers import Heartbeat, Role, StepFit

MODEL_DIGEST = "digest"
STEPS = StepFit(
    prompt_step_s=0.01,
    prompt_token_s=0.001,
    prompt_pair_s=1e-9,
    decode_step_s=0.008,
    sequence_s=0.001,
    kv_s=0.01,
    spread=0.1,
    samples=100,
)
"""Rates of a worker that computes about 1,000 prompt tokens per second."""


def heartbeat(worker: str = "w", role: Role = Role.DECODE, *, generation: int = 1, **changes: Any) -> Heartbeat:
    return msgspec.structs.replace(
        Heartbeat(
            address=WorkerAddress(worker=worker, generation=generation, agents=(f"agent-{worker}",)),
            role=role,
            model="tiny",
            model_path="tiny",
            model_digest=MODEL_DIGEST,
            engine="simulated",
            block_tokens=32,
            context_tokens_max=4096,
            running_max=8,
            kv_blocks_total=1000,
            engine_block_tokens=32,
            step_tokens_max=2048,
            steps=STEPS,
            kv_bytes_per_token=1024,
        ),
        **changes,
    )
