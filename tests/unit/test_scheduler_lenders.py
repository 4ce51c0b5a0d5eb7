"""The worker that lends a prefix: the one that saves most time beside computing, if any does."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from baton_scheduler.placement import PlacementOptions, choose
from baton_scheduler.policies.predicted import Predicted
from baton_scheduler.prediction import Demand, PrefixMatch
from baton_scheduler.team import Serving
from baton_scheduler.worker_load import WorkerLoad

from baton.messages.placement import Disaggregation
from baton.messages.workers import Heartbeat, PromotionFit, Role, StepFit, TransferFit
from tests.harness.heartbeats import heartbeat

KV_BYTES_PER_TOKEN = 1000
RATES = StepFit(
    prompt_step_s=1e-9,
    prompt_token_s=1e-3,
    prompt_pair_s=1e-15,
    decode_step_s=0.01,
    sequence_s=1e-9,
    kv_s=1e-9,
    samples=100,
)
"""A thousand prompt tokens per second; a loan of one token takes a microsecond unless a test says otherwise."""


def beat(name: str, role: Role = Role.DECODE, *, pool: bool = True, **fields: Any) -> Heartbeat:
    promotion = PromotionFit(bytes_per_s=1e9, samples=1) if pool else None
    return heartbeat(name, role, steps=RATES, kv_bytes_per_token=KV_BYTES_PER_TOKEN, promotion=promotion, **fields)


def lender(match: PrefixMatch, *beats: Heartbeat, mode: Disaggregation = Disaggregation.NEVER) -> tuple[str, str]:
    """Return the worker that computes, and the one that lends to it."""
    demand = Demand(model="tiny", prompt_tokens=1000, output_tokens_max=100, disaggregation=mode)
    serving = Serving([WorkerLoad(each) for each in beats])
    placement = choose(demand, serving, match, Predicted(), PlacementOptions(), Random(0), 0.0)
    return placement.predicted.prefill or placement.predicted.decode, placement.lender


def test_a_busy_worker_lends_what_an_idle_one_would_compute() -> None:
    busy = beat("busy", prefill_tokens_queued=5000)
    assert lender(PrefixMatch({"busy": 20}), busy, beat("idle")) == ("idle", "busy")
    assert lender(PrefixMatch({"busy": 2}, {}, {"busy": 20}), busy, beat("idle")) == ("idle", "busy")


def test_the_longest_prefix_is_borrowed() -> None:
    beats = [beat("idle"), *(beat(name, prefill_tokens_queued=5000) for name in ("a", "b"))]
    assert lender(PrefixMatch({"a": 20, "b": 25}), *beats)[1] == "b"


def test_a_prefill_worker_borrows_from_one_that_decodes() -> None:
    beats = [beat("p", Role.PREFILL), beat("d")]
    assert lender(PrefixMatch({"d": 20}), *beats, mode=Disaggregation.ALWAYS) == ("p", "d")


@pytest.mark.parametrize(
    ("match", "busy", "idle"),
    [
        (PrefixMatch(), {}, {}),
        (PrefixMatch({"busy": 20, "idle": 20}), {}, {}),
        (PrefixMatch({"busy": 20}), {"pool": False}, {}),
        (PrefixMatch({"busy": 20}), {}, {"pool": False}),
        (PrefixMatch({"busy": 20}), {"draining": True}, {}),
        (PrefixMatch({"busy": 20}), {"kv_identity": "dtype=bfloat16"}, {}),
        (
            PrefixMatch({"busy": 20}),
            {},
            {"transfers": (TransferFit(peer="busy", backend="tcp", bytes_per_s=500e3, samples=9),)},
        ),
        (PrefixMatch({"gone": 20}), {}, {}),
    ],
    ids=[
        "nothing held",
        "held here as well",
        "lender without pool",
        "borrower without pool",
        "lender leaves",
        "other KV",
        "slower than to compute",
        "lender is gone",
    ],
)
def test_nobody_lends(match: PrefixMatch, busy: dict[str, Any], idle: dict[str, Any]) -> None:
    beats = [beat("busy", prefill_tokens_queued=50_000, **busy), beat("idle", **idle)]
    assert lender(match, *beats)[1] == ""
