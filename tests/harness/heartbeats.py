"""A worker's heartbeat with plausible figures."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.messages.base import WorkerAddress
from baton.messages.workers import Heartbeat, Role

MODEL_DIGEST = "digest"


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
            prefill_tokens_per_s=1000.0,
            decode_tokens_per_s=100.0,
            transfer_bytes_per_s=1e9,
            kv_bytes_per_token=1024,
        ),
        **changes,
    )
