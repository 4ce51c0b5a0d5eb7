"""The behaviour of a transfer agent, over every implementation and backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import replace

import pytest
from transfer_rig import BLOCK_BYTES, BLOCK_TOKENS, LAYERS, POISON, TERMINAL, Node, content, wait_until

from baton.transfer import AgentOptions, Cause, EventKind, Faults, NativeAgent, lease_key

KEY = lease_key("request", 0)
OPTIONS = AgentOptions(secret="shared", lease_ttl_s=3.0, unclaimed_ttl_s=5.0)
SOURCE_BLOCKS = list(range(3, 15))
SINK_BLOCKS = list(range(30, 42))
TOKENS = len(SOURCE_BLOCKS) * BLOCK_TOKENS

MakeNode = Callable[..., Node]


@pytest.fixture(params=["shm", "tcp"])
def make(request: pytest.FixtureRequest) -> Generator[MakeNode]:
    """Make nodes whose agents talk over one backend; close them afterwards."""
    nodes: list[Node] = []

    def make_node(*, fingerprint: str = "model", block_bytes: int = BLOCK_BYTES, **changes: object) -> Node:
        options = replace(OPTIONS, backends=(request.param,))
        node = Node(
            NativeAgent(replace(options, **changes)),  # pyright: ignore[reportArgumentType]
            fingerprint=fingerprint,
            block_bytes=block_bytes,
        )
        nodes.append(node)
        return node

    yield make_node
    for node in nodes:
        node.agent.close()


@pytest.fixture
def source(make: MakeNode) -> Node:
    return make()


@pytest.fixture
def sink(make: MakeNode) -> Node:
    return make()


def pull(sink: Node, source: Node, key: bytes = KEY, *, first_token: int = 0, budget_s: float = 10.0) -> None:
    blocks = SINK_BLOCKS[first_token // BLOCK_TOKENS :]
    sink.agent.pull(
        key, source.agent.endpoint, first_token=first_token, tokens=TOKENS, blocks=blocks, budget_s=budget_s
    )


def assert_nothing_left(*nodes: Node) -> None:
    for node in nodes:
        stats = node.agent.stats()
        assert (stats.leases, stats.leased_blocks, stats.pulls, stats.parked) == (0, 0, 0, 0)


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
        sink.read(layer, block) == bytes([POISON]) * BLOCK_BYTES for layer in range(LAYERS) for block in (29, 42)
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


def test_a_last_block_that_is_not_full(source: Node, sink: Node) -> None:
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    source.agent.post_ready(KEY, generation, -1, TOKENS - 5)
    sink.agent.pull(KEY, source.agent.endpoint, first_token=0, tokens=TOKENS - 5, blocks=SINK_BLOCKS, budget_s=5.0)
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
    from_blocks, to_blocks = [7, 3, 4, 40, 2, 1, 0], [5, 4, 3, 20, 21, 47, 9]
    source.offer(KEY, from_blocks)
    tokens = len(from_blocks) * BLOCK_TOKENS
    sink.agent.pull(KEY, source.agent.endpoint, first_token=0, tokens=tokens, blocks=to_blocks, budget_s=5.0)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds(to_blocks)
    assert sink.gaps_are_untouched()


@pytest.mark.parametrize("block_bytes", [64, 4096, 3 << 20])
def test_small_and_large_blocks(make: MakeNode, block_bytes: int) -> None:
    source, sink = make(block_bytes=block_bytes), make(block_bytes=block_bytes)
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS)
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
    generation = source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    for seed in range(1, 60):
        time.sleep(0.0004 * (seed % 7))
        source.agent.revoke_lease(KEY, final=False)
        if source.agent.stats().leases == 0:
            break  # The pull was faster.
        source.fill(SOURCE_BLOCKS, seed=200)  # Overwritten at once, as a preempted engine does.
        assert source.offer(KEY, SOURCE_BLOCKS, seed=seed) == generation + seed
    else:
        seed = 60
    done = sink.wait_end(KEY)
    assert done.kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS, seed=seed - 1)


def test_a_final_revocation_fails_the_pull_at_once(source: Node, sink: Node) -> None:
    source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    wait_until(lambda: sink.agent.stats().pulls == 1)
    source.agent.revoke_lease(KEY, final=True)
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.REVOKED
    failed = sink.wait_end(KEY, 2.0)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.REVOKED)
    assert_nothing_left(source, sink)


def test_a_final_revocation_may_come_before_the_pull(source: Node, sink: Node) -> None:
    source.agent.revoke_lease(KEY, final=True)
    pull(sink, source)
    assert sink.wait_end(KEY, 2.0).cause == Cause.REVOKED
    assert source.rest() == []


def test_a_revoked_lease_that_stays_closed_fails_at_the_deadline(source: Node, sink: Node) -> None:
    source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source, budget_s=0.5)
    wait_until(lambda: sink.agent.stats().pulls == 1)
    time.sleep(0.1)
    source.agent.revoke_lease(KEY, final=False)
    assert sink.wait_end(KEY).cause == Cause.REVOKED
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.REVOKED
    assert_nothing_left(source, sink)


def test_a_lease_expires_under_a_read(make: MakeNode) -> None:
    # The sink's own time to live decides how often it says that it lives: too seldom for this source.
    source, sink = make(lease_ttl_s=0.3), make(lease_ttl_s=30.0)
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    source.agent.post_ready(KEY, generation, 0, TOKENS)
    sink.wait(EventKind.PULL_PROGRESS)
    assert source.wait(EventKind.LEASE_ENDED, timeout_s=2.0).cause == Cause.EXPIRED
    source.fill(SOURCE_BLOCKS, seed=3)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    assert sink.wait_end(KEY, 2.0).cause == Cause.EXPIRED
    assert source.agent.stats().leases_expired == 1
    assert_nothing_left(source, sink)


def test_a_live_sink_keeps_its_lease(make: MakeNode) -> None:
    source, sink = make(lease_ttl_s=0.3, unclaimed_ttl_s=0.3), make(lease_ttl_s=0.3)
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    time.sleep(1.2)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE


def test_a_lease_that_nobody_asks_for_expires(source: Node) -> None:
    source.agent.open_lease(KEY, unclaimed_ttl_s=0.1)
    ended = source.wait(EventKind.LEASE_ENDED, timeout_s=1.0)
    assert (ended.cause, source.agent.stats().leases) == (Cause.EXPIRED, 0)


def test_an_old_ask_is_not_parked_for_ever(make: MakeNode) -> None:
    source, sink = make(lease_ttl_s=0.3), make(lease_ttl_s=30.0)
    pull(sink, source, budget_s=5.0)
    wait_until(lambda: source.agent.stats().parked == 1)
    wait_until(lambda: source.agent.stats().parked == 0, 2.0)


# ---------------------------------------------------------------- failures


def test_a_corrupted_chunk_fails_the_pull(source: Node, sink: Node) -> None:
    source.agent.set_faults(Faults(corrupt_every=3))
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.CHECKSUM)
    assert sink.agent.stats().checksum_failures == 1
    assert source.holds(SOURCE_BLOCKS), "the fault is in the copy, not in the pool"
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.CHECKSUM
    source.agent.set_faults(Faults())
    source.offer(again := lease_key("request", 1), SOURCE_BLOCKS)
    pull(sink, source, again)
    assert sink.wait_end(again).kind == EventKind.PULL_DONE
    assert_nothing_left(source, sink)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"secret": "other"}, ("secret",)),
        ({"fingerprint": "other"}, ("fingerprint", "'other'", "'model'")),
        ({"block_bytes": 64}, ("bytes per block", "'64'", f"'{BLOCK_BYTES}'")),
    ],
)
def test_unlike_agents_refuse_each_other(make: MakeNode, changes: dict[str, object], words: tuple[str, ...]) -> None:
    source, sink = make(), make(**changes)
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    failed = sink.wait_end(KEY, 2.0)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.REFUSED)
    assert all(word in failed.detail for word in words), failed.detail
    assert sink.is_poison()
    assert source.agent.stats().served_bytes == 0


def test_a_sink_that_wants_more_than_the_lease_has_is_refused(source: Node, sink: Node) -> None:
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    source.agent.post_ready(KEY, generation, -1, TOKENS - BLOCK_TOKENS)
    source.agent.complete_lease(KEY, generation, TOKENS - BLOCK_TOKENS)
    failed = sink.wait_end(KEY, 2.0)
    assert (failed.cause, str(TOKENS) in failed.detail) == (Cause.REFUSED, True)


def test_a_pull_has_a_deadline(source: Node, sink: Node) -> None:
    source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source, budget_s=0.2)
    began_s = time.monotonic()
    assert sink.wait_end(KEY).cause == Cause.DEADLINE
    assert 0.1 < time.monotonic() - began_s < 0.6
    assert source.wait(EventKind.LEASE_ENDED).cause == Cause.DEADLINE


def test_a_lease_that_never_opens_fails_the_pull(make: MakeNode) -> None:
    source, sink = make(), make(wanted_timeout_s=0.2)
    pull(sink, source)
    assert sink.wait_end(KEY, 1.0).cause == Cause.STALLED


def test_no_agent_there(make: MakeNode) -> None:
    source, sink = make(), make(connect_timeout_s=0.3)
    endpoint = source.agent.endpoint
    source.agent.close()
    sink.agent.pull(KEY, endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=5.0)
    failed = sink.wait_end(KEY, 2.0)
    assert (failed.cause, "127.0.0.1" in failed.detail) == (Cause.UNREACHABLE, True)


def test_another_life_of_the_source_is_not_the_source(make: MakeNode) -> None:
    source, sink = make(), make()
    endpoint = source.agent.endpoint
    source.agent.close()
    reborn = make(port=int(endpoint.split(":")[1].split("/")[0]))
    reborn.offer(KEY, SOURCE_BLOCKS)
    sink.agent.pull(KEY, endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=5.0)
    failed = sink.wait_end(KEY, 2.0)
    assert (failed.cause, "restarted" in failed.detail) == (Cause.UNREACHABLE, True)
    assert sink.is_poison()


# ---------------------------------------------------------------- cancellation, release, several at once


@pytest.mark.parametrize("state", ["connecting", "wanted", "opened", "delayed", "moving", "revoked"])
def test_nothing_is_written_after_a_cancel(make: MakeNode, state: str) -> None:
    source, sink = make(faults=Faults(delay_s=0.3 if state == "delayed" else 0.0)), make()
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
    ended = sink.wait_end(KEY, 2.0)
    if ended.kind == EventKind.PULL_DONE:
        assert state == "moving"  # The pull was faster.
        return
    sink.poison()
    assert ended.cause == Cause.CANCELLED
    if generation == 0:
        generation = source.agent.open_lease(KEY)
    source.agent.post_ready(KEY, generation, -1, 0)
    assert source.wait(EventKind.LEASE_ENDED, timeout_s=2.0).cause == Cause.CANCELLED
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


def test_pulls_do_not_wait_for_a_delayed_one(make: MakeNode) -> None:
    source, sink = make(), make()
    slow, fast = lease_key("slow", 0), lease_key("fast", 0)
    source.offer(slow, SOURCE_BLOCKS)
    source.offer(fast, SOURCE_BLOCKS)
    source.agent.set_faults(Faults(delay_s=0.5))
    began_s = time.monotonic()
    pull(sink, source, slow)
    time.sleep(0.1)
    source.agent.set_faults(Faults())
    sink.agent.pull(fast, source.agent.endpoint, first_token=0, tokens=TOKENS, blocks=list(range(12)), budget_s=5.0)
    assert sink.wait_end(fast).kind == EventKind.PULL_DONE
    assert time.monotonic() - began_s < 0.4
    assert sink.wait_end(slow).kind == EventKind.PULL_DONE
    assert time.monotonic() - began_s > 0.5


def test_many_pulls_at_once(make: MakeNode) -> None:
    source, sink = make(faults=Faults(delay_s=0.1), block_bytes=20_000), make(block_bytes=20_000)
    keys = [lease_key("many", attempt) for attempt in range(20)]
    for attempt, key in enumerate(keys):
        source.offer(key, [attempt, 20 + attempt], seed=7)
        sink.agent.pull(
            key,
            source.agent.endpoint,
            first_token=0,
            tokens=2 * BLOCK_TOKENS,
            blocks=[47 - 2 * attempt, 46 - 2 * attempt],
            budget_s=5.0,
        )
    began_s = time.monotonic()
    for attempt, key in enumerate(keys):
        assert sink.wait_end(key).kind == EventKind.PULL_DONE
        for layer in range(LAYERS):
            for position, block in enumerate([47 - 2 * attempt, 46 - 2 * attempt]):
                assert sink.read(layer, block) == content(layer, position, 7, 20_000)
    assert time.monotonic() - began_s < 1.0, "the delays must run side by side"
    for _ in keys:
        source.wait(EventKind.LEASE_RELEASED)
    assert_nothing_left(source, sink)


def test_a_sink_releases_what_it_does_not_need(source: Node, sink: Node) -> None:
    source.offer(KEY, SOURCE_BLOCKS)
    sink.agent.release(KEY, source.agent.endpoint)
    assert source.wait(EventKind.LEASE_RELEASED, timeout_s=2.0).key == KEY
    assert_nothing_left(source, sink)


def test_a_release_may_come_before_the_lease(source: Node, sink: Node) -> None:
    sink.agent.release(KEY, source.agent.endpoint)
    time.sleep(0.2)
    generation = source.agent.open_lease(KEY)
    assert source.wait(EventKind.LEASE_RELEASED, timeout_s=2.0).key == KEY
    source.agent.extend_lease(KEY, generation, SOURCE_BLOCKS)
    assert_nothing_left(source, sink)
