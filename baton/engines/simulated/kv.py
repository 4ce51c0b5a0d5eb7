"""The simulated engine's KV cache: real bytes in a paged pool, and what a context in it means.

One token's KV in one layer is `layer_words` 64-bit words. The first is the layer's rolling state,

    state[p] = state[p - 1] + mix(token, p, layer)                                          modulo 2^64

where state[p - 1] is *read back from the pool*, and the others are the state times fixed odd numbers.
The next token follows from `ContextReader.digest`, a sum over every word of every token of the
context as the pool has it at that moment, weighted by position and layer. So a block that is wrong,
stale, missing, shifted or of another request changes the output: one flipped bit always, since odd
weights keep it apart from zero; a larger change except by a collision of 64 bits. The digest does not
depend on the block size or on who computed the KV.

Reading all of a long context at every step would cost more than the step it stands for. So a reader
reads each token's bytes once when it first samples from them, the newest block again at every step,
and the state of every 16th token again at every step: a block overwritten under a running request shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.identity import NONE, KvIdentity
from baton.transfer import Pool
from baton.transfer.layout import Layout

Words = NDArray[np.uint64]
Indexes = NDArray[np.int64]

MASK: Final = (1 << 64) - 1
_FLOAT_BYTES: Final = 4
"""Words are moved, never computed with, as two elements of the widest type that layouts know."""
GUARD_TOKENS: Final = 16
"""Interval, in tokens, of the states that are read again at each step."""

_TOKEN: Final = np.uint64(0x9E3779B97F4A7C15)
_POSITION: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_LAYER: Final = np.uint64(0x165667B19E3779F9)
_GUARD: Final = np.uint64(0x27D4EB2F165667C5)
_SPREAD: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


def mix(words: Words) -> Words:
    """Return each word well mixed. Source: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    mixed = words ^ (words >> _SHIFTS[0])
    mixed *= _SPREAD[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _SPREAD[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def mix_word(word: int) -> int:
    """Return `mix` of one word, in Python's integers."""
    word &= MASK
    word = ((word ^ (word >> 30)) * int(_SPREAD[0])) & MASK
    word = ((word ^ (word >> 27)) * int(_SPREAD[1])) & MASK
    return word ^ (word >> 31)


class KvChunk(msgspec.Struct, frozen=True):
    """Tokens to compute: `tokens` stand at `start` of a context whose blocks `table` lists."""

    table: Sequence[int]
    tokens: Sequence[int]
    start: int


class KvPool:
    """The paged pool, layer-major: layer l is one span of `blocks` blocks, as in the real engines."""

    def __init__(self, *, layers: int, blocks: int, block_tokens: int, layer_words: int) -> None:
        self.layers = layers
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.layer_words = layer_words
        # Pages come from the machine on first touch, so a large pool costs nothing until it is used.
        self.words: Words = np.zeros((layers, blocks * block_tokens, layer_words), dtype=np.uint64)
        numbers = np.arange(layer_words, dtype=np.uint64)
        self._body: Words = mix(numbers * _TOKEN) | np.uint64(1)
        self._body[0] = 1
        self._weights: Words = mix(numbers * _POSITION + _LAYER) | np.uint64(1)
        self._layer_numbers: Words = np.arange(layers, dtype=np.uint64)[:, None] * _LAYER

    @property
    def layout(self) -> Layout:
        """Return a block's layout in the transfer agents' terms: one row of words for each token."""
        return Layout(
            layers=self.layers,
            kv_heads=1,
            dim=self.words.itemsize // _FLOAT_BYTES * self.layer_words,
            dtype="float32",
            order="NHD",
            form="latent",
            block_tokens=self.block_tokens,
        )

    def identity(self, model: str, digest: str) -> str:
        """Return the KV identity: only simulated engines of the same model can use the rows."""
        layout = self.layout
        return str(
            KvIdentity(
                model=model,
                digest=digest,
                layers=layout.layers,
                kv_heads=layout.kv_heads,
                dim=layout.dim,
                dtype=layout.dtype,
                rope=NONE,
            )
        )

    def describe(self, fingerprint: str) -> Pool:
        """Return the pool's description for a transfer agent."""
        block_bytes = self.block_tokens * self.layer_words * self.words.itemsize
        base, stride = self.words.ctypes.data, self.blocks * block_bytes
        return Pool(
            layer_addresses=tuple(base + layer * stride for layer in range(self.layers)),
            blocks=self.blocks,
            block_bytes=block_bytes,
            block_stride_bytes=block_bytes,
            block_tokens=self.block_tokens,
            fingerprint=fingerprint,
            layout=str(self.layout),
        )

    def slots(self, table: Sequence[int], start: int, end: int) -> Indexes:
        """Return where tokens [start, end) of a block table lie, counted in tokens of the pool."""
        first = start // self.block_tokens
        blocks = np.array(table[first : -(-end // self.block_tokens)], dtype=np.int64)
        positions = np.arange(start, end, dtype=np.int64)
        return blocks[positions // self.block_tokens - first] * self.block_tokens + positions % self.block_tokens

    def write(self, chunks: Sequence[KvChunk], layers: slice) -> None:
        """Compute the KV of all `chunks` in some of the layers."""
        singles = [chunk for chunk in chunks if len(chunk.tokens) == 1 and chunk.start]
        if singles:
            # One pass over all sequences that decode: their number, not their length, is what costs here.
            size = self.block_tokens
            starts = np.array([chunk.start for chunk in singles], dtype=np.int64)
            within = starts % size
            slots = np.array([chunk.table[chunk.start // size] for chunk in singles], dtype=np.int64) * size + within
            before = slots - 1
            for index in np.flatnonzero(within == 0):
                # The token before is in another block.
                chunk = singles[int(index)]
                before[index] = chunk.table[chunk.start // size - 1] * size + size - 1
            states = self._own_states([chunk.tokens[0] for chunk in singles], starts, layers)
            states += self.words[layers, before, 0]
            self.words[layers, slots] = states[:, :, None] * self._body
        for chunk in chunks:
            if len(chunk.tokens) > 1 or not chunk.start:
                self._write_run(chunk, layers)

    def _write_run(self, chunk: KvChunk, layers: slice) -> None:
        end = chunk.start + len(chunk.tokens)
        states = self._own_states(chunk.tokens, np.arange(chunk.start, end, dtype=np.int64), layers)
        if chunk.start:
            before = self.slots(chunk.table, chunk.start - 1, chunk.start)[0]
            states[:, 0] += self.words[layers, before, 0]
        np.cumsum(states, axis=1, out=states)
        self.words[layers, self.slots(chunk.table, chunk.start, end)] = states[:, :, None] * self._body

    def _own_states(self, tokens: Sequence[int], positions: Indexes, layers: slice) -> Words:
        """Return what each token adds to the rolling state, by layer and token."""
        ids = np.array(tokens, dtype=np.uint64) + np.uint64(1)
        return mix(ids * _TOKEN + positions.astype(np.uint64) * _POSITION + self._layer_numbers[layers])

    def attend(self, slots: Indexes, positions: Indexes) -> Words:
        """Return, for each token, the weighted sum over every word of its KV."""
        mixed = mix(
            self.words[:, slots] @ self._weights + positions.astype(np.uint64) * _POSITION + self._layer_numbers
        )
        return mixed.sum(axis=0)

    def guard(self, slots: Indexes, positions: Indexes) -> Words:
        """Return, for each token, the weighted sum over its states."""
        mixed = mix(self.words[:, slots, 0] + positions.astype(np.uint64) * _GUARD + self._layer_numbers)
        return mixed.sum(axis=0)


class ContextReader:
    """The part of one request's context that has been read; the module's docstring says what is read when."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self.forget()

    def forget(self) -> None:
        """Start again, because the context now lies in other blocks."""
        self.read_tokens = 0
        self.sum = 0
        self.newest_slot = 0
        """Slot of the first token that is read at every step."""
        self.guard_slots: Indexes = np.empty(0, dtype=np.int64)
        self.read_until_tokens = 0
        """Length of the context up to which `read_to` has nothing to do."""

    def read_to(self, table: Sequence[int], tokens: int) -> None:
        """Read all bytes of the blocks before the one that holds the last token."""
        size = self._pool.block_tokens
        newest = (tokens - 1) // size * size
        if newest > self.read_tokens:
            slots = self._pool.slots(table, self.read_tokens, newest)
            words = self._pool.attend(slots, np.arange(self.read_tokens, newest, dtype=np.int64))
            self.sum = (self.sum + int(words.sum())) & MASK
            self.read_tokens = newest
        self.newest_slot = table[newest // size] * size
        guarded = np.arange(len(self.guard_slots) * GUARD_TOKENS, tokens, GUARD_TOKENS, dtype=np.int64)
        if guarded.size:
            blocks = np.array([table[position // size] for position in guarded.tolist()], dtype=np.int64)
            self.guard_slots = np.concatenate((self.guard_slots, blocks * size + guarded % size))
        self.read_until_tokens = min(newest + size, len(self.guard_slots) * GUARD_TOKENS)


def read_contexts(pool: KvPool, contexts: Sequence[tuple[ContextReader, Sequence[int], int]]) -> list[int]:
    """Return a digest for each (reader, block table, tokens): 64 bits that follow from the KV bytes of those tokens."""
    for reader, table, tokens in contexts:
        if tokens > reader.read_until_tokens:
            reader.read_to(table, tokens)
    readers = [reader for reader, _, _ in contexts]
    lengths = np.array([tokens for _, _, tokens in contexts], dtype=np.int64)
    # The newest blocks of all contexts are read in one pass, and so are the guards.
    firsts = np.array([reader.read_tokens for reader in readers], dtype=np.int64)
    slots = np.array([reader.newest_slot for reader in readers], dtype=np.int64)
    counts = lengths - firsts
    within, heads = _count_up(counts)
    tails = pool.attend(np.repeat(slots, counts) + within, np.repeat(firsts, counts) + within)
    order, guard_heads = _count_up(np.array([len(reader.guard_slots) for reader in readers], dtype=np.int64))
    states = pool.guard(np.concatenate([reader.guard_slots for reader in readers]), order * GUARD_TOKENS)
    sums = np.add.reduceat(tails, heads) + np.add.reduceat(states, guard_heads)
    sums += np.array([reader.sum for reader in readers], dtype=np.uint64)
    return mix(sums + lengths.astype(np.uint64)).tolist()


def _count_up(counts: Indexes) -> tuple[Indexes, Indexes]:
    """Return 0, 1, … for each count in turn, and where each begins: [2, 3] gives [0, 1, 0, 1, 2] and [0, 2]."""
    ends = np.cumsum(counts)
    heads = ends - counts
    return np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(heads, counts), heads
