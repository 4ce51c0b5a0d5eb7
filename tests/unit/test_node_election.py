"""The election of one process among several, as a state machine."""

from __future__ import annotations

from baton.bus import Entry
from baton.messages.base import Lease
from baton.node.election import Election


def entry(holder: str, revision: int) -> Entry:
    return Entry(Lease(holder=holder), revision)


def holding(revision: int = 5) -> Election:
    """Return a lease that was taken at 0 s."""
    lease = Election("me", 1.0)
    lease.saw(None, 0.0)
    assert lease.revision_to_put(0.0) == 0
    lease.stored(revision, 0.0)
    return lease


def test_a_free_lease_is_taken_and_its_first_revision_is_the_fence() -> None:
    lease = holding(5)
    assert (lease.fence(0.9), lease.must_read) == (5, False)
    assert lease.revision_to_put(0.9) == 5
    lease.stored(8, 0.9)
    assert (lease.fence(1.8), lease.fence(1.9)) == (5, 0)


def test_anothers_lease_is_taken_when_it_stood_still() -> None:
    lease = Election("me", 1.0)
    for now_s, revision in ((0.0, 3), (0.5, 4), (1.4, 4)):
        assert lease.must_read
        lease.saw(entry("other", revision), now_s)
        assert lease.revision_to_put(now_s) is None
    assert lease.revision_to_put(1.5) == 4
    assert not lease.fence(1.5)
    lease.stored(9, 1.5)
    assert lease.fence(1.6) == 9


def test_a_holder_that_was_away_too_long_begins_a_new_term_with_a_higher_fence() -> None:
    lease = holding(5)
    lease.stored(6, 3.0)
    assert lease.fence(3.0) == 6


def test_a_put_without_an_answer_is_looked_up_and_the_term_goes_on() -> None:
    lease = holding(5)
    lease.failed()
    assert (lease.must_read, lease.fence(0.3)) == (True, 5)
    lease.saw(entry("me", 7), 0.3)
    assert lease.revision_to_put(0.3) == 7
    lease.stored(8, 0.3)
    assert lease.fence(1.2) == 5


def test_a_holder_that_was_replaced_stops_at_once() -> None:
    lease = holding(5)
    lease.failed()
    lease.saw(entry("other", 7), 0.3)
    assert (lease.fence(0.3), lease.held_revision, lease.revision_to_put(0.3)) == (0, 0, None)
