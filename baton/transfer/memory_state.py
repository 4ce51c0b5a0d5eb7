"""What an in-memory transfer agent keeps of each lease and pull, and how it copies a block."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from zlib import crc32

from baton.errors import LayoutMismatch
from baton.transfer.layout import Layout, matches, read_layout
from baton.transfer.protocol import Cause, Pool


@dataclass(slots=True)
class Lease:
    """A lease at its source; while it is revoked it is not open, and has the next generation already."""

    generation: int
    opened_s: float
    layers: int
    open: bool = False
    unclaimed_ttl_s: float = 0.0
    blocks: list[int] = field(default_factory=list[int])
    ready_tokens: list[int] = field(default_factory=list[int])
    """Per layer."""
    complete_tokens: int | None = None
    claimed_s: float | None = None
    """When a sink last said that it wants the lease."""

    def reset(self) -> None:
        self.blocks = []
        self.ready_tokens = [0] * self.layers
        self.complete_tokens = None

    def expires_s(self, claimed_ttl_s: float) -> float:
        if self.claimed_s is None:
            return self.opened_s + self.unclaimed_ttl_s
        return self.claimed_s + claimed_ttl_s


@dataclass(frozen=True, slots=True)
class EndedLease:
    cause: Cause
    """NONE: the sink released it."""
    generation: int
    by_sink: bool
    """The sink is done with it: when it is opened, for the first time or again, it ends at once."""


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
    compared = [("fingerprint", source.fingerprint, sink.fingerprint)]
    if not with_layouts:
        compared += [
            ("number of layers", str(len(source.layer_addresses)), str(len(sink.layer_addresses))),
            ("bytes per block", str(source.block_bytes), str(sink.block_bytes)),
            ("tokens per block", str(source.block_tokens), str(sink.block_tokens)),
        ]
    for name, theirs, ours in compared:
        if theirs != ours:
            return Cause.REFUSED, f"{name} differs: the source has '{theirs}', the sink '{ours}'"
    if with_layouts:
        try:
            if not matches(read_layout(source.layout), read_layout(sink.layout)):
                return Cause.LAYOUT, f"only equal blocks are moved: '{source.layout}' and '{sink.layout}'"
        except LayoutMismatch as mismatch:
            return Cause.LAYOUT, mismatch.detail
    return Cause.NONE, ""


def copy_block(source: Pool, origin: int, sink: Pool, target: int, layer: int, *, corrupt: bool, check: bool) -> bool:
    """Copy one block of one layer; False where its checksum is wrong, and then nothing was written."""
    address = source.layer_addresses[layer] + origin * source.block_stride_bytes
    data = bytearray(ctypes.string_at(address, source.block_bytes))
    checksum = crc32(data) if check else 0
    if corrupt:
        data[0] ^= 1
    if check and crc32(data) != checksum:
        return False
    ctypes.memmove(sink.layer_addresses[layer] + target * sink.block_stride_bytes, bytes(data), len(data))
    return True


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
