"""The hand-off's decisions where KV is staged: blocks that are freed before their lease ends, and waits for slots."""

from __future__ import annotations

from recording_agent import RecordingAgent

from baton.connectors.handoff import STAGING_WAIT_S, Handoff, HandoffLeg, HandoffScheduler, StepPlan
from baton.connectors.place import RankPlace
from baton.connectors.rank import HandoffRank, RankResults
from baton.pool.block_copies import BlockCopies
from baton.pool.cells import CellTable
from baton.pool.slot_queue import SlotQueue
from baton.pool.staged_flows import Flow, Staging
from baton.pool.staged_leases import StagedLeases
from baton.transfer import Cause, EventKind, Pool, TransferEvent, Whole, rank_key
from baton.transfer.device import host_copies
from baton.transfer.layout import Layout

BLOCK = 32
KEY, OTHER, LEASED, LEASED_WHOLE = (letter * 16 for letter in (b"k", b"o", b"l", b"w"))


def step(rank: HandoffRank, plan: StepPlan) -> RankResults:
    rank.revoke(plan)
    rank.begin(plan)
    return rank.end()


def held_lease() -> tuple[HandoffScheduler, HandoffRank, RecordingAgent]:
    """Return a prefill whose prompt is computed, and whose blocks are held."""
    agent = RecordingAgent()
    rank, scheduler = HandoffRank(agent, RankPlace()), HandoffScheduler(BLOCK, staging_slots=4)
    scheduler.admit("r", Handoff(leg=HandoffLeg.PREFILL, key=KEY), 64)
    step(rank, scheduler.plan([scheduler.computes("r", [1, 2], 0, 64)]))
    assert scheduler.finished("r", computed=True)
    assert step(rank, scheduler.plan([])) == RankResults()
    return scheduler, rank, agent


def leased_blocks(rank: HandoffRank) -> int:
    """Return what the rank reports, which it does when it has changed."""
    report = rank.report()
    assert report is not None
    return report.leased_blocks[0]


def test_blocks_of_a_staged_lease_are_freed_and_the_engine_steps_until_it_ends() -> None:
    scheduler, rank, agent = held_lease()
    assert leased_blocks(rank) == 2
    agent.tell(EventKind.LEASE_STAGED, KEY)
    staged = step(rank, StepPlan())
    assert staged == RankResults(sent={"r"}, leases_open=1)
    assert leased_blocks(rank) == 0
    scheduler.freed("r")
    scheduler.leases_open += staged.leases_open
    assert not scheduler.is_idle
    assert rank.is_active
    agent.tell(EventKind.LEASE_RELEASED, KEY)
    ended = step(rank, StepPlan())
    assert ended == RankResults(leases_open=-1)
    scheduler.leases_open += ended.leases_open
    assert scheduler.is_idle
    assert not rank.is_active


def test_a_lease_that_ends_before_it_is_staged_is_sent_once() -> None:
    _, rank, agent = held_lease()
    agent.tell(EventKind.LEASE_RELEASED, KEY)
    assert step(rank, StepPlan()) == RankResults(sent={"r"})


def test_a_staged_lease_that_is_ended_from_outside_closes() -> None:
    _, rank, agent = held_lease()
    agent.tell(EventKind.LEASE_STAGED, KEY)
    assert step(rank, StepPlan()).leases_open == 1
    rank.end_lease(KEY)
    assert step(rank, StepPlan()) == RankResults(leases_open=-1)


def test_a_preempted_prompt_is_not_sent_before_it_is_staged_again() -> None:
    agent = RecordingAgent()
    rank, scheduler = HandoffRank(agent, RankPlace()), HandoffScheduler(BLOCK, staging_slots=4)
    scheduler.admit("r", Handoff(leg=HandoffLeg.PREFILL, key=KEY), 64)
    step(rank, scheduler.plan([scheduler.computes("r", [1, 2], 0, 64)]))
    agent.tell(EventKind.LEASE_STAGED, KEY)
    step(rank, StepPlan())
    scheduler.preempted("r")
    step(rank, scheduler.plan([]))
    step(rank, scheduler.plan([scheduler.computes("r", [3, 4], 0, 64)]))
    scheduler.finished("r", computed=True)
    assert step(rank, scheduler.plan([])) == RankResults()
    agent.tell(EventKind.LEASE_STAGED, KEY)
    assert step(rank, StepPlan()) == RankResults(sent={"r"}, leases_open=1)


def test_a_request_waits_for_slots_and_then_computes() -> None:
    now_s = 10.0
    scheduler = HandoffScheduler(BLOCK, staging_slots=4, now_s=lambda: now_s)
    for request, key in (("a", KEY), ("b", OTHER), ("c", b"c" * 16)):
        handoff = Handoff(leg=HandoffLeg.DECODE, key=key, endpoints=("source",), deadline_s=100.0)
        scheduler.admit(request, handoff, 3 * BLOCK)
    assert scheduler.tokens_from_source("a", 0) == 3 * BLOCK - 1
    assert scheduler.allocated("a", [1, 2, 3], 3 * BLOCK - 1)
    assert scheduler.tokens_from_source("b", 0) is None
    assert scheduler.tokens_from_source("b", 2 * BLOCK) == BLOCK - 1, "what is cached needs no slots"
    now_s += STAGING_WAIT_S / 2
    assert scheduler.tokens_from_source("b", 0) is None
    assert scheduler.tokens_from_source("c", 0) is None
    now_s += STAGING_WAIT_S / 2
    assert scheduler.tokens_from_source("b", 0) == 0
    assert not scheduler.allocated("b", [4, 5, 6], 0)
    assert scheduler.plan([]).release == ((OTHER, ("source",)),)
    scheduler.pulled("a")
    assert scheduler.tokens_from_source("c", 0) == 3 * BLOCK - 1


def test_the_agent_is_told_which_ranks_share_blocks() -> None:
    """So that it copies them once; where there is one rank for each, its key says it all."""
    layout = Layout(layers=2, kv_heads=4, dim=64, dtype="float32", order="HND", form="fused", block_tokens=BLOCK)
    agent = RecordingAgent()
    rank, scheduler = HandoffRank(agent, RankPlace(layout=layout)), HandoffScheduler(BLOCK)
    for request, key, endpoints in (("r", KEY, ("a", "b")), ("s", OTHER, ("a",))):
        handoff = Handoff(leg=HandoffLeg.DECODE, key=key, endpoints=endpoints, deadline_s=60.0)
        scheduler.admit(request, handoff, 64)
        scheduler.allocated(request, [1, 2], external_tokens=63)
    for request, key, sink_ranks in (("p", LEASED, 2), ("q", LEASED_WHOLE, 1)):
        scheduler.admit(request, Handoff(leg=HandoffLeg.PREFILL, key=key, sink_ranks=sink_ranks), 64)
    step(rank, scheduler.plan([scheduler.computes(request, [1, 2], 0, 64) for request in ("p", "q")]))
    assert agent.wholes == {
        **dict.fromkeys((rank_key(KEY, 0, 0), rank_key(KEY, 1, 0)), Whole(key=KEY, parts=2)),
        **dict.fromkeys((rank_key(LEASED, 0, 0), rank_key(LEASED, 0, 1)), Whole(key=LEASED, parts=2)),
        OTHER: None,
        LEASED_WHOLE: None,
    }


def test_a_lease_that_expires_as_it_is_opened_again_is_not_open_on_slots_that_are_given_back() -> None:
    agent, copies, told = RecordingAgent(), host_copies(), list[TransferEvent]()
    pool = Pool(
        layer_addresses=(0,), blocks=4, block_bytes=32, block_stride_bytes=32, block_tokens=BLOCK, fingerprint=""
    )
    queue: SlotQueue[Flow] = SlotQueue(CellTable(0, spare=4))
    staging = Staging(pool, 1, queue, BlockCopies(copies, pool, pool), told.append)
    leases = StagedLeases(agent, staging, lambda: None, lambda _lease: None, on_ask=False)
    leases.open(KEY, agent.open_lease(KEY), KEY, 2)
    leases.leave(KEY)
    leases.open(KEY, agent.open_lease(KEY), KEY, 2)
    expired = TransferEvent(kind=EventKind.LEASE_ENDED, key=KEY, cause=Cause.EXPIRED)
    leases.leave(KEY, expired)
    assert agent.calls[-1] == ("revoke_lease", KEY, True)
    assert (told, queue.free) == ([expired], 4)
    copies.close()
