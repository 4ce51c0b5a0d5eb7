"""Measures KV in CUDA memory: `python -m baton_native.bench_cuda`, on any host; without a GPU it says so and ends.

First copies between host and GPU, in batches of scattered blocks, verified and then measured beside cudaMemcpy from and
to pinned memory. Then conversions, on the GPU alone: verified against the host's for each pair of layouts, then
measured beside cudaMemcpy within the GPU, which is the limit. Then pulls between two processes, by each backend, with
and without checksums: every byte is compared; pulls that are cancelled, before or while they move, or whose time is up,
must end in time and write nothing after that. Ends with status 1 where anything is wrong; with `--goals`, also where
a copy misses its goal, or nothing could be measured.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from baton_native import Agent, DeviceMemory, GpuUnavailable, Options, Report
from baton_native.bench_copies import Figure, measure_copies, median_gb_per_s, random_bytes
from baton_native.layout import Chunk, DeviceMover, Layout, Pool, Table, convert

BLOCK_TOKENS = 16
BLOCK_BYTES = 64 << 10
"""Bytes of a block in one layer: K and V of 8 heads of 128 dimensions in bfloat16, as Llama 8B has them."""
BACKENDS = ("cuda-ipc", "cuda-put", "gpudirect")
ADAPTERS = Path("/sys/class/infiniband")
CHUNK_BYTES = 8 << 20
"""Size of a chunk, the one of Baton's agents for these backends (`DIRECT_CHUNK_BYTES`)."""
POISON = 0xA5
WAIT_S = 60.0
END_S_MAX = 0.6
"""Longest time from a cancel, or the end of a budget, to the report."""
CANCELS = 5
"""Number of cancels, in the middle of pulls that would succeed."""
PLANES: tuple[Literal["k", "v"], ...] = ("k", "v")


def layout_of(
    layers: int, order: Literal["NHD", "HND"], form: Literal["split", "fused"], block_tokens: int = BLOCK_TOKENS
) -> Layout:
    return Layout(
        layers=layers, kv_heads=8, dim=128, dtype="bfloat16", order=order, form=form, block_tokens=block_tokens
    )


class Cache:
    """A paged cache of a GPU, or with `library` None of the host, and a table of scattered blocks."""

    def __init__(self, like: Layout, tokens: int, library: str | None) -> None:
        blocks = tokens // like.block_tokens
        tensors = like.layers * like.tensors
        size = blocks * like.block_bytes
        self.bytes = tensors * size
        if library is None:
            self.host = (ctypes.c_uint8 * self.bytes)()
            base = ctypes.addressof(self.host)
        else:
            self.memory = DeviceMemory(self.bytes, 0, library)
            base = self.memory.address
        self.pool = Pool(like, [base + tensor * size for tensor in range(tensors)], blocks, like.block_bytes)
        self.table = Table(random.Random(str(like)).sample(range(blocks), blocks))


def measure_conversions(library: str, tokens: int, layers: int) -> list[Figure]:
    """Return GB/s of bytes copied, by the device's clock; verified for a few tokens first."""
    from_layout = layout_of(layers, "NHD", "fused")
    targets = {
        "whole blocks": from_layout,
        "blocks of 16 to 64 tokens": layout_of(layers, "NHD", "fused", 64),
        "fused to split": layout_of(layers, "NHD", "split"),
        "NHD to HND": layout_of(layers, "HND", "fused"),
        "NHD to HND, fused to split": layout_of(layers, "HND", "split"),
    }
    mover = DeviceMover(library)
    for to_layout in targets.values():
        verify_conversion(mover, library, from_layout, to_layout)
    source = Cache(from_layout, tokens, library)
    other = DeviceMemory(source.bytes, 0, library)

    def copy() -> float:
        began_s = time.perf_counter()
        other.copy_from(source.memory, source.bytes)
        return time.perf_counter() - began_s

    limit = median_gb_per_s(source.bytes, copy)
    figures = [Figure("limit: cudaMemcpy within the GPU", limit, 1.0)]

    def note(what: str, run: Callable[[], float]) -> None:
        speed = median_gb_per_s(source.bytes, run)
        figures.append(Figure(what, speed, speed / limit))

    for what, to_layout in targets.items():
        sink = Cache(to_layout, tokens, library)

        def run(sink: Cache = sink) -> float:
            return mover.convert(source.pool, source.table, sink.pool, sink.table, 0, tokens, 0, layers)

        note(what, run)
    chunks = [
        Chunk(layer=layer, plane=plane, first_token=0, tokens=tokens, heads=(0, 8))
        for layer in range(layers)
        for plane in PLANES
    ]
    wire = other.address
    note("gather into the wire form", lambda: sum(mover.gather(source.pool, source.table, c, wire) for c in chunks))
    note("scatter out of the wire form", lambda: sum(mover.scatter(source.pool, source.table, c, wire) for c in chunks))
    return figures


def verify_conversion(mover: DeviceMover, library: str, from_layout: Layout, to_layout: Layout) -> None:
    """Raise unless the GPU writes what the host writes, into a poisoned cache, for a ragged range."""
    tokens, first, count = 256, 5, 200
    data = random_bytes(1, Cache(from_layout, tokens, None).bytes)
    source, sink = Cache(from_layout, tokens, library), Cache(to_layout, tokens, library)
    host_source, host_sink = Cache(from_layout, tokens, None), Cache(to_layout, tokens, None)
    source.memory.write(0, data)
    ctypes.memmove(host_source.host, data, len(data))
    sink.memory.fill(0, sink.bytes, POISON)
    ctypes.memset(host_sink.host, POISON, host_sink.bytes)
    layers = from_layout.layers
    mover.convert(source.pool, source.table, sink.pool, sink.table, first, count, 0, layers)
    convert(host_source.pool, host_source.table, host_sink.pool, host_sink.table, first, count, 0, layers)
    if sink.memory.read(0, sink.bytes) != bytes(host_sink.host):
        raise RuntimeError(f"the GPU converts otherwise than the host: {from_layout} to {to_layout}")


# ---------------------------------------------------------------- pulls between two processes


class GpuNode:
    """An agent with a pool in the GPU's memory; either side of a pull."""

    def __init__(self, library: str, backend: str, checksum: bool, layers: int, blocks: int) -> None:
        self.layers, self.blocks = layers, blocks
        self.layer_bytes = blocks * BLOCK_BYTES
        self.memory = DeviceMemory(layers * self.layer_bytes, 0, library)
        options = Options()
        options.backends = [backend]
        options.chunk_bytes = CHUNK_BYTES
        options.checksum = checksum
        options.gpu_library = library
        self.agent = Agent(options, ("127.0.0.1:0",))
        addresses = [self.memory.address + layer * self.layer_bytes for layer in range(layers)]
        self.agent.set_pool(addresses, blocks, BLOCK_BYTES, BLOCK_BYTES, BLOCK_TOKENS, "bench", None, 0)

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS

    def wait_end(self) -> Report:
        while True:
            if not select.select([self.agent.fileno()], [], [], WAIT_S)[0]:
                raise RuntimeError("no report came in time")
            for report in self.agent.poll():
                if report.kind in ("pull_done", "pull_failed"):
                    return report

    def holds(self, data: bytes, order: Sequence[int], their_order: Sequence[int]) -> bool:
        """Whether each block holds what `data`, the source's whole pool, has in its place."""
        own = self.memory.read(0, self.memory.bytes)
        for layer in range(self.layers):
            for to, source in zip(order, their_order, strict=True):
                at, theirs = (layer * self.layer_bytes + block * BLOCK_BYTES for block in (to, source))
                if own[at : at + BLOCK_BYTES] != data[theirs : theirs + BLOCK_BYTES]:
                    return False
        return True

    def poison(self) -> None:
        self.memory.fill(0, self.memory.bytes, POISON)

    def is_untouched(self) -> bool:
        return self.memory.read(0, self.memory.bytes) == bytes([POISON]) * self.memory.bytes


def content(size: int) -> bytes:
    return random_bytes(7, size)


def serve(library: str) -> None:
    """Be the source's process: commands are lines of JSON, each answered by one."""
    node: GpuNode | None = None
    for line in sys.stdin:
        command = json.loads(line)
        answer = ""
        if command["do"] == "prepare":
            node = GpuNode(library, command["backend"], command["checksum"], command["layers"], command["blocks"])
            node.memory.write(0, content(node.memory.bytes))
            answer = node.agent.endpoint
        elif node is not None:
            key = bytes.fromhex(command["key"])
            generation = node.agent.open_lease(key, WAIT_S)
            node.agent.extend_lease(key, generation, command["order"])
            for layer in range(command["ready"]):
                node.agent.post_ready_after(key, generation, layer, node.tokens, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class SourceProcess:
    def __init__(self, library: str) -> None:
        command = [sys.executable, "-m", "baton_native.bench_cuda", "--library", library, "--source"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, **command: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the source's process has ended")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)
        self._process.stdout.close()


class Pair:
    """A source's process and a sink here, which pulls all it has, by one backend."""

    def __init__(self, library: str, backend: str, checksum: bool, layers: int, blocks: int) -> None:
        self._backend = backend
        self._order, self._their_order = (random.Random(seed).sample(range(blocks), blocks) for seed in (1, 2))
        self._source = SourceProcess(library)
        self.sink = GpuNode(library, backend, checksum, layers, blocks)
        self._endpoint = self._source.tell(
            do="prepare", backend=backend, checksum=checksum, layers=layers, blocks=blocks
        )
        self._pulls = 0

    def begin(self, layers: int, budget_s: float = WAIT_S) -> bytes:
        """Begin to pull from a lease of which so many layers are ready; return its key."""
        self._pulls += 1
        key = self._pulls.to_bytes(16, "little")
        self._source.tell(do="lease", key=key.hex(), order=self._their_order, ready=layers)
        self.sink.agent.pull(key, self._endpoint, 0, self.sink.tokens, self._order, budget_s)
        return key

    def pull(self) -> float:
        began_s = time.perf_counter()
        self.begin(self.sink.layers)
        report = self.sink.wait_end()
        took_s = time.perf_counter() - began_s
        if report.kind != "pull_done" or report.backend != self._backend:
            raise RuntimeError(f"a pull by {self._backend} failed: {report.detail or report.declined}")
        return took_s

    def check_bytes(self) -> None:
        self.sink.poison()
        self.pull()
        if not self.sink.holds(content(self.sink.memory.bytes), self._order, self._their_order):
            raise RuntimeError(f"a pull by {self._backend} succeeded with wrong bytes")

    def check_ends(self) -> None:
        """Raise unless pulls end in time, by a cancel or by their budget, and nothing is written after that."""
        delays_s = [random.Random(3).uniform(0.0, 0.003) for _ in range(CANCELS)]
        for layers, delay_s, budget_s in (
            (0, 0.1, WAIT_S),
            (0, 0.1, 0.2),
            *((self.sink.layers, d, WAIT_S) for d in delays_s),
        ):
            key = self.begin(layers, budget_s)
            time.sleep(delay_s)
            began_s = time.perf_counter()
            if budget_s == WAIT_S:
                self.sink.agent.cancel_pull(key)
            report = self.sink.wait_end()
            took_s = time.perf_counter() - began_s
            self.sink.poison()
            time.sleep(0.02)
            expected = {"cancelled" if budget_s == WAIT_S else "deadline", "none" if layers else ""}
            if report.cause not in expected or took_s > END_S_MAX or not self.sink.is_untouched():
                raise RuntimeError(
                    f"a pull by {self._backend} ended as {report.cause} after {took_s:.3f} s, or wrote late"
                )

    def close(self) -> None:
        self.sink.agent.close()
        self._source.close()


def measure_pulls(library: str, layers: int, blocks: int) -> list[Figure]:
    """Return GB/s of whole pulls, as a caller sees them; raise if a byte is wrong, or written too late."""
    figures: list[Figure] = []
    has_adapters = ADAPTERS.is_dir() and any(ADAPTERS.iterdir())
    backends = [name for name in BACKENDS if has_adapters or name != "gpudirect"]
    for backend, checksum in itertools.product(backends, (False, True)):
        pair = Pair(library, backend, checksum, layers, blocks)
        try:
            pair.check_bytes()
            speed = median_gb_per_s(pair.sink.memory.bytes, pair.pull)
            figures.append(Figure(f"{backend}, {'checksum' if checksum else 'no checksum'}", speed))
            pair.check_ends()
        finally:
            pair.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m baton_native.bench_cuda", description="KV on a CUDA GPU")
    parser.add_argument("--library", default="", help="in place of this build's own")
    parser.add_argument("--tokens", type=int, default=8192, help="of each measured cache")
    parser.add_argument("--layers", type=int, default=8, help="of each measured cache")
    parser.add_argument("--goals", action="store_true", help="fail where a goal is missed or nothing is measured")
    parser.add_argument("--out", help="a file for the figures, as JSON")
    parser.add_argument("--source", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.source:
        return serve(arguments.library)
    try:
        device = DeviceMemory(1, 0, arguments.library).device
    except GpuUnavailable as error:
        sys.stdout.write(f"nothing was measured: {error}\n")
        return sys.exit(1) if arguments.goals else None
    sys.stdout.write(f"{device}\n")
    blocks = arguments.tokens // BLOCK_TOKENS
    library, layers = arguments.library, arguments.layers
    figures: list[Figure] = []
    for measure in (
        lambda: measure_copies(library, blocks * layers * BLOCK_BYTES),
        lambda: measure_conversions(library, arguments.tokens, layers),
        lambda: measure_pulls(library, layers, blocks),
    ):
        measured = measure()
        figures += measured
        for figure in measured:
            share = f"{figure.of_limit:>8.0%}" if figure.of_limit else ""
            goal = f", goal {figure.goal:.0%}: {'missed' if figure.is_missed else 'met'}" if figure.goal else ""
            sys.stdout.write(f"  {figure.what:<44}{figure.gb_per_s:>9.1f} GB/s{share}{goal}\n")
        sys.stdout.flush()
    sys.stdout.write("copies, conversions and pulls are right, cancelled and late pulls wrote nothing\n")
    if arguments.out:
        results = {"device": device, "figures": [asdict(figure) for figure in figures]}
        Path(arguments.out).write_text(json.dumps(results, indent=2) + "\n")
    if arguments.goals and (missed := [figure.what for figure in figures if figure.is_missed]):
        sys.exit(f"goals missed: {', '.join(missed)}")
    return None


if __name__ == "__main__":
    main()
