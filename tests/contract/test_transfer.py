"""The movement of KV between transfer agents: the suite of every implementation and backend."""

from __future__ import annotations

import time

import pytest
from transfer_rig import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    BLOCKS,
    KEY,
    LAYERS,
    POISON,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TOKENS,
    MakeNode,
    Node,
    assert_nothing_left,
    content,
    pull,
    wait_until,
)

from baton.pool.staging import StagedAgent
from baton.transfer import Cause, EventKind, TransferFaults, lease_key
from tests.harness.limits import HANG_S


def test_a_whole_pull(source: Node, sink: Node, request: pytest.FixtureRequest) -> None:
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    done = sink.wait_end(KEY)
    assert (done.kind, done.layers, done.tokens, done.restarts) == (EventKind.PULL_DONE, LAYERS, TOKENS, 0)
    assert done.bytes == LAYERS * len(SOURCE_BLOCKS) * BLOCK_BYTES
    assert done.backend in request.node.name
    assert sink.holds(SINK_BLOCKS)
    assert sink.gaps_are_untouched()
    assert all(
        sink.read(layer, block) == bytes([POISON]) * BLOCK_BYTES
        for layer in range(LAYERS)
        for block in (SINK_BLOCKS[0] - 1, SINK_BLOCKS[-1] + 1)
    )
    assert source.wait(EventKind.LEASE_RELEASED).key == KEY
    progress = [event.layers for event in sink.rest()]
    assert progress == [1, 2, 3, 4]
    stats = sink.agent.stats()
    assert (stats.pulled_bytes, stats.pulled_blocks, stats.pulls_done) == (done.bytes, LAYERS * len(SINK_BLOCKS), 1)
    assert source.agent.stats().served_bytes == done.bytes
    assert_nothing_left(source, sink)


def test_a_layer_moves_before_the_next_is_ready(source: Node, sink: Node) -> None:
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    for layer in range(LAYERS):
        source.agent.post_ready(KEY, generation, layer, TOKENS)
        if layer + 1 < LAYERS:
            assert sink.wait(EventKind.PULL_PROGRESS).layers == layer + 1
            assert sink.holds(SINK_BLOCKS, layers=range(layer + 1))
            later = range(layer + 1, LAYERS)
            assert all(sink.read(at, block)[:8] == bytes([POISON]) * 8 for at in later for block in SINK_BLOCKS)
            assert sink.rest() == []
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS)


def test_blocks_are_appended_while_the_pull_runs(source: Node, sink: Node) -> None:
    source.fill(SOURCE_BLOCKS)
    generation = source.agent.open_lease(KEY)
    pull(sink, source)
    for count in range(0, len(SOURCE_BLOCKS), 5):
        source.agent.extend_lease(KEY, generation, SOURCE_BLOCKS[count : count + 5])
        ready = min(count + 5, len(SOURCE_BLOCKS)) * BLOCK_TOKENS
        # In the middle of a block, as a chunk of a prompt ends: a block moves only when it is whole.
        source.agent.post_ready(KEY, generation, -1, ready - 3)
        wait_until(lambda ready=ready: sink.agent.stats().pulled_blocks >= LAYERS * (ready // BLOCK_TOKENS - 1))
        assert sink.agent.stats().pulled_blocks == LAYERS * (ready // BLOCK_TOKENS - 1)
        source.agent.post_ready(KEY, generation, -1, ready)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS)


@pytest.mark.parametrize("complete", [True, False])
def test_a_last_block_that_is_not_full(source: Node, sink: Node, way: str, complete: bool) -> None:
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    if complete:
        source.agent.complete_lease(KEY, generation, TOKENS - 5)
    elif "staged" in way:
        pytest.skip("a block that may still grow is not staged")
    source.agent.post_ready(KEY, generation, -1, TOKENS - 5)
    sink.agent.pull(KEY, source.agent.endpoint, first_token=0, tokens=TOKENS - 5, blocks=SINK_BLOCKS, budget_s=HANG_S)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS)


def test_only_the_missing_blocks_move(source: Node, sink: Node) -> None:
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source, first_token=9 * BLOCK_TOKENS)
    done = sink.wait_end(KEY)
    assert (done.kind, done.bytes) == (EventKind.PULL_DONE, LAYERS * 3 * BLOCK_BYTES)
    assert sink.holds(SINK_BLOCKS[9:], first=9)
    assert all(sink.read(layer, block)[0] == POISON for layer in range(LAYERS) for block in SINK_BLOCKS[:9])


def test_blocks_in_any_order(source: Node, sink: Node) -> None:
    from_blocks, to_blocks = [7, 3, 4, 28, 2, 1, 0], [5, 4, 3, 20, 21, BLOCKS - 1, 9]
    source.offer(KEY, from_blocks)
    tokens = len(from_blocks) * BLOCK_TOKENS
    sink.agent.pull(KEY, source.agent.endpoint, first_token=0, tokens=tokens, blocks=to_blocks, budget_s=HANG_S)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds(to_blocks)
    assert sink.gaps_are_untouched()


@pytest.mark.parametrize("block_bytes", [64, 4096, 5 << 18])
def test_small_and_large_blocks(make_node: MakeNode, block_bytes: int) -> None:
    source, sink = (make_node(block_bytes=block_bytes, blocks=8) for _ in range(2))
    source.offer(KEY, [1, 6, 7])
    tokens = 3 * BLOCK_TOKENS
    sink.agent.pull(KEY, source.agent.endpoint, first_token=0, tokens=tokens, blocks=[4, 5, 0], budget_s=HANG_S)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds([4, 5, 0])
    assert sink.gaps_are_untouched()


def test_a_pull_may_come_before_its_lease(source: Node, sink: Node) -> None:
    pull(sink, source)
    wait_until(lambda: source.agent.stats().parked == 1)
    source.offer(KEY, SOURCE_BLOCKS)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS)
    source.wait(EventKind.LEASE_RELEASED)
    assert_nothing_left(source, sink)


def test_two_agents_pull_from_each_other(source: Node, sink: Node) -> None:
    other = lease_key("other", 0)
    source.offer(KEY, SOURCE_BLOCKS)
    sink.offer(other, SOURCE_BLOCKS, seed=1)
    pull(sink, source)
    pull(source, sink, other)
    assert sink.wait_end(KEY).kind == source.wait_end(other).kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS) and source.holds(SINK_BLOCKS, seed=1)


def test_pulls_do_not_wait_for_a_delayed_one(make_node: MakeNode, way: str) -> None:
    source, sink = make_node(), make_node()
    slow, short, fast = (lease_key(name, 0) for name in ("slow", "short", "fast"))
    source.offer(slow, SOURCE_BLOCKS)
    source.offer(short, [1])
    if isinstance(source.agent, StagedAgent):  # What is asked for before it is ready is delayed by later faults.
        source.wait(EventKind.LEASE_STAGED, key=slow)
    source.agent.set_faults(TransferFaults(delay_s=60.0))
    pull(sink, source, slow)
    pull(sink, source, short)
    # There is less than it wants: it ends by a frame each way, behind those that the slow one was asked for by.
    source.wait(EventKind.LEASE_ENDED, key=short)
    if "staged for" in way:  # The slow one is staged since it was asked for.
        source.wait(EventKind.LEASE_STAGED, key=slow)
    source.agent.set_faults(TransferFaults())
    source.offer(fast, SOURCE_BLOCKS)
    sink.agent.pull(fast, source.agent.endpoint, first_token=0, tokens=TOKENS, blocks=list(range(12)), budget_s=HANG_S)
    assert sink.wait_end(fast).kind == EventKind.PULL_DONE
    sink.agent.cancel_pull(slow)
    assert sink.wait_end(slow).cause == Cause.CANCELLED


def test_many_pulls_at_once(make_node: MakeNode) -> None:
    small = {"block_bytes": 20_000, "blocks": 40}
    source, sink = make_node(faults=TransferFaults(delay_s=0.5), **small), make_node(**small)
    keys = [lease_key("many", attempt) for attempt in range(20)]
    for attempt, key in enumerate(keys):
        source.offer(key, [attempt, 20 + attempt], seed=7)
        sink.agent.pull(
            key,
            source.agent.endpoint,
            first_token=0,
            tokens=2 * BLOCK_TOKENS,
            blocks=[39 - 2 * attempt, 38 - 2 * attempt],
            budget_s=HANG_S,
        )
    began_s = time.monotonic()
    for attempt, key in enumerate(keys):
        assert sink.wait_end(key).kind == EventKind.PULL_DONE
        for layer in range(LAYERS):
            for position, block in enumerate([39 - 2 * attempt, 38 - 2 * attempt]):
                assert sink.read(layer, block) == content(layer, position, 7, 20_000)
    assert time.monotonic() - began_s < 20 * 0.5, "the delays must run side by side"
    for _ in keys:
        source.wait(EventKind.LEASE_RELEASED)
    assert_nothing_left(source, sink)


def test_a_sink_releases_what_it_does_not_need(source: Node, sink: Node) -> None:
    source.offer(KEY, SOURCE_BLOCKS)
    sink.agent.release(KEY, source.agent.endpoint)
    assert source.wait(EventKind.LEASE_RELEASED).key == KEY
    assert_nothing_left(source, sink)


def test_a_release_may_come_before_the_lease(source: Node, sink: Node) -> None:
    sink.agent.release(KEY, source.agent.endpoint)
    time.sleep(0.2)
    generation = source.agent.open_lease(KEY)
    assert source.wait(EventKind.LEASE_RELEASED).key == KEY
    source.agent.extend_lease(KEY, generation, SOURCE_BLOCKS)
    assert_nothing_left(source, sink)
