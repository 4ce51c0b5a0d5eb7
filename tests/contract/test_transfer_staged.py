"""What staging adds to a transfer agent, over the stand-in for GPUs: ends of copies, slots, and failures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
from fake_library import FakeGpu
from transfer_rig import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    KEY,
    LAYERS,
    OPTIONS,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TOKENS,
    Node,
    assert_nothing_left,
    pull,
    wait_until,
)

from baton.errors import ConfigurationError, TransferFailed
from baton.pool.copier import CopyEnd, CopyJob
from baton.pool.memory import slot_bytes
from baton.pool.staging import StagedAgent
from baton.transfer import Cause, EventKind, NativeAgent, lease_key
from baton.transfer.device import cuda_copies, host_copies

SLOTS = 16
POOL_SLOTS = 12
OTHER = lease_key("other", 0)
MakeStaged = Callable[[], Node]


@pytest.fixture
def gpu(fake_gpu: FakeGpu) -> Iterator[FakeGpu]:
    yield fake_gpu
    fake_gpu.set(hold_copies=0)


def staged_agent(gpu: FakeGpu) -> StagedAgent:
    size = (SLOTS + POOL_SLOTS) * slot_bytes(LAYERS, BLOCK_BYTES)
    return StagedAgent(NativeAgent(OPTIONS), cuda_copies(0, library=gpu.library), SLOTS, pool_bytes=size)


@pytest.fixture
def make_staged(gpu: FakeGpu) -> Iterator[MakeStaged]:
    nodes: list[Node] = []

    def make() -> Node:
        nodes.append(Node(staged_agent(gpu), gpu_library=gpu.library))
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


def test_slots_for_staging_are_part_of_the_pools_size(make_staged: MakeStaged) -> None:
    memory = agent_of(make_staged()).memory
    assert (memory.slots, memory.cells.spare) == (POOL_SLOTS, SLOTS)
    assert memory.pool.region is not None
    assert memory.pool.region.bytes == (POOL_SLOTS + SLOTS) * slot_bytes(LAYERS, BLOCK_BYTES)


@pytest.mark.parametrize(("unpinned", "slots"), [(1, 0), (0, POOL_SLOTS)])
def test_without_pinned_memory_for_the_pool_there_is_staging_only(
    make_staged: MakeStaged, direct: Node, gpu: FakeGpu, unpinned: int, slots: int
) -> None:
    gpu.set(no_pin=unpinned)
    source = make_staged()
    assert agent_of(source).memory.slots == slots
    source.offer(KEY, SOURCE_BLOCKS)
    pull(direct, source)
    assert direct.wait_end(KEY).kind is EventKind.PULL_DONE


def test_memory_that_cannot_be_pinned_stops_the_start_by_name(gpu: FakeGpu) -> None:
    gpu.set(no_pin=2)
    agent = staged_agent(gpu)
    with pytest.raises(ConfigurationError, match="through which KV is staged, cannot be pinned") as refusal:
        Node(agent)
    assert refusal.value.param == "kv_staging_tokens"
    agent.close()


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


# ---------------------------------------------------------------- the KV pool in the same memory


def agent_of(node: Node) -> StagedAgent:
    assert isinstance(node.agent, StagedAgent)
    return node.agent


def save(number: int, blocks: list[int], slots: range, key: bytes = b"", *, promotes: bool = False) -> CopyJob:
    return CopyJob(job=number, promotes=promotes, blocks=tuple(blocks), slots=tuple(slots), key=key)


def run(node: Node, job: CopyJob) -> CopyEnd:
    """Order a copy of the pool and wait for its end."""
    agent_of(node).copier.submit(job)
    return wait_for_copy(node)


def wait_for_copy(node: Node) -> CopyEnd:
    ended: list[CopyEnd] = []
    wait_until(lambda: bool(ended.extend(agent_of(node).copier.poll()) or ended))
    (end,) = ended
    return end


def test_a_save_takes_what_is_staged_and_copies_the_rest(make_staged: MakeStaged, direct: Node, gpu: FakeGpu) -> None:
    """The slots stay what they are whatever becomes of lease and cache, and the lease whatever becomes of the slots."""
    source = make_staged()
    source.fill([1, 2], seed=5)
    gpu.set(hold_copies=1)
    source.offer(KEY, SOURCE_BLOCKS)
    agent_of(source).copier.submit(save(1, [*SOURCE_BLOCKS[:4], 1], range(5), KEY))
    assert agent_of(source).copier.poll() == []
    gpu.set(hold_copies=0)
    assert not wait_for_copy(source).failed
    assert gpu.counts()["copies"] == LAYERS * (len(SOURCE_BLOCKS) + 1)
    source.poison()
    assert not run(source, save(2, SINK_BLOCKS[:5], range(5), promotes=True)).failed
    assert source.holds(SINK_BLOCKS[:4])
    assert source.holds(SINK_BLOCKS[4:5], seed=5)
    source.fill([1, 2], seed=6)
    assert not run(source, save(3, [1, 2], range(2))).failed
    pull(direct, source)
    assert direct.wait_end(KEY).kind is EventKind.PULL_DONE
    assert direct.holds(SINK_BLOCKS)
    assert_nothing_left(source, direct)


@pytest.mark.parametrize("held", [False, True], ids=["expected", "held"])
def test_a_save_takes_what_a_lease_had_staged_that_has_ended_since(
    make_staged: MakeStaged, direct: Node, gpu: FakeGpu, *, held: bool
) -> None:
    source = make_staged()
    job = save(1, SOURCE_BLOCKS[:4], range(4), KEY)
    if held:
        agent_of(source).copier.hold([KEY])
    else:
        agent_of(source).copier.expect(job)
    source.offer(KEY, SOURCE_BLOCKS)
    pull(direct, source)
    source.wait(EventKind.LEASE_RELEASED)
    source.poison()
    if held:
        agent_of(source).copier.expect(job)
        agent_of(source).copier.hold([])
    assert not run(source, job).failed
    assert gpu.counts()["copies"] == LAYERS * len(SOURCE_BLOCKS)
    assert not run(source, save(2, SINK_BLOCKS[:4], range(4), promotes=True)).failed
    assert source.holds(SINK_BLOCKS[:4])


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_a_save_waits_for_copies_of_a_lease_that_was_revoked(
    make_staged: MakeStaged, gpu: FakeGpu, *, fails: bool
) -> None:
    source = make_staged()
    agent_of(source).copier.hold([KEY])
    gpu.set(hold_copies=1)
    source.offer(KEY, SOURCE_BLOCKS)
    source.agent.revoke_lease(KEY, final=True)
    job = save(1, SOURCE_BLOCKS[:4], range(4), KEY)
    agent_of(source).copier.expect(job)
    agent_of(source).copier.hold([])
    agent_of(source).copier.submit(job)
    assert agent_of(source).copier.poll() == []
    gpu.set(fail_copies=fails, hold_copies=0)
    assert wait_for_copy(source).failed == fails
    assert gpu.counts()["copies"] == (0 if fails else LAYERS * len(SOURCE_BLOCKS))


def test_slots_of_a_held_lease_are_free_once_it_is_not_held(make_staged: MakeStaged, direct: Node) -> None:
    source = make_staged()
    agent_of(source).copier.hold([KEY])
    source.offer(KEY, SOURCE_BLOCKS)
    pull(direct, source)
    source.wait(EventKind.LEASE_STAGED)
    source.wait(EventKind.LEASE_RELEASED)
    source.offer(OTHER, SOURCE_BLOCKS, seed=1)
    assert source.rest() == []
    agent_of(source).copier.hold([])
    source.wait(EventKind.LEASE_STAGED, key=OTHER)


def test_a_pull_that_is_done_is_kept_without_a_copy(make_staged: MakeStaged, direct: Node, gpu: FakeGpu) -> None:
    sink = make_staged()
    direct.offer(KEY, SOURCE_BLOCKS)
    agent_of(sink).copier.keep(KEY, save(1, SINK_BLOCKS[2:6], range(4), KEY))
    pull(sink, direct)
    assert sink.wait_end(KEY).kind is EventKind.PULL_DONE
    assert agent_of(sink).copier.kept(KEY)
    assert gpu.counts()["copies"] == LAYERS * len(SINK_BLOCKS)
    sink.poison()
    assert not run(sink, save(2, [0, 1, 2, 3], range(4), promotes=True)).failed
    assert sink.holds([0, 1, 2, 3], first=2)


def test_a_pull_that_fails_is_not_kept(make_staged: MakeStaged, direct: Node) -> None:
    sink = make_staged()
    direct.lease(KEY, SOURCE_BLOCKS)
    agent_of(sink).copier.keep(KEY, save(1, SINK_BLOCKS, range(12), KEY))
    pull(sink, direct)
    sink.agent.cancel_pull(KEY)
    assert sink.wait_end(KEY).kind is EventKind.PULL_FAILED
    assert not agent_of(sink).copier.kept(KEY)


@pytest.mark.parametrize("fault", ["fail_start", "fail_copies"])
def test_a_copy_that_fails_fails_the_save_that_waits_for_it(make_staged: MakeStaged, gpu: FakeGpu, fault: str) -> None:
    source = make_staged()
    gpu.set(hold_copies=1)
    source.offer(KEY, SOURCE_BLOCKS)
    gpu.set(**{fault: 1})
    assert source.agent.stats().leases == 1
    agent_of(source).copier.submit(save(1, [*SOURCE_BLOCKS[:4], 1], range(5), KEY))
    gpu.set(hold_copies=0)
    assert wait_for_copy(source).failed


def test_a_lease_takes_all_slots_while_the_pool_is_full(make_staged: MakeStaged, direct: Node) -> None:
    """Leases that share cells with the pool count against the slots of hand-offs until they end."""
    source = make_staged()
    for number, key in enumerate((KEY, OTHER)):
        source.offer(key, SOURCE_BLOCKS, seed=number)
        source.wait(EventKind.LEASE_STAGED, key=key)
        assert not run(source, save(number, SOURCE_BLOCKS, range(POOL_SLOTS), key)).failed
        pull(direct, source, key)
        assert direct.wait_end(key).kind is EventKind.PULL_DONE
        assert direct.holds(SINK_BLOCKS, seed=number)
    source.poison()
    assert not run(source, save(3, SINK_BLOCKS, range(POOL_SLOTS), promotes=True)).failed
    assert source.holds(SINK_BLOCKS, seed=1)
