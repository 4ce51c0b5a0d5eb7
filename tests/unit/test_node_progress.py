"""Workers whose heartbeats go on and whose engines stand still."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.messages.workers import Heartbeat
from baton.node.progress import GAP_S_MAX, PREDICTION_FACTOR, PREDICTION_S_MAX, UNMEASURED_S, Progress, allowance_s
from tests.harness.heartbeats import STEPS, heartbeat

BEAT_S = 0.25
FLOOR_S = 5.0


def beat(tokens: int = 0, computing: int = 1, **changes: Any) -> Heartbeat:
    return heartbeat("w", progress_tokens=tokens, computing=computing, **changes)


def stuck_after_s(message: Heartbeat, *, interval_s: float = BEAT_S, until_s: float = 200.0) -> float | None:
    """Repeat a heartbeat; return when the worker counts as stuck."""
    progress, now_s = Progress(message, 0.0, floor_s=FLOOR_S), 0.0
    while now_s < until_s:
        now_s += interval_s
        progress.hear(message, now_s)
        if progress.is_stuck:
            return now_s
    return None


def test_a_worker_with_work_and_no_tokens_is_stuck() -> None:
    after_s = stuck_after_s(beat())
    assert after_s is not None
    assert FLOOR_S < after_s < FLOOR_S + 1.0


def test_a_worker_without_work_is_not() -> None:
    assert stuck_after_s(beat(computing=0)) is None


def test_a_token_restores_it() -> None:
    progress = Progress(beat(), 0.0, floor_s=FLOOR_S)
    for number in range(100):
        progress.hear(beat(), number * BEAT_S)
    assert progress.is_stuck
    progress.hear(beat(computing=0), 26.0)
    assert progress.is_stuck, "its attempts were given up, which proves nothing"
    assert progress.hear(beat(1), 26.25)
    assert not progress.is_stuck


def test_long_prompts_get_their_predicted_time() -> None:
    message = beat(prefill_tokens_queued=8000)
    after_s = stuck_after_s(message)
    assert after_s is not None
    assert after_s == pytest.approx(FLOOR_S + PREDICTION_FACTOR * 8.05, abs=1.0), "1,000 tokens/s are measured"
    assert allowance_s(beat(prefill_tokens_queued=10**9)) == PREDICTION_FACTOR * PREDICTION_S_MAX
    unmeasured = msgspec.structs.replace(STEPS, samples=0)
    assert allowance_s(beat(steps=unmeasured)) - allowance_s(beat()) == UNMEASURED_S


@given(st.lists(st.floats(0.0, 60.0), max_size=12))
def test_pauses_condemn_nobody(gaps_s: list[float]) -> None:
    """After a pause of the worker, the bus or the listener, heartbeats come late, or many at once."""
    progress, now_s, counted_s = Progress(beat(), 0.0, floor_s=FLOOR_S), 0.0, 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        counted_s += min(gap_s, GAP_S_MAX)
        progress.hear(beat(), now_s)
        assert not progress.is_stuck or counted_s > FLOOR_S
    for _ in range(1000):
        progress.hear(beat(), now_s)
    assert not progress.is_stuck or counted_s > FLOOR_S


@given(st.integers(1, 40))
def test_a_slow_worker_is_not_stuck(beats_per_token: int) -> None:
    progress = Progress(beat(), 0.0, floor_s=FLOOR_S)
    if beats_per_token * BEAT_S < FLOOR_S:
        for number in range(200):
            progress.hear(beat(number // beats_per_token), number * BEAT_S)
            assert not progress.is_stuck
