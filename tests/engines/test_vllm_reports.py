"""Reports of engine steps about transfers, gathered over ranks; no engine runs here."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from baton.connectors.handoff import PullOutcome, TransferReport
from baton.engines.attempts import EngineAttempt
from baton.engines.engine import EngineRequest, Leg
from baton.engines.vllm.stats import StatLogger
from baton.errors import BatonError, EngineFailed, InvalidRequest, TransferFailed
from baton.messages.attempts import Constraint, ConstraintKind, Sampling
from baton.messages.workers import Role
from baton.transfer import AgentOptions, AgentStats, Cause, LayerGroup, PullTotals

KEY = b"k" * 16
CONSTRAINT = Constraint(kind=ConstraintKind.REGEX, text="a")


def record(recorder: StatLogger, report: TransferReport) -> None:
    """Hand a report over as vLLM does, by way of MessagePack."""
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(report, builtin_types=(bytes,))))
    stats = SimpleNamespace(
        num_running_reqs=2,
        num_waiting_reqs=1,
        num_skipped_waiting_reqs=3,
        kv_cache_usage=0.25,
        kv_connector_stats=payload,
    )
    recorder.record(cast("Any", stats), None)


def pull(**fields: Any) -> TransferReport:
    return TransferReport(pulls=(PullOutcome(key=KEY, **fields),))


async def test_outcome_is_there_once_all_ranks_have_ended() -> None:
    recorder = StatLogger(ranks=2)
    record(recorder, pull(tokens=99, moved_bytes=10, moving_s=0.1))
    assert recorder.take_outcome(KEY) is None
    record(recorder, pull(tokens=99, moved_bytes=20, moving_s=0.4))
    outcome = recorder.take_outcome(KEY)
    assert outcome == PullOutcome(key=KEY, tokens=99, moved_bytes=30, moving_s=0.4)
    assert recorder.take_outcome(KEY) is None
    assert recorder.load.bytes_pulled == 30


async def test_one_failed_rank_fails_the_pull() -> None:
    for ranks in ((True, False), (False, True)):
        recorder = StatLogger(ranks=2)
        for failed in ranks:
            cause = Cause.CHECKSUM if failed else Cause.NONE
            record(recorder, pull(failed=failed, cause=cause, tokens=0 if failed else 99))
        outcome = recorder.take_outcome(KEY)
        assert outcome is not None
        assert (outcome.failed, outcome.cause) == (True, Cause.CHECKSUM)


async def test_waiting_for_an_outcome_ends_with_it_or_with_its_time() -> None:
    recorder = StatLogger(ranks=1)
    assert await recorder.wait_outcome(KEY, 0.01) is None
    asyncio.get_running_loop().call_later(0.01, record, recorder, pull(failed=True, cause=Cause.UNREACHABLE))
    outcome = await recorder.wait_outcome(KEY, 5)
    assert outcome is not None
    assert outcome.cause is Cause.UNREACHABLE


async def test_load_counts_waiting_for_kv_as_waiting_and_leases_once_for_all_ranks() -> None:
    recorder = StatLogger(ranks=2)
    ended: list[bytes] = []
    recorder.on_lease_ended = ended.append
    record(recorder, TransferReport(leased_blocks={0: 7}))
    record(recorder, TransferReport(leased_blocks={1: 7}))
    load = recorder.load
    assert (load.running, load.waiting, load.kv_usage, load.leased_blocks) == (2, 4, 0.25, 7)
    record(recorder, TransferReport(leased_blocks={0: 0, 1: 0}, leases_ended=(KEY,)))
    assert recorder.load.leased_blocks == 0
    assert ended == [], "the other rank still has it"
    record(recorder, TransferReport(leases_ended=(KEY,)))
    assert ended == [KEY]


def test_figures_are_of_all_ranks_together() -> None:
    recorder = StatLogger(ranks=2)
    assert recorder.transfers().agents is None
    stats = {figure.name: number for number, figure in enumerate(fields(AgentStats))}
    for rank in range(2):
        group = LayerGroup(
            first_layer=0, layers=4, began_s=1.0, ended_s=2.0, waiting_s=0.5, moved_bytes=7, backend="tcp", rail="r"
        )
        pulled = PullOutcome(key=KEY, tokens=99, moved_bytes=7, moving_s=0.25, groups=(group,))
        record(recorder, TransferReport(pulls=(pulled,), agents={rank: AgentStats(**stats)}))
        # The newest word of a rank replaces the one before.
        record(recorder, TransferReport(agents={rank: AgentStats(**stats)}))
    record(recorder, pull(failed=True, cause=Cause.STALLED))
    transfers = recorder.transfers()
    assert transfers.agents == AgentStats(**{name: 2 * figure for name, figure in stats.items()})
    assert transfers.pulls.done == {"tcp": PullTotals(pulls=2, moved_bytes=14, waiting_s=1.0, moving_s=0.5)}
    assert transfers.pulls.failed == {Cause.STALLED: 1}


@pytest.mark.parametrize(
    ("constraint", "begun", "outcome", "error"),
    [
        (CONSTRAINT, False, None, InvalidRequest),
        (CONSTRAINT, False, PullOutcome(key=KEY), InvalidRequest),
        (CONSTRAINT, True, None, EngineFailed),
        (None, False, None, EngineFailed),
        (CONSTRAINT, False, PullOutcome(key=KEY, failed=True, cause=Cause.CHECKSUM), TransferFailed),
    ],
)
async def test_an_error_before_the_first_token_refuses_the_constraint(
    constraint: Constraint | None, begun: bool, outcome: PullOutcome | None, error: type[BatonError]
) -> None:
    from baton.engines.vllm.engine import VllmEngine

    engine: Any = VllmEngine("model", role=Role.DECODE, options={}, agent=AgentOptions())
    recorder = StatLogger(ranks=1)
    engine._host = SimpleNamespace(recorder=recorder)
    if outcome is not None:
        record(recorder, TransferReport(pulls=(outcome,)))
    sampling = Sampling(max_tokens=1, constraint=constraint)
    request = EngineRequest(request="r", attempt=0, leg=Leg.DECODE, tokens=[1, 2], sampling=sampling, budget_s=9)
    attempt = EngineAttempt(request, KEY, 0.0, 9.0, begun=begun)
    with pytest.raises(error):
        await engine._delta(attempt, SimpleNamespace(outputs=[SimpleNamespace(finish_reason="error")], metrics=None))
