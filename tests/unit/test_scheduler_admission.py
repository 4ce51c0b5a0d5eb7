"""Admission: who may wait and for how long, the speed of the queue, and when a turn comes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from baton_scheduler.admission import (
    HOLD_S_MAX,
    RETRY_AFTER_S_MAX,
    WAIT_SHARE,
    DrainRate,
    Objectives,
    look_ahead,
    retry_after_s,
)
from baton_scheduler.queue import Entry, Key, Queue
from hypothesis import given
from hypothesis import strategies as st

from baton.messages.placement import Candidate

STRICT = Objectives(ttft_s=2.0)


def candidate(waiting_s: float = 0.0, queue_s: float = 0.0, own_s: float = 0.0, interval_s: float = 0.01) -> Candidate:
    return Candidate(
        decode="d",
        predicted_ttft_s=waiting_s + queue_s + own_s,
        waiting_s=waiting_s,
        queue_s=queue_s,
        predicted_token_interval_s=interval_s,
    )


def entry(name: str, tokens: int = 100, *, model: str = "m", until_s: float = 10.0) -> Entry:
    return Entry(
        key=(name, 0),
        tenant="",
        model=model,
        priority=1,
        due_s=0.0,
        tokens=tokens,
        since_s=0.0,
        until_s=until_s,
    )


def draining(tokens_per_s: float) -> DrainRate:
    """Return a rate that was measured for a long time."""
    rate = DrainRate()
    for _ in range(400):
        rate.note_placed(round(tokens_per_s / 4))
        rate.note_held(0.25)
    return rate


# ---------------------------------------------------------------- who may wait


def test_a_long_prompt_is_admitted_like_a_short_one() -> None:
    assert STRICT.begins_soon(candidate(own_s=60.0), 0.5)
    assert not STRICT.begins_soon(candidate(waiting_s=0.3, queue_s=0.3), 0.5)


def test_an_objective_bounds_the_wait_at_workers() -> None:
    assert STRICT.begins_soon(candidate(queue_s=0.5), 5.0)
    assert not STRICT.begins_soon(candidate(queue_s=0.51), 5.0)
    assert Objectives().begins_soon(candidate(queue_s=60.0), 0.5), "without an objective, only room counts"
    assert not Objectives().begins_soon(candidate(waiting_s=0.6), 0.5)


def test_a_tenant_that_waits_leaves_workers_free_for_others() -> None:
    assert STRICT.begins_soon(candidate(queue_s=0.2), 0.5)
    assert not STRICT.begins_soon(candidate(queue_s=0.2), 0.5, room=0.5)
    assert STRICT.begins_soon(candidate(queue_s=0.1), 0.5, room=0.5)
    assert Objectives().begins_soon(candidate(waiting_s=0.5), 0.5, room=0.5)
    assert STRICT.begins_soon(candidate(), 0.5, room=0.5, free=0.5)
    fast = Objectives(tpot_s=0.02)
    assert fast.begins_soon(candidate(interval_s=0.02), 0.5)
    assert fast.begins_soon(candidate(interval_s=0.01), 0.5, room=0.5)
    assert not fast.begins_soon(candidate(interval_s=0.011), 0.5, room=0.5), "others need short steps, too"
    for objectives in (STRICT, Objectives()):
        assert not objectives.begins_soon(candidate(), 0.5, room=0.5, free=0.4)


def test_a_tpot_objective_waits_for_a_worker_that_is_fast_enough() -> None:
    slow = candidate(interval_s=0.06)
    assert not Objectives(tpot_s=0.05).begins_soon(slow, 0.5)
    assert Objectives(tpot_s=0.06).begins_soon(slow, 0.5)


def test_a_request_is_held_for_a_share_of_its_objective_since_its_arrival() -> None:
    assert STRICT.hold_s_max(10.0, due_in_s=2.0) == pytest.approx(WAIT_SHARE * 2.0)
    assert STRICT.hold_s_max(10.0, due_in_s=1.8) == pytest.approx(WAIT_SHARE * 2.0 - 0.2)
    assert STRICT.hold_s_max(10.0, due_in_s=-1.0) < 0
    assert STRICT.hold_s_max(0.1, due_in_s=2.0) == 0.1
    assert Objectives().hold_s_max(1e9, due_in_s=-1.0) == HOLD_S_MAX


# ---------------------------------------------------------------- the speed of the queue


def test_the_rate_is_that_of_the_last_seconds_in_which_requests_were_held() -> None:
    rate = draining(1000.0)
    assert rate.wait_s(5000) == pytest.approx(5.0, rel=0.05)
    for _ in range(400):
        rate.note_placed(25)
        rate.note_held(0.25)
    assert rate.wait_s(5000) == pytest.approx(50.0, rel=0.05)


def test_a_few_placements_tell_nothing() -> None:
    rate = DrainRate()
    for _ in range(7):
        rate.note_placed(100)
    rate.note_held(1.0)
    assert not rate.is_known


def test_a_stall_is_taken_to_last_as_long_again() -> None:
    rate = draining(1000.0)
    while rate.is_known:
        rate.note_held(0.25)
    for _ in range(40):
        rate.note_held(0.25)
    assert rate.wait_s(100) == pytest.approx(rate.wait_s(10_000))
    assert rate.wait_s(100) >= 10.0


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 1e6)), max_size=50), st.integers(0, 10**12))
def test_no_history_makes_a_prediction_impossible(history: list[tuple[int, float]], tokens: int) -> None:
    rate = DrainRate()
    for placed_tokens, duration_s in history:
        rate.note_placed(max(1, placed_tokens))
        rate.note_held(duration_s)
    assert rate.wait_s(tokens) >= 0
    assert 1 <= retry_after_s(rate.wait_s(tokens)) <= RETRY_AFTER_S_MAX


# ---------------------------------------------------------------- turns


def test_a_turn_comes_once_those_before_it_are_placed() -> None:
    outlook = look_ahead([entry("a", 500), entry("b", 1000), entry("c", 10)], {"m": draining(1000.0)})
    assert list(outlook.turns_s) == [("a", 0), ("b", 0), ("c", 0)]
    assert list(outlook.turns_s.values()) == pytest.approx([0.0, 0.5, 1.5], rel=0.05)
    assert outlook.last_s["m"] == pytest.approx(1.51, rel=0.05)


def test_requests_of_another_model_are_not_before_it() -> None:
    rates = {"m": draining(1000.0), "other": draining(10.0)}
    outlook = look_ahead([entry("a", 500, model="other"), entry("b", 1000)], rates)
    assert outlook.turns_s["b", 0] == 0.0


def test_while_the_rate_is_unknown_a_stall_lasts_as_long_again() -> None:
    rate = DrainRate()
    rate.note_held(100.0)
    outlook = look_ahead([entry("a", 10**9), entry("b", until_s=0.01)], {"m": rate})
    assert retry_after_s(outlook.last_s["m"]) == 100.0


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 7), st.integers(1, 5000), st.sampled_from((0.0, 0.4, 2.0))),
        min_size=50,
        max_size=150,
    ),
    tokens_per_s=st.integers(100, 20_000),
)
def test_every_request_is_placed_or_refused_within_its_time(
    arrivals: list[tuple[str, int, int, float]], tokens_per_s: int
) -> None:
    """Ten requests arrive each second, of all classes and objectives; a worker takes so many tokens per second."""
    queue, rate, step_s = Queue(entries_max=1000, age_s=5.0), DrainRate(), 0.1
    until_s: dict[Key, float] = {}
    ended: list[Key] = []
    room, now_s = 0.0, 0.0
    while len(ended) < len(arrivals):
        if len(until_s) < len(arrivals):
            tenant, priority, tokens, ttft_s = arrivals[len(until_s)]
            hold_s = Objectives(ttft_s=ttft_s).hold_s_max(10.0, ttft_s)
            new = replace(entry(f"{len(until_s):03}", tokens, until_s=now_s + hold_s), tenant=tenant, priority=priority)
            new = replace(new, since_s=now_s, due_s=now_s + ttft_s)
            until_s[new.key] = new.until_s
            assert queue.add(new) is None
        now_s, room = now_s + step_s, min(room + tokens_per_s * step_s, 5000.0)
        over = queue.tick(now_s)
        assert all(now_s - step_s < each.until_s <= now_s for each in over), "none stays longer than it may"
        ended += [each.key for each in over]
        while (first := next(queue.order(), None)) is not None and first.tokens <= room:
            room -= first.tokens
            rate.note_placed(queue.take(first.key).tokens)
            ended.append(first.key)
        if len(queue):
            rate.note_held(step_s)
        assert look_ahead(queue.order(), {"m": rate}).turns_s.keys() == {each.key for each in queue.order()}
    assert sorted(ended) == sorted(until_s), "each ends once"
