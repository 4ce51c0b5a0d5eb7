"""Parts of the KV pool against the generic path: `make bench-pool-parts`.

- CRC-32C by the processor's instruction, beside tables; a save, a file's write and its read, a loan, and a hand-off
  between two engines' caches, beside memcpy.
- Saves and promotions of a pool in huge pages beside one in small pages, where the system gives shared memory huge
  ones; between a cache and a pool on one NUMA node beside two, where the machine has two.
- What a promotion costs in moves, and bytes per move, in a fresh pool and after 10,000 random operations.
- Blocks written to a file when they are saved, beside when they are evicted, on Mooncake's conversation trace.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from random import Random
from select import select
from typing import Final

import baton_native
from baton_simulator.traffic.library import load

from baton.pool.copier import CopyJob, copy
from baton.pool.directory import PoolDirectory
from baton.pool.file import KvFile
from baton.pool.file_format import FileBlock, Geometry
from baton.pool.memory import KvPool, slot_bytes
from baton.pool.policy import PolicyName, make_policy
from baton.transfer import AgentOptions, EventKind, NativeAgent, Pool, checksum_memory
from benchmarks.pool_replay import ENGINE_BLOCKS
from benchmarks.report import Row, report

LAYERS: Final = 32
BLOCK_BYTES: Final = 128 << 10
"""One block of one layer: 32 tokens, K and V, 8 heads of 128, 16 bits."""
BLOCK_TOKENS: Final = 32
TENSOR_ALIGNMENT: Final = 64
BLOCKS: Final = 48
PROMPT_BLOCKS: Final = 46
"""Full blocks of 1,500 tokens."""
LOAN_S: Final = 30.0
OPERATIONS: Final = 10_000
FILE_SLOTS: Final = 30_000
POOL_SLOTS: Final = (3_000, 10_000)
COPIES: Final = ("save", "promotion")
PR_SET_THP_DISABLE: Final = 41


def bytes_per_s(move: Callable[[], None], size: int, repeats: int) -> float:
    """Return the median rate of a move, after one that is not counted."""
    move()
    times: list[float] = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        move()
        times.append(time.perf_counter() - began_s)
    return size / statistics.median(times)


def make_cache() -> tuple[Pool, ctypes.Array[ctypes.c_char]]:
    """Return an engine's cache and the memory that it is in, aligned as torch aligns tensors.

    With other offsets the processor's `rep movsb`, which copies blocks of this size, can be three times slower.
    """
    memory = ctypes.create_string_buffer(LAYERS * BLOCKS * BLOCK_BYTES + TENSOR_ALIGNMENT)
    base = ctypes.addressof(memory) + -ctypes.addressof(memory) % TENSOR_ALIGNMENT
    cache = Pool(
        layer_addresses=tuple(base + layer * BLOCKS * BLOCK_BYTES for layer in range(LAYERS)),
        blocks=BLOCKS,
        block_bytes=BLOCK_BYTES,
        block_stride_bytes=BLOCK_BYTES,
        block_tokens=BLOCK_TOKENS,
        fingerprint="bench",
    )
    return cache, memory


def make_pool() -> tuple[KvPool, ctypes.Array[ctypes.c_char]]:
    cache, memory = make_cache()
    return KvPool(cache, BLOCKS * slot_bytes(LAYERS, BLOCK_BYTES)), memory


def measure_checksums(repeats: int) -> list[Row]:
    size = 8 << 20
    data = bytes(bytearray(range(256)) * (size // 256))
    memory = ctypes.create_string_buffer(data, size)
    ours = bytes_per_s(lambda: _discard(checksum_memory(ctypes.addressof(memory), size)), size, repeats)
    tables = bytes_per_s(lambda: _discard(baton_native.crc32c_portable(data)), size, max(repeats // 5, 3))
    sink = ctypes.create_string_buffer(size)
    memcpy = bytes_per_s(lambda: _discard(ctypes.memmove(sink, memory, size)), size, repeats)
    return [Row.against("CRC-32C", "GB/s", ours / 1e9, tables=tables / 1e9, memcpy=memcpy / 1e9)]


@contextmanager
def small_pages() -> Generator[None]:
    """Let pools that are made here be in small pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "huge pages cannot be disabled for this process")
    try:
        yield
    finally:
        libc.prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)


def huge_bytes() -> int:
    """Return how much shared memory is mapped to this process in huge pages."""
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return sum(int(line[1]) << 10 for line in fields if line[0] == "ShmemPmdMapped:")


def node_cpus() -> list[set[int]]:
    """Return the processors of each NUMA node that has any."""
    nodes: list[set[int]] = []
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")):
        spans = (span.partition("-") for span in path.read_text().strip().split(",") if span)
        nodes.append({cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)})
    return [cpus for cpus in nodes if cpus]


def measure_copies(pool: KvPool, repeats: int) -> dict[str, float]:
    """Return GB/s of saves and promotions of a prompt, its slots in another order than its blocks."""
    blocks, slots = tuple(range(PROMPT_BLOCKS)), list(range(PROMPT_BLOCKS))
    Random(1).shuffle(slots)
    size = PROMPT_BLOCKS * LAYERS * BLOCK_BYTES
    jobs = {name: CopyJob(job=1, promotes=name == "promotion", blocks=blocks, slots=tuple(slots)) for name in COPIES}
    return {name: bytes_per_s(lambda job=job: copy(pool, job), size, repeats) / 1e9 for name, job in jobs.items()}


def measure_pages(repeats: int) -> tuple[list[Row], str]:
    with small_pages():
        small, _cache = make_pool()
    before = huge_bytes()
    huge, _cache_too = make_pool()
    if not (given := huge_bytes() - before):
        return [], "huge pages: none, the system gives shared memory none (shmem_enabled)"
    rates = [measure_copies(pool, repeats) for pool in (huge, small)]
    return [
        Row.against(f"{name}, pool in huge pages", "GB/s", rates[0][name], small_pages=rates[1][name])
        for name in COPIES
    ], f"{given >> 20} MiB of the pool in huge pages"


def measure_nodes(repeats: int) -> tuple[list[Row], str]:
    nodes = node_cpus()
    if len(nodes) < 2:
        return [], "NUMA: one node, so near and far pools are not compared"
    allowed = os.sched_getaffinity(0)
    try:
        # Memory is taken from the node of the processor that reserves it.
        os.sched_setaffinity(0, nodes[1])
        far, _cache = make_pool()
        os.sched_setaffinity(0, nodes[0])
        near, _cache_too = make_pool()
        rates = [measure_copies(pool, repeats) for pool in (near, far)]
    finally:
        os.sched_setaffinity(0, allowed)
    rows = [
        Row.against(f"{name}, pool on the cache's NUMA node", "GB/s", rates[0][name], far_node=rates[1][name])
        for name in COPIES
    ]
    return rows, f"NUMA nodes: {len(nodes)}"


def measure_moves(folder: Path, repeats: int) -> list[Row]:
    pool, _cache = make_pool()
    blocks = tuple(range(PROMPT_BLOCKS))
    size = PROMPT_BLOCKS * LAYERS * BLOCK_BYTES
    save = CopyJob(job=1, promotes=False, blocks=blocks, slots=blocks)
    promotion = CopyJob(job=2, promotes=True, blocks=blocks, slots=tuple(reversed(blocks)))
    source, sink = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
    memcpy = bytes_per_s(lambda: _discard(ctypes.memmove(sink, source, size)), size, repeats) / 1e9
    rows = [
        Row.against(name, "GB/s", bytes_per_s(lambda job=job: copy(pool, job), size, repeats) / 1e9, memcpy=memcpy)
        for name, job in (("save", save), ("promotion", promotion))
    ]
    names = [
        FileBlock(key=bytes([number]) * 16, parent=b"", index=0, units=(bytes([number]) * 16,)) for number in blocks
    ]
    budget_bytes = Geometry(pool.stride_bytes).file_bytes(PROMPT_BLOCKS)
    for direct in (True, False):
        file = KvFile(folder / f"kv-{direct}", pool, budget_bytes, content="bench", direct=direct)

        def write(file: KvFile = file) -> None:
            for number in blocks:
                file.write(number, names[number], number)

        def read(file: KvFile = file) -> None:
            assert all(file.read(number, names[number].key, number) for number in blocks)

        path = "direct" if file.direct else "through the page cache"
        few = max(repeats // 5, 3)
        rows.append(Row.against(f"file, write, {path}", "GB/s", bytes_per_s(write, size, few) / 1e9, memcpy=memcpy))
        rows.append(Row.against(f"file, read, {path}", "GB/s", bytes_per_s(read, size, few) / 1e9, memcpy=memcpy))
        file.close()
    return rows


def measure_pulls(repeats: int) -> list[Row]:
    (source, _one), (sink, _two) = make_pool(), make_pool()
    (prefill, _three), (decode, _four) = make_cache(), make_cache()
    return [
        measure_pull("loan between two pools", source.pool, sink.pool, repeats),
        measure_pull("hand-off between two engines' caches", prefill, decode, repeats),
    ]


def measure_pull(name: str, source: Pool, sink: Pool, repeats: int) -> Row:
    """Pull a prompt's blocks from one memory into another one, by their agents, in this process."""
    lender, borrower = NativeAgent(AgentOptions()), NativeAgent(AgentOptions())
    lender.set_pool(source)
    borrower.set_pool(sink)
    slots, tokens = tuple(range(PROMPT_BLOCKS)), PROMPT_BLOCKS * BLOCK_TOKENS
    size = PROMPT_BLOCKS * LAYERS * BLOCK_BYTES
    numbers, backends = count(1), set[str]()

    def pull() -> None:
        key = next(numbers).to_bytes(16, "little")
        generation = lender.open_lease(key)
        lender.extend_lease(key, generation, slots)
        lender.post_ready(key, generation, -1, tokens)
        lender.complete_lease(key, generation, tokens)
        borrower.pull(key, lender.endpoint, first_token=0, tokens=tokens, blocks=slots, budget_s=LOAN_S)
        while True:
            ready, _, _ = select([borrower.fileno()], [], [], LOAN_S)
            assert ready, "the pull did not end"
            for event in borrower.poll():
                assert event.kind is not EventKind.PULL_FAILED, event.detail
                if event.kind is EventKind.PULL_DONE:
                    backends.add(event.backend)
                    lender.poll()
                    return

    one, other = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
    memcpy = bytes_per_s(lambda: _discard(ctypes.memmove(one, other, size)), size, repeats)
    rate = bytes_per_s(pull, size, repeats)
    borrower.close()
    lender.close()
    name = f"{name}, {'/'.join(sorted(backends))}, checksums included"
    return Row.against(name, "GB/s", rate / 1e9, memcpy=memcpy / 1e9)


def measure_fragmentation() -> tuple[list[Row], str]:
    """Return the runs of neighbouring slots of a prompt's blocks, in a fresh pool and after random operations.

    Each block of each layer is one move whatever the slots are: runs would matter to readers that join neighbours.
    """
    random, slots = Random(1), 1024
    directory = PoolDirectory(slots, make_policy(PolicyName.S3_FIFO, slots))

    def runs(name: str) -> int:
        chain = [f"{name}/{index}".encode() for index in range(PROMPT_BLOCKS)]
        reserved = [slot for _, slot in directory.reserve(chain, 0)]
        directory.filled(chain)
        return 1 + sum(abs(after - before) != 1 for before, after in pairwise(reserved))

    fresh = runs("first")
    for _ in range(OPERATIONS):
        prompt = random.randrange(200)
        chain = [f"{prompt}/{index}".encode() for index in range(random.randint(1, PROMPT_BLOCKS))]
        if reached := directory.match(chain):
            directory.pin(chain, 0, reached)
            directory.unpin(chain[:reached])
        directory.filled([chain[index] for index, _ in directory.reserve(chain, 0)])
    later = statistics.median(runs(f"last {number}") for number in range(21))
    moves = PROMPT_BLOCKS * LAYERS
    rows = [
        Row(name="moves of a promotion of 1,500 tokens", unit="", ours=moves),
        Row(name="bytes per move", unit="KiB", ours=BLOCK_BYTES / 1024),
        Row.against("runs of slots of one prompt after random operations", "", later, fresh=fresh),
    ]
    return rows, f"{LAYERS} layers, blocks of {BLOCK_BYTES >> 10} KiB each"


def count_writes(prompts: Sequence[Sequence[int]], slots: int) -> tuple[int, int]:
    """Return the blocks that a file gets if they are written when saved, and if when evicted."""
    pool = PoolDirectory(slots, make_policy(PolicyName.S3_FIFO, slots))
    files = [PoolDirectory(FILE_SLOTS, make_policy(PolicyName.S3_FIFO, FILE_SLOTS)) for _ in range(2)]
    engine: OrderedDict[bytes, None] = OrderedDict()
    chains: dict[bytes, tuple[list[bytes], int]] = {}
    for prompt in prompts:
        chain = [block.to_bytes(8, "little") for block in prompt]
        chains |= {key: (chain, index) for index, key in enumerate(chain)}
        for key in reversed(chain):
            engine[key] = None
            engine.move_to_end(key)
        while len(engine) > ENGINE_BLOCKS:
            engine.popitem(last=False)
        for each in (pool, *files):
            each.touch(chain)
        pool.filled([chain[index] for index, _ in pool.reserve(chain, 0)])
        changes = pool.take_changes()
        for file, keys in zip(files, (changes.stored, changes.removed), strict=True):
            for key in keys:
                # A block is stored behind its predecessors only, so those that are missing are written with it.
                whole, index = chains[key]
                file.filled([whole[at] for at, _ in file.reserve(whole[: index + 1], 0)])
    at_save, at_eviction = (file.counts.stored for file in files)
    return at_save, at_eviction


def measure_writes() -> list[Row]:
    prompts = [request.blocks for request in load("conversation", 1).requests]
    rows: list[Row] = []
    for slots in POOL_SLOTS:
        at_save, at_eviction = count_writes(prompts, slots)
        name = f"blocks written at the save, pool of {slots:,}"
        rows.append(Row.against(name, "blocks", at_save, at_eviction=at_eviction))
    return rows


def _discard(_: object) -> None:
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=30, help="repeats of each move (default 30)")
    parser.add_argument("--folder", type=Path, help="folder for the file; default: a temporary one")
    arguments = parser.parse_args()
    moves, blocks = measure_fragmentation()
    pages, page_notes = measure_pages(arguments.repeats)
    nodes, node_notes = measure_nodes(arguments.repeats)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = [
            *measure_checksums(arguments.repeats),
            *pages,
            *nodes,
            *measure_moves(Path(folder), arguments.repeats),
            *measure_pulls(arguments.repeats),
            *moves,
            *measure_writes(),
        ]
    report("pool_parts", rows, notes="; ".join((blocks, page_notes, node_notes)))


if __name__ == "__main__":
    main()
