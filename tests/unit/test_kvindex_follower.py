"""The follower: whatever happens to events, the index ends up with what the workers hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from baton_kvindex.apply import EVENTS_BYTES_MAX
from baton_kvindex.durable import Journal
from baton_kvindex.follower import Follower, FollowerOptions
from baton_kvindex.index import IndexFull, Run, Tier, link, split_ids
from baton_kvindex.radix import RadixIndex
from baton_kvindex.table import TableIndex
from baton_kvindex.trees import Trees
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from msgspec.structs import replace

from baton.messages import BlocksRemoved, BlocksStored, Fingerprint, KvEvents, ShadowPage, WorkerAddress
from tests.harness.index.worker import MODEL, Cache, chain


def make_follower(**options: Any) -> Follower:
    return Follower(RadixIndex, FollowerOptions(**options), Journal(blocks_max=1000))


def holdings(follower: Follower, worker: str = "w") -> dict[bytes, bytes]:
    return {block: parent for run in follower.dump(worker) for block, parent in link(run.parent, run.blocks)}


def resync_due(follower: Follower, worker: Cache, now_s: float) -> int:
    due = follower.due_resyncs(now_s)
    for address in due:
        follower.on_pages(address, worker.pages())
    return len(due)


def test_events_in_order_are_applied() -> None:
    follower, worker = make_follower(), Cache()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    follower.on_events(worker.stored("abc"), 1, 0.0)
    follower.on_events(worker.removed(chain("ab")), 2, 0.0)
    assert holdings(follower) == worker.held
    assert follower.match(MODEL, chain("abc")) == {}
    assert follower.match("another model", chain("abc")) == {}
    assert follower.due_resyncs(0.0) == []
    assert follower.stream_sequence == 2


def test_duplicates_and_older_generations_are_dropped() -> None:
    follower, worker = make_follower(), Cache()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    first, second = worker.stored("abc"), worker.cleared()
    for message in (first, second, first, second):
        follower.on_events(message, 0, 0.0)
    assert holdings(follower) == {}
    worker.restart()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    follower.on_events(first, 0, 0.0)
    assert holdings(follower) == {}
    assert (follower.counters.duplicates, follower.counters.stale) == (2, 1)


def test_a_gap_resyncs_that_worker_alone_and_keeps_later_events() -> None:
    follower, worker, other = make_follower(), Cache(), Cache("x")
    for each in (worker, other):
        follower.on_heartbeat(each.heartbeat(), 0.0)
    follower.on_events(other.stored("xyz"), 0, 0.0)
    follower.on_events(worker.stored("ab"), 0, 0.0)
    worker.stored("abc")
    after_gap = worker.stored("abcd")
    follower.on_events(after_gap, 0, 0.0)
    due = follower.due_resyncs(0.0)
    assert [address.worker for address in due] == ["w"]
    pages = worker.pages()
    during = worker.stored("abcde")
    follower.on_events(during, 0, 0.0)
    follower.on_pages(due[0], pages)
    assert holdings(follower) == worker.held
    assert holdings(follower, "x") == other.held
    assert follower.settled()


def test_a_gap_is_counted_once_while_the_resync_runs() -> None:
    follower, worker = make_follower(), Cache()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    worker.stored("lost")
    for path in ("a", "b", "c"):
        follower.on_events(worker.stored(path), 0, 0.0)
    assert follower.counters.gaps == 1
    assert resync_due(follower, worker, 0.0) == 1
    assert holdings(follower) == worker.held


def test_a_lost_tail_shows_in_heartbeats() -> None:
    follower, worker = make_follower(behind_s=1.0, dead_after_s=10.0), Cache()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    follower.on_events(worker.stored("a"), 0, 0.0)
    worker.stored("ab")
    follower.on_heartbeat(worker.heartbeat(), 0.25)
    follower.on_tick(1.2)
    assert follower.due_resyncs(1.2) == []
    follower.on_tick(1.3)
    assert resync_due(follower, worker, 1.3) == 1
    assert holdings(follower) == worker.held


def test_events_that_merely_lag_behind_heartbeats_cause_no_resync() -> None:
    follower, worker = make_follower(behind_s=1.0, dead_after_s=10.0), Cache()
    late = [worker.stored("a" * length) for length in range(1, 41)]
    now_s = 0.0
    follower.on_events(late[0], 0, now_s)
    for number, message in enumerate(late[1:], 2):
        now_s += 0.25
        worker.sequence = number
        follower.on_heartbeat(replace(worker.heartbeat(), held=None), now_s)
        follower.on_tick(now_s)
        follower.on_events(message, 0, now_s + 0.2)
    assert follower.counters.behind == 0
    assert follower.due_resyncs(now_s) == []


def test_a_worker_first_seen_with_events_behind_it_is_queried_at_once() -> None:
    follower, worker = make_follower(), Cache()
    worker.stored("abc")
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    assert not follower.settled()
    assert resync_due(follower, worker, 0.0) == 1
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    assert follower.settled()


def test_a_worker_first_seen_needs_no_query_where_the_stream_brings_all_of_it() -> None:
    follower, worker = make_follower(), Cache()
    first, second = worker.stored("ab"), worker.stored("abc")
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    (address,) = follower.due_resyncs(0.0)
    follower.on_events(first, 0, 0.0)
    follower.on_resync_failed(address)
    assert not follower.settled()
    follower.on_events(second, 0, 0.1)
    assert follower.settled()
    assert holdings(follower) == worker.held
    assert follower.due_resyncs(10.0) == []


def test_unknown_parents_and_malformed_events_lead_to_a_resync() -> None:
    follower, worker = make_follower(resync_interval_s=1.0, dead_after_s=10.0), Cache()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    worker.held = dict(link(b"", chain("abc")))
    bad = worker.changed(
        BlocksStored(parent=chain("zz")[-16:], blocks=chain("zzz")[-16:]),
        BlocksStored(parent=b"odd", blocks=chain("q")),
        BlocksRemoved(blocks=b"short"),
        BlocksStored(parent=b"", blocks=chain("abc")),
    )
    follower.on_events(bad, 0, 0.0)
    assert (follower.counters.unknown_parents, follower.counters.malformed) == (1, 2)
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    assert resync_due(follower, worker, 0.0) == 1
    follower.on_events(worker.changed(BlocksRemoved(blocks=b"short")), 0, 0.5)
    assert follower.due_resyncs(0.5) == [], "a worker that talks nonsense is queried once an interval"
    assert resync_due(follower, worker, 1.0) == 1


def test_each_kind_of_bad_input_is_counted_and_disturbs_nothing_else() -> None:
    follower, worker, other = make_follower(dead_after_s=10.0), Cache(), Cache("x")
    for each in (worker, other):
        follower.on_heartbeat(each.heartbeat(), 0.0)
        follower.on_events(each.stored("abc"), 0, 0.0)
    counters = follower.counters
    foreign = replace(worker.stored("abcd"), model_digest="foreign")
    follower.on_events(foreign, 5, 0.0)
    follower.on_heartbeat(replace(worker.heartbeat(), model_digest="foreign"), 0.0)
    assert counters.foreign_models == 2
    follower.on_odd_message(6)
    assert (counters.malformed, follower.stream_sequence) == (1, 6)
    assert follower.settled()
    worker.sequence -= 1
    follower.on_events(worker.changed(BlocksStored(parent=b"", blocks=bytes(EVENTS_BYTES_MAX + 16))), 0, 0.0)
    assert counters.oversized == 1
    assert holdings(follower).keys() == set(split_ids(chain("abc"))), "nothing of it was taken"
    assert resync_due(follower, worker, 0.0) == 1, "what it should have told is read"
    assert holdings(follower) == worker.held
    assert holdings(follower, "x") == other.held
    assert follower.match(MODEL, chain("abc")) == {"w": 3, "x": 3}


def test_a_full_index_is_counted_and_serves_what_it_has() -> None:
    class Full(TableIndex):
        def store(self, worker: str, parent: bytes, blocks: bytes, tier: Tier = Tier.ACTIVE) -> int:
            if blocks == chain("more"):
                raise IndexFull("no room")
            return super().store(worker, parent, blocks, tier)

        def load(self, worker: str, runs: Sequence[Run], tier: Tier = Tier.ACTIVE) -> None:
            raise IndexFull("no room")

    follower, worker = Follower(Full, FollowerOptions(), Journal(1000)), Cache()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    follower.on_events(worker.stored("abc"), 0, 0.0)
    follower.on_events(worker.stored("more"), 0, 0.0)
    assert resync_due(follower, worker, 0.0) == 1
    assert follower.counters.full == 2
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    assert resync_due(follower, worker, 1.0) == 1, "room may come"


def test_a_new_generation_a_goodbye_and_silence_drop_everything_at_once() -> None:
    follower, worker = make_follower(dead_after_s=1.5), Cache()
    follower.on_events(worker.stored("abc"), 0, 0.0)
    worker.restart()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    assert follower.match(MODEL, chain("abc")) == {}

    last = worker.stored("abc")
    follower.on_events(last, 0, 0.1)
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    follower.on_goodbye(worker.address)
    assert follower.match(MODEL, chain("abc")) == {}
    follower.on_events(last, 0, 0.2)
    assert follower.match(MODEL, chain("abc")) == {}, "an event may be later than its worker's Goodbye"

    worker.restart()
    follower.on_heartbeat(worker.heartbeat(), 0.3)
    follower.on_events(worker.stored("abc"), 0, 0.3)
    follower.on_tick(1.8)
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    follower.on_tick(1.9)
    assert follower.match(MODEL, chain("abc")) == {}
    follower.on_heartbeat(worker.heartbeat(), 5.0)
    assert resync_due(follower, worker, 5.0) == 1, "a worker that was only paused comes back with all it holds"
    assert follower.match(MODEL, chain("abc")) == {"w": 3}


def test_time_in_which_nobody_could_be_heard_costs_no_worker() -> None:
    follower, worker = make_follower(), Cache()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    follower.on_tick(0.0)
    follower.on_events(worker.stored("abc"), 0, 0.0)
    follower.excuse(60.0, 60.0)
    follower.on_tick(60.0)
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    for tenths in range(1, 15):
        follower.on_tick(60.0 + tenths / 10)
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    follower.on_tick(61.6)
    assert follower.match(MODEL, chain("abc")) == {}


def test_pages_of_another_life_or_a_broken_page_change_nothing() -> None:
    follower, worker = make_follower(resync_interval_s=0.5), Cache()
    worker.stored("abc")
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    (address,) = follower.due_resyncs(0.0)
    old = ShadowPage(worker="w", generation=0, model_digest=MODEL, sequence=9, runs=())
    follower.on_pages(address, [old])
    assert follower.due_resyncs(0.1) == []
    (address,) = follower.due_resyncs(0.5)
    broken = BlocksStored(parent=b"", blocks=b"odd")
    follower.on_pages(address, [ShadowPage(worker="w", generation=1, model_digest=MODEL, sequence=1, runs=(broken,))])
    assert resync_due(follower, worker, 1.0) == 1
    assert holdings(follower) == worker.held


def test_what_waits_for_a_resync_is_bounded() -> None:
    follower = Follower(RadixIndex, FollowerOptions(waiting_events_max=3), Journal(1000))
    worker = Cache()
    worker.stored("lost")
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    (address,) = follower.due_resyncs(0.0)
    pages = worker.pages()
    for number in range(8):
        follower.on_events(worker.stored("x" * (number + 1)), 0, 0.0)
    follower.on_pages(address, pages)
    assert not follower.settled()
    assert resync_due(follower, worker, 1.0) == 1
    assert holdings(follower) == worker.held


def drift(follower: Follower, blocks: bytes = b"", phantoms: bytes = b"") -> None:
    """Change what is held of the worker behind the follower's back, as a bug or a flipped bit would."""
    trees: Trees = follower._trees  # pyright: ignore[reportPrivateUsage]
    index = trees.assign("w", MODEL)
    index.remove("w", blocks)
    index.store("w", b"", phantoms)


@pytest.mark.parametrize(("dropped", "phantom"), [("ab", ""), ("", "x"), ("b", "y")])
def test_drift_is_found_by_the_next_heartbeat_and_repaired(dropped: str, phantom: str) -> None:
    follower, worker, other = make_follower(), Cache(), Cache("x")
    for each in (worker, other):
        follower.on_heartbeat(each.heartbeat(), 0.0)
        follower.on_events(each.stored("abc"), 0, 0.0)
        follower.on_heartbeat(each.heartbeat(), 0.1)
    assert follower.counters.drifts == 0
    drift(follower, chain("abc")[16 : 16 * len(dropped) + 16], chain(phantom))
    follower.on_heartbeat(other.heartbeat(), 0.2)
    assert follower.due_resyncs(0.2) == []
    follower.on_heartbeat(worker.heartbeat(), 0.3)
    assert follower.counters.drifts == 1
    assert resync_due(follower, worker, 0.3) == 1, "that worker alone"
    assert holdings(follower) == worker.held
    follower.on_heartbeat(worker.heartbeat(), 0.4)
    assert (follower.counters.drifts, follower.counters.resyncs) == (1, 1)
    assert follower.settled()


def test_events_that_go_on_do_not_put_off_the_repair_of_drift() -> None:
    follower, worker = make_follower(), Cache()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    follower.on_events(worker.stored("abc"), 0, 0.0)
    drift(follower, phantoms=chain("x"))
    follower.on_heartbeat(worker.heartbeat(), 0.1)
    follower.on_events(worker.stored("abcd"), 0, 0.1)
    assert resync_due(follower, worker, 0.1) == 1
    assert holdings(follower) == worker.held


def test_a_fingerprint_is_compared_after_exactly_its_event() -> None:
    follower, worker = make_follower(behind_s=10.0, dead_after_s=10.0), Cache()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    first, early = worker.stored("abc"), worker.heartbeat()
    second, late = worker.removed(chain("abc")[32:]), worker.heartbeat()
    follower.on_heartbeat(early, 0.1)
    drift(follower, phantoms=chain("x"))
    follower.on_heartbeat(late, 0.2)
    assert follower.counters.drifts == 0, "neither event has come"
    follower.on_events(first, 0, 0.3)
    assert follower.counters.drifts == 1, "the first claim was kept until it could be checked"
    assert resync_due(follower, worker, 0.3) == 1
    follower.on_events(second, 0, 0.4)
    follower.on_heartbeat(early, 0.5)
    follower.on_heartbeat(late, 0.6)
    assert follower.counters.drifts == 1, "a claim about an earlier event says nothing"


def test_a_worker_whose_fingerprint_stays_wrong_is_read_ever_more_seldom() -> None:
    follower, worker = make_follower(resync_interval_s=0.5), Cache()
    worker.stored("abc")
    now_s, resyncs = 0.0, 0
    for _ in range(120):
        now_s += 0.25
        follower.on_heartbeat(replace(worker.heartbeat(), held=Fingerprint(blocks=7)), now_s)
        resyncs += resync_due(follower, worker, now_s)
    assert resyncs == 6, "at once, then after 0.5, 1, 2, 4 and 8 s"


class LossyStream(RuleBasedStateMachine):
    """Events are lost, doubled, delayed and reordered; workers restart; resyncs overlap with events."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.follower = make_follower()
        self.worker = Cache()
        self.in_flight: list[KvEvents] = []
        self.resyncs: list[tuple[WorkerAddress, list[ShadowPage]]] = []

    def emit(self, message: KvEvents) -> None:
        self.in_flight.append(message)

    @rule(path=st.text(alphabet="ab", min_size=1, max_size=5))
    def store(self, path: str) -> None:
        self.emit(self.worker.stored(path))

    @rule(path=st.text(alphabet="ab", min_size=1, max_size=5))
    def remove(self, path: str) -> None:
        self.emit(self.worker.removed(chain(path)))

    @rule()
    def clear(self) -> None:
        self.emit(self.worker.cleared())

    @rule()
    def restart(self) -> None:
        self.worker.restart()

    @rule(block=st.integers(0, 3), phantom=st.sampled_from(["", "x", "ax"]))
    def drift(self, block: int, phantom: str) -> None:
        drift(self.follower, b"".join(list(holdings(self.follower))[block : block + 1]), chain(phantom))

    @rule(at=st.integers(0, 3), keep=st.booleans())
    def deliver(self, at: int, keep: bool) -> None:
        if self.in_flight:
            message = self.in_flight[min(at, len(self.in_flight) - 1)]
            self.follower.on_events(message, 0, self.now_s)
            if not keep:
                self.in_flight.remove(message)

    @rule(at=st.integers(0, 3))
    def lose(self, at: int) -> None:
        if self.in_flight:
            del self.in_flight[min(at, len(self.in_flight) - 1)]

    @rule(after_s=st.floats(0.0, 1.0))
    def heartbeat(self, after_s: float) -> None:
        self.now_s += after_s
        self.follower.on_heartbeat(self.worker.heartbeat(), self.now_s)
        self.follower.on_tick(self.now_s)

    @rule()
    def begin_resync(self) -> None:
        self.resyncs += [(address, self.worker.pages()) for address in self.follower.due_resyncs(self.now_s)]

    @rule(fails=st.booleans())
    def end_resync(self, fails: bool) -> None:
        if self.resyncs:
            address, pages = self.resyncs.pop()
            if fails:
                self.follower.on_resync_failed(address)
            else:
                self.follower.on_pages(address, pages)

    def teardown(self) -> None:
        """Once the stream is quiet, heartbeats and resyncs alone bring the index to what the worker holds."""
        for address, _ in self.resyncs:
            self.follower.on_resync_failed(address)
        for _ in range(140):  # Drift that was planted many times in a row is looked for ever more seldom.
            self.now_s += 0.25
            self.follower.on_heartbeat(self.worker.heartbeat(), self.now_s)
            self.follower.on_tick(self.now_s)
            resync_due(self.follower, self.worker, self.now_s)
            if self.follower.settled() and holdings(self.follower) == self.worker.held:
                break
        assert holdings(self.follower) == self.worker.held
        assert self.follower.settled()


TestLossyStream = LossyStream.TestCase
TestLossyStream.settings = settings(stateful_step_count=40)
