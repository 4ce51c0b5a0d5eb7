"""The simulated KV cache: the digest of a context follows from every byte of it, and from nothing else."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.engines.simulated.kv import ContextReader, KvChunk, KvPool, read_contexts
from baton.transfer.layout import Layout

LAYERS = 3
WORDS = 4
ALL = slice(0, LAYERS)
TOKENS = [random.Random(1).randrange(8000) for _ in range(200)]


def make_pool(block_tokens: int = 16, blocks: int = 40) -> KvPool:
    return KvPool(layers=LAYERS, blocks=blocks, block_tokens=block_tokens, layer_words=WORDS)


def make_table(pool: KvPool, tokens: int, seed: int = 0) -> list[int]:
    blocks = list(range(pool.blocks))
    random.Random(seed).shuffle(blocks)
    return blocks[: -(-tokens // pool.block_tokens)]


def digest(pool: KvPool, table: list[int], tokens: int) -> int:
    return read_contexts(pool, [(ContextReader(pool), table, tokens)])[0]


def write(pool: KvPool, table: list[int], tokens: list[int], start: int = 0, layers: slice = ALL) -> None:
    pool.write([KvChunk(table, tokens, start)], layers)


def written(tokens: list[int], seed: int = 0) -> tuple[KvPool, list[int]]:
    pool = make_pool()
    table = make_table(pool, len(tokens), seed)
    write(pool, table, tokens)
    return pool, table


@given(st.lists(st.integers(0, 8000), min_size=1, max_size=150), st.data())
def test_the_digest_does_not_depend_on_who_computed_what_when(tokens: list[int], data: st.DataObject) -> None:
    pool, table = written(tokens)
    expected = digest(pool, table, len(tokens))
    other = make_pool(block_tokens=data.draw(st.sampled_from([1, 8, 32])), blocks=200)
    other_table = make_table(other, len(tokens), seed=5)
    start = 0
    while start < len(tokens):
        end = data.draw(st.integers(start + 1, len(tokens)))
        for layer in range(LAYERS):
            write(other, other_table, tokens[start:end], start, slice(layer, layer + 1))
        start = end
    assert digest(other, other_table, len(tokens)) == expected


@given(
    length=st.integers(1, 200),
    place=st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 199), st.integers(0, WORDS - 1), st.integers(0, 63)),
)
def test_one_flipped_bit_anywhere_in_the_context_changes_the_digest(
    length: int, place: tuple[int, int, int, int]
) -> None:
    layer, position, word, bit = place
    pool, table = written(TOKENS)
    expected = digest(pool, table, length)
    slot = table[position // 16] * 16 + position % 16
    pool.words[layer, slot, word] ^= np.uint64(1 << bit)
    assert (digest(pool, table, length) != expected) is (position < length)


def test_foreign_shifted_stale_and_missing_blocks_change_the_digest() -> None:
    pool, table = written(TOKENS)
    expected = digest(pool, table, 200)
    others = [token + 1 for token in TOKENS]
    foreign = [block for block in range(pool.blocks) if block not in table][:13]
    write(pool, foreign, others)
    for index in range(len(table)):
        wrong = list(table)
        wrong[index] = foreign[index]
        assert digest(pool, wrong, 200) != expected, "another request's block at the same place"
        wrong[index] = table[index - 1]
        assert digest(pool, wrong, 200) != expected, "another block of this request"
        wrong[index] = pool.blocks - 1 if pool.blocks - 1 not in table else foreign[-1]
        assert digest(pool, wrong, 200) != expected, "a block that was not written"
    shifted = [*table[1:], table[0]]
    assert digest(pool, shifted, 200) != expected
    assert digest(pool, table, 199) != expected
    assert digest(pool, table, 200) == expected


def test_a_wrong_state_spoils_every_token_after_it() -> None:
    pool, table = written(TOKENS[:100])
    expected_pool, expected_table = written(TOKENS[:101])
    slot = table[99 // 16] * 16 + 99 % 16
    pool.words[0, slot, 0] ^= np.uint64(1)
    write(pool, table, [TOKENS[100]], 100)
    pool.words[0, slot, 0] ^= np.uint64(1)
    assert digest(pool, table, 101) != digest(expected_pool, expected_table, 101)


def test_a_block_overwritten_under_a_reader_shows_at_its_next_step() -> None:
    for victim in range(12):
        pool, table = written(TOKENS)
        reader = ContextReader(pool)
        expected = read_contexts(pool, [(reader, table, 199)])[0]
        assert read_contexts(pool, [(reader, table, 199)])[0] == expected
        write(pool, [*table[:victim], table[victim]], [token + 1 for token in TOKENS[: 16 * (victim + 1)]])
        assert read_contexts(pool, [(reader, table, 199)])[0] != expected


def test_reading_step_by_step_is_reading_at_once() -> None:
    pool, table = written(TOKENS)
    reader = ContextReader(pool)
    for tokens in (1, 2, 15, 16, 17, 18, 60, 61, 64, 65, 150, 200):
        assert read_contexts(pool, [(reader, table, tokens)])[0] == digest(pool, table, tokens)


def test_many_contexts_are_read_and_written_as_if_alone() -> None:
    lengths = [1, 5, 16, 17, 33]
    pool = make_pool()
    tables = [[3 * number + index for index in range(3)] for number in range(len(lengths))]
    prompts = [TOKENS[number : number + length] for number, length in enumerate(lengths)]
    pool.write([KvChunk(table, prompt, 0) for table, prompt in zip(tables, prompts, strict=True)], ALL)
    pool.write([KvChunk(table, [7], length) for table, length in zip(tables, lengths, strict=True)], ALL)
    contexts = [(ContextReader(pool), table, length + 1) for table, length in zip(tables, lengths, strict=True)]
    together = read_contexts(pool, contexts)
    for prompt, found in zip(prompts, together, strict=True):
        alone, table = written([*prompt, 7])
        assert found == digest(alone, table, len(prompt) + 1)


def test_the_pool_lies_in_memory_as_it_says() -> None:
    pool, _ = written(TOKENS)
    described = pool.describe("a fingerprint")
    assert Layout.parse(described.layout).block_bytes == described.block_bytes
    assert described.block_bytes == described.block_stride_bytes == 16 * WORDS * 8
    assert len(described.layer_addresses) == LAYERS
    for layer, address in enumerate(described.layer_addresses):
        assert address == pool.words[layer].ctypes.data
