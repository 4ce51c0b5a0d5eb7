"""The connection between an engine's scheduler process and ours."""

from __future__ import annotations

import threading
from dataclasses import fields
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from baton.connectors.handoff import PullOutcome, TransferReport
from baton.connectors.link import (
    ADDRESS_VARIABLE,
    AskStats,
    EndLease,
    HostEnd,
    RankReport,
    SchedulerEnd,
    SetFaults,
    Setup,
    StepReport,
)
from baton.transfer import AgentOptions, AgentStats, Cause, LayerGroup, TransferFaults

SETUP = Setup(agent=AgentOptions(secret="s", rails=("127.0.0.1:1",)), model_digest="d")


def joined(host: HostEnd, monkeypatch: pytest.MonkeyPatch, *ranks: int) -> list[SchedulerEnd]:
    """Connect ranks in this order."""
    accepting = threading.Thread(target=host.accept, args=(SETUP,))
    accepting.start()
    monkeypatch.setenv(ADDRESS_VARIABLE, host.address)
    schedulers = [SchedulerEnd(rank) for rank in ranks]
    accepting.join(5)
    return schedulers


def test_both_ends_understand_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostEnd(1)
    (scheduler,) = joined(host, monkeypatch, 0)
    assert scheduler.setup() == SETUP
    orders = [EndLease(key=b"k" * 16), SetFaults(faults=TransferFaults(delay_s=0.5))]
    for order in orders:
        host.tell(order)
    assert scheduler.orders() == orders
    group = LayerGroup(
        first_layer=0, layers=4, began_s=1.0, ended_s=2.0, waiting_s=0.5, moved_bytes=7, backend="tcp", rail="r"
    )
    pulled = PullOutcome(key=b"k" * 16, cause=Cause.CHECKSUM, failed=True, groups=(group,))
    stats = AgentStats(**{figure.name: number for number, figure in enumerate(fields(AgentStats))})
    report = StepReport(running=1, transfers=TransferReport(pulls=(pulled,), agents={0: stats}))
    scheduler.tell(report)
    assert host.reports() == [(0, report)]
    host.close()
    with pytest.raises(EOFError):
        scheduler.orders()
    scheduler.tell(report)


def test_each_rank_has_a_connection_whichever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostEnd(2)
    second, first = joined(host, monkeypatch, 1, 0)
    assert (first.setup(), second.setup()) == (SETUP, SETUP)
    host.tell(AskStats())
    assert first.orders() == second.orders() == [AskStats()]
    report = RankReport(transfers=TransferReport(leases_ended=(b"k" * 16,)))
    second.tell(report)
    first.tell(StepReport())
    assert host.reports() == [(0, StepReport()), (1, report)]
    host.close()


def test_a_process_that_does_not_know_the_key_is_not_let_in() -> None:
    host = HostEnd(1)
    refused: list[Exception] = []

    def accept() -> None:
        try:
            host.accept(SETUP)
        except AuthenticationError as error:
            refused.append(error)

    accepting = threading.Thread(target=accept)
    accepting.start()
    with pytest.raises(AuthenticationError):
        Client("\0" + host.address, "AF_UNIX", authkey=b"another")
    accepting.join(5)
    assert refused
    host.close()


def test_a_wait_for_a_process_that_never_comes_ends_with_the_link() -> None:
    host = HostEnd(1)
    ended = threading.Event()

    def accept() -> None:
        with pytest.raises(OSError):
            host.accept(SETUP)
        ended.set()

    threading.Thread(target=accept).start()
    host.close()
    assert ended.wait(5)


def test_a_process_that_baton_did_not_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="not started by Baton"):
        SchedulerEnd(0)
