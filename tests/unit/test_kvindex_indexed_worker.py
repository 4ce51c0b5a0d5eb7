"""The state machine of one worker: causes and ends of a resync, and the events that wait meanwhile."""

from __future__ import annotations

import pytest
from baton_kvindex.audit import REQUESTS
from baton_kvindex.config import IndexSettings
from baton_kvindex.counters import Counters, ResyncReason
from baton_kvindex.durable import WorkerState
from baton_kvindex.indexed_worker import IndexedWorker, SyncState

from baton.messages.base import Context
from baton.messages.placement import Audited
from baton.messages.workers import Fingerprint
from tests.harness.index.worker import MODEL, Cache


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def worker(counters: Counters) -> IndexedWorker:
    state = WorkerState(generation=1, model_digest=MODEL, sequence=0)
    return IndexedWorker("w", state, IndexSettings(behind_s=1.0), counters)


def apply_all(worker: IndexedWorker) -> int:
    applied = 0
    while (message := worker.next_events()) is not None:
        worker.on_applied(message, None)
        applied += 1
    return applied


def fall_short(worker: IndexedWorker) -> None:
    for number in range(REQUESTS):
        context = Context(request=f"r{number}", budget_s=1.0)
        worker.on_audited(Audited(context=context, address=worker.address, predicted_tokens=320, cached_tokens=0))


def test_a_worker_without_a_heartbeat_is_followed_but_not_read(worker: IndexedWorker) -> None:
    cache = Cache()
    cache.stored("lost")
    worker.on_events(cache.stored("a"))
    assert worker.next_events() is None
    assert (worker.state, worker.reason) == (SyncState.NEEDED, ResyncReason.GAP)
    assert not worker.start_resync(0.0)
    assert worker.is_settled, "it answers nothing yet"
    worker.on_heartbeat(cache.heartbeat(), 0.0)
    assert not worker.is_settled
    assert worker.start_resync(0.0)


@pytest.mark.parametrize("joins", [True, False])
def test_late_events_end_what_they_were_missed_for(worker: IndexedWorker, counters: Counters, joins: bool) -> None:
    cache = Cache()
    if not joins:
        worker.on_heartbeat(cache.heartbeat(), 0.0)
    late = [cache.stored("a"), cache.stored("ab")]
    worker.on_heartbeat(cache.heartbeat(), 0.0)
    worker.on_tick(1.5)
    reason = ResyncReason.JOINED if joins else ResyncReason.BEHIND
    assert (worker.state, worker.reason) == (SyncState.NEEDED, reason)
    worker.on_events(late[0])
    assert apply_all(worker) == 1
    assert worker.state is SyncState.NEEDED
    worker.on_events(late[1])
    assert apply_all(worker) == 1
    assert (worker.state, worker.reason) == (SyncState.SYNCED, None)
    assert sum(counters.resyncs.values()) == counters.resyncs[reason] == 1


def test_what_events_cannot_mend_outlives_them_and_a_resync_that_fails(
    worker: IndexedWorker, counters: Counters
) -> None:
    cache = Cache()
    first = cache.stored("a")
    worker.on_heartbeat(cache.heartbeat(), 0.0)
    assert worker.start_resync(0.0)
    fall_short(worker)
    worker.on_events(first)
    assert worker.next_events() is None, "events wait while the map is read"
    worker.on_resync_failed()
    assert apply_all(worker) == 1
    assert (worker.state, worker.reason) == (SyncState.NEEDED, ResyncReason.AUDIT)
    worker.on_cold_lost()
    assert worker.reason is ResyncReason.AUDIT, "one resync serves both"
    assert sum(counters.resyncs.values()) == 2
    assert worker.start_resync(10.0)
    worker.on_pages(1)
    assert (worker.state, worker.reason, worker.sequence) == (SyncState.SYNCED, None, 1)


def test_what_differs_is_not_written_down_as_the_state_after_an_event(worker: IndexedWorker) -> None:
    cache = Cache()
    worker.on_events(cache.stored("a"))
    apply_all(worker)
    worker.on_heartbeat(cache.heartbeat(), 0.0)
    assert worker.sound_sequence == 1
    assert worker.fingerprint_is_due
    assert not worker.on_fingerprint((cache.fingerprint(), Fingerprint(blocks=7), Fingerprint()))
    assert (worker.sound_sequence, worker.drifts, worker.agreed_sequence) == (0, 1, -1)
    worker.start_resync(0.0)
    worker.on_pages(1)
    assert worker.fingerprint_is_due, "the claim is kept for what the resync brings"
    assert worker.on_fingerprint((cache.fingerprint(), Fingerprint(), Fingerprint()))
    assert (worker.sound_sequence, worker.drifts, worker.agreed_sequence) == (1, 0, 1)


def test_a_reload_holds_up_later_events_and_comparisons(worker: IndexedWorker) -> None:
    cache = Cache()
    worker.on_heartbeat(cache.heartbeat(), 0.0)
    worker.on_events(cache.stored("a"))
    cache.stored("ab")
    worker.on_heartbeat(cache.heartbeat(), 0.0)
    message = worker.next_events()
    assert message is not None
    worker.on_cold(message)
    worker.on_events(cache.stored("abc"))
    assert worker.next_events() is None
    assert not worker.fingerprint_is_due
    worker.on_tick(5.0)
    assert worker.state is SyncState.SYNCED, "it is this index that is late"
    worker.on_reloaded()
    assert apply_all(worker) == 1
