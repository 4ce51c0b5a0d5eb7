"""A naive paged KV cache in numpy: the oracle that native conversions must match byte for byte.

Elements are unsigned integers of the dtype's size: conversions move bits and do no arithmetic. A cache is
kept in logical order, `(layers, planes, slots, heads, dim)`, and written out as bytes by transposing, so it
shares no formula with the native code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.transfer.layout import Layout, Pool, Table

Elements = NDArray[Any]
Data = NDArray[np.uint8]

ELEMENTS: dict[str, type[np.unsignedinteger[Any]]] = {
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float8_e4m3": np.uint8,
    "float8_e5m2": np.uint8,
}


def random_elements(layout: Layout, shape: tuple[int, ...], seed: int) -> Elements:
    element = ELEMENTS[layout.dtype]
    return np.random.default_rng(seed).integers(0, np.iinfo(element).max, shape, dtype=element, endpoint=True)


def block_tensors(layout: Layout, kv: Elements) -> list[Elements]:
    """Return one block's tensors, flat, from `kv` (planes, tokens, heads, dim)."""
    if layout.form == "latent":
        return [kv[0].ravel()]
    k, v = kv
    if layout.packing == "plain":
        planes = [np.concatenate([k, v], axis=-1)] if layout.form == "fused" else [k, v]
        return [(plane if layout.order == "NHD" else plane.swapaxes(0, 1)).ravel() for plane in planes]
    tokens, heads, dim = k.shape
    parts: list[Elements] = []
    for head in range(heads):
        own_k, own_v = k[:, head], v[:, head]
        if layout.packing == "amx":
            own_k = own_k.reshape(tokens // 16, 16, dim // 2, 2).transpose(0, 2, 1, 3)
            own_v = own_v.reshape(tokens // 2, 2, dim // 16, 16).transpose(2, 0, 3, 1)
        else:
            own_k = own_k.T
        parts += [own_k.ravel(), own_v.ravel()]
    return [np.concatenate(parts)]


@dataclass
class Cache:
    """One rank's cache, its memory, and the position of a sequence in it."""

    layout: Layout
    blocks: tuple[int, ...]
    """Block table of the sequence."""
    origin: int = 0
    pool_blocks: int = 8
    gap_bytes: int = 0
    """Distance between two blocks of a tensor."""
    seed: int = 1
    kv: Elements = field(init=False)
    """(layers, planes, slots, heads, dim): the expected content; random at first."""
    memory: list[Data] = field(init=False)
    """One array per layer and tensor: (pool_blocks, stride_bytes)."""

    def __post_init__(self) -> None:
        planes = 1 if self.layout.form == "latent" else 2
        slots = self.pool_blocks * self.layout.block_tokens
        shape = (self.layout.layers, planes, slots, self.layout.heads[1], self.layout.dim)
        self.kv = random_elements(self.layout, shape, self.seed)
        self.memory = self.expected()

    def expected(self) -> list[Data]:
        """Return the memory content that `kv` requires."""
        tokens = self.layout.block_tokens
        memory: list[Data] = []
        for layer in self.kv:
            tensors = [
                np.full((self.pool_blocks, self.layout.block_bytes + self.gap_bytes), 0xA5, dtype=np.uint8)
                for _ in range(self.layout.tensors)
            ]
            for block in range(self.pool_blocks):
                held = layer[:, block * tokens : (block + 1) * tokens]
                for tensor, elements in zip(tensors, block_tensors(self.layout, held), strict=True):
                    tensor[block, : self.layout.block_bytes] = np.ascontiguousarray(elements).view(np.uint8)
            memory += tensors
        return memory

    def slots(self, first_token: int, tokens: int) -> NDArray[np.int64]:
        """Return the pool slots that hold the sequence's tokens [first_token, first_token + tokens)."""
        positions = np.arange(first_token, first_token + tokens) - self.origin
        size = self.layout.block_tokens
        return np.array(self.blocks)[positions // size] * size + positions % size

    def wire(self, layer: int, plane: int, first_token: int, tokens: int, heads: tuple[int, int]) -> bytes:
        """Return a chunk's expected wire form, [head][token][dim]."""
        first = heads[0] - self.layout.heads[0]
        rows = self.kv[layer, plane, self.slots(first_token, tokens), first : first + heads[1]]
        return rows.swapaxes(0, 1).tobytes()

    @property
    def table(self) -> Table:
        return Table(self.blocks, self.origin)

    @property
    def pool(self) -> Pool:
        """Return the native description of the memory, which is valid as long as this object."""
        addresses = [tensor.ctypes.data for tensor in self.memory]
        return Pool(self.layout, addresses, self.pool_blocks, self.layout.block_bytes + self.gap_bytes)

    def is_as_expected(self) -> bool:
        return all(map(np.array_equal, self.memory, self.expected()))
