"""Early ends of pulls and leases: the suite of every implementation and backend."""

from __future__ import annotations

import time

import pytest
from transfer_rig import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    KEY,
    LAYERS,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TERMINAL,
    TOKENS,
    MakeNode,
    Node,
    assert_nothing_left,
    pull,
    wait_until,
)

from baton.errors import LayoutMismatch, ModelMismatch
from baton.transfer import Cause, Corruption, EventKind, TransferFaults, lease_key, pull_failure
from tests.harness.limits import HANG_S

# ---------------------------------------------------------------- revocation and expiry


def test_a_revoked_pull_starts_again_with_the_new_generation(source: Node, sink: Node) -> None:
    source.fill(SOURCE_BLOCKS)
    first = source.lease(KEY, SOURCE_BLOCKS)
    source.agent.post_ready(KEY, first, 0, TOKENS)
    source.agent.post_ready(KEY, first, 1, TOKENS)
    pull(sink, source)
    sink.wait(EventKind.PULL_PROGRESS, layers=2)
    source.agent.revoke_lease(KEY, final=False)
    source.fill(SOURCE_BLOCKS, seed=9)
    source.agent.post_ready(KEY, first, -1, TOKENS)  # Of the old generation: must not count.
    moved = [block + 15 for block in SOURCE_BLOCKS]
    second = source.offer(KEY, moved, seed=1)
    assert second == first + 1
    done = sink.wait_end(KEY)
    assert (done.kind, done.restarts) == (EventKind.PULL_DONE, 1)
    assert sink.holds(SINK_BLOCKS, seed=1)
    assert [event.layers for event in sink.rest()] == [1, 3, 4]  # 2 was waited for; none comes twice.
    assert source.wait(EventKind.LEASE_RELEASED).key == KEY
    assert source.agent.stats().leases_revoked == 1
    assert_nothing_left(source, sink)


def test_revoking_again_and_again_never_delivers_stale_bytes(source: Node, sink: Node) -> None:
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    offered = [0]
    for seed in range(1, 60):
        time.sleep(0.0004 * (seed % 7))
        source.agent.revoke_lease(KEY, final=False)
        if source.agent.stats().leases == 0:
            break  # The pull was faster.
        source.fill(SOURCE_BLOCKS, seed=200)  # Overwritten at once, as a preempted engine does.
        source.offer(KEY, SOURCE_BLOCKS, seed=seed)
        offered.append(seed)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert any(sink.holds(SINK_BLOCKS, seed=seed) for seed in offered), "torn or stale"
    wait_until(lambda: source.agent.stats().leases == 0)


def test_a_lease_opened_again_after_its_release_ends_at_once(source: Node, sink: Node) -> None:
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    source.wait(EventKind.LEASE_RELEASED)
    assert source.agent.open_lease(KEY) == 2
    source.wait(EventKind.LEASE_RELEASED)
    assert_nothing_left(source, sink)


def test_a_final_revocation_fails_the_pull_at_once(source: Node, sink: Node) -> None:
    source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    wait_until(lambda: sink.agent.stats().pulls == 1)
    source.agent.revoke_lease(KEY, final=True)
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.REVOKED
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.REVOKED)
    assert_nothing_left(source, sink)


def test_a_final_revocation_may_come_before_the_pull(source: Node, sink: Node) -> None:
    source.agent.revoke_lease(KEY, final=True)
    pull(sink, source)
    assert sink.wait_end(KEY).cause == Cause.REVOKED
    assert source.rest() == []


def test_a_revoked_lease_that_stays_closed_fails_at_the_deadline(source: Node, sink: Node) -> None:
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    source.agent.post_ready(KEY, generation, 0, TOKENS)
    pull(sink, source, budget_s=2.0)
    sink.wait(EventKind.PULL_PROGRESS)
    source.agent.revoke_lease(KEY, final=False)
    assert sink.wait_end(KEY).cause == Cause.REVOKED
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.REVOKED
    assert_nothing_left(source, sink)


def test_a_lease_expires_under_a_read(make_node: MakeNode) -> None:
    source, sink = make_node(lease_ttl_s=1.0), make_node(faults=TransferFaults(silent=True))
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    source.agent.post_ready(KEY, generation, 0, TOKENS)
    sink.wait(EventKind.PULL_PROGRESS)
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.EXPIRED
    source.fill(SOURCE_BLOCKS, seed=3)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    assert sink.wait_end(KEY).cause == Cause.EXPIRED
    assert source.agent.stats().leases_expired == 1
    assert_nothing_left(source, sink)


@pytest.mark.parametrize("way", ["tcp", "cuda-put", "memory"])  # Backends take no part in it.
def test_a_live_sink_keeps_its_lease(make_node: MakeNode) -> None:
    """The sink's keep-alive interval follows the source's TTL, not its own."""
    ends: list[EventKind] = []
    for ttl_s in (1.0, 4.0, 16.0):  # A busy machine may stop any process for as long as a short lease lives.
        source, sink = make_node(lease_ttl_s=ttl_s, unclaimed_ttl_s=ttl_s), make_node()
        source.fill(SOURCE_BLOCKS)
        generation = source.lease(KEY, SOURCE_BLOCKS)
        pull(sink, source)
        time.sleep(2.1 * ttl_s)
        source.agent.post_ready(KEY, generation, -1, TOKENS)
        ends.append(sink.wait_end(KEY).kind)
        if ends[-1] == EventKind.PULL_DONE:
            break
    assert ends[-1] == EventKind.PULL_DONE


def test_an_unclaimed_lease_expires(source: Node) -> None:
    source.agent.open_lease(KEY, unclaimed_ttl_s=0.1)
    ended = source.wait(EventKind.LEASE_ENDED)
    assert (ended.cause, source.agent.stats().leases) == (Cause.EXPIRED, 0)


def test_an_old_ask_is_not_parked_for_ever(make_node: MakeNode) -> None:
    source, sink = make_node(lease_ttl_s=0.3), make_node(faults=TransferFaults(silent=True))
    pull(sink, source, budget_s=HANG_S)
    wait_until(lambda: source.agent.stats().parked == 1)
    wait_until(lambda: source.agent.stats().parked == 0)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("corruption", Corruption)
def test_a_corrupted_chunk_fails_the_pull(source: Node, sink: Node, corruption: Corruption) -> None:
    source.agent.set_faults(TransferFaults(corrupt_every=3, corruption=corruption))
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.CHECKSUM)
    assert sink.agent.stats().checksum_failures == 1
    assert source.holds(SOURCE_BLOCKS), "the fault is in the copy, not in the pool"
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.CHECKSUM
    source.agent.set_faults(TransferFaults())
    source.offer(again := lease_key("request", 1), SOURCE_BLOCKS)
    pull(sink, source, again)
    assert sink.wait_end(again).kind == EventKind.PULL_DONE
    assert_nothing_left(source, sink)


def test_bytes_that_are_wrong_before_their_checksum_arrive(source: Node, sink: Node, backend: str) -> None:
    source.agent.set_faults(TransferFaults(corrupt_every=1, corruption=Corruption.ZERO, before_checksum=True))
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    copied_by_source = backend in ("shm", "tcp", "memory")
    ended = sink.wait_end(KEY)
    right = (EventKind.PULL_DONE, Cause.NONE) if copied_by_source else (EventKind.PULL_FAILED, Cause.CHECKSUM)
    assert (ended.kind, ended.cause) == right
    arrived = b"".join(sink.read(layer, block) for layer in range(LAYERS) for block in SINK_BLOCKS)
    assert not copied_by_source or not any(arrived)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"secret": "other"}, ("secret",)),
        ({"block_bytes": 64}, ("bytes per block", "'64'", f"'{BLOCK_BYTES}'")),
    ],
)
def test_unlike_agents_refuse_each_other(
    make_node: MakeNode, changes: dict[str, object], words: tuple[str, ...]
) -> None:
    source, sink = make_node(), make_node(**changes)
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.REFUSED)
    assert all(word in failed.detail for word in words), failed.detail
    assert sink.is_poison()
    assert source.agent.stats().served_bytes == 0


def test_agents_whose_kv_means_something_else_refuse_each_other(make_node: MakeNode) -> None:
    source = make_node(fingerprint="model=a layers=4 rope=after,default,rope_theta=10000.0 dtype=float32")
    sink = make_node(fingerprint="model=a layers=4 rope=after,default,rope_theta=500000.0 dtype=float32 scales=1.0/1.0")
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.MODEL)
    assert failed.detail == (
        "model differs: the sink has 'rope=after,default,rope_theta=500000.0 scales=1.0/1.0',"
        " the source has 'rope=after,default,rope_theta=10000.0'"
    )
    assert isinstance(pull_failure(failed.cause, failed.detail), ModelMismatch)
    assert sink.is_poison()
    assert source.agent.stats().served_bytes == 0


LAYOUT = "layers=4 kv_heads=3 dim=128 dtype=bfloat16 order=NHD form=fused packing=plain block_tokens=16 tp=0/1"


OF_TWO = LAYOUT.replace("kv_heads=3", "kv_heads=6").replace("tp=0/1", "tp=0/2")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (LAYOUT, LAYOUT.replace("bfloat16", "float16")),
        (LAYOUT, LAYOUT.replace("kv_heads=3 dim=128", "kv_heads=6 dim=64")),
        (OF_TWO, OF_TWO.replace("tp=0/2", "tp=1/2")),  # They have no head in common.
    ],
)
def test_caches_that_cannot_be_converted_refuse_each_other(make_node: MakeNode, theirs: str, ours: str) -> None:
    source, sink = make_node(layout=theirs), make_node(layout=ours)
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.LAYOUT)
    assert all(f"'{layout}'" in failed.detail for layout in (ours, theirs)), failed.detail
    assert isinstance(pull_failure(failed.cause, failed.detail), LayoutMismatch)
    assert sink.is_poison()


def test_equal_layouts_move_whole_blocks(make_node: MakeNode) -> None:
    source, sink, silent = make_node(layout=LAYOUT), make_node(layout=LAYOUT), make_node()
    for number, node in enumerate((sink, silent)):  # Without a declared layout, equal sizes are enough.
        source.offer(key := lease_key("equal", number), SOURCE_BLOCKS)
        pull(node, source, key)
        assert node.wait_end(key).kind == EventKind.PULL_DONE
        assert node.holds(SINK_BLOCKS)


@pytest.mark.parametrize("layout", ["KV", LAYOUT.replace("dim=128", "dim=64"), LAYOUT.replace("layers=4", "layers=2")])
def test_a_layout_must_be_that_of_the_pool(make_node: MakeNode, layout: str) -> None:
    with pytest.raises(ValueError, match=r"does not describe|is not one of|addresses|2 tensors, not 4"):
        make_node(layout=layout)


def test_a_sink_that_wants_more_than_the_lease_has_is_refused(source: Node, sink: Node) -> None:
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    source.agent.post_ready(KEY, generation, -1, TOKENS - BLOCK_TOKENS)
    source.agent.complete_lease(KEY, generation, TOKENS - BLOCK_TOKENS)
    failed = sink.wait_end(KEY)
    assert (failed.cause, str(TOKENS) in failed.detail) == (Cause.REFUSED, True)
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.REFUSED, "sooner than its time is up"


def test_a_pull_has_a_deadline(source: Node, sink: Node) -> None:
    source.lease(KEY, SOURCE_BLOCKS)
    began_s = time.monotonic()
    pull(sink, source, budget_s=0.2)
    assert sink.wait_end(KEY).cause == Cause.DEADLINE
    assert time.monotonic() - began_s > 0.1
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.DEADLINE


def test_a_lease_that_never_opens_fails_the_pull(make_node: MakeNode) -> None:
    source, sink = make_node(), make_node(wanted_timeout_s=0.2)
    pull(sink, source)
    assert sink.wait_end(KEY).cause == Cause.STALLED


# ---------------------------------------------------------------- cancellation, release, several at once


@pytest.mark.parametrize("state", ["connecting", "wanted", "opened", "delayed", "moving", "revoked"])
def test_nothing_is_written_after_a_cancel(make_node: MakeNode, state: str) -> None:
    source, sink = make_node(faults=TransferFaults(delay_s=0.3 if state == "delayed" else 0.0)), make_node()
    source.fill(SOURCE_BLOCKS)
    generation = 0
    if state in {"opened", "delayed", "moving", "revoked"}:
        generation = source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    if state == "wanted":
        wait_until(lambda: source.agent.stats().parked == 1)
    if state in {"delayed", "moving"}:
        source.agent.post_ready(KEY, generation, -1, TOKENS)
    if state == "moving":
        wait_until(lambda: sink.agent.stats().pulled_blocks > 0)
    if state == "revoked":
        source.agent.post_ready(KEY, generation, 0, TOKENS)
        sink.wait(EventKind.PULL_PROGRESS)
        source.agent.revoke_lease(KEY, final=False)
    sink.agent.cancel_pull(KEY)
    ended = sink.wait_end(KEY)
    if ended.kind == EventKind.PULL_DONE:
        assert state == "moving"  # The pull was faster.
        return
    sink.poison()
    assert ended.cause == Cause.CANCELLED
    if generation == 0:
        generation = source.agent.open_lease(KEY)
    source.agent.post_ready(KEY, generation, -1, 0)
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.CANCELLED
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    time.sleep(0.4 if state == "delayed" else 0.05)
    assert sink.is_poison()
    assert [event for event in sink.rest() if event.kind in TERMINAL] == []
    assert source.rest() == []
    assert_nothing_left(source, sink)


def test_a_cancel_of_nothing_is_ignored(sink: Node) -> None:
    sink.agent.cancel_pull(KEY)
    time.sleep(0.02)
    assert sink.rest() == []
