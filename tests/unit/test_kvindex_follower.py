"""The follower: whatever happens to events, the index ends up with what the workers hold."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from baton_kvindex.durable import Journal
from baton_kvindex.follower import Follower, FollowerOptions
from baton_kvindex.index import link
from baton_kvindex.radix import RadixIndex
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from baton.messages import (
    BlockEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Heartbeat,
    KvEvents,
    Role,
    ShadowPage,
    WorkerAddress,
)

MODEL = "digest"


def chain(path: str) -> bytes:
    return b"".join(hashlib.blake2b(path[:end].encode(), digest_size=16).digest() for end in range(1, len(path) + 1))


@dataclass
class Worker:
    """A worker's side: its shadow map and the events that it sends."""

    name: str = "w"
    generation: int = 1
    sequence: int = 0
    held: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(worker=self.name, generation=self.generation)

    def restart(self) -> None:
        self.generation += 1
        self.sequence = 0
        self.held = {}

    def store(self, path: str) -> KvEvents:
        self.held |= dict(link(b"", chain(path)))
        return self.send(BlocksStored(parent=b"", blocks=chain(path)))

    def remove(self, path: str) -> KvEvents:
        for block in (chain(path)[at : at + 16] for at in range(0, 16 * len(path), 16)):
            self.held.pop(block, None)
        return self.send(BlocksRemoved(blocks=chain(path)))

    def clear(self) -> KvEvents:
        self.held = {}
        return self.send(BlocksCleared())

    def send(self, *events: BlockEvent) -> KvEvents:
        self.sequence += 1
        return KvEvents(
            worker=self.name, generation=self.generation, model_digest=MODEL, sequence=self.sequence, events=events
        )

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            address=self.address,
            role=Role.PREFILL,
            model="tiny",
            model_path="tiny",
            model_digest=MODEL,
            engine="simulated",
            block_tokens=32,
            context_tokens_max=4096,
            running_max=8,
            kv_blocks_total=100,
            engine_block_tokens=32,
            prefill_tokens_per_s=1000.0,
            decode_tokens_per_s=100.0,
            transfer_bytes_per_s=1e9,
            kv_bytes_per_token=1024,
            events_sequence=self.sequence,
        )

    def pages(self) -> list[ShadowPage]:
        """Return the shadow map, two blocks to a page."""
        runs = [BlocksStored(parent=parent, blocks=block) for block, parent in self.held.items()]
        groups = [runs[at : at + 2] for at in range(0, len(runs), 2)] or [[]]
        return [
            ShadowPage(
                worker=self.name,
                generation=self.generation,
                model_digest=MODEL,
                sequence=self.sequence,
                runs=tuple(group),
                next_cursor=number + 1 if number + 1 < len(groups) else 0,
            )
            for number, group in enumerate(groups)
        ]


def make_follower(**options: Any) -> Follower:
    return Follower(RadixIndex, FollowerOptions(**options), Journal(blocks_max=1000))


def holdings(follower: Follower, worker: str = "w") -> dict[bytes, bytes]:
    return {block: parent for run in follower.dump(worker) for block, parent in link(run.parent, run.blocks)}


def resync_due(follower: Follower, worker: Worker, now_s: float) -> int:
    due = follower.due_resyncs(now_s)
    for address in due:
        follower.on_pages(address, worker.pages())
    return len(due)


def test_events_in_order_are_applied() -> None:
    follower, worker = make_follower(), Worker()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    follower.on_events(worker.store("abc"), 1, 0.0)
    follower.on_events(worker.remove("ab"), 2, 0.0)
    assert holdings(follower) == worker.held
    assert follower.match(MODEL, chain("abc")) == {}
    assert follower.match("another model", chain("abc")) == {}
    assert follower.due_resyncs(0.0) == []
    assert follower.stream_sequence == 2


def test_duplicates_and_older_generations_are_dropped() -> None:
    follower, worker = make_follower(), Worker()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    first, second = worker.store("abc"), worker.clear()
    for message in (first, second, first, second):
        follower.on_events(message, 0, 0.0)
    assert holdings(follower) == {}
    worker.restart()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    follower.on_events(first, 0, 0.0)
    assert holdings(follower) == {}
    assert (follower.counters.duplicates, follower.counters.stale) == (2, 1)


def test_a_gap_resyncs_that_worker_alone_and_keeps_later_events() -> None:
    follower, worker, other = make_follower(), Worker(), Worker("x")
    for each in (worker, other):
        follower.on_heartbeat(each.heartbeat(), 0.0)
    follower.on_events(other.store("xyz"), 0, 0.0)
    follower.on_events(worker.store("ab"), 0, 0.0)
    worker.store("abc")
    after_gap = worker.store("abcd")
    follower.on_events(after_gap, 0, 0.0)
    due = follower.due_resyncs(0.0)
    assert [address.worker for address in due] == ["w"]
    pages = worker.pages()
    during = worker.store("abcde")
    follower.on_events(during, 0, 0.0)
    follower.on_pages(due[0], pages)
    assert holdings(follower) == worker.held
    assert holdings(follower, "x") == other.held
    assert follower.settled()


def test_a_gap_is_counted_once_while_the_resync_runs() -> None:
    follower, worker = make_follower(), Worker()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    worker.store("lost")
    for path in ("a", "b", "c"):
        follower.on_events(worker.store(path), 0, 0.0)
    assert follower.counters.gaps == 1
    assert resync_due(follower, worker, 0.0) == 1
    assert holdings(follower) == worker.held


def test_a_lost_tail_shows_in_heartbeats() -> None:
    follower, worker = make_follower(behind_s=1.0, dead_after_s=10.0), Worker()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    follower.on_events(worker.store("a"), 0, 0.0)
    worker.store("ab")
    follower.on_heartbeat(worker.heartbeat(), 0.25)
    follower.on_tick(1.2)
    assert follower.due_resyncs(1.2) == []
    follower.on_tick(1.3)
    assert resync_due(follower, worker, 1.3) == 1
    assert holdings(follower) == worker.held


def test_events_that_merely_lag_behind_heartbeats_cause_no_resync() -> None:
    follower, worker = make_follower(behind_s=1.0, dead_after_s=10.0), Worker()
    late = [worker.store("a" * length) for length in range(1, 41)]
    now_s = 0.0
    follower.on_events(late[0], 0, now_s)
    for number, message in enumerate(late[1:], 2):
        now_s += 0.25
        worker.sequence = number
        follower.on_heartbeat(worker.heartbeat(), now_s)
        follower.on_tick(now_s)
        follower.on_events(message, 0, now_s + 0.2)
    assert follower.counters.behind == 0
    assert follower.due_resyncs(now_s) == []


def test_a_worker_first_seen_with_events_behind_it_is_queried_at_once() -> None:
    follower, worker = make_follower(), Worker()
    worker.store("abc")
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    assert not follower.settled()
    assert resync_due(follower, worker, 0.0) == 1
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    assert follower.settled()


def test_a_worker_first_seen_needs_no_query_where_the_stream_brings_all_of_it() -> None:
    follower, worker = make_follower(), Worker()
    first, second = worker.store("ab"), worker.store("abc")
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
    follower, worker = make_follower(resync_interval_s=1.0, dead_after_s=10.0), Worker()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    worker.held = dict(link(b"", chain("abc")))
    bad = worker.send(
        BlocksStored(parent=chain("zz")[-16:], blocks=chain("zzz")[-16:]),
        BlocksStored(parent=b"odd", blocks=chain("q")),
        BlocksRemoved(blocks=b"short"),
        BlocksStored(parent=b"", blocks=chain("abc")),
    )
    follower.on_events(bad, 0, 0.0)
    assert (follower.counters.unknown_parents, follower.counters.malformed) == (1, 2)
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    assert resync_due(follower, worker, 0.0) == 1
    follower.on_events(worker.send(BlocksRemoved(blocks=b"short")), 0, 0.5)
    assert follower.due_resyncs(0.5) == [], "a worker that talks nonsense is queried once an interval"
    assert resync_due(follower, worker, 1.0) == 1


def test_a_new_generation_a_goodbye_and_silence_drop_everything_at_once() -> None:
    follower, worker = make_follower(dead_after_s=1.5), Worker()
    follower.on_events(worker.store("abc"), 0, 0.0)
    worker.restart()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    assert follower.match(MODEL, chain("abc")) == {}

    last = worker.store("abc")
    follower.on_events(last, 0, 0.1)
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    follower.on_goodbye(worker.address)
    assert follower.match(MODEL, chain("abc")) == {}
    follower.on_events(last, 0, 0.2)
    assert follower.match(MODEL, chain("abc")) == {}, "an event may be later than its worker's Goodbye"

    worker.restart()
    follower.on_heartbeat(worker.heartbeat(), 0.3)
    follower.on_events(worker.store("abc"), 0, 0.3)
    follower.on_tick(1.8)
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    follower.on_tick(1.9)
    assert follower.match(MODEL, chain("abc")) == {}
    follower.on_heartbeat(worker.heartbeat(), 5.0)
    assert resync_due(follower, worker, 5.0) == 1, "a worker that was only paused comes back with all it holds"
    assert follower.match(MODEL, chain("abc")) == {"w": 3}


def test_a_pause_of_the_index_itself_costs_no_worker() -> None:
    follower, worker = make_follower(), Worker()
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    follower.on_tick(0.0)
    follower.on_events(worker.store("abc"), 0, 0.0)
    follower.on_tick(60.0)
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    for tenths in range(1, 15):
        follower.on_tick(60.0 + tenths / 10)
    assert follower.match(MODEL, chain("abc")) == {"w": 3}
    follower.on_tick(61.6)
    assert follower.match(MODEL, chain("abc")) == {}


def test_pages_of_another_life_or_a_broken_page_change_nothing() -> None:
    follower, worker = make_follower(resync_interval_s=0.5), Worker()
    worker.store("abc")
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
    worker = Worker()
    worker.store("lost")
    follower.on_heartbeat(worker.heartbeat(), 0.0)
    (address,) = follower.due_resyncs(0.0)
    pages = worker.pages()
    for number in range(8):
        follower.on_events(worker.store("x" * (number + 1)), 0, 0.0)
    follower.on_pages(address, pages)
    assert not follower.settled()
    assert resync_due(follower, worker, 1.0) == 1
    assert holdings(follower) == worker.held


class LossyStream(RuleBasedStateMachine):
    """Events are lost, doubled, delayed and reordered; workers restart; resyncs overlap with events."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.follower = make_follower()
        self.worker = Worker()
        self.in_flight: list[KvEvents] = []
        self.resyncs: list[tuple[WorkerAddress, list[ShadowPage]]] = []

    def emit(self, message: KvEvents) -> None:
        self.in_flight.append(message)

    @rule(path=st.text(alphabet="ab", min_size=1, max_size=5))
    def store(self, path: str) -> None:
        self.emit(self.worker.store(path))

    @rule(path=st.text(alphabet="ab", min_size=1, max_size=5))
    def remove(self, path: str) -> None:
        self.emit(self.worker.remove(path))

    @rule()
    def clear(self) -> None:
        self.emit(self.worker.clear())

    @rule()
    def restart(self) -> None:
        self.worker.restart()

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
        for _ in range(12):
            self.now_s += 0.25
            self.follower.on_heartbeat(self.worker.heartbeat(), self.now_s)
            self.follower.on_tick(self.now_s)
            resync_due(self.follower, self.worker, self.now_s)
        assert holdings(self.follower) == self.worker.held
        assert self.follower.settled()


TestLossyStream = LossyStream.TestCase
TestLossyStream.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
