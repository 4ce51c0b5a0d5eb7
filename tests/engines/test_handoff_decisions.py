"""The hand-off's decisions without an engine: the scheduler's side and the rank's, together and apart."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from handoff_rig import BLOCK, KEY, decode_handoff, new_rank, place, prefill_handoff, step
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connectors.handoff import (
    HandoffScheduler,
    LeaseStep,
    PullOutcome,
    StepPlan,
    TransferReport,
)
from baton.connectors.rank import ALL_LAYERS, RankResults
from baton.transfer import Cause, EventKind, rank_key
from tests.harness.limits import HANG_S

# ---------------------------------------------------------------- decode


@pytest.mark.parametrize(
    ("prompt_tokens", "computed", "pulled"),
    [(1, 0, 0), (2, 0, 1), (33, 0, 32), (33, 32, 0), (64, 32, 31), (1500, 0, 1499)],
)
def test_decode_asks_for_all_but_the_last_token(prompt_tokens: int, computed: int, pulled: int) -> None:
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", decode_handoff(), prompt_tokens)
    assert scheduler.tokens_from_source("r", computed) == pulled
    assert scheduler.tokens_from_source("r", computed) == pulled, "asking changes nothing"


def test_decode_pulls_only_the_blocks_it_lacks() -> None:
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", decode_handoff(), 100)
    scheduler.allocated("r", [7, 8, 9, 10], external_tokens=100 - 1 - 32)
    (pull,) = scheduler.plan([]).pulls
    assert (pull.first_token, pull.tokens, pull.blocks) == (32, 99, (8, 9, 10))


def test_decode_does_not_pull_a_block_for_the_last_token_alone() -> None:
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", decode_handoff(), 65)
    scheduler.allocated("r", [1, 2, 3], external_tokens=64)
    (pull,) = scheduler.plan([]).pulls
    assert pull.blocks == (1, 2)


def test_preempted_decode_never_asks_again() -> None:
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", decode_handoff(), 100)
    scheduler.allocated("r", [1, 2, 3, 4], external_tokens=99)
    scheduler.plan([])
    scheduler.pulled("r")
    assert scheduler.tokens_from_source("r", 0) == 0
    scheduler.allocated("r", [5, 6, 7, 8], external_tokens=0)
    assert not scheduler.has_orders


def test_decode_that_lacks_nothing_releases_at_the_source_once() -> None:
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", decode_handoff(), 33)
    scheduler.allocated("r", [1, 2], external_tokens=0)
    scheduler.allocated("r", [1, 2], external_tokens=0)
    assert scheduler.plan([]).release == ((KEY, ("source",)),)


def test_aborted_decode_cancels_its_pull_or_releases() -> None:
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("pulling", decode_handoff(b"a" * 16), 100)
    scheduler.admit("waiting", decode_handoff(b"b" * 16), 100)
    scheduler.allocated("pulling", [1, 2, 3, 4], external_tokens=99)
    scheduler.plan([])
    assert scheduler.finished("pulling", computed=False) is False
    assert scheduler.finished("waiting", computed=False) is False
    plan = scheduler.plan([])
    assert plan.cancel == (b"a" * 16,)
    assert plan.release == ((b"b" * 16, ("source",)),)
    assert scheduler.is_idle


def test_failed_pull_is_received_and_failed_once() -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", decode_handoff(), 100)
    scheduler.allocated("r", [1, 2, 3, 4], external_tokens=99)
    assert step(rank, scheduler.plan([])) == RankResults()
    assert agent.calls == [("pull", KEY, "source", 0, 99, (1, 2, 3, 4), 60.0)]
    agent.tell(EventKind.PULL_FAILED, KEY, Cause.CHECKSUM)
    assert step(rank, StepPlan()) == RankResults(received={"r"}, failed={"r"})
    agent.tell(EventKind.PULL_FAILED, KEY, Cause.CHECKSUM)
    assert step(rank, StepPlan()) == RankResults()
    report = rank.report()
    assert report is not None
    assert [(outcome.cause, outcome.failed) for outcome in report.pulls] == [(Cause.CHECKSUM, True)]
    assert rank.report() is None


def test_report_survives_its_way_through_the_engine() -> None:
    report = TransferReport(pulls=(PullOutcome(key=KEY, moved_bytes=3, failed=True),), leased_blocks={0: 4})
    wire = msgspec.msgpack.encode(msgspec.to_builtins(report, builtin_types=(bytes,)))
    assert msgspec.convert(msgspec.msgpack.decode(wire), TransferReport) == report


def test_agent_that_refuses_a_pull_fails_that_request_only() -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("bad", decode_handoff(), 100)
    scheduler.allocated("bad", [1, 2, 3, 4], external_tokens=99)
    agent.fails.add("pull")
    assert step(rank, scheduler.plan([])) == RankResults(received={"bad"}, failed={"bad"})


# ---------------------------------------------------------------- prefill


def test_prefill_leases_posts_and_is_sent_once() -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 70)
    # 32 tokens were cached; the first step computes 20 more, the second the rest and samples.
    step(rank, scheduler.plan([scheduler.computes("r", [4, 5], 32, 52)]))
    step(rank, scheduler.plan([scheduler.computes("r", [4, 5, 6], 52, 70)]))
    assert agent.calls == [
        ("open_lease", KEY),
        ("extend_lease", KEY, 1, (4, 5)),
        ("post_ready", KEY, 1, ALL_LAYERS, 32),
        ("post_ready", KEY, 1, 0, 52),
        ("post_ready", KEY, 1, 1, 52),
        ("post_ready", KEY, 1, ALL_LAYERS, 52),
        ("extend_lease", KEY, 1, (6,)),
        ("complete_lease", KEY, 1, 70),
        ("post_ready", KEY, 1, 0, 70),
        ("post_ready", KEY, 1, 1, 70),
        ("post_ready", KEY, 1, ALL_LAYERS, 70),
    ]
    assert scheduler.finished("r", computed=True) is True
    assert step(rank, scheduler.plan([])) == RankResults()
    agent.tell(EventKind.LEASE_RELEASED, KEY)
    assert step(rank, StepPlan()) == RankResults(sent={"r"})
    scheduler.freed("r")
    assert scheduler.is_idle


def test_release_that_comes_before_the_engine_is_done_is_kept() -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 40)
    step(rank, scheduler.plan([scheduler.computes("r", [1, 2], 0, 40)]))
    agent.tell(EventKind.LEASE_RELEASED, KEY)
    assert step(rank, StepPlan()) == RankResults()
    assert scheduler.finished("r", computed=True) is True
    assert step(rank, scheduler.plan([])) == RankResults(sent={"r"})


def test_preempted_prefill_is_revoked_before_the_step_and_reopened() -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 64)
    step(rank, scheduler.plan([scheduler.computes("r", [1], 0, 32)]))
    scheduler.preempted("r")
    agent.calls.clear()
    step(rank, scheduler.plan([]))
    assert agent.calls == [("revoke_lease", KEY, False)]
    step(rank, scheduler.plan([scheduler.computes("r", [8, 9], 32, 64)]))
    assert ("open_lease", KEY) in agent.calls
    assert ("extend_lease", KEY, 2, (8, 9)) in agent.calls
    assert ("post_ready", KEY, 2, ALL_LAYERS, 32) in agent.calls


@pytest.mark.parametrize("preempted", [False, True])
def test_aborted_prefill_is_revoked_for_good_then_sent(preempted: bool) -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 64)
    step(rank, scheduler.plan([scheduler.computes("r", [1], 0, 32)]))
    if preempted:
        scheduler.preempted("r")
        step(rank, scheduler.plan([]))
    assert scheduler.finished("r", computed=False) is True
    assert step(rank, scheduler.plan([])) == RankResults(sent={"r"})
    assert agent.calls[-1] == ("revoke_lease", KEY, True)


def test_preempted_prefill_that_is_aborted_while_blocks_are_promoted_is_not_sent() -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 64)
    step(rank, scheduler.plan([scheduler.computes("r", [1], 0, 32)]))
    scheduler.preempted("r")
    step(rank, scheduler.plan([]))
    assert scheduler.finished("r", computed=False, loads=True) is False
    assert step(rank, scheduler.plan([])) == RankResults()
    assert agent.calls[-1] == ("revoke_lease", KEY, True)
    assert scheduler.is_idle
    assert not rank.is_active
    report = rank.report()
    assert report is not None
    assert report.leases_ended == (KEY,)


def test_prefill_aborted_before_its_first_step_holds_nothing() -> None:
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 64)
    assert scheduler.finished("r", computed=False) is False
    assert scheduler.is_idle
    assert not scheduler.has_orders


def test_lease_that_expired_is_not_posted_to_and_is_sent_when_held() -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 64)
    step(rank, scheduler.plan([scheduler.computes("r", [1], 0, 32)]))
    agent.tell(EventKind.LEASE_ENDED, KEY, Cause.EXPIRED)
    step(rank, StepPlan())
    agent.calls.clear()
    step(rank, scheduler.plan([scheduler.computes("r", [1, 2], 32, 64)]))
    assert agent.calls == []
    assert scheduler.finished("r", computed=True) is True
    assert step(rank, scheduler.plan([])) == RankResults(sent={"r"})


def test_agent_that_fails_to_post_ends_the_lease_not_the_engine() -> None:
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 64)
    agent.fails.add("post_ready")
    step(rank, scheduler.plan([scheduler.computes("r", [1], 0, 32)]))
    assert agent.calls[-1] == ("revoke_lease", KEY, True)
    assert scheduler.finished("r", computed=False) is True
    assert step(rank, scheduler.plan([])) == RankResults(sent={"r"})


def test_held_lease_ended_from_outside_is_sent_with_the_next_step() -> None:
    rank, _ = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", prefill_handoff(), 32)
    step(rank, scheduler.plan([scheduler.computes("r", [1], 0, 32)]))
    scheduler.finished("r", computed=True)
    step(rank, scheduler.plan([]))
    rank.end_lease(KEY)
    rank.end_lease(b"unknown" + bytes(9))
    assert step(rank, StepPlan()) == RankResults(sent={"r"})
    report = rank.report()
    assert report is not None
    assert (report.leases_ended, report.leased_blocks) == ((KEY,), {0: 0})


# ---------------------------------------------------------------- both


def test_step_with_nothing_to_compute_waits_for_news_but_not_without_anything_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.connectors.rank.IDLE_WAIT_S", 0.5)
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    scheduler.admit("r", decode_handoff(), 100)
    scheduler.allocated("r", [1, 2, 3, 4], external_tokens=99)
    rank.begin(scheduler.plan([], computes=False))
    assert _duration_s(rank.end) > 0.25
    agent.tell(EventKind.PULL_PROGRESS, KEY, layers=1)
    rank.begin(StepPlan(computes=False))
    assert _duration_s(rank.end) > 0.25
    assert rank.layers_arrived == {KEY: 1}
    monkeypatch.setattr("baton.connectors.rank.IDLE_WAIT_S", 2 * HANG_S)
    agent.tell(EventKind.PULL_DONE, KEY)
    rank.begin(StepPlan(computes=False))
    assert rank.end() == RankResults(received={"r"})
    rank.begin(StepPlan(computes=False))
    assert _duration_s(rank.end) < HANG_S


def test_no_step_waits_while_results_of_the_one_before_may_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.connectors.rank.IDLE_WAIT_S", 2 * HANG_S)
    rank, agent = new_rank()
    scheduler = HandoffScheduler(BLOCK)
    for request, key, table in (("r", KEY, [1, 2, 3, 4]), ("s", b"o" * 16, [5, 6, 7, 8])):
        scheduler.admit(request, decode_handoff(key), 100)
        scheduler.allocated(request, table, external_tokens=99)
    agent.tell(EventKind.PULL_DONE, KEY)
    rank.begin(scheduler.plan([], computes=False))
    assert rank.end() == RankResults(received={"r"})
    rank.begin(StepPlan(computes=False))
    assert _duration_s(rank.end) < HANG_S


def _duration_s(act: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    act()
    return time.perf_counter() - started_s


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["compute", "preempt", "abort", "allocate", "pull_done", "pull_failed", "release", "expire"]),
        st.integers(0, 5),
        st.integers(0, 1),
    ),
    max_size=60,
)


@pytest.mark.parametrize("peers", [1, 2])
@given(actions=ACTIONS)
@settings(max_examples=300, deadline=None)
def test_every_request_is_reported_exactly_once_and_nothing_stays(
    peers: int, actions: list[tuple[str, int, int]]
) -> None:
    world = World(peers)
    for action, number, peer in actions:
        world.act(action, number, peer)
    world.finish()


class World:
    """An engine's scheduler as the connector sees it: three prompts of 96 tokens to prefill, three to decode.

    The engine has one rank, which deals with as many `peers` of each other engine's.
    """

    def __init__(self, peers: int) -> None:
        self.rank, self.agent = new_rank(place(0, 1))
        self.peers = peers
        self.scheduler = HandoffScheduler(BLOCK)
        self.computed = dict.fromkeys(range(3), 0)
        self.allocated: set[int] = set()
        self.waiting: set[int] = set()
        """Decode requests whose blocks must stay until they are received."""
        self.held: set[int] = set()
        """Prefill requests whose blocks must stay until they are sent."""
        self.gone: set[int] = set()
        for number in range(6):
            endpoints = tuple(map(str, range(peers)))
            key = self.key(number)
            handoff = prefill_handoff(key, peers) if number < 3 else decode_handoff(key, endpoints)
            self.scheduler.admit(str(number), handoff, 96)

    @staticmethod
    def key(number: int) -> bytes:
        return bytes([number]) * 16

    def parts(self, number: int) -> list[bytes]:
        """Return the keys under which the agent knows a request."""
        if self.peers == 1:
            return [self.key(number)]
        key = self.key(number)
        return [rank_key(key, 0, peer) if number < 3 else rank_key(key, peer, 0) for peer in range(self.peers)]

    def act(self, action: str, number: int, peer: int = 0) -> None:
        part = self.parts(number)[peer % self.peers]
        leases: list[LeaseStep] = []
        alive = number not in self.gone
        match action:
            case "compute" if alive and number < 3 and self.computed[number] < 96:
                before = self.computed[number]
                self.computed[number] += 32
                blocks = list(range(self.computed[number] // BLOCK))
                leases.append(self.scheduler.computes(str(number), blocks, before, before + 32))
            case "preempt" if alive and number < 3 and 0 < self.computed[number] < 96:
                self.computed[number] = 0
                self.scheduler.preempted(str(number))
            case "abort" if alive:
                self.end(number, computed=False)
            case "allocate" if alive and number >= 3 and number not in self.allocated:
                self.allocated.add(number)
                external = self.scheduler.tokens_from_source(str(number), 0)
                assert external is not None
                self.scheduler.allocated(str(number), [1, 2, 3], external)
                self.waiting.add(number)
            case "pull_done" | "pull_failed" if part in self.agent.pulls:
                self.agent.tell(EventKind(action), part)
            case "release" | "expire" if part in self.agent.generations:
                kind = EventKind.LEASE_RELEASED if action == "release" else EventKind.LEASE_ENDED
                self.agent.tell(kind, part, Cause.NONE if action == "release" else Cause.EXPIRED)
            case _:
                pass
        self.step(leases)
        if number < 3 and alive and number not in self.gone and self.computed[number] == 96:
            self.end(number, computed=True)

    def end(self, number: int, *, computed: bool) -> None:
        self.gone.add(number)
        if self.scheduler.finished(str(number), computed=computed):
            self.held.add(number)

    def step(self, leases: list[LeaseStep]) -> None:
        results = step(self.rank, self.scheduler.plan(leases))
        assert results.failed <= results.received
        for request in results.received:
            self.waiting.remove(int(request))
            self.scheduler.pulled(request)
        for request in results.sent:
            self.held.remove(int(request))
            self.scheduler.freed(request)

    def finish(self) -> None:
        for number in range(6):
            if number not in self.gone:
                self.end(number, computed=False)
        self.step([])
        for part in self.agent.generations:
            self.agent.tell(EventKind.LEASE_RELEASED, part)
        self.step([])
        # Of a cancelled pull, the last part's end comes a step later than the order.
        self.step([])
        assert not self.held
        assert not self.waiting
        assert self.scheduler.is_idle
        report = self.rank.report()
        assert report is None or set(report.leased_blocks.values()) <= {0}
