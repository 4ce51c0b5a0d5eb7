"""One rank of the hand-off over an agent that records, and steps of an engine that it takes."""

from __future__ import annotations

from typing import Any

from recording_agent import RecordingAgent

from baton.connectors.handoff import (
    Handoff,
    HandoffLeg,
    StepPlan,
)
from baton.connectors.place import RankPlace
from baton.connectors.rank import ALL_LAYERS, HandoffRank, RankResults
from baton.transfer.layout import Layout

BLOCK = 32
KEY = b"k" * 16


def prefill_handoff(key: bytes = KEY, sink_ranks: int = 1) -> Handoff:
    return Handoff(leg=HandoffLeg.PREFILL, key=key, sink_ranks=sink_ranks)


def decode_handoff(key: bytes = KEY, endpoints: tuple[str, ...] = ("source",)) -> Handoff:
    return Handoff(leg=HandoffLeg.DECODE, key=key, endpoints=endpoints, deadline_s=100.0)


def step(rank: HandoffRank, plan: StepPlan, layers: int = 2) -> RankResults:
    """Run one engine step as vLLM calls it."""
    rank.revoke(plan)
    rank.begin(plan)
    for layer in range(layers):
        rank.layer_saved(layer)
    rank.layer_saved(ALL_LAYERS)
    return rank.end()


def new_rank(place: RankPlace = RankPlace()) -> tuple[HandoffRank, RecordingAgent]:  # noqa: B008
    agent = RecordingAgent()
    return HandoffRank(agent, place, now_s=lambda: 40.0), agent


def place(rank: int, size: int, **changes: Any) -> RankPlace:
    plain: dict[str, Any] = {"layers": 2, "kv_heads": 4, "dim": 64, "dtype": "float32", "order": "HND", "form": "fused"}
    layout: dict[str, Any] = plain | {"block_tokens": 32, "tp_rank": rank, "tp_size": size} | changes
    return RankPlace(rank=rank, size=size, layout=Layout(**layout))
