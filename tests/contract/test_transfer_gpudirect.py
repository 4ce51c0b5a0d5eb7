"""GPUDirect over the fake GPUs and adapters, as far as it is special: registration, and writes of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fake_library import FakeGpu, FakeVerbs
from transfer_rig import (
    KEY,
    OPTIONS,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TOKENS,
    Fabric,
    MakeNode,
    Node,
    assert_nothing_left,
    begin,
    make_gpu_agent,
    pull,
    wait_until,
)

from baton.transfer import Cause, EventKind, TransferEvent, lease_key

SLOTS = 16
REMOTE_ACCESS = 10
STREAM = 7
OTHER = lease_key("other", 0)


@pytest.fixture
def way() -> str:
    return "gpudirect"


@pytest.fixture
def hosts(fabric: Fabric) -> Iterator[tuple[Node, Node]]:
    """Provide a source and a sink on two hosts, both with adapters, which stage where they must."""
    made = [on_host(name, fabric) for name in ("here", "there")]
    yield made[0], made[1]
    for node in made:
        node.close()


def on_host(host: str, fabric: Fabric, *, adapters: bool = True, stream: int | None = None) -> Node:
    agent = make_gpu_agent(replace(OPTIONS, **fabric), SLOTS, adapters=adapters, host=host, stream=stream)
    return Node(agent, gpu_library=fabric.get("gpu_library"))


def whole_pull(sink: Node, source: Node) -> TransferEvent:
    source.offer(KEY, SOURCE_BLOCKS, seed=3)
    pull(sink, source)
    done = sink.wait_end(KEY)
    assert done.kind is EventKind.PULL_DONE, done
    assert sink.holds(SINK_BLOCKS, seed=3) and sink.gaps_are_untouched()
    assert_nothing_left(source, sink)
    return done


# ---------------------------------------------------------------- the choice


def test_gpus_of_two_hosts_with_adapters_exchange_kv_without_host_memory(
    hosts: tuple[Node, Node], fake_gpu: FakeGpu
) -> None:
    source, sink = hosts
    assert whole_pull(sink, source).backend == "gpudirect"
    assert fake_gpu.counts()["batches"] == 0, "nothing is staged"
    assert sink.agent.stats().fallbacks == 0


@pytest.mark.parametrize("lacks", ["source", "sink"])
def test_a_host_without_adapters_is_staged_and_that_is_no_fallback(fabric: Fabric, lacks: str) -> None:
    source = on_host("here", fabric, adapters=lacks != "source")
    sink = on_host("there", fabric, adapters=lacks != "sink")
    done = whole_pull(sink, source)
    assert (done.backend, sink.agent.stats().fallbacks) == ("direct+staged", 0)
    assert done.declined == "gpudirect: the source is on another host, and not both have RDMA adapters"
    source.close()
    sink.close()


@pytest.mark.parametrize(
    ("gpu", "adapters", "why"),
    [
        ({"no_dma_buf": 1}, {}, "the driver makes no dma-buf of this memory; nor is it without one (nvidia-peermem"),
        ({"no_flush": 1}, {}, "the GPU does not tell of adapters' writes"),
        ({}, {"ports_down": 3}, "the port is down"),
        ({}, {"fail_nth": 1, "fail_status": REMOTE_ACCESS}, "a read failed: remote access error"),
    ],
)
def test_what_stands_in_the_way_is_named_and_counted_and_kv_is_staged(
    fabric: Fabric, fake_gpu: FakeGpu, fake_verbs: FakeVerbs, gpu: dict[str, int], adapters: dict[str, int], why: str
) -> None:
    fake_gpu.set(**gpu)
    fake_verbs.set(**adapters)
    source, sink = on_host("here", fabric), on_host("there", fabric)
    done = whole_pull(sink, source)
    assert (done.backend, sink.agent.stats().fallbacks) == ("direct+staged", 1)
    assert why in done.declined
    source.close()
    sink.close()


def test_without_a_dma_buf_memory_is_registered_by_nvidia_peermem(
    make_node: MakeNode, fake_gpu: FakeGpu, fake_verbs: FakeVerbs
) -> None:
    fake_gpu.set(no_dma_buf=1)
    fake_verbs.set(peer_memory=1)
    assert whole_pull(make_node(), make_node()).backend == "gpudirect"


# ---------------------------------------------------------------- order


def test_what_is_posted_is_read_once_the_stream_has_written_it(fabric: Fabric, fake_gpu: FakeGpu) -> None:
    """An adapter waits for no stream: the source grants a chunk once its GPU has seen the release."""
    source, sink = on_host("here", fabric, stream=STREAM), on_host("there", fabric)
    fake_gpu.set(hold_streams=1)
    source.offer(KEY, SOURCE_BLOCKS, seed=1)
    pull(sink, source)
    wait_until(lambda: fake_gpu.counts()["not_ready"] > 5)
    assert sink.is_poison()
    source.fill(SOURCE_BLOCKS, seed=2)  # As the work in the stream does.
    fake_gpu.set(hold_streams=0)
    assert sink.wait_end(KEY).kind is EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS, seed=2)
    source.close()
    sink.close()


def test_writes_that_the_gpu_does_not_see_never_count(make_node: MakeNode, fake_gpu: FakeGpu) -> None:
    """A planted fault: what adapters wrote is not waited for."""
    source, sink = make_node(), make_node()
    generation = begin(source, sink)
    fake_gpu.set(lose_flush=1)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.CHECKSUM)
    fake_gpu.set(lose_flush=0)


# ---------------------------------------------------------------- ends


def test_a_pull_that_is_cancelled_leaves_no_write_behind(make_node: MakeNode, fake_verbs: FakeVerbs) -> None:
    """Writes that an adapter has reported and the GPU does not see yet would reach blocks of another request."""
    source, sink = make_node(), make_node()
    generation = begin(source, sink)
    fake_verbs.set(delay_ms=100)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    wait_until(lambda: sink.agent.stats().pulled_blocks > 0)
    sink.agent.cancel_pull(KEY)
    assert sink.wait_end(KEY).cause is Cause.CANCELLED
    assert fake_verbs.left_open().get("unflushed", 0) == 0
    sink.poison()
    fake_verbs.set(delay_ms=0)
    source.offer(OTHER, SOURCE_BLOCKS)
    other = make_node()
    pull(other, source, OTHER)
    assert other.wait_end(OTHER).kind is EventKind.PULL_DONE
    assert sink.is_poison()
