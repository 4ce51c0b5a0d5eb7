"""Bytes that tenants share: bounded, and divided so that a tenant that comes later finds room."""

from __future__ import annotations

from collections import Counter

from baton_gateway.byte_shares import ByteShares
from hypothesis import given
from hypothesis import strategies as st


@given(tenants=st.integers(1, 6), bytes_max=st.integers(20, 500))
def test_greedy_tenants_get_the_same_share_and_leave_one_more(tenants: int, bytes_max: int) -> None:
    shares, held = ByteShares(bytes_max), Counter[str]()
    names = [f"tenant {number}" for number in range(tenants)]
    while fitting := [name for name in names if shares.fits(name, 1)]:
        shares.take(fitting[0], 1)
        held[fitting[0]] += 1
        names.append(names.pop(0))
    assert max(held.values()) - min(held.values()) <= 1
    assert bytes_max - shares.held_bytes >= bytes_max // (tenants + 1)
    assert shares.fits("late", bytes_max // (tenants + 1)), "its first body needs room only"


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 40), st.booleans()), max_size=60))
def test_the_total_is_never_exceeded_and_all_comes_back(steps: list[tuple[str, int, bool]]) -> None:
    shares = ByteShares(100)
    held: list[tuple[str, int]] = []
    for tenant, more_bytes, gives_back in steps:
        if gives_back and held:
            owner, held_bytes = held.pop(more_bytes % len(held))
            shares.take(owner, -held_bytes)
        elif shares.fits(tenant, more_bytes):
            shares.take(tenant, more_bytes)
            held.append((tenant, more_bytes))
        else:
            free_bytes = 100 - sum(each for _, each in held)
            own_bytes = sum(each for owner, each in held if owner == tenant)
            assert more_bytes > free_bytes or (
                tenant and own_bytes and own_bytes + more_bytes > free_bytes - more_bytes
            )
        assert shares.held_bytes == sum(each for _, each in held) <= 100


def test_a_body_in_parts_is_the_first_one_until_another_comes() -> None:
    shares = ByteShares(100)
    shares.take("a", 60)
    assert shares.fits("a", 40, of_bytes=60), "its only body may grow to the whole"
    assert not shares.fits("a", 1), "a second one would have more than what is free"
    shares.take("", 10)
    assert shares.fits("", 30), "requests without a tenant share the whole"
    assert not shares.fits("", 31)
