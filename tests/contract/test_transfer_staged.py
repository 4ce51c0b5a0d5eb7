"""What staging adds to a transfer agent, over the stand-in for GPUs: ends of copies, slots, and failures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
from fake_library import FakeGpu
from transfer_rig import (
    BLOCK_TOKENS,
    KEY,
    OPTIONS,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TOKENS,
    Node,
    assert_nothing_left,
    pull,
    wait_until,
)

from baton.errors import TransferFailed
from baton.pool.staging import StagedAgent
from baton.transfer import Cause, EventKind, NativeAgent, lease_key
from baton.transfer.device import cuda_copies, host_copies

SLOTS = 16
OTHER = lease_key("other", 0)
MakeStaged = Callable[[], Node]


@pytest.fixture
def gpu(fake_gpu: FakeGpu) -> Iterator[FakeGpu]:
    yield fake_gpu
    fake_gpu.set(hold_copies=0)


@pytest.fixture
def make_staged(gpu: FakeGpu) -> Iterator[MakeStaged]:
    nodes: list[Node] = []

    def make() -> Node:
        agent = StagedAgent(NativeAgent(OPTIONS), cuda_copies(0, library=gpu.library), SLOTS)
        nodes.append(Node(agent, gpu_library=gpu.library))
        return nodes[-1]

    yield make
    gpu.set(hold_copies=0)
    for node in nodes:
        node.close()
    gc.collect()


@pytest.fixture
def host_node() -> Iterator[Node]:
    """A node whose copies a thread of the host makes, so that a held stand-in is the other's only."""
    node = Node(StagedAgent(NativeAgent(OPTIONS), host_copies(), SLOTS))
    yield node
    node.close()


@pytest.fixture
def direct() -> Iterator[Node]:
    node = Node(NativeAgent(OPTIONS))
    yield node
    node.close()


def test_the_blocks_are_free_at_the_copies_end_and_the_lease_goes_on(
    make_staged: MakeStaged, direct: Node, gpu: FakeGpu
) -> None:
    source = make_staged()
    gpu.set(hold_copies=1)
    source.offer(KEY, SOURCE_BLOCKS)
    assert source.rest() == []
    gpu.set(hold_copies=0)
    assert source.wait(EventKind.LEASE_STAGED).key == KEY
    source.poison()
    pull(direct, source)
    assert direct.wait_end(KEY).kind is EventKind.PULL_DONE
    assert direct.holds(SINK_BLOCKS)
    source.wait(EventKind.LEASE_RELEASED)
    assert_nothing_left(source, direct)


def test_a_revoked_lease_is_not_staged(make_staged: MakeStaged, gpu: FakeGpu) -> None:
    source = make_staged()
    source.offer(KEY, SOURCE_BLOCKS)
    wait_until(lambda: gpu.counts()["batches"] == 1)
    source.agent.revoke_lease(KEY, final=True)
    assert EventKind.LEASE_STAGED not in [event.kind for event in source.rest()]


@pytest.mark.parametrize("end", ["cancel", "done"])
def test_a_pull_ends_after_its_copies(make_staged: MakeStaged, direct: Node, gpu: FakeGpu, end: str) -> None:
    sink = make_staged()
    gpu.set(hold_copies=1)
    direct.offer(KEY, SOURCE_BLOCKS)
    pull(sink, direct)
    direct.wait(EventKind.LEASE_RELEASED)
    if end == "cancel":
        sink.agent.cancel_pull(KEY)
    assert sink.rest() == []
    gpu.set(hold_copies=0)
    assert sink.wait_end(KEY).kind is EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS)
    assert_nothing_left(sink, direct)


def test_leases_wait_for_slots_in_order(make_staged: MakeStaged, direct: Node) -> None:
    source = make_staged()
    source.offer(KEY, SOURCE_BLOCKS)
    source.offer(OTHER, SOURCE_BLOCKS, seed=1)
    source.wait(EventKind.LEASE_STAGED, key=KEY)
    assert source.rest() == []
    pull(direct, source, OTHER)
    pull(direct, source)
    assert direct.wait_end(KEY).kind is EventKind.PULL_DONE
    assert direct.wait_end(OTHER).kind is EventKind.PULL_DONE
    source.wait(EventKind.LEASE_STAGED, key=OTHER)


@pytest.mark.parametrize("end", ["deadline", "cancelled"])
def test_a_pull_that_waits_for_slots_ends_in_time(host_node: Node, direct: Node, end: str) -> None:
    direct.lease(KEY, SOURCE_BLOCKS)
    pull(host_node, direct)
    host_node.agent.pull(
        OTHER, direct.agent.endpoint, first_token=0, tokens=TOKENS, blocks=list(range(12)), budget_s=0.2
    )
    if end == "cancelled":
        host_node.agent.cancel_pull(OTHER)
    ended = host_node.wait_end(OTHER)
    assert (ended.kind, ended.cause) == (EventKind.PULL_FAILED, Cause(end))
    host_node.agent.cancel_pull(KEY)
    host_node.wait_end(KEY)


def test_a_lease_longer_than_the_slots_is_refused(make_staged: MakeStaged) -> None:
    with pytest.raises(TransferFailed, match="need 17 slots to be staged, and there are 16"):
        make_staged().agent.open_lease(KEY, tokens=SLOTS * BLOCK_TOKENS + 1)


def test_a_copy_that_fails_ends_its_lease(make_staged: MakeStaged, direct: Node, gpu: FakeGpu) -> None:
    source = make_staged()
    gpu.set(fail_start=1)
    source.offer(KEY, SOURCE_BLOCKS)
    ended = source.wait(EventKind.LEASE_ENDED)
    pull(direct, source)
    assert direct.wait_end(KEY).cause is Cause.REVOKED
    while ended.cause is Cause.REVOKED:
        ended = source.wait(EventKind.LEASE_ENDED)
    assert (ended.cause, "refused" in ended.detail) == (Cause.COPY, True)
    source.offer(OTHER, SOURCE_BLOCKS)
    pull(direct, source, OTHER)
    assert direct.wait_end(OTHER).kind is EventKind.PULL_DONE


def test_a_copy_that_fails_fails_its_pull(make_staged: MakeStaged, direct: Node, gpu: FakeGpu) -> None:
    sink = make_staged()
    gpu.set(fail_start=2)
    direct.offer(KEY, SOURCE_BLOCKS)
    pull(sink, direct)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.COPY)
    direct.offer(OTHER, SOURCE_BLOCKS)
    pull(sink, direct, OTHER)
    assert sink.wait_end(OTHER).kind is EventKind.PULL_DONE


@pytest.mark.parametrize("sink_fails", [True, False])
def test_a_device_that_fails_fails_what_it_copies(
    make_staged: MakeStaged, direct: Node, gpu: FakeGpu, sink_fails: bool
) -> None:
    """It announces nothing: the agent looks for it."""
    staged = make_staged()
    source, sink = (direct, staged) if sink_fails else (staged, direct)
    gpu.set(fail_copies=1)
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    assert sink.wait_end(KEY).cause is (Cause.COPY if sink_fails else Cause.REVOKED)
