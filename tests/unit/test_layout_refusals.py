"""Invalid or unsuitable descriptors, ranges, pools and peers: typed errors, and nothing is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.errors import LayoutMismatch, MalformedMessage
from baton.transfer.layout import (
    Chunk,
    Layout,
    Pool,
    Table,
    agree,
    chunk_bytes,
    chunks,
    convert,
    gather,
    identical,
    plan,
    read_layout,
    scatter,
)
from tests.harness.transfer import Cache

WORDS: dict[str, Any] = {
    "layers": 2,
    "kv_heads": 4,
    "dim": 16,
    "dtype": "bfloat16",
    "order": "HND",
    "form": "fused",
    "packing": "vec",
    "block_tokens": 32,
}


def layout(**changes: Any) -> Layout:
    return Layout(**{**WORDS, **changes})


GOOD = layout()
HUGE = 2**32 - 1


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in ("layers", "kv_heads", "dim", "block_tokens", "tp_size")
          for value in (0, -1, 65537, 2**32, 2**70)),
        {"kv_heads": 6, "tp_size": 4},
        {"tp_rank": 1},
        {"tp_rank": -1},
        {"tp_rank": HUGE},
        {"dtype": "int8"},
        {"dtype": "bfloat16 order=HND"},
        {"order": "hnd"},
        {"form": ""},
        {"packing": "neon"},
        {"order": "NHD"},
        {"form": "split"},
        {"form": "latent", "packing": "plain"},
        {"packing": "amx", "dtype": "float32"},
        {"packing": "amx", "block_tokens": 8},
        {"packing": "amx", "dim": 24},
    ],
)  # fmt: skip
def test_a_layout_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="KV layout"):
        layout(**change)


def cut_and_edited(parts: tuple[int, bytes]) -> str:
    return str(GOOD)[: parts[0]] + parts[1].decode("latin-1")


@given(st.tuples(st.integers(0, 150), st.binary(max_size=9)).map(cut_and_edited))
@example("\x00")
@example("é" * 500)
def test_what_a_peer_sends_is_a_layout_or_a_malformed_message(text: str) -> None:
    try:
        assert str(read_layout(text)) == text
    except MalformedMessage as error:
        assert "KV layout" in error.detail


def test_a_layout_is_a_value_and_its_text_is_itself() -> None:
    again = read_layout(str(GOOD))
    assert (again, hash(again), {GOOD: 1}[again]) == (GOOD, hash(GOOD), 1)
    assert again != layout(packing="plain")
    assert eval(repr(GOOD), {"Layout": Layout}) == GOOD
    assert (GOOD.heads, GOOD.tensors, GOOD.block_bytes) == ((0, 4), 1, 2 * 4 * 32 * 16 * 2)
    assert {name: getattr(GOOD, name) for name in WORDS} == WORDS


@pytest.mark.parametrize(
    "change", [{"layers": 3}, {"kv_heads": 8}, {"dim": 32}, {"dtype": "float16"}, {"form": "latent", "kv_heads": 1}]
)
def test_layouts_that_cannot_be_converted_are_refused_with_both_named_in_full(change: dict[str, Any]) -> None:
    other = layout(**{"packing": "plain", **change})
    with pytest.raises(LayoutMismatch) as refused:
        agree(GOOD, other)
    assert str(GOOD) in refused.value.detail and str(other) in refused.value.detail
    with pytest.raises(ValueError, match="differ"):
        identical(GOOD, other)
    with pytest.raises(ValueError, match="differ"):
        plan(GOOD, Table([0]), other, Table([0]), 0, 1)


def test_only_equal_blocks_are_identical() -> None:
    assert identical(GOOD, GOOD)
    assert not identical(GOOD, layout(packing="plain"))
    assert not identical(GOOD, layout(block_tokens=64))
    assert not identical(layout(tp_size=2), layout(tp_size=2, tp_rank=1))
    # With one head, or one token, the order of both means nothing.
    for same in ("kv_heads", "block_tokens"):
        plain = {same: 1, "packing": "plain"}
        assert identical(layout(**plain), layout(**plain, order="NHD"))


@pytest.mark.parametrize(
    "change",
    [
        {"layer": 2},
        {"layer": HUGE},
        {"plane": "latent"},
        {"first_token": 0},
        {"first_token": HUGE},
        {"tokens": 0},
        {"tokens": 97},
        {"tokens": HUGE},
        {"heads": (0, 0)},
        {"heads": (0, 5)},
        {"heads": (3, 2)},
        {"heads": (HUGE, HUGE)},
    ],
)
def test_a_chunk_that_is_not_there_is_neither_read_nor_written(change: dict[str, Any]) -> None:
    cache = Cache(GOOD, blocks=(5, 2, 3), origin=3)
    good: dict[str, Any] = {"layer": 1, "plane": "k", "first_token": 3, "tokens": 96, "heads": (0, 4)}
    buffer = bytearray(chunk_bytes(GOOD, Chunk(**good)))
    chunk = Chunk(**(good | change))
    with pytest.raises(ValueError):
        gather(cache.pool, cache.table, chunk, buffer)
    with pytest.raises(ValueError):
        scatter(cache.pool, cache.table, chunk, buffer)
    assert cache.is_as_expected() and not any(buffer)


def test_buffers_tables_and_pools_that_do_not_fit_are_refused() -> None:
    cache = Cache(GOOD, blocks=(5, 2, 3))
    chunk = Chunk(layer=0, plane="v", first_token=0, tokens=96, heads=(0, 4))
    size = chunk_bytes(GOOD, chunk)
    for wrong in (0, size - 1, size + 1):
        with pytest.raises(ValueError, match="bytes in wire form"):
            gather(cache.pool, cache.table, chunk, bytearray(wrong))
        with pytest.raises(ValueError, match="bytes in wire form"):
            scatter(cache.pool, cache.table, chunk, bytes(wrong))
    with pytest.raises(BufferError):
        gather(cache.pool, cache.table, chunk, bytes(size))
    with pytest.raises(BufferError):
        scatter(cache.pool, cache.table, chunk, np.zeros((2, size), np.uint8)[:, ::2].data)
    with pytest.raises(ValueError, match="none with the number 8"):
        scatter(cache.pool, Table([5, 2, 8]), chunk, bytes(size))
    with pytest.raises(ValueError, match="none with the number"):
        convert(cache.pool, Table([HUGE] * 3), cache.pool, cache.table, 0, 96, 0, 1)
    for first_layer, layers in ((0, 0), (0, 3), (2, 1), (HUGE, HUGE)):
        with pytest.raises(ValueError, match="layers"):
            convert(cache.pool, cache.table, cache.pool, Table([0, 1, 4]), 0, 96, first_layer, layers)
    with pytest.raises(ValueError, match="holds not one token"):
        chunks(GOOD, 0, 0, 96, (0, 4), 31)
    addresses = [tensor.ctypes.data for tensor in cache.memory]
    for bad in ((addresses[:1], 8, 4096), ([0, addresses[1]], 8, 8192), (addresses, 0, 8192), (addresses, 8, 8191),
                (addresses, HUGE, 2**63)):  # fmt: skip
        with pytest.raises(ValueError):
            Pool(GOOD, *bad)
    assert cache.is_as_expected()


def test_a_rank_gives_no_heads_but_its_own() -> None:
    second = layout(tp_rank=1, tp_size=2)
    for heads in ((0, 1), (1, 2), (2, 3)):
        with pytest.raises(ValueError, match="not held by the rank"):
            chunk_bytes(second, Chunk(layer=0, plane="k", first_token=0, tokens=1, heads=heads))


@pytest.mark.parametrize("change", [("layers=2", "layers=02"), ("tp=0/1", "tp=0/1 "), ("dim=16", "dim=+16")])
def test_a_layout_has_one_text(change: tuple[str, str]) -> None:
    with pytest.raises(MalformedMessage):
        read_layout(str(GOOD).replace(*change))


def test_chunks_end_where_the_sinks_blocks_do() -> None:
    cut = chunks(GOOD, 0, 5, 96, (0, 4), 70 * 4 * 16 * 2)
    assert [(piece.plane, piece.first_token, piece.tokens) for piece in cut] == [
        (plane, first, tokens) for first, tokens in ((5, 59), (64, 37)) for plane in ("k", "v")
    ]
