"""Workers and demands with plain figures, and the placement among them."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from baton_scheduler.placement import PlacementOptions, choose
from baton_scheduler.policies.predicted import Predicted
from baton_scheduler.prediction import Demand, PrefixMatch
from baton_scheduler.team import Serving
from baton_scheduler.worker_load import WorkerLoad

from baton.messages.base import WorkerAddress
from baton.messages.placement import Disaggregation, Placement
from baton.messages.workers import Role, StepFit, TransferFit
from tests.harness.heartbeats import heartbeat

OPTIONS = PlacementOptions()
AUTO, ALWAYS, NEVER = Disaggregation.AUTO, Disaggregation.ALWAYS, Disaggregation.NEVER
STEP_TOKENS_MAX = 2048


def steps(**changes: Any) -> StepFit:
    """Return rates of 1,000 prompt tokens per second, with nothing else that takes long."""
    return msgspec.structs.replace(
        StepFit(
            prompt_step_s=1e-9,
            prompt_token_s=1e-3,
            prompt_pair_s=1e-15,
            decode_step_s=0.01,
            sequence_s=1e-9,
            kv_s=1e-9,
            samples=100,
        ),
        **changes,
    )


def bandwidth(peer: str, bytes_per_s: float) -> TransferFit:
    return TransferFit(peer=peer, backend="tcp", bytes_per_s=bytes_per_s, samples=10)


def worker(name: str, role: Role, *, agents: tuple[str, ...] = ("agent",), **changes: Any) -> WorkerLoad:
    plain: dict[str, Any] = {
        "address": WorkerAddress(worker=name, generation=3, agents=agents),
        "context_tokens_max": 8192,
        "step_tokens_max": STEP_TOKENS_MAX,
        "steps": steps(),
        "kv_bytes_per_token": 10_000,
    }
    return WorkerLoad(heartbeat(name, role, **(plain | changes)))


def prefill(name: str = "p1", **changes: Any) -> WorkerLoad:
    return worker(name, Role.PREFILL, **changes)


def decode(name: str = "d1", **changes: Any) -> WorkerLoad:
    return worker(name, Role.DECODE, **changes)


def demand(mode: Disaggregation = AUTO, **changes: Any) -> Demand:
    plain = Demand(model="tiny", prompt_tokens=1000, output_tokens_max=100, disaggregation=mode)
    return msgspec.structs.replace(plain, **changes)


def place(
    asked: Demand, *workers: WorkerLoad, held: dict[str, int] | None = None, seed: int = 0, now_s: float = 0.0
) -> Placement:
    return choose(asked, Serving(workers), PrefixMatch(held or {}), Predicted(), OPTIONS, Random(seed), now_s)


def names(placement: Placement) -> tuple[str, str]:
    return (placement.prefill.worker if placement.prefill else "", placement.decode.worker)
