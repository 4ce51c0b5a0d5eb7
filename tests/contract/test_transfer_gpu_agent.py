"""The choice between a GPU's memory and staging, over the stand-in for GPUs. The suite covers what both ways share."""

from __future__ import annotations

import gc
import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fake_library import FakeGpu
from peer_process import Peer
from transfer_peer import GPU_AGENT
from transfer_rig import (
    KEY,
    LAYERS,
    OPTIONS,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TOKENS,
    Node,
    assert_nothing_left,
    content,
    make_gpu_agent,
    pull,
    pull_whole,
    wait_until,
)

from baton.pool.gpu_pulls import REFUSED_S
from baton.transfer import Cause, EventKind, NativeAgent, Whole, lease_key
from tests.harness.limits import HANG_S

SLOTS = 16
STREAM = 7
OTHER = lease_key("other", 0)
_numbers = itertools.count(1)
MakeGpu = Callable[..., Node]


@pytest.fixture
def gpu(fake_gpu: FakeGpu) -> Iterator[FakeGpu]:
    yield fake_gpu
    fake_gpu.set(hold=0, hold_copies=0, hold_streams=0)


@pytest.fixture
def make(gpu: FakeGpu) -> Iterator[MakeGpu]:
    """Make nodes with a `GpuAgent`; delays end before they are closed."""
    nodes: list[Node] = []

    def make(
        *,
        stream: int | None = None,
        host: str = "",
        now_s: Callable[[], float] = time.monotonic,
        connect_timeout_s: float = HANG_S,
    ) -> Node:
        options = replace(OPTIONS, gpu_library=gpu.library, connect_timeout_s=connect_timeout_s)
        agent = make_gpu_agent(options, SLOTS, stream=stream, host=host, now_s=now_s)
        nodes.append(Node(agent, gpu_library=gpu.library))
        return nodes[-1]

    yield make
    gpu.set(hold=0, hold_copies=0, hold_streams=0)
    for node in nodes:
        node.close()
    gc.collect()


@pytest.fixture
def host_node() -> Iterator[Node]:
    """A node in host memory, which knows nothing of GPUs."""
    node = Node(NativeAgent(OPTIONS), shared=True)
    yield node
    node.close()


def assert_whole(sink: Node, source: Node, backend: str, declined: str = "") -> None:
    key = lease_key("request", next(_numbers))
    source.offer(key, SOURCE_BLOCKS, seed=3)
    pull(sink, source, key)
    done = sink.wait_end(key)
    assert sink.holds(SINK_BLOCKS, seed=3) and sink.gaps_are_untouched()
    assert (done.kind, done.backend) == (EventKind.PULL_DONE, backend), done
    assert re.search(declined, done.declined), done.declined
    assert_nothing_left(source, sink)


# ---------------------------------------------------------------- the choice


def test_gpus_of_one_host_read_each_other_and_nothing_is_staged(make: MakeGpu, gpu: FakeGpu) -> None:
    source, sink = make(), make()
    assert_whole(sink, source, "cuda-ipc")
    assert [event.kind for event in source.rest()] == [EventKind.LEASE_RELEASED]
    assert gpu.counts()["batches"] == 0
    assert sink.agent.stats().fallbacks == 0


def test_a_handle_that_cannot_be_opened_is_a_fallback_by_name_and_is_tried_again_later(
    make: MakeGpu, gpu: FakeGpu
) -> None:
    now_s = 0.0
    source, sink = make(), make(now_s=lambda: now_s)
    gpu.set(no_map=1)
    why = "cuda-ipc: the other process's memory cannot be mapped"
    assert_whole(sink, source, "direct+staged", why)
    gpu.set(no_map=0)
    assert_whole(sink, source, "direct+staged", why)
    stats = sink.agent.stats()
    assert (stats.fallbacks, stats.pulls_done, stats.pulls_failed) == (2, 2, 0)
    now_s = REFUSED_S
    assert_whole(sink, source, "cuda-ipc")


@pytest.mark.parametrize("stream", [None, STREAM])
def test_memory_that_cannot_be_exported_is_staged(make: MakeGpu, gpu: FakeGpu, stream: int | None) -> None:
    """Memory of the kind of PyTorch's expandable segments."""
    gpu.set(no_share=1)
    source = make(stream=stream)
    gpu.set(no_share=0)
    sink = make(stream=stream)
    assert_whole(sink, source, "direct+staged", "cuda-ipc: the memory cannot be shared")
    assert sink.agent.stats().fallbacks == 1


def test_a_source_on_another_host_is_staged_and_that_is_no_fallback(make: MakeGpu) -> None:
    sink = make()
    assert_whole(sink, make(host="elsewhere"), "direct+staged", "another host")
    assert sink.agent.stats().fallbacks == 0


def test_peers_without_gpus_take_the_staged_copy(make: MakeGpu, host_node: Node) -> None:
    assert_whole(host_node, make(), "direct")
    assert_whole(make(), host_node, "direct+staged", "does not offer")


def test_several_ranks_take_the_staged_copy(make: MakeGpu) -> None:
    source, sink = make(), make()
    source.fill(SOURCE_BLOCKS)
    whole = Whole(key=KEY, parts=1)
    generation = source.agent.open_lease(OTHER, whole=whole)
    source.agent.extend_lease(OTHER, generation, SOURCE_BLOCKS)
    source.agent.post_ready(OTHER, generation, -1, TOKENS)
    source.agent.complete_lease(OTHER, generation, TOKENS)
    endpoint = source.agent.endpoint
    sink.agent.pull(OTHER, endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S, whole=whole)
    done = sink.wait_end(OTHER)
    assert (done.backend, "tensor-parallel ranks differ" in done.declined) == ("direct+staged", True)
    assert sink.holds(SINK_BLOCKS)


def test_a_refusal_of_both_ways_fails_the_pull(make: MakeGpu, gpu: FakeGpu) -> None:
    other = make_gpu_agent(replace(OPTIONS, gpu_library=gpu.library, secret="another"), SLOTS)
    stranger = Node(other, gpu_library=gpu.library)
    failed = pull_whole(make(), stranger)
    assert (failed.kind, failed.cause, "secret" in failed.detail) == (EventKind.PULL_FAILED, Cause.REFUSED, True)
    stranger.close()


# ---------------------------------------------------------------- the source's blocks


def test_blocks_are_leased_until_a_direct_pull_has_ended(make: MakeGpu, gpu: FakeGpu) -> None:
    source, sink = make(), make()
    gpu.set(hold=1)
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    wait_until(lambda: source.agent.stats().parked == 0 and sink.agent.stats().pulls == 1)
    assert source.rest() == []
    gpu.set(hold=0)
    assert sink.wait_end(KEY).kind is EventKind.PULL_DONE
    assert [event.kind for event in (source.wait(EventKind.LEASE_RELEASED), *source.rest())] == [
        EventKind.LEASE_RELEASED
    ]


def test_nothing_is_staged_before_a_peer_asks_and_the_blocks_are_free_then(
    make: MakeGpu, host_node: Node, gpu: FakeGpu
) -> None:
    source = make()
    source.offer(KEY, SOURCE_BLOCKS)
    assert (source.rest(), gpu.counts()["batches"]) == ([], 0)
    pull(host_node, source)
    assert host_node.wait_end(KEY).kind is EventKind.PULL_DONE
    assert source.wait(EventKind.LEASE_STAGED).key == KEY
    assert host_node.holds(SINK_BLOCKS)


@pytest.mark.parametrize("way", ["cuda-ipc", "direct+staged"])
def test_a_new_generation_goes_the_way_of_the_first(make: MakeGpu, gpu: FakeGpu, way: str) -> None:
    source, sink = make(), make(host="" if way == "cuda-ipc" else "elsewhere")
    first = source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    source.fill(SOURCE_BLOCKS, seed=1)
    source.agent.post_ready(KEY, first, 0, TOKENS)
    sink.wait(EventKind.PULL_PROGRESS)
    source.agent.revoke_lease(KEY, final=False)
    source.poison()
    source.fill(SOURCE_BLOCKS, seed=2)
    second = source.lease(KEY, SOURCE_BLOCKS)
    assert second == first + 1
    source.agent.post_ready(KEY, first, -1, TOKENS)
    source.agent.post_ready(KEY, second, -1, TOKENS)
    done = sink.wait_end(KEY)
    assert (done.kind, done.backend, done.restarts) == (EventKind.PULL_DONE, way, 1)
    assert sink.holds(SINK_BLOCKS, seed=2)


# ---------------------------------------------------------------- streams


def test_what_is_posted_is_read_once_the_stream_has_written_it(make: MakeGpu, gpu: FakeGpu) -> None:
    source, sink = make(stream=STREAM), make()
    gpu.set(hold_streams=1)
    source.offer(KEY, SOURCE_BLOCKS, seed=1)
    pull(sink, source)
    wait_until(lambda: gpu.counts()["not_ready"] > 5)
    assert sink.is_poison()
    source.fill(SOURCE_BLOCKS, seed=2)  # As the work in the stream does.
    gpu.set(hold_streams=0)
    assert sink.wait_end(KEY).kind is EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS, seed=2)


def test_a_post_that_follows_no_stream_shows(make: MakeGpu, gpu: FakeGpu) -> None:
    """A planted fault: the source does not wait for the stream that writes its cache."""
    source, sink = make(stream=None), make()
    gpu.set(hold_streams=1)
    source.poison()
    for layer in range(LAYERS):
        for position, block in enumerate(SOURCE_BLOCKS):
            gpu.write(STREAM, source.address(layer, block), content(layer, position, 0))
    generation = source.lease(KEY, SOURCE_BLOCKS)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    source.agent.complete_lease(KEY, generation, TOKENS)
    pull(sink, source, budget_s=0.5)
    assert sink.wait_end(KEY).kind is EventKind.PULL_FAILED
    assert sink.is_poison()
    gpu.synchronise()


def test_a_pull_writes_its_blocks_after_the_stream_that_used_them(make: MakeGpu, gpu: FakeGpu) -> None:
    source, sink = make(), make(stream=STREAM)
    source.offer(KEY, SOURCE_BLOCKS)
    gpu.set(hold_streams=1)
    for block in SINK_BLOCKS:
        gpu.write(STREAM, sink.address(0, block), bytes(sink.block_bytes))
    pull(sink, source)
    wait_until(lambda: source.agent.stats().leases == 1)
    assert sink.rest() == []
    gpu.set(hold_streams=0)
    assert sink.wait_end(KEY).kind is EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS)
    gpu.synchronise()


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("waits_for", ["stream", "source"])
def test_a_cancelled_pull_writes_nothing_any_more(make: MakeGpu, gpu: FakeGpu, waits_for: str) -> None:
    source, sink = make(), make(stream=STREAM)
    source.lease(KEY, SOURCE_BLOCKS)
    gpu.set(hold_streams=int(waits_for == "stream"))
    if waits_for == "stream":
        gpu.write(STREAM, sink.address(0, 0), b"\xa5" * 16)
    pull(sink, source)
    if waits_for == "source":
        wait_until(lambda: sink.agent.stats().pulls == 1)
    sink.agent.cancel_pull(KEY)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.CANCELLED)
    gpu.set(hold_streams=0)
    assert sink.is_poison()
    gpu.synchronise()


@pytest.mark.parametrize("budget_s", [0.2, 0.0])
def test_a_direct_pull_ends_at_its_deadline(make: MakeGpu, budget_s: float) -> None:
    source, sink = make(), make()
    source.lease(KEY, SOURCE_BLOCKS)
    pull(sink, source, budget_s=budget_s)
    assert sink.wait_end(KEY).cause is Cause.DEADLINE
    assert sink.is_poison()


@pytest.mark.parametrize("backend", ["cuda-ipc", "direct+staged"])
def test_a_source_that_dies_fails_the_pull(make: MakeGpu, gpu: FakeGpu, backend: str) -> None:
    sink = make(host="" if backend == "cuda-ipc" else "elsewhere", connect_timeout_s=1.0)
    peer = Peer({"gpu_library": gpu.library}, GPU_AGENT)
    try:
        peer.lease()
        sink.agent.pull(KEY, peer.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
        peer.ready(0)
        sink.wait(EventKind.PULL_PROGRESS)
        assert sink.holds(SINK_BLOCKS, layers=[0])
        peer.kill()
        assert sink.wait_end(KEY).cause is Cause.UNREACHABLE
    finally:
        peer.close()
    assert_whole(sink, make(), backend)
