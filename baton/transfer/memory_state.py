"""What an in-memory transfer agent keeps of a pull, and how it copies a block."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from zlib import crc32

from baton.errors import LayoutMismatch
from baton.identity import unlike
from baton.transfer.layout import Layout, Table, convert, matches, read_layout
from baton.transfer.layout import Pool as LayoutPool
from baton.transfer.protocol import Cause, Corruption, Faults, Pool


@dataclass(slots=True)
class Pull:
    """A pull at its sink."""

    endpoint: str
    first_token: int
    tokens: int
    blocks: tuple[int, ...]
    wanted_s: float
    """When it was asked for, or its lease was last seen open."""
    deadline_s: float
    moved_tokens: list[int]
    """Per layer, counted from the start of the context."""
    kept_alive_s: float
    began_s: float
    generation: int = 0
    """Of the lease while it is open, else 0."""
    serve_after_s: float | None = None
    """When an injected delay is over; None before anything was ready."""
    layers_reported: int = 0
    bytes: int = 0
    moving_s: float = 0.0
    restarts: int = 0
    cancelled: bool = False

    def restart(self) -> None:
        """What arrived is of a generation that is over."""
        self.restarts += self.generation > 0
        self.generation = 0
        self.moved_tokens = [self.first_token] * len(self.moved_tokens)

    def layers_whole(self) -> int:
        """Return how many layers, from the first on, have arrived."""
        missing = (layer for layer, tokens in enumerate(self.moved_tokens) if tokens < self.tokens)
        return next(missing, len(self.moved_tokens))


def refusal(source: Pool, sink: Pool) -> tuple[Cause, str]:
    """Return why two pools cannot exchange blocks, naming both sides; NONE where they can."""
    with_layouts = bool(source.layout and sink.layout)
    if source.fingerprint != sink.fingerprint:
        ours, theirs = unlike(sink.fingerprint, source.fingerprint)
        return Cause.MODEL, f"model differs: the sink has '{ours}', the source has '{theirs}'"
    if not with_layouts:
        compared = [
            ("number of layers", str(len(source.layer_addresses)), str(len(sink.layer_addresses))),
            ("bytes per block", str(source.block_bytes), str(sink.block_bytes)),
            ("tokens per block", str(source.block_tokens), str(sink.block_tokens)),
        ]
        for name, theirs, ours in compared:
            if theirs != ours:
                return Cause.REFUSED, f"{name} differs: the source has '{theirs}', the sink '{ours}'"
    if with_layouts:
        try:
            matches(read_layout(source.layout), read_layout(sink.layout))
        except LayoutMismatch as mismatch:
            return Cause.LAYOUT, mismatch.detail
    return Cause.NONE, ""


def read_block(pool: Pool, block: int, layer: int, *, faults: Faults | None, check: bool) -> bytearray | None:
    """Return a block of a layer, of all its tensors, as the faults make of it; None where its checksum is wrong."""
    tensors = tensors_of(pool)
    addresses = pool.layer_addresses[layer * tensors : (layer + 1) * tensors]
    parts = [ctypes.string_at(address + block * pool.block_stride_bytes, pool.block_bytes) for address in addresses]
    data = bytearray(b"".join(parts))
    checksum = crc32(data) if check else 0
    if faults is not None:
        data = corrupted(data, faults.corruption)
        if faults.before_checksum:
            return data
    return None if check and crc32(data) != checksum else data


def corrupted(data: bytearray, corruption: Corruption) -> bytearray:
    match corruption:
        case Corruption.FLIP:
            return bytearray((data[0] ^ 1,)) + data[1:]
        case Corruption.ZERO:
            return bytearray(len(data))
        case Corruption.SHIFT:
            shift = 64 if len(data) > 64 else len(data) // 2
            return data[shift:] + data[:shift]


def write_block(data: bytearray, pool: Pool, block: int, layer: int) -> None:
    """Write what was read from a block that is like this pool's."""
    tensors, size = tensors_of(pool), pool.block_bytes
    for tensor, address in enumerate(pool.layer_addresses[layer * tensors : (layer + 1) * tensors]):
        ctypes.memmove(
            address + block * pool.block_stride_bytes, bytes(data[tensor * size : (tensor + 1) * size]), size
        )


def convert_block(data: bytearray, source: Pool, position: int, sink: Pool, pull: Pull, layer: int) -> None:
    """Write the tokens of a source's block that the pull wants; the block begins at `position` of the sequence."""
    layout, own = Layout.parse(source.layout), Layout.parse(sink.layout)
    memory = (ctypes.c_char * len(data)).from_buffer(data)
    tensors = [ctypes.addressof(memory) + tensor * source.block_bytes for tensor in range(layout.tensors)]
    staged = LayoutPool(layout, tensors * layout.layers, 1, source.block_bytes)
    into = LayoutPool(own, sink.layer_addresses, sink.blocks, sink.block_stride_bytes)
    first = max(position, pull.first_token)
    tokens = min(position + source.block_tokens, pull.tokens) - first
    convert(staged, Table([0], position), into, Table(pull.blocks, pull.first_token), first, tokens, layer, 1)


def tensors_of(pool: Pool) -> int:
    """Return of how many tensors a layer consists."""
    return Layout.parse(pool.layout).tensors if pool.layout else 1


def layers_of(pool: Pool) -> int:
    return len(pool.layer_addresses) // tensors_of(pool)


def is_alike(source: Pool, sink: Pool) -> bool:
    """Return whether blocks can be moved whole between two pools that do not refuse each other."""
    return not (source.layout and sink.layout) or matches(read_layout(source.layout), read_layout(sink.layout))


def check_layout(pool: Pool) -> None:
    """Raise ValueError where the pool is not what its layout says."""
    if not pool.layout:
        return
    layout = Layout.parse(pool.layout)
    said = (layout.layers * layout.tensors, layout.block_bytes, layout.block_tokens)
    if said != (len(pool.layer_addresses), pool.block_bytes, pool.block_tokens):
        raise ValueError(f"the pool is not one of '{pool.layout}'")


def check_blocks(blocks: tuple[int, ...], pool: Pool) -> None:
    """Raise ValueError for a block that is not in the pool."""
    wrong = next((block for block in blocks if not 0 <= block < pool.blocks), None)
    if wrong is not None:
        raise ValueError(f"block {wrong} lies outside the pool of {pool.blocks} blocks")
