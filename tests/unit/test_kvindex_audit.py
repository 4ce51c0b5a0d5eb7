"""Hits that stay below the promise make the index resync the worker, unless eviction explains them."""

from __future__ import annotations

import pytest
from baton_kvindex.audit import REQUESTS, Audit
from baton_kvindex.config import IndexSettings
from baton_kvindex.counters import ResyncReason
from baton_kvindex.durable import Journal
from baton_kvindex.radix import RadixIndex
from baton_kvindex.reconciler import Reconciler

from baton.messages.base import Context
from baton.messages.placement import Audited
from tests.harness.index.worker import Cache


def noted(*pairs: tuple[int, int], times: int = REQUESTS) -> list[bool]:
    audit = Audit()
    return [audit.note(predicted, cached, 32) for _ in range(times) for predicted, cached in pairs]


def test_only_what_lasts_counts() -> None:
    assert noted((320, 0)) == [False] * (REQUESTS - 1) + [True]
    assert noted((320, 0), times=2 * REQUESTS).count(True) == 2, "once in so many requests"
    assert not any(noted((320, 0), times=REQUESTS - 1))
    assert not any(noted((320, 0), (320, 320), times=5 * REQUESTS)), "evicted now and then"


@pytest.mark.parametrize("pair", [(320, 320), (320, 288), (31, 0), (32, 0), (0, 320)])
def test_a_block_is_forgiven(pair: tuple[int, int]) -> None:
    """An engine takes whole blocks of its own size, and computes the last token in any case."""
    assert not any(noted(pair, times=5 * REQUESTS))


def test_totals_are_of_all_requests() -> None:
    audit = Audit()
    for predicted, cached in ((320, 100), (31, 0), (64, 128)):
        audit.note(predicted, cached, 32)
    assert (audit.predicted_tokens, audit.cached_tokens) == (415, 164)


def test_a_worker_that_falls_short_is_resynced_whatever_events_come() -> None:
    reconciler, worker, other = Reconciler(RadixIndex, IndexSettings(), Journal(1000)), Cache(), Cache("x")
    for each in (worker, other):
        reconciler.on_heartbeat(each.heartbeat(), 0.0)
    reconciler.on_events(worker.stored("abc"), 0, 0.0)
    for number in range(REQUESTS):
        for each, cached in ((worker, 0), (other, 320)):
            context = Context(request=f"r{number}", budget_s=1.0)
            reconciler.on_audited(
                Audited(context=context, address=each.address, predicted_tokens=320, cached_tokens=cached)
            )
    reconciler.on_events(worker.stored("abcd"), 0, 0.0)
    assert reconciler.counters.resyncs[ResyncReason.AUDIT] == 1
    assert [address.worker for address in reconciler.due_resyncs(0.0)] == ["w"]
    reconciler.on_pages(worker.address, worker.pages())
    assert reconciler.settled()
    reconciler.on_audited(
        Audited(
            context=Context(request="r", budget_s=1.0),
            address=Cache("nobody").address,
            predicted_tokens=1,
            cached_tokens=0,
        )
    )
    assert reconciler.counters.unknown_workers == 1
