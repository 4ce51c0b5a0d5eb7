"""Hand-offs between engines of different numbers of ranks, as one rank decides them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from handoff_rig import BLOCK, KEY, decode_handoff, new_rank, place, prefill_handoff, step

from baton.connectors.handoff import (
    HandoffScheduler,
    StepPlan,
)
from baton.connectors.place import RankPlace
from baton.connectors.rank import RankResults
from baton.transfer import Cause, EventKind, rank_key


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2}, {"kv_heads": 1, "form": "latent", "order": "NHD"}])
def test_what_sinks_pull_is_what_sources_lease(changes: dict[str, Any]) -> None:
    """Each side knows only how many ranks the other has."""
    for sources, sinks in itertools.product((1, 2, 4), repeat=2):
        endpoints = tuple(f"source-{rank}" for rank in range(sources))
        leased = [
            (key, endpoints[rank])
            for rank in range(sources)
            for key in place(rank, sources, **changes).readers(KEY, sinks)
        ]
        pulled = [part for rank in range(sinks) for part in place(rank, sinks, **changes).parts(KEY, endpoints).items()]
        if sources == sinks:
            assert pulled == leased == [(KEY, endpoint) for endpoint in endpoints]
        else:
            assert sorted(pulled) == sorted(leased), (sources, sinks)
            assert len(set(pulled)) == len(pulled)


def test_a_cache_that_cannot_be_described_is_not_divided() -> None:
    blind = RankPlace(rank=1, size=2)
    assert blind.parts(KEY, ("a", "b")) == {KEY: "b"}
    assert blind.readers(KEY, 0) == blind.readers(KEY, 2) == (KEY,)
    for divide in (lambda: blind.parts(KEY, ("a",)), lambda: blind.readers(KEY, 4)):
        with pytest.raises(ValueError, match="ranks"):
            divide()


def test_rank_pulls_from_all_that_have_its_heads_and_is_done_when_all_are() -> None:
    rank, agent = new_rank(place(0, 1))
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", decode_handoff(endpoints=("a", "b")), 100)
    scheduler.allocated("r", [1, 2, 3, 4], external_tokens=99)
    assert step(rank, scheduler.plan([])) == RankResults()
    first, second = (rank_key(KEY, source, 0) for source in range(2))
    assert agent.calls == [
        ("pull", key, source, 0, 99, (1, 2, 3, 4), 60.0) for key, source in ((first, "a"), (second, "b"))
    ]
    agent.tell(EventKind.PULL_PROGRESS, first, layers=2)
    agent.tell(EventKind.PULL_PROGRESS, second, layers=1)
    agent.tell(EventKind.PULL_DONE, first, moved=5)
    assert step(rank, StepPlan()) == RankResults()
    assert rank.layers_arrived == {KEY: 1}
    agent.tell(EventKind.PULL_DONE, second, moved=7)
    assert step(rank, StepPlan()) == RankResults(received={"r"})
    report = rank.report()
    assert report is not None
    assert [(pull.key, pull.tokens, pull.moved_bytes) for pull in report.pulls] == [(KEY, 99, 12)]
    assert rank.layers_arrived == {}


def test_one_part_that_fails_cancels_the_others_and_the_request_waits_for_their_end() -> None:
    rank, agent = new_rank(place(0, 1))
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", decode_handoff(endpoints=("a", "b")), 100)
    scheduler.allocated("r", [1, 2, 3, 4], external_tokens=99)
    step(rank, scheduler.plan([]))
    first, second = (rank_key(KEY, source, 0) for source in range(2))
    agent.tell(EventKind.PULL_FAILED, second, Cause.CHECKSUM)
    assert step(rank, StepPlan()) == RankResults(), "the first part may still write"
    assert agent.calls[-1] == ("cancel_pull", first)
    assert step(rank, StepPlan()) == RankResults(received={"r"}, failed={"r"})
    report = rank.report()
    assert report is not None
    assert [(pull.cause, pull.tokens) for pull in report.pulls] == [(Cause.CHECKSUM, 0)]


def test_part_that_does_not_start_fails_the_request_once_the_others_have_ended() -> None:
    rank, agent = new_rank(place(0, 1))
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", decode_handoff(endpoints=("a", "unreadable")), 100)
    scheduler.allocated("r", [1, 2, 3, 4], external_tokens=99)
    agent.fails.add("cancel_pull")
    assert step(rank, scheduler.plan([])) == RankResults()
    agent.tell(EventKind.PULL_DONE, rank_key(KEY, 0, 0))
    assert step(rank, StepPlan()) == RankResults(received={"r"}, failed={"r"})


def test_lease_is_over_when_the_last_reader_is_done() -> None:
    rank, agent = new_rank(place(0, 1))
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(sink_ranks=2), 64)
    step(rank, scheduler.plan([scheduler.computes("r", [1], 0, 32)]))
    readers = [rank_key(KEY, 0, sink) for sink in range(2)]
    assert [call for call in agent.calls if call[0] == "open_lease"] == [("open_lease", key) for key in readers]
    agent.tell(EventKind.LEASE_ENDED, readers[0], Cause.EXPIRED)
    step(rank, StepPlan())
    agent.calls.clear()
    step(rank, scheduler.plan([scheduler.computes("r", [1, 2], 32, 64)]))
    assert {call[1] for call in agent.calls} == {readers[1]}, "the one that ended is left alone"
    assert scheduler.finished("r", computed=True) is True
    assert step(rank, scheduler.plan([])) == RankResults()
    agent.tell(EventKind.LEASE_RELEASED, readers[1])
    assert step(rank, StepPlan()) == RankResults(sent={"r"})


def test_lease_that_expires_as_it_is_opened_again_is_not_open_on_blocks_that_are_freed() -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 64)
    step(rank, scheduler.plan([scheduler.computes("r", [1], 0, 32)]))
    scheduler.preempted("r")
    step(rank, scheduler.plan([]))
    agent.tell(EventKind.LEASE_ENDED, KEY, Cause.EXPIRED)
    agent.calls.clear()
    step(rank, scheduler.plan([scheduler.computes("r", [2, 3], 0, 64)]))
    assert agent.calls[0] == ("open_lease", KEY)
    assert agent.calls[-1] == ("revoke_lease", KEY, True)
    assert scheduler.finished("r", computed=True) is True
    assert step(rank, scheduler.plan([])) == RankResults(sent={"r"})


def test_lease_that_ended_is_not_opened_again_with_the_step_after_which_its_blocks_are_freed() -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 64)
    step(rank, scheduler.plan([scheduler.computes("r", [1, 2], 0, 64)]))
    agent.tell(EventKind.LEASE_RELEASED, KEY)
    assert step(rank, StepPlan()) == RankResults()
    agent.calls.clear()
    # SGLang's cache had the same prompt by the time the request ended, which moved to that one's blocks.
    assert scheduler.finished("r", computed=True) is True
    scheduler.preempted("r")
    assert step(rank, scheduler.plan([scheduler.computes("r", [3, 4], 64, 64)])) == RankResults(sent={"r"})
    assert agent.calls == []
    assert not rank.is_active


def test_rank_whose_heads_are_read_elsewhere_leases_nothing_and_holds_nothing_up() -> None:
    rank, agent = new_rank(place(1, 2, kv_heads=1))
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(sink_ranks=1), 32)
    step(rank, scheduler.plan([scheduler.computes("r", [1], 0, 32)]))
    assert agent.calls == []
    assert scheduler.finished("r", computed=True) is True
    assert step(rank, scheduler.plan([])) == RankResults(sent={"r"})
    report = rank.report()
    assert report is not None
    assert report.leases_ended == (KEY,)
