"""CUDA memory over the fake GPUs, as far as it is special: epochs, releases by the device, missing parts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import baton_native
import pytest
from baton_native import DeviceMemory, GpuError, GpuUnavailable, layout
from fake_library import FakeGpu
from transfer_rig import (
    BLOCK_TOKENS,
    KEY,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TOKENS,
    Fabric,
    MakeAgent,
    MakeNode,
    Node,
    Party,
    pull,
    pull_whole,
    wait_until,
)

from baton.transfer import Cause, EventKind, NativeAgent, Pool
from tests.harness.limits import HANG_S

Order = Literal["NHD", "HND"]
Form = Literal["split", "fused"]
PLANES: tuple[Literal["k", "v"], ...] = ("k", "v")


@pytest.fixture(params=["cuda-ipc", "cuda-put", "gpudirect"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(make_node: MakeNode, fake_gpu: FakeGpu) -> Iterator[MakeNode]:
    """Make nodes; delays end before they are closed."""
    yield make_node
    fake_gpu.set(hold=0, hold_streams=0)


def native(node: Node) -> NativeAgent:
    assert isinstance(node.agent, NativeAgent)
    return node.agent


# ---------------------------------------------------------------- failures


def test_bytes_that_change_on_their_way_never_count(make: MakeNode, fake_gpu: FakeGpu) -> None:
    source, sink = make(), make()
    source.offer(KEY, SOURCE_BLOCKS)
    fake_gpu.set(corrupt=9)
    pull(sink, source)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.CHECKSUM)


@pytest.mark.parametrize("way", ["cuda-ipc"], indirect=True)
def test_a_chunk_that_is_stale_on_the_device_alone_never_counts(make: MakeNode, fake_gpu: FakeGpu) -> None:
    """A pull fails if only the sink's GPU saw the epoch change, although the source reports success."""
    source, sink = make(), make(stall_timeout_s=0.4)
    source.offer(KEY, SOURCE_BLOCKS)
    fake_gpu.set(stale=5)
    pull(sink, source)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.STALLED)


@pytest.mark.parametrize("way", ["cuda-put"], indirect=True)
def test_a_put_into_a_window_that_was_given_up_ends_the_connection(make: MakeNode, fake_gpu: FakeGpu) -> None:
    fake_gpu.set(stale=5)
    assert pull_whole(make(), make()).backend == "cuda-put"


# ---------------------------------------------------------------- releases by the device


@pytest.mark.parametrize("checksum", [True, False])
def test_the_gpu_waits_for_layers_that_are_released_by_a_stream(
    make: MakeNode, fake_gpu: FakeGpu, checksum: bool
) -> None:
    """A layer posted behind a stream is requested at once, and read only when the stream has reached that point."""
    source, sink = make(checksum=checksum), make(checksum=checksum)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    fake_gpu.set(hold_streams=1)
    native(source).post_ready_after(KEY, generation, 0, TOKENS, stream=0)
    native(source).post_ready_after(KEY, generation, -1, TOKENS, stream=0)
    pull(sink, source)
    wait_until(lambda: fake_gpu.counts()["not_ready"] > 5)
    assert sink.rest() == []
    source.fill(SOURCE_BLOCKS, seed=7)  # As the work in the stream does.
    fake_gpu.set(hold_streams=0)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS, seed=7) and sink.gaps_are_untouched()


def test_what_is_released_does_not_wait_for_what_is_not(make: MakeNode, fake_gpu: FakeGpu) -> None:
    source, sink = make(), make()
    source.fill(SOURCE_BLOCKS, seed=2)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    source.agent.post_ready(KEY, generation, 0, TOKENS)
    fake_gpu.set(hold_streams=1)
    native(source).post_ready_after(KEY, generation, 1, TOKENS, stream=0)
    pull(sink, source)
    assert sink.wait(EventKind.PULL_PROGRESS).layers == 1
    source.agent.post_ready(KEY, generation, 2, TOKENS)
    wait_until(lambda: sink.agent.stats().pulled_blocks == 2 * len(SOURCE_BLOCKS))
    fake_gpu.set(hold_streams=0)
    sink.wait(EventKind.PULL_PROGRESS, layers=3)


@pytest.mark.parametrize("end", ["cancel", "revoke", "close"])
def test_a_pull_that_waits_on_the_device_ends_at_once(make: MakeNode, fake_gpu: FakeGpu, end: str) -> None:
    source, sink = make(), make()
    generation = source.lease(KEY, SOURCE_BLOCKS)
    fake_gpu.set(hold_streams=1)
    native(source).post_ready_after(KEY, generation, -1, TOKENS, stream=0)
    pull(sink, source)
    wait_until(lambda: fake_gpu.counts()["not_ready"] > 0)
    if end == "cancel":
        sink.agent.cancel_pull(KEY)
    elif end == "revoke":
        source.agent.revoke_lease(KEY, final=True)
    else:
        sink.agent.close()
    failed = sink.wait_end(KEY)
    assert failed.cause == (Cause.REVOKED if end == "revoke" else Cause.CANCELLED)
    assert sink.is_poison()


# ---------------------------------------------------------------- what is missing


@pytest.mark.parametrize(
    ("control", "options", "why"),
    [
        ({"no_share": 1}, {}, "the memory cannot be shared"),
        # If the source cannot map the sink's memory, the sink only learns that it was not reached.
        ({"no_map": 1}, {}, "cannot be mapped|reached something else"),
        ({}, {"gpu_library": "/nowhere/libbaton_gpu.so"}, "/nowhere/libbaton_gpu.so: cannot open"),
        ({}, {"gpu_library": "libm.so.6"}, "baton_gpu_abi"),
    ],
)
@pytest.mark.parametrize("way", ["cuda-ipc", "cuda-put"], indirect=True)
def test_what_is_missing_is_named(
    make: MakeNode, fake_gpu: FakeGpu, control: dict[str, int], options: dict[str, object], why: str
) -> None:
    fake_gpu.set(**control)
    failed = pull_whole(make(**options), make())
    assert failed.cause == Cause.REFUSED
    assert re.search(why, failed.detail), failed.detail


def test_blocks_that_are_not_whole_16_bytes_are_refused(make: MakeNode) -> None:
    source, sink = make(block_bytes=1000), make(block_bytes=1000)
    pull(sink, source)
    assert "blocks are not made of whole, aligned 16 bytes" in sink.wait_end(KEY).detail


def test_host_memory_goes_another_way(make: MakeNode, backend: str) -> None:
    source, sink = make(host=True, backends=(backend, "tcp")), make(host=True, backends=(backend, "tcp"))
    source.offer(KEY, SOURCE_BLOCKS, seed=3)
    pull(sink, source)
    done = sink.wait_end(KEY)
    assert (done.backend, done.declined) == ("tcp", f"{backend}: the pool lies in host memory")
    assert sink.holds(SINK_BLOCKS, seed=3)


def test_memory_of_a_gpu_goes_no_other_way(make: MakeNode, backend: str) -> None:
    with pytest.raises(
        ValueError, match="by cuda-ipc, cuda-put and gpudirect only, and this agent's backends name tcp"
    ):
        make(backends=(backend, "tcp"))


def test_only_memory_of_a_gpu_is_released_by_it(make: MakeNode) -> None:
    source = make(host=True, backends=("tcp",))
    generation = source.lease(KEY, SOURCE_BLOCKS)
    with pytest.raises(ValueError, match="does not lie in CUDA memory"):
        native(source).post_ready_after(KEY, generation, 0, TOKENS, stream=0)


def test_memory_says_why_there_is_none(fake_gpu: FakeGpu) -> None:
    for control, why in (("no_driver", "no NVIDIA driver"), ("no_device", "no such GPU")):
        fake_gpu.reset()
        fake_gpu.set(**{control: 1})
        with pytest.raises(GpuUnavailable, match=why):
            DeviceMemory(1, 0, fake_gpu.library)
    with pytest.raises(ValueError, match="at least one byte"):
        DeviceMemory(0, 0, fake_gpu.library)


def test_memory_is_read_and_written_within_its_bounds(fake_gpu: FakeGpu) -> None:
    memory = DeviceMemory(100, 0, fake_gpu.library)
    memory.fill(0, 100, 5)
    memory.write(10, b"abc")
    assert memory.read(9, 5) == b"\5abc\5"
    for offset, size in ((0, 101), (100, 1), (1 << 63, 1 << 63)):
        with pytest.raises(ValueError, match="do not lie in the memory"):
            memory.read(offset, size)


# ---------------------------------------------------------------- the library that this build made


def test_the_cuda_part_is_loaded_and_says_what_it_finds() -> None:
    library = Path(baton_native.__file__).parent / "libbaton_gpu.so"
    if not library.exists():
        nvcc = shutil.which("nvcc")
        version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True) if nvcc else None
        release = re.search(r"release (\d+)", version.stdout if version else "")
        assert release is None or int(release[1]) < 12, "there is an nvcc, but the build made no CUDA part"
        pytest.skip("this build has no CUDA part: with nvcc 12 on the path, `make clean environment` makes it")
    try:
        assert "sm_" in DeviceMemory(16, 0, str(library)).device
    except GpuUnavailable as error:
        assert re.search("NVIDIA driver|GPU", str(error))


# ---------------------------------------------------------------- conversions


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["split", "fused"])
def test_a_gpu_converts_as_the_host_does(fake_gpu: FakeGpu, order: Order, form: Form) -> None:
    """Conversions from split NHD blocks of 16 tokens, direct and by the wire form. The planner's own test is in C++."""

    def made(order: Order, form: Form, block_tokens: int) -> tuple[layout.Layout, DeviceMemory, layout.Pool]:
        like = layout.Layout(
            layers=2, kv_heads=4, dim=64, dtype="bfloat16", order=order, form=form, block_tokens=block_tokens
        )
        size = 8 * like.block_bytes
        memory = DeviceMemory(2 * like.tensors * size, 0, fake_gpu.library)
        addresses = [memory.address + tensor * size for tensor in range(2 * like.tensors)]
        return like, memory, layout.Pool(like, addresses, 8, like.block_bytes)

    _, memory, source = made("NHD", "split", 16)
    memory.write(0, bytes((i * 7 + i // 251) % 256 for i in range(memory.bytes)))
    table = layout.Table([5, 2, 7])
    mover = layout.DeviceMover(fake_gpu.library)
    to, other = made(order, form, 32), made(order, form, 32)
    for _, sink_memory, _ in (to, other):
        sink_memory.fill(0, sink_memory.bytes, 9)
    target = layout.Table([3, 1])
    assert mover.convert(source, table, to[2], target, 3, 40, 0, 2) > 0
    wire = DeviceMemory(1 << 16, 0, fake_gpu.library)
    for layer in range(2):
        for plane in PLANES:
            chunk = layout.Chunk(layer=layer, plane=plane, first_token=3, tokens=40, heads=(0, 4))
            mover.gather(source, table, chunk, wire.address)
            mover.scatter(other[2], target, chunk, wire.address)
    assert to[1].read(0, to[1].bytes) == other[1].read(0, other[1].bytes)
    assert to[1].read(0, to[1].bytes) != bytes([9]) * to[1].bytes


def test_a_conversion_that_does_not_end_is_given_up(fake_gpu: FakeGpu) -> None:
    like = layout.Layout(layers=1, kv_heads=1, dim=64, dtype="bfloat16", order="NHD", form="fused", block_tokens=16)
    memory = DeviceMemory(8 * like.block_bytes, 0, fake_gpu.library)
    pool = layout.Pool(like, [memory.address], 4, like.block_bytes)
    other = layout.Pool(like, [memory.address + 4 * like.block_bytes], 4, like.block_bytes)
    mover = layout.DeviceMover(fake_gpu.library, budget_s=0.05)
    fake_gpu.set(hold=1)
    with pytest.raises(GpuError, match="not moved this in time"):
        mover.convert(pool, layout.Table([0]), other, layout.Table([0]), 0, 16, 0, 1)


# ---------------------------------------------------------------- large caches


def test_small_blocks_move_as_many_at_once_as_a_chunk_may_have(make: MakeNode, fake_gpu: FakeGpu, way: str) -> None:
    """A chunk has 1024 blocks at most; whoever reads that many itself is told where all of them are."""
    blocks = range(1, 1025)
    source, sink = (make(block_bytes=16, blocks=1025) for _ in range(2))
    source.offer(KEY, blocks)
    sink.agent.pull(
        KEY, source.agent.endpoint, first_token=0, tokens=len(blocks) * BLOCK_TOKENS, blocks=blocks, budget_s=HANG_S
    )
    done = sink.wait_end(KEY)
    assert (done.kind, done.backend) == (EventKind.PULL_DONE, way)
    assert sink.holds(blocks) and sink.gaps_are_untouched()


def test_layers_may_lie_in_many_allocations(make_agent: MakeAgent, fabric: Fabric, fake_gpu: FakeGpu, way: str) -> None:
    """80 layers, each allocated by itself: their handles are more than 4 KiB."""
    layers, block_bytes = 80, 64
    parties = [Party(make_agent()) for _ in range(2)]
    memories = [[DeviceMemory(block_bytes, 0, fabric.get("gpu_library", "")) for _ in range(layers)] for _ in parties]
    for party, memory in zip(parties, memories, strict=True):
        pool = Pool(
            layer_addresses=tuple(layer.address for layer in memory),
            blocks=1,
            block_bytes=block_bytes,
            block_stride_bytes=block_bytes,
            block_tokens=BLOCK_TOKENS,
            fingerprint="model",
            device=0,
        )
        party.agent.set_pool(pool)
    source, sink = parties
    for number, layer in enumerate(memories[0]):
        layer.fill(0, block_bytes, number)
    generation = source.lease(KEY, [0])
    source.agent.post_ready(KEY, generation, -1, BLOCK_TOKENS)
    sink.agent.pull(KEY, source.agent.endpoint, first_token=0, tokens=BLOCK_TOKENS, blocks=[0], budget_s=HANG_S)
    done = sink.wait_end(KEY)
    assert (done.kind, done.backend) == (EventKind.PULL_DONE, way), done.detail
    assert [layer.read(0, 1) for layer in memories[1]] == [bytes([number]) for number in range(layers)]
    for party in parties:
        party.agent.close()


# ---------------------------------------------------------------- what it costs


def test_many_chunks_go_in_few_launches(make: MakeNode, fake_gpu: FakeGpu) -> None:
    pull_whole(make(), make())
    counts = fake_gpu.counts()
    assert counts["chunks"] >= counts["launches"]
    assert set(fake_gpu.left_open()) - {"mappings"} == {"devices", "allocations", "queues"}
