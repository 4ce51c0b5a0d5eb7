"""CUDA memory over the stand-in for GPUs: failures, the fence, releases by the device, what is missing or left."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import baton_native
import pytest
from baton_native import DeviceMemory, GpuError, GpuUnavailable, layout
from fake_library import FakeGpu
from test_transfer_processes import Peer
from transfer_rig import (
    BLOCK_BYTES,
    KEY,
    LAYERS,
    OPTIONS,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TOKENS,
    Node,
    pull,
    wait_until,
)

from baton.transfer import Cause, EventKind, NativeAgent, TransferEvent

Make = Callable[..., Node]
BACKENDS = ("cuda-ipc", "cuda-put")
Order = Literal["NHD", "HND"]
Form = Literal["split", "fused"]
PLANES: tuple[Literal["k", "v"], ...] = ("k", "v")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(fake_gpu: FakeGpu, backend: str) -> Iterator[Make]:
    nodes: list[Node] = []

    def make(*, host: bool = False, block_bytes: int = BLOCK_BYTES, **changes: object) -> Node:
        given = {"backends": (backend,), "gpu_library": fake_gpu.library, **changes}
        agent = NativeAgent(replace(OPTIONS, **given))  # pyright: ignore[reportArgumentType]
        nodes.append(Node(agent, block_bytes=block_bytes, gpu_library=None if host else fake_gpu.library))
        return nodes[-1]

    yield make
    fake_gpu.set(hold=0, hold_streams=0)
    for node in nodes:
        node.close()


def native(node: Node) -> NativeAgent:
    assert isinstance(node.agent, NativeAgent)
    return node.agent


def whole_pull(make: Make, *, ends: EventKind = EventKind.PULL_DONE, **of_sink: object) -> TransferEvent:
    source, sink = make(), make(**of_sink)
    source.offer(KEY, SOURCE_BLOCKS, seed=3)
    pull(sink, source)
    end = sink.wait_end(KEY)
    assert end.kind == ends, end
    assert end.kind == EventKind.PULL_FAILED or sink.holds(SINK_BLOCKS, seed=3)
    assert sink.gaps_are_untouched()
    return end


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("fault", ["fail_launch", "fail_run"])
@pytest.mark.parametrize("nth", [3, 4, 6])
def test_a_launch_that_fails_is_made_again_on_a_new_connection(
    make: Make, fake_gpu: FakeGpu, fault: str, nth: int
) -> None:
    source, sink = make(), make()
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    fake_gpu.set(**{fault: nth})
    pull(sink, source)
    for layer in range(LAYERS):  # One after the other, so that there are launches enough.
        source.agent.post_ready(KEY, generation, layer, TOKENS)
        sink.wait(EventKind.PULL_PROGRESS, layers=layer + 1)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS)


def test_bytes_that_change_on_their_way_never_count(make: Make, fake_gpu: FakeGpu) -> None:
    source, sink = make(), make()
    source.offer(KEY, SOURCE_BLOCKS)
    fake_gpu.set(corrupt=9)
    pull(sink, source)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.CHECKSUM)


@pytest.mark.parametrize("backend", ["cuda-ipc"], indirect=True)
def test_a_chunk_that_is_stale_on_the_device_alone_never_counts(make: Make, fake_gpu: FakeGpu) -> None:
    """Nobody but the sink's GPU saw the epoch change: the pull fails, though the source says that all is well."""
    source, sink = make(), make(stall_timeout_s=0.4)
    source.offer(KEY, SOURCE_BLOCKS)
    fake_gpu.set(stale=5)
    pull(sink, source)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.STALLED)


@pytest.mark.parametrize("backend", ["cuda-put"], indirect=True)
def test_a_put_into_a_window_that_was_given_up_ends_the_connection(make: Make, fake_gpu: FakeGpu) -> None:
    fake_gpu.set(stale=5)
    assert whole_pull(make).backend == "cuda-put"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_ends_under_a_read(make: Make, fake_gpu: FakeGpu, backend: str, end: signal.Signals) -> None:
    sink = make(connect_timeout_s=0.3, stall_timeout_s=0.3)
    peer = Peer({"gpu_library": fake_gpu.library}, backend)
    try:
        peer.lease()
        sink.agent.pull(KEY, peer.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=10.0)
        peer.ready(0)
        sink.wait(EventKind.PULL_PROGRESS)
        fake_gpu.set(delay_ms=250)
        peer.ready(-1)
        time.sleep(0.1)
        peer.signal(end)
        failed = sink.wait_end(KEY, 3.0)
        assert failed.cause == (Cause.UNREACHABLE if end == signal.SIGKILL else Cause.STALLED)
    finally:
        peer.close()


# ---------------------------------------------------------------- the fence


def test_a_cancelled_pull_ends_when_its_launch_has(make: Make, fake_gpu: FakeGpu) -> None:
    source, sink = make(), make()
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    source.agent.post_ready(KEY, generation, 0, TOKENS)
    pull(sink, source)
    sink.wait(EventKind.PULL_PROGRESS)
    fake_gpu.set(delay_ms=100)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    time.sleep(0.15)
    sink.agent.cancel_pull(KEY)
    assert sink.wait_end(KEY, 3.0).cause == Cause.CANCELLED
    sink.poison()
    time.sleep(0.3)
    assert sink.is_poison(), "a late chunk was written into blocks that were given back"


@pytest.mark.parametrize("end", ["cancel", "stall", "close"])
def test_launches_that_never_begin_are_ended_by_force(make: Make, fake_gpu: FakeGpu, end: str) -> None:
    source, sink = make(), make(stall_timeout_s=0.3)
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    source.agent.post_ready(KEY, generation, 0, TOKENS)
    pull(sink, source)
    sink.wait(EventKind.PULL_PROGRESS)
    fake_gpu.set(hold=1)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    time.sleep(0.1)
    if end == "cancel":
        sink.agent.cancel_pull(KEY)
    elif end == "close":
        sink.agent.close()
    failed = sink.wait_end(KEY, 3.0)
    assert failed.cause == (Cause.STALLED if end == "stall" else Cause.CANCELLED)
    sink.poison()
    fake_gpu.set(hold=0)
    time.sleep(0.1)
    assert sink.is_poison()


# ---------------------------------------------------------------- releases by the device


@pytest.mark.parametrize("checksum", [True, False])
def test_the_gpu_waits_for_layers_that_are_released_by_a_stream(make: Make, fake_gpu: FakeGpu, checksum: bool) -> None:
    """What was posted behind a stream is asked for at once, and read only when that stream has come there."""
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


def test_what_is_released_does_not_wait_for_what_is_not(make: Make, fake_gpu: FakeGpu) -> None:
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
def test_a_pull_that_waits_on_the_device_ends_at_once(make: Make, fake_gpu: FakeGpu, end: str) -> None:
    source, sink = make(), make()
    generation = source.lease(KEY, SOURCE_BLOCKS)
    fake_gpu.set(hold_streams=1)
    native(source).post_ready_after(KEY, generation, -1, TOKENS, stream=0)
    pull(sink, source)
    wait_until(lambda: fake_gpu.counts()["not_ready"] > 0)
    began_s = time.monotonic()
    if end == "cancel":
        sink.agent.cancel_pull(KEY)
    elif end == "revoke":
        source.agent.revoke_lease(KEY, final=True)
    else:
        sink.agent.close()
    failed = sink.wait_end(KEY, 2.0)
    assert failed.cause == (Cause.REVOKED if end == "revoke" else Cause.CANCELLED)
    assert time.monotonic() - began_s < 0.5
    assert sink.is_poison()


# ---------------------------------------------------------------- what is missing


@pytest.mark.parametrize(
    ("control", "options", "why"),
    [
        ({"no_share": 1}, {}, "the memory cannot be shared"),
        # What the sink offers and the source cannot map, the sink only knows not to have been reached.
        ({"no_map": 1}, {}, "cannot be mapped|reached something else"),
        ({}, {"gpu_library": "/nowhere/libbaton_gpu.so"}, "/nowhere/libbaton_gpu.so: cannot open"),
        ({}, {"gpu_library": "libm.so.6"}, "baton_gpu_abi"),
    ],
)
def test_what_is_missing_is_named(
    make: Make, fake_gpu: FakeGpu, control: dict[str, int], options: dict[str, object], why: str
) -> None:
    fake_gpu.set(**control)
    failed = whole_pull(make, ends=EventKind.PULL_FAILED, **options)
    assert failed.cause == Cause.REFUSED
    assert re.search(why, failed.detail), failed.detail


def test_blocks_that_are_not_whole_16_bytes_are_refused(make: Make) -> None:
    source, sink = make(block_bytes=1000), make(block_bytes=1000)
    pull(sink, source)
    assert "blocks are not made of whole, aligned 16 bytes" in sink.wait_end(KEY).detail


def test_host_memory_goes_another_way(make: Make, backend: str) -> None:
    source, sink = make(host=True, backends=(backend, "tcp")), make(host=True, backends=(backend, "tcp"))
    source.offer(KEY, SOURCE_BLOCKS, seed=3)
    pull(sink, source)
    done = sink.wait_end(KEY)
    assert (done.backend, done.declined) == ("tcp", f"{backend}: the pool lies in host memory")
    assert sink.holds(SINK_BLOCKS, seed=3)


def test_memory_of_a_gpu_goes_no_other_way(make: Make, backend: str) -> None:
    with pytest.raises(ValueError, match="by cuda-ipc and cuda-put only, and this agent's backends name tcp"):
        make(backends=(backend, "tcp"))


def test_only_memory_of_a_gpu_is_released_by_it(make: Make) -> None:
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
        pytest.skip("this build has no CUDA part: there is no nvcc here")
    try:
        assert "sm_" in DeviceMemory(16, 0, str(library)).device
    except GpuUnavailable as error:
        assert re.search("NVIDIA driver|GPU", str(error))


# ---------------------------------------------------------------- conversions


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["split", "fused"])
def test_a_gpu_converts_as_the_host_does(fake_gpu: FakeGpu, order: Order, form: Form) -> None:
    """From split NHD blocks of 16 tokens, directly and through the wire form. The planner's own test is in C++."""

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


def test_the_gpu_check_finds_all_right(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    """What `make test-gpu` runs; on a GPU its figures mean something."""
    out = tmp_path / "gpu.json"
    arguments = ["--library", fake_gpu.library, "--tokens", "256", "--layers", "1", "--out", str(out)]
    run = [sys.executable, "-m", "baton_native.bench_cuda", *arguments]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    assert "conversions and pulls are right" in done.stdout
    assert {"cuda-ipc, checksum", "cuda-put, checksum", "whole blocks"} <= {
        figure["what"] for figure in json.loads(out.read_text())["figures"]
    }
    fake_gpu.set(corrupt=4)
    broken = subprocess.run(run, check=False, capture_output=True, text=True)
    assert broken.returncode == 1 and "otherwise than the host" in broken.stderr
    fake_gpu.set(no_driver=1)
    assert subprocess.run(run, check=True, capture_output=True, text=True).stdout == (
        "nothing was measured: there is no NVIDIA driver here\n"
    )


# ---------------------------------------------------------------- what it costs


def test_an_idle_connection_costs_nothing(make: Make) -> None:
    whole_pull(make)
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.02


def test_many_chunks_go_in_few_launches(make: Make, fake_gpu: FakeGpu) -> None:
    whole_pull(make)
    counts = fake_gpu.counts()
    assert counts["chunks"] >= counts["launches"]
    assert set(fake_gpu.left_open()) == set(FakeGpu.open)
