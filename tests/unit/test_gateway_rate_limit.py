"""The limit on repeated questions."""

from __future__ import annotations

from baton_gateway.rate_limit import RateLimit


def test_after_a_burst_only_the_rate_is_allowed() -> None:
    limit = RateLimit(per_s=10.0, burst=3.0)
    assert [limit.allow(5.0) for _ in range(4)] == [True, True, True, False]
    assert not limit.allow(5.05)
    assert limit.allow(5.11)
    assert not limit.allow(5.12)
    assert sum(limit.allow(100.0) for _ in range(10)) == 3, "a pause allows one burst, no more"
