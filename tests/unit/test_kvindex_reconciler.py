"""The reconciler: after any fault in the events, the index ends up equal to the workers' caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from baton_kvindex.apply import EVENTS_BYTES_MAX
from baton_kvindex.config import IndexSettings
from baton_kvindex.counters import ResyncReason
from baton_kvindex.durable import Journal, SavedWorker, runs_of, slots
from baton_kvindex.index import IndexFull, Run, Tier, link, split_ids
from baton_kvindex.indexed_worker import WAITING_BYTES_MAX
from baton_kvindex.radix import RadixIndex
from baton_kvindex.reconciler import LocalMatch, Reconciler
from baton_kvindex.trees import Trees
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from msgspec.structs import replace

from baton.messages.base import WorkerAddress
from baton.messages.index import BlocksCleared, BlocksRemoved, BlocksStored, KvEvents, ShadowPage
from baton.messages.workers import Fingerprint, Goodbye
from tests.contract.index_world import block
from tests.harness.index.table import TableIndex
from tests.harness.index.worker import MODEL, Cache, chain


def make_reconciler(**options: Any) -> Reconciler:
    return Reconciler(RadixIndex, IndexSettings(**options), Journal(blocks_max=1000))


def holdings(reconciler: Reconciler, worker: str = "w", tier: Tier = Tier.DEVICE) -> dict[bytes, bytes]:
    runs = [run for run in reconciler.dump(worker) if run.tier is tier]
    return {block: parent for run in runs for block, parent in link(run.parent, run.blocks)}


def equal(reconciler: Reconciler, worker: Cache) -> bool:
    return all(holdings(reconciler, tier=tier) == worker.on(tier) for tier in Tier)


def resync_due(reconciler: Reconciler, worker: Cache, now_s: float) -> int:
    due = reconciler.due_resyncs(now_s)
    for address in due:
        reconciler.on_pages(address, worker.pages())
    return len(due)


def test_events_in_order_are_applied() -> None:
    reconciler, worker = make_reconciler(), Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    reconciler.on_events(worker.stored("abc"), 1, 0.0)
    reconciler.on_events(worker.removed(chain("ab")), 2, 0.0)
    assert holdings(reconciler) == worker.held
    assert reconciler.match(MODEL, chain("abc")).held == {}
    assert reconciler.match("another model", chain("abc")).held == {}
    assert reconciler.due_resyncs(0.0) == []
    assert reconciler.stream_sequence == 2


def test_a_match_says_how_far_each_tier_reaches() -> None:
    reconciler, worker, other = make_reconciler(), Cache(), Cache("v")
    reconciler.on_events(other.stored("a"), 1, 0.0)
    reconciler.on_events(worker.stored("ab"), 2, 0.0)
    assert reconciler.match(MODEL, chain("abcd")) == LocalMatch({"w": 2, "v": 1})
    reconciler.on_events(worker.stored("abc", Tier.POOL), 3, 0.0)
    reconciler.on_events(other.stored("ab", Tier.POOL), 4, 0.0)
    assert reconciler.match(MODEL, chain("abcd")) == LocalMatch({"w": 2, "v": 1}, {"w": 3, "v": 2})
    reconciler.on_events(worker.removed(chain("ab")), 5, 0.0)
    assert reconciler.match(MODEL, chain("abcd")) == LocalMatch({"v": 1}, {"w": 3, "v": 2})
    worker.held = {}
    reconciler.on_events(worker.changed(BlocksCleared(tier=Tier.DEVICE)), 6, 0.0)
    assert reconciler.match(MODEL, chain("abcd")) == LocalMatch({"v": 1}, {"w": 3, "v": 2})
    assert equal(reconciler, worker)
    reconciler.on_events(worker.cleared(), 7, 0.0)
    assert reconciler.match(MODEL, chain("abcd")) == LocalMatch({"v": 1}, {"v": 2})


def test_a_pool_that_differs_is_resynced() -> None:
    reconciler, worker = make_reconciler(), Cache()
    reconciler.on_events(worker.stored("ab"), 1, 0.0)
    reconciler.on_events(worker.stored("abc", Tier.POOL), 2, 0.0)
    worker.pooled |= dict(link(b"", chain("x")))
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    assert reconciler.counters.resyncs[ResyncReason.DRIFT] == 1
    assert resync_due(reconciler, worker, 0.0) == 1
    assert equal(reconciler, worker)
    assert reconciler.settled()


def test_the_durable_form_has_both_tiers() -> None:
    reconciler, worker = make_reconciler(), Cache()
    reconciler.on_events(worker.stored("ab"), 1, 0.0)
    reconciler.on_events(worker.stored("abc", Tier.POOL), 2, 0.0)
    reconciler.on_events(worker.removed(block("ab"), Tier.POOL), 3, 0.0)
    change = reconciler.take_batch().workers["w"]
    assert change is not None
    assert change.runs is not None, "a worker is written whole at first"
    again = make_reconciler()
    again.restore_worker("w", SavedWorker(change.state, change.runs), 0.0)
    assert equal(again, worker)
    reconciler.on_events(worker.stored("xy", Tier.POOL), 4, 0.0)
    reconciler.on_events(worker.removed(block("a")), 5, 0.0)
    change = reconciler.take_batch().workers["w"]
    assert change is not None
    assert change.runs is None
    slots_now = {slot: parent for run in again.dump("w") for slot, parent in slots(run.parent, run.blocks, run.tier)}
    slots_now |= change.stored
    for slot in change.removed:
        del slots_now[slot]
    again = make_reconciler()
    again.restore_worker("w", SavedWorker(change.state, runs_of(slots_now)), 0.0)
    assert equal(again, worker)
    assert again.match(MODEL, chain("xyz")) == LocalMatch({}, {"w": 2})


def test_duplicates_and_older_generations_are_dropped() -> None:
    reconciler, worker = make_reconciler(), Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    first, second = worker.stored("abc"), worker.cleared()
    for message in (first, second, first, second):
        reconciler.on_events(message, 0, 0.0)
    assert holdings(reconciler) == {}
    worker.restart()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    reconciler.on_events(first, 0, 0.0)
    assert holdings(reconciler) == {}
    assert (reconciler.counters.duplicates, reconciler.counters.stale) == (2, 1)


def test_a_gap_resyncs_that_worker_alone_and_keeps_later_events() -> None:
    reconciler, worker, other = make_reconciler(), Cache(), Cache("x")
    for each in (worker, other):
        reconciler.on_heartbeat(each.heartbeat(), 0.0)
    reconciler.on_events(other.stored("xyz"), 0, 0.0)
    reconciler.on_events(worker.stored("ab"), 0, 0.0)
    worker.stored("abc")
    after_gap = worker.stored("abcd")
    reconciler.on_events(after_gap, 0, 0.0)
    due = reconciler.due_resyncs(0.0)
    assert [address.worker for address in due] == ["w"]
    pages = worker.pages()
    during = worker.stored("abcde")
    reconciler.on_events(during, 0, 0.0)
    reconciler.on_pages(due[0], pages)
    assert holdings(reconciler) == worker.held
    assert holdings(reconciler, "x") == other.held
    assert reconciler.settled()


def test_a_gap_is_counted_once_while_the_resync_runs() -> None:
    reconciler, worker = make_reconciler(), Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    worker.stored("lost")
    for path in ("a", "b", "c"):
        reconciler.on_events(worker.stored(path), 0, 0.0)
    assert reconciler.counters.resyncs[ResyncReason.GAP] == 1
    assert resync_due(reconciler, worker, 0.0) == 1
    assert holdings(reconciler) == worker.held


def test_a_lost_tail_shows_in_heartbeats() -> None:
    reconciler, worker = make_reconciler(behind_s=1.0, lost_after_s=10.0), Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    reconciler.on_events(worker.stored("a"), 0, 0.0)
    worker.stored("ab")
    reconciler.on_heartbeat(worker.heartbeat(), 0.25)
    reconciler.on_tick(1.2)
    assert reconciler.due_resyncs(1.2) == []
    reconciler.on_tick(1.3)
    assert resync_due(reconciler, worker, 1.3) == 1
    assert holdings(reconciler) == worker.held


def test_events_that_merely_lag_behind_heartbeats_cause_no_resync() -> None:
    reconciler, worker = make_reconciler(behind_s=1.0, lost_after_s=10.0), Cache()
    late = [worker.stored("a" * length) for length in range(1, 41)]
    now_s = 0.0
    reconciler.on_events(late[0], 0, now_s)
    for number, message in enumerate(late[1:], 2):
        now_s += 0.25
        worker.sequence = number
        reconciler.on_heartbeat(replace(worker.heartbeat(), held=None), now_s)
        reconciler.on_tick(now_s)
        reconciler.on_events(message, 0, now_s + 0.2)
    assert reconciler.counters.resyncs[ResyncReason.BEHIND] == 0
    assert reconciler.due_resyncs(now_s) == []


def test_a_worker_first_seen_with_events_behind_it_is_queried_at_once() -> None:
    reconciler, worker = make_reconciler(), Cache()
    worker.stored("abc")
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    assert not reconciler.settled()
    assert resync_due(reconciler, worker, 0.0) == 1
    assert reconciler.match(MODEL, chain("abc")).held == {"w": 3}
    assert reconciler.settled()


def test_a_worker_first_seen_needs_no_query_where_the_stream_brings_all_of_it() -> None:
    reconciler, worker = make_reconciler(), Cache()
    first, second = worker.stored("ab"), worker.stored("abc")
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    (address,) = reconciler.due_resyncs(0.0)
    reconciler.on_events(first, 0, 0.0)
    reconciler.on_resync_failed(address)
    assert not reconciler.settled()
    reconciler.on_events(second, 0, 0.1)
    assert reconciler.settled()
    assert holdings(reconciler) == worker.held
    assert reconciler.due_resyncs(10.0) == []


def test_unknown_parents_and_malformed_events_lead_to_a_resync() -> None:
    reconciler, worker = make_reconciler(resync_interval_s=1.0, lost_after_s=10.0), Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    worker.held = dict(link(b"", chain("abc")))
    bad = worker.changed(
        BlocksStored(parent=chain("zz")[-16:], blocks=chain("zzz")[-16:]),
        BlocksStored(parent=b"odd", blocks=chain("q")),
        BlocksRemoved(blocks=b"short"),
        BlocksStored(parent=b"", blocks=chain("abc")),
    )
    reconciler.on_events(bad, 0, 0.0)
    assert (reconciler.counters.resyncs[ResyncReason.UNKNOWN_PARENT], reconciler.counters.malformed) == (1, 2)
    assert reconciler.match(MODEL, chain("abc")).held == {"w": 3}
    assert resync_due(reconciler, worker, 0.0) == 1
    reconciler.on_events(worker.changed(BlocksRemoved(blocks=b"short")), 0, 0.5)
    assert reconciler.due_resyncs(0.5) == [], "a worker that talks nonsense is queried once an interval"
    assert resync_due(reconciler, worker, 1.0) == 1


def test_each_kind_of_bad_input_is_counted_and_disturbs_nothing_else() -> None:
    reconciler, worker, other = make_reconciler(lost_after_s=10.0), Cache(), Cache("x")
    for each in (worker, other):
        reconciler.on_heartbeat(each.heartbeat(), 0.0)
        reconciler.on_events(each.stored("abc"), 0, 0.0)
    counters = reconciler.counters
    foreign = replace(worker.stored("abcd"), model_digest="foreign")
    reconciler.on_events(foreign, 5, 0.0)
    reconciler.on_heartbeat(replace(worker.heartbeat(), model_digest="foreign"), 0.0)
    assert counters.foreign_models == 2
    reconciler.on_odd_message(6)
    assert (counters.malformed, reconciler.stream_sequence) == (1, 6)
    assert reconciler.settled()
    worker.sequence -= 1
    reconciler.on_events(worker.changed(BlocksStored(parent=b"", blocks=bytes(EVENTS_BYTES_MAX + 16))), 0, 0.0)
    assert counters.oversized == 1
    assert holdings(reconciler).keys() == set(split_ids(chain("abc"))), "nothing of it was taken"
    assert resync_due(reconciler, worker, 0.0) == 1, "what it should have told is read"
    assert holdings(reconciler) == worker.held
    assert holdings(reconciler, "x") == other.held
    assert reconciler.match(MODEL, chain("abc")).held == {"w": 3, "x": 3}


def test_a_full_index_is_counted_and_serves_what_it_has() -> None:
    class Full(TableIndex):
        def store(self, worker: str, parent: bytes, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
            if blocks == chain("more"):
                raise IndexFull("no room")
            return super().store(worker, parent, blocks, tier)

        def load(self, worker: str, runs: Sequence[Run], tier: Tier = Tier.DEVICE) -> None:
            raise IndexFull("no room")

    reconciler, worker = Reconciler(Full, IndexSettings(), Journal(1000)), Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    reconciler.on_events(worker.stored("abc"), 0, 0.0)
    reconciler.on_events(worker.stored("more"), 0, 0.0)
    assert resync_due(reconciler, worker, 0.0) == 1
    assert reconciler.counters.full == 2
    assert reconciler.match(MODEL, chain("abc")).held == {"w": 3}
    assert resync_due(reconciler, worker, 1.0) == 1, "room may come"


def test_a_new_generation_a_goodbye_and_silence_drop_everything_at_once() -> None:
    reconciler, worker = make_reconciler(lost_after_s=1.5), Cache()
    reconciler.on_events(worker.stored("abc"), 0, 0.0)
    worker.restart()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    assert reconciler.match(MODEL, chain("abc")).held == {}

    last = worker.stored("abc")
    reconciler.on_events(last, 0, 0.1)
    assert reconciler.match(MODEL, chain("abc")).held == {"w": 3}
    reconciler.on_goodbye(Goodbye(address=worker.address), 0.0)
    assert reconciler.match(MODEL, chain("abc")).held == {}
    reconciler.on_events(last, 0, 0.2)
    assert reconciler.match(MODEL, chain("abc")).held == {}, "an event may be later than its worker's Goodbye"

    worker.restart()
    reconciler.on_heartbeat(worker.heartbeat(), 0.3)
    reconciler.on_events(worker.stored("abc"), 0, 0.3)
    reconciler.on_tick(1.8)
    assert reconciler.match(MODEL, chain("abc")).held == {"w": 3}
    reconciler.on_tick(1.9)
    assert reconciler.match(MODEL, chain("abc")).held == {}
    reconciler.on_heartbeat(worker.heartbeat(), 5.0)
    assert resync_due(reconciler, worker, 5.0) == 1, "a worker that was only paused comes back with all it holds"
    assert reconciler.match(MODEL, chain("abc")).held == {"w": 3}


def test_a_pause_of_this_process_costs_no_worker() -> None:
    reconciler, worker = make_reconciler(), Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    reconciler.on_tick(0.0)
    reconciler.on_events(worker.stored("abc"), 0, 0.0)
    reconciler.extend_deadlines(60.0, 60.0)
    reconciler.on_tick(60.0)
    assert reconciler.match(MODEL, chain("abc")).held == {"w": 3}
    for tenths in range(1, 15):
        reconciler.on_tick(60.0 + tenths / 10)
    assert reconciler.match(MODEL, chain("abc")).held == {"w": 3}
    reconciler.on_tick(61.6)
    assert reconciler.match(MODEL, chain("abc")).held == {}


def test_pages_of_another_generation_or_a_broken_page_change_nothing() -> None:
    reconciler, worker = make_reconciler(resync_interval_s=0.5), Cache()
    worker.stored("abc")
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    (address,) = reconciler.due_resyncs(0.0)
    old = ShadowPage(worker="w", generation=0, model_digest=MODEL, sequence=9, runs=())
    reconciler.on_pages(address, [old])
    assert reconciler.due_resyncs(0.1) == []
    (address,) = reconciler.due_resyncs(0.5)
    broken = BlocksStored(parent=b"", blocks=b"odd")
    reconciler.on_pages(address, [ShadowPage(worker="w", generation=1, model_digest=MODEL, sequence=1, runs=(broken,))])
    assert resync_due(reconciler, worker, 1.0) == 1
    assert holdings(reconciler) == worker.held


def test_what_waits_for_a_resync_is_bounded() -> None:
    reconciler, worker = make_reconciler(), Cache()
    worker.stored("lost")
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    (address,) = reconciler.due_resyncs(0.0)
    pages = worker.pages()
    large = BlocksRemoved(blocks=bytes(EVENTS_BYTES_MAX))
    for _ in range(WAITING_BYTES_MAX // EVENTS_BYTES_MAX + 1):
        reconciler.on_events(worker.changed(large), 0, 0.0)
    reconciler.on_pages(address, pages)
    assert not reconciler.settled()
    assert resync_due(reconciler, worker, 1.0) == 1
    assert holdings(reconciler) == worker.held


def drift(reconciler: Reconciler, blocks: bytes = b"", phantoms: bytes = b"") -> None:
    """Change what is held of the worker behind the reconciler's back, as a bug or a flipped bit would."""
    trees: Trees = reconciler._trees  # pyright: ignore[reportPrivateUsage]
    index = trees.assign("w", MODEL)
    index.remove("w", blocks)
    index.store("w", b"", phantoms)


@pytest.mark.parametrize(("dropped", "phantom"), [("ab", ""), ("", "x"), ("b", "y")])
def test_drift_is_found_by_the_next_heartbeat_and_repaired(dropped: str, phantom: str) -> None:
    reconciler, worker, other = make_reconciler(), Cache(), Cache("x")
    for each in (worker, other):
        reconciler.on_heartbeat(each.heartbeat(), 0.0)
        reconciler.on_events(each.stored("abc"), 0, 0.0)
        reconciler.on_heartbeat(each.heartbeat(), 0.1)
    assert reconciler.counters.resyncs[ResyncReason.DRIFT] == 0
    drift(reconciler, chain("abc")[16 : 16 * len(dropped) + 16], chain(phantom))
    reconciler.on_heartbeat(other.heartbeat(), 0.2)
    assert reconciler.due_resyncs(0.2) == []
    reconciler.on_heartbeat(worker.heartbeat(), 0.3)
    assert reconciler.counters.resyncs[ResyncReason.DRIFT] == 1
    assert resync_due(reconciler, worker, 0.3) == 1, "that worker alone"
    assert holdings(reconciler) == worker.held
    reconciler.on_heartbeat(worker.heartbeat(), 0.4)
    assert sum(reconciler.counters.resyncs.values()) == reconciler.counters.resyncs[ResyncReason.DRIFT] == 1
    assert reconciler.settled()


def test_events_that_go_on_do_not_put_off_the_repair_of_drift() -> None:
    reconciler, worker = make_reconciler(), Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    reconciler.on_events(worker.stored("abc"), 0, 0.0)
    drift(reconciler, phantoms=chain("x"))
    reconciler.on_heartbeat(worker.heartbeat(), 0.1)
    reconciler.on_events(worker.stored("abcd"), 0, 0.1)
    assert resync_due(reconciler, worker, 0.1) == 1
    assert holdings(reconciler) == worker.held


def test_a_fingerprint_is_compared_after_exactly_its_event() -> None:
    reconciler, worker = make_reconciler(behind_s=10.0, lost_after_s=10.0), Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    first, early = worker.stored("abc"), worker.heartbeat()
    second, late = worker.removed(chain("abc")[32:]), worker.heartbeat()
    reconciler.on_heartbeat(early, 0.1)
    drift(reconciler, phantoms=chain("x"))
    reconciler.on_heartbeat(late, 0.2)
    assert reconciler.counters.resyncs[ResyncReason.DRIFT] == 0, "neither event has come"
    reconciler.on_events(first, 0, 0.3)
    assert reconciler.counters.resyncs[ResyncReason.DRIFT] == 1, "the first claim was kept until it could be checked"
    assert resync_due(reconciler, worker, 0.3) == 1
    reconciler.on_events(second, 0, 0.4)
    reconciler.on_heartbeat(early, 0.5)
    reconciler.on_heartbeat(late, 0.6)
    assert reconciler.counters.resyncs[ResyncReason.DRIFT] == 1, "a claim about an earlier event says nothing"


def test_a_worker_whose_fingerprint_stays_wrong_is_read_ever_more_seldom() -> None:
    reconciler, worker = make_reconciler(resync_interval_s=0.5), Cache()
    worker.stored("abc")
    now_s, resyncs = 0.0, 0
    for _ in range(120):
        now_s += 0.25
        reconciler.on_heartbeat(replace(worker.heartbeat(), held=Fingerprint(blocks=7)), now_s)
        resyncs += resync_due(reconciler, worker, now_s)
    assert resyncs == 6, "at once, then after 0.5, 1, 2, 4 and 8 s"


class LossyStream(RuleBasedStateMachine):
    """Events are lost, doubled, delayed and reordered; workers restart; resyncs overlap with events."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.reconciler = make_reconciler()
        self.worker = Cache()
        self.in_flight: list[KvEvents] = []
        self.resyncs: list[tuple[WorkerAddress, list[ShadowPage]]] = []

    def emit(self, message: KvEvents) -> None:
        self.in_flight.append(message)

    @rule(path=st.text(alphabet="ab", min_size=1, max_size=5), tier=st.sampled_from(Tier))
    def store(self, path: str, tier: Tier) -> None:
        self.emit(self.worker.stored(path, tier))

    @rule(path=st.text(alphabet="ab", min_size=1, max_size=5), tier=st.sampled_from(Tier))
    def remove(self, path: str, tier: Tier) -> None:
        self.emit(self.worker.removed(chain(path), tier))

    @rule()
    def clear(self) -> None:
        self.emit(self.worker.cleared())

    @rule()
    def restart(self) -> None:
        self.worker.restart()

    @rule(block=st.integers(0, 3), phantom=st.sampled_from(["", "x", "ax"]))
    def drift(self, block: int, phantom: str) -> None:
        drift(self.reconciler, b"".join(list(holdings(self.reconciler))[block : block + 1]), chain(phantom))

    @rule(at=st.integers(0, 3), keep=st.booleans())
    def deliver(self, at: int, keep: bool) -> None:
        if self.in_flight:
            message = self.in_flight[min(at, len(self.in_flight) - 1)]
            self.reconciler.on_events(message, 0, self.now_s)
            if not keep:
                self.in_flight.remove(message)

    @rule(at=st.integers(0, 3))
    def lose(self, at: int) -> None:
        if self.in_flight:
            del self.in_flight[min(at, len(self.in_flight) - 1)]

    @rule(after_s=st.floats(0.0, 1.0))
    def heartbeat(self, after_s: float) -> None:
        self.now_s += after_s
        self.reconciler.on_heartbeat(self.worker.heartbeat(), self.now_s)
        self.reconciler.on_tick(self.now_s)

    @rule()
    def begin_resync(self) -> None:
        self.resyncs += [(address, self.worker.pages()) for address in self.reconciler.due_resyncs(self.now_s)]

    @rule(fails=st.booleans())
    def end_resync(self, fails: bool) -> None:
        if self.resyncs:
            address, pages = self.resyncs.pop()
            if fails:
                self.reconciler.on_resync_failed(address)
            else:
                self.reconciler.on_pages(address, pages)

    def teardown(self) -> None:
        """Heartbeats and resyncs alone, once the stream is quiet, bring the index to what the worker holds."""
        for address, _ in self.resyncs:
            self.reconciler.on_resync_failed(address)
        for _ in range(140):  # Drift that was planted many times in a row is looked for ever more seldom.
            self.now_s += 0.25
            self.reconciler.on_heartbeat(self.worker.heartbeat(), self.now_s)
            self.reconciler.on_tick(self.now_s)
            resync_due(self.reconciler, self.worker, self.now_s)
            if self.reconciler.settled() and equal(self.reconciler, self.worker):
                break
        assert equal(self.reconciler, self.worker)
        assert self.reconciler.settled()


TestLossyStream = LossyStream.TestCase
TestLossyStream.settings = settings(stateful_step_count=40)
