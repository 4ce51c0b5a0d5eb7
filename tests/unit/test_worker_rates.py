"""Rates: measured work per second of busy time."""

from __future__ import annotations

import pytest

from baton.worker.rates import Average, BusyTime, Rates


def test_the_first_sample_replaces_the_guess_and_later_ones_are_weighed() -> None:
    average = Average(1000.0)
    average.add(10.0)
    assert average.value == 10.0
    for _ in range(100):
        average.add(20.0)
    assert average.value == pytest.approx(20.0, abs=0.1)


def test_prompts_that_run_together_count_their_time_once() -> None:
    rates = Rates()
    rates.prefill_began(0.0)
    rates.prefill_began(0.0)
    rates.prefill_ended(1000, 1.0)
    assert rates.prefill_tokens_per_s.value == 1000
    rates.prefill_ended(1000, 2.0)
    assert rates.prefill_tokens_per_s.value == 1000
    rates.prefill_began(50.0)
    rates.prefill_ended(1000, 51.0)
    assert rates.prefill_tokens_per_s.value == pytest.approx(1000), "idle time does not count"


@pytest.mark.parametrize("apart_s", [0.0, 0.00005])
def test_prompts_that_one_step_computes_end_together_and_count_once(apart_s: float) -> None:
    rates = Rates()
    for step in range(20):
        for _ in range(8):
            rates.prefill_began(float(step))
        for number in range(8):
            rates.prefill_ended(500, step + 0.5 + number * apart_s)
    assert rates.prefill_tokens_per_s.value == pytest.approx(8 * 500 / 0.5, rel=0.01)


def test_an_engine_that_stood_still_for_once_is_not_taken_for_slow() -> None:
    rates = Rates()
    for second in range(20):
        rates.prefill_began(float(second))
        rates.prefill_ended(900, second + 0.9)
        rates.tokens_came(50, 0.5)
        rates.tick()
        rates.transfer_ended(1 << 20, 0.001)
    rates.prefill_began(20.0)
    rates.prefill_ended(900, 50.0)
    rates.tokens_came(1, 30.0)
    rates.tick()
    rates.transfer_ended(1 << 20, 30.0)
    assert rates.prefill_tokens_per_s.value > 250
    assert rates.token_interval_s.value < 0.02
    assert rates.transfer_bytes_per_s.value > 5e8


def test_a_worker_that_was_crowded_is_as_fast_as_before_when_it_is_empty() -> None:
    rates = Rates()
    rates.tick()
    assert rates.decode_tokens_per_s == pytest.approx(50), "a guess is no measurement to return to"
    for interval_s in [0.01] * 20 + [0.3] * 20:
        rates.tokens_came(10, 10 * interval_s)
        rates.tick()
    rates.busy.began(0.0)
    rates.tick()
    assert rates.token_interval_s.value > 0.25, "it is not empty, it stands still"
    rates.busy.ended(1.0)
    for _ in range(100):
        rates.tick()
    assert rates.token_interval_s.value < 0.015


def test_a_pace_that_stays_is_followed() -> None:
    rates = Rates()
    for step in range(60):
        tokens = 10_000 if step < 20 else 100
        rates.prefill_began(float(step))
        rates.prefill_ended(tokens, step + 1.0)
        rates.tokens_came(1, 0.01 if step < 20 else 1.0)
        rates.tick()
    assert rates.prefill_tokens_per_s.value == pytest.approx(100, rel=0.1)
    assert rates.token_interval_s.value == pytest.approx(1.0, rel=0.1)


def test_prompts_that_were_cached_or_stopped_say_nothing() -> None:
    rates = Rates()
    before = rates.prefill_tokens_per_s.value
    rates.prefill_began(0.0)
    rates.prefill_ended(1, 0.5)
    rates.prefill_began(1.0)
    rates.prefill_ended(0, 9.0)
    assert rates.prefill_tokens_per_s.value == before


def test_token_intervals_of_a_tick_are_one_sample() -> None:
    rates = Rates()
    for _ in range(100):
        rates.tokens_came(2, 0.02)
    rates.tick()
    assert rates.decode_tokens_per_s == pytest.approx(100)
    rates.tick()
    assert rates.token_interval_s.samples == 1
    assert rates.decode_tokens_per_s == pytest.approx(100), "an empty tick says nothing"


def test_transfers_count_only_the_time_in_which_bytes_moved() -> None:
    rates = Rates()
    rates.transfer_ended(1 << 20, 0.0)
    assert rates.transfer_bytes_per_s.samples == 0
    rates.transfer_ended(1 << 20, 0.5)
    assert rates.transfer_bytes_per_s.value == 2 << 20


def test_busy_time_counts_once_and_while_it_lasts() -> None:
    busy = BusyTime()
    assert busy.total_s(5.0) == 0
    busy.began(10.0)
    busy.began(11.0)
    busy.ended(12.0)
    assert busy.total_s(13.0) == 3.0
    busy.ended(14.0)
    assert busy.total_s(99.0) == 4.0
