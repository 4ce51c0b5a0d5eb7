"""The speed of KV conversions on one core: `make bench-layout`.

A layer of 2,048 tokens of a Llama-8B layout (8 KV heads of 128 dimensions) moves between an engine's
scattered blocks and the wire form, through one buffer that is reused, as in a transfer. Peers in the same
interleaved rounds: memcpy of the same bytes between the same memory, and plain torch.

`in memory`: the cache is larger than the last-level cache. `in cache`: 128 tokens over and over, which
leaves out the memory's speed and shows the code's. Times are the thread's own processor time, so other
load on the machine does not count, except where it takes memory bandwidth.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import time
from collections.abc import Callable

import torch

from baton.transfer.layout import Chunk, Layout, Pool, Table, chunk_bytes, chunks, gather, scatter
from benchmarks.report import Row, report

HEADS, DIM = 8, 128
CHUNK_BYTES = 512 << 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = {
    "vec, blocks of 32": ("HND", "fused", "vec", 32),
    "vec, blocks of 128": ("HND", "fused", "vec", 128),
    "amx, blocks of 32": ("HND", "fused", "amx", 32),
    "NHD, pages of 1": ("NHD", "split", "plain", 1),
    "NHD, pages of 32": ("NHD", "split", "plain", 32),
    "NHD, pages of 64": ("NHD", "split", "plain", 64),
}
PLACES = {"in memory": (16, 2048), "in cache": (1, 128)}
"""Layers and tokens."""

# For plain torch: the shape of a chunk's [head][token][dim], and in which order its axes lie in the blocks.
AXES = {
    ("vec", "k"): ((HEADS, -1, "block", DIM), (1, 0, 3, 2)),
    ("vec", "v"): ((HEADS, -1, "block", DIM), (1, 0, 2, 3)),
    ("amx", "k"): ((HEADS, -1, "block/16", 16, DIM // 2, 2), (1, 0, 2, 4, 3, 5)),
    ("amx", "v"): ((HEADS, -1, "block/2", 2, DIM // 16, 16), (1, 0, 4, 2, 5, 3)),
    ("plain", "k"): ((HEADS, -1, "block", DIM), (1, 2, 0, 3)),
    ("plain", "v"): ((HEADS, -1, "block", DIM), (1, 2, 0, 3)),
}


class Case:
    """A cache, a sequence scattered over half of its blocks, and one buffer for chunks."""

    def __init__(self, layout: Layout, tokens: int) -> None:
        self.layout = layout
        dtype = DTYPES[layout.dtype]
        blocks = 2 * tokens // layout.block_tokens
        chosen = random.Random(0).sample(range(blocks), blocks // 2)
        elements = layout.block_bytes // dtype.itemsize
        # One allocation in which every tensor begins at a cache line, as in an engine.
        self.memory = torch.ones((layout.layers * layout.tensors, blocks, elements), dtype=dtype)
        self.pool = Pool(
            layout, [tensor.data_ptr() for tensor in self.memory], blocks, layout.block_bytes
        )  # fmt: skip
        self.table = Table(chosen)
        self.chosen = torch.tensor(chosen)
        self.buffer = torch.ones(CHUNK_BYTES // dtype.itemsize, dtype=dtype)
        self.pieces = [
            piece
            for layer in range(layout.layers)
            for piece in chunks(layout, layer, 0, tokens, (0, layout.kv_heads), CHUNK_BYTES)
        ]
        self.bytes = sum(chunk_bytes(layout, piece) for piece in self.pieces)

    def ours(self, piece: Chunk, *, to_wire: bool) -> None:
        data = self.buffer.view(torch.uint8).numpy().data[: chunk_bytes(self.layout, piece)]
        if to_wire:
            gather(self.pool, self.table, piece, data)
        else:
            scatter(self.pool, self.table, piece, data)

    def memcpy(self, piece: Chunk, *, to_wire: bool) -> None:
        size = chunk_bytes(self.layout, piece)
        tensor = self.memory[self._tensor(piece)]
        place = tensor.data_ptr() + piece.first_token * HEADS * DIM * tensor.itemsize
        if self.layout.form == "fused" and piece.plane == "v":
            place += tensor.nbytes // 2
        wire = self.buffer.data_ptr()
        ctypes.memmove(wire if to_wire else place, place if to_wire else wire, size)

    def torch(self, piece: Chunk, *, to_wire: bool) -> None:
        tokens, block_tokens = piece.tokens, self.layout.block_tokens
        shape, order = AXES[self.layout.packing, piece.plane]
        sizes = {"block": block_tokens, "block/16": block_tokens // 16, "block/2": block_tokens // 2}
        wire = self.buffer[: HEADS * tokens * DIM].view([sizes[n] if isinstance(n, str) else n for n in shape])
        wire = wire.permute(order)
        cells = self.memory[self._tensor(piece)]
        if self.layout.form == "fused":
            cells = cells.view(len(cells), HEADS, 2, -1)[:, :, 0 if piece.plane == "k" else 1]
        cells = cells.view(len(cells), *wire.shape[1:])
        first = piece.first_token // block_tokens
        blocks = self.chosen[first : first + tokens // block_tokens]
        if to_wire:
            wire.copy_(cells[blocks])
        else:
            cells[blocks] = wire

    def _tensor(self, piece: Chunk) -> int:
        return piece.layer * self.layout.tensors + (piece.plane == "v") * (self.layout.tensors - 1)

    def took_s(self, way: Callable[..., None], repeats: int = 1, *, to_wire: bool) -> float:
        """Return this thread's processor time for all tokens of all layers."""
        began_s = time.thread_time()
        for _ in range(repeats):
            for piece in self.pieces:
                way(piece, to_wire=to_wire)
        return time.thread_time() - began_s


def measure(name: str, case: Case, rounds: int) -> list[Row]:
    repeats = max(1, (64 << 20) // case.bytes)
    rows: list[Row] = []
    for to_wire, direction in ((True, "to the wire"), (False, "from the wire")):
        ways = {"ours": case.ours, "memcpy": case.memcpy, "torch": case.torch}
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, call in ways.items():
                rates[way].append(repeats * case.bytes / case.took_s(call, repeats, to_wire=to_wire) / 1e9)
        # The first round also pays for memory that is touched for the first time.
        medians = {way: statistics.median(values[1:]) for way, values in rates.items()}
        rows.append(Row.against(f"{name}, {direction}", "GB/s", medians.pop("ours"), **medians))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each (default 7)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for place, (layers, tokens) in PLACES.items():
        for kind, (order, form, packing, block_tokens) in LAYOUTS.items():
            for dtype in DTYPES:
                if packing == "amx" and dtype == "float32":
                    continue
                layout = Layout(
                    layers=layers,
                    kv_heads=HEADS,
                    dim=DIM,
                    dtype=dtype,
                    order=order,
                    form=form,
                    packing=packing,
                    block_tokens=block_tokens,
                )
                rows += measure(f"{place}: {dtype}, {kind}", Case(layout, tokens), arguments.rounds)
    report("layout", rows, notes=f"medians of {arguments.rounds} interleaved rounds; ratio is ours to memcpy")


if __name__ == "__main__":
    main()
