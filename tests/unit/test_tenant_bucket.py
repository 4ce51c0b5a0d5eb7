"""Token buckets of limits per minute, against a naive one in fractions."""

from __future__ import annotations

from fractions import Fraction

from baton_gateway.tenants import bucket
from hypothesis import given
from hypothesis import strategies as st


class Level:
    """Naive token bucket: what it holds, as an exact fraction."""

    def __init__(self, per_minute: int) -> None:
        self.most = self.level = Fraction(per_minute)

    def pass_us(self, duration_us: int) -> None:
        self.level = min(self.most, self.level + self.most * duration_us / bucket.MINUTE_US)

    def take(self, amount: int) -> bool:
        fits = amount <= self.level
        self.level -= amount if fits else 0
        return fits


STEPS = st.lists(
    st.tuples(
        st.integers(0, 90_000_000),
        st.integers(1, 100),
        st.none() | st.integers(0, 300),
    ),
    max_size=40,
)
"""Time that passes, share of the limit that is taken in percent, share that is used instead."""


@given(per_minute=st.sampled_from([1, 7, 60, 1000, 999_983, 60_000_000]), steps=STEPS)
def test_a_bucket_agrees_with_the_naive_one(per_minute: int, steps: list[tuple[int, int, int | None]]) -> None:
    naive, full_at_us, now_us = Level(per_minute), 0, 1_700_000_000_000_000
    for operations, (passed_us, percent, used_percent) in enumerate(steps, 1):
        naive.pass_us(passed_us)
        now_us += passed_us
        amount = max(1, per_minute * percent // 100)
        cost = bucket.cost_us(amount, per_minute)
        # Each cost is rounded down by less than a microsecond of refill.
        slack = per_minute * operations / bucket.MINUTE_US
        level_before = naive.level
        full_at_us, taken = bucket.take(full_at_us, now_us, cost)
        if abs(level_before - amount) > slack:
            assert taken.fits == (amount <= level_before)
        naive.level -= amount if taken.fits else 0
        assert abs(bucket.left(taken, per_minute) - max(0, naive.level)) <= slack + 1
        if not taken.fits:
            needed = (amount - level_before) * bucket.MINUTE_US / per_minute
            assert abs(bucket.wait_s(taken, cost) * 1e6 - needed) <= operations + 1
        elif used_percent is not None:
            used = per_minute * used_percent // 100
            full_at_us = bucket.settle(full_at_us, now_us, bucket.cost_us(used, per_minute) - cost)
            naive.level = min(naive.most, naive.level + amount - used)


@given(per_minute=st.integers(1, 10_000), settled=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100))))
def test_what_was_taken_counts_as_what_was_used(per_minute: int, settled: list[tuple[int, int]]) -> None:
    now_us, full_at_us, used_us = 10**15, 0, 0
    for percent, used_percent in settled:
        cost = bucket.cost_us(per_minute * percent // 100, per_minute)
        full_at_us, taken = bucket.take(full_at_us, now_us, cost)
        if taken.fits:
            used = bucket.cost_us(per_minute * used_percent // 100, per_minute)
            full_at_us = bucket.settle(full_at_us, now_us, used - cost)
            used_us += used
    assert max(full_at_us, now_us) == now_us + used_us, "at one instant, only use is gone"


def test_a_whole_limit_fits_at_once_and_no_more() -> None:
    for per_minute in (1, 7, 13, 59, 61, 1000, 999_983):
        full_at_us = 0
        for _ in range(min(per_minute, 100)):
            full_at_us, taken = bucket.take(full_at_us, 10**15, bucket.cost_us(1, per_minute))
            assert taken.fits
        rest = per_minute - min(per_minute, 100)
        full_at_us, taken = bucket.take(full_at_us, 10**15, bucket.cost_us(rest, per_minute))
        assert taken.fits
        _, taken = bucket.take(full_at_us, 10**15, bucket.cost_us(1, per_minute))
        assert not taken.fits
        assert bucket.wait_s(taken, bucket.cost_us(1, per_minute)) <= 60 / per_minute


def test_debt_is_paid_before_anything_fits() -> None:
    full_at_us, taken = bucket.take(0, 0, bucket.cost_us(10, 60))
    full_at_us = bucket.settle(full_at_us, 0, bucket.cost_us(120 - 10, 60))
    _, taken = bucket.take(full_at_us, 0, bucket.cost_us(1, 60))
    assert (taken.fits, bucket.left(taken, 60)) == (False, 0)
    assert bucket.wait_s(taken, bucket.cost_us(1, 60)) == 61.0
    _, taken = bucket.take(full_at_us, 61_000_000, bucket.cost_us(1, 60))
    assert taken.fits


def test_an_unused_bucket_is_never_more_than_full() -> None:
    full_at_us = bucket.settle(0, 10**15, -bucket.cost_us(50, 60))
    _, taken = bucket.take(full_at_us, 10**15, bucket.cost_us(61, 60))
    assert (taken.fits, bucket.left(taken, 60)) == (False, 60)
