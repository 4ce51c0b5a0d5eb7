"""Every conversion of the wire layout against the naive oracle, over pairs of layouts, ranges and tables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    plan,
    scatter,
)
from tests.harness.transfer import Cache

# Many examples, on machines that do other things too.

BLOCK_TOKENS = (1, 16, 32, 64, 128)
SHAPES = tuple(
    (order, form, packing)
    for order, form, packing in itertools.product(("NHD", "HND"), ("split", "fused"), ("plain", "vec", "amx"))
    if packing == "plain" or (order, form) == ("HND", "fused")
)
PLANES = ("k", "v")
RANKS = (1, 2, 3, 4, 6, 12, 24)


@dataclass(frozen=True)
class Model:
    kv_heads: int
    dim: int
    dtype: str
    latent: bool = False
    layers: int = 2


models = st.one_of(
    st.builds(
        Model,
        kv_heads=st.sampled_from((1, 2, 4, 6)),
        # Multiples of the vectors' width and not: the tails of rows are code of their own.
        dim=st.sampled_from((1, 5, 16, 20, 64, 80)),
        dtype=st.sampled_from(("float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2")),
    ),
    st.builds(
        Model, kv_heads=st.just(1), dim=st.sampled_from((40, 576)), dtype=st.just("bfloat16"), latent=st.just(True)
    ),
)


@st.composite
def layouts(draw: st.DrawFn, model: Model) -> Layout:
    shapes = [
        shape
        for shape in SHAPES
        if shape[2] != "amx" or (model.dim % 16 == 0 and model.dtype != "float32" and not model.latent)
    ]
    order, form, packing = draw(st.sampled_from(shapes))
    if model.latent:
        form, packing = "latent", "plain"
    sizes = [size for size in BLOCK_TOKENS if packing != "amx" or size % 16 == 0]
    tp_sizes = (1, 2, 4) if model.latent else [size for size in (1, 2, 4, 6, 12) if fits(model.kv_heads, size)]
    tp_size = draw(st.sampled_from(tp_sizes))
    return Layout(
        layers=model.layers,
        kv_heads=model.kv_heads,
        dim=model.dim,
        dtype=model.dtype,
        order=order,
        form=form,
        packing=packing,
        block_tokens=draw(st.sampled_from(sizes)),
        tp_rank=draw(st.integers(0, tp_size - 1)),
        tp_size=tp_size,
    )


def fits(heads: int, ranks: int) -> bool:
    return heads % ranks == 0 or ranks % heads == 0


def rank(layout: Layout, tp_rank: int) -> Layout:
    return Layout.parse(str(layout).rpartition("tp=")[0] + f"tp={tp_rank}/{layout.tp_size}")


@st.composite
def caches(draw: st.DrawFn, layout: Layout, first_token: int, tokens: int, seed: int) -> Cache:
    """A cache whose table covers the range: it begins earlier by some tokens, and its blocks are anywhere."""
    origin = draw(st.integers(max(0, first_token - 2 * layout.block_tokens), first_token))
    needed = -(-(first_token + tokens - origin) // layout.block_tokens)
    pool_blocks = needed + 3
    scattered = draw(st.permutations(range(pool_blocks)))[:needed]
    in_order = tuple(range(1, 1 + needed))
    return Cache(
        layout,
        blocks=draw(st.sampled_from((tuple(scattered), in_order))),
        origin=origin,
        pool_blocks=pool_blocks,
        gap_bytes=draw(st.sampled_from((0, 24))),
        seed=seed,
    )


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int]:
    return draw(st.integers(0, 70)), draw(st.one_of(st.integers(1, 150), st.sampled_from((1, 32, 64, 128))))


def carry_over(source: Cache, sink: Cache, first_token: int, tokens: int, heads: tuple[int, int], layer: int) -> None:
    """Do to what the sink is meant to hold what a conversion has to do to its bytes."""
    theirs, ours = (slice(heads[0] - c.layout.heads[0], sum(heads) - c.layout.heads[0]) for c in (source, sink))
    rows = source.kv[layer][:, source.slots(first_token, tokens), theirs]
    sink.kv[layer][:, sink.slots(first_token, tokens), ours] = rows


def common_heads(source: Layout, sink: Layout) -> tuple[int, int]:
    first = max(source.heads[0], sink.heads[0])
    return first, min(sum(source.heads), sum(sink.heads)) - first


@given(st.data())
def test_a_conversion_writes_the_tokens_it_was_asked_for_and_nothing_else(data: st.DataObject) -> None:
    model = data.draw(models)
    first_token, tokens = data.draw(ranges())
    sink = data.draw(layouts(model).flatmap(lambda layout: caches(layout, first_token, tokens, 1)))
    layout = data.draw(layouts(model))
    share = data.draw(st.sampled_from(agree(layout, sink.layout)))
    source = data.draw(caches(rank(layout, share.source_rank), first_token, tokens, 2))
    layer = data.draw(st.integers(0, model.layers - 1))

    moved = convert(source.pool, source.table, sink.pool, sink.table, first_token, tokens, layer, model.layers - layer)

    assert common_heads(source.layout, sink.layout) == share.heads
    for converted in range(layer, model.layers):
        carry_over(source, sink, first_token, tokens, share.heads, converted)
    assert sink.is_as_expected()
    assert source.is_as_expected()
    row_bytes = model.dim * source.kv.itemsize
    assert moved == (model.layers - layer) * source.kv.shape[1] * tokens * share.heads[1] * row_bytes


@given(st.data())
def test_chunks_in_wire_form_are_heads_of_tokens_of_dimensions_and_arrive_whole(data: st.DataObject) -> None:
    model = data.draw(models)
    first_token, tokens = data.draw(ranges())
    sink = data.draw(layouts(model).flatmap(lambda layout: caches(layout, first_token, tokens, 1)))
    layout = data.draw(layouts(model))
    # Of all the ranks that the sink asks, so that all of its heads come.
    sources = [
        (share.heads, data.draw(caches(rank(layout, share.source_rank), first_token, tokens, 2 + number)))
        for number, share in enumerate(agree(layout, sink.layout))
    ]
    row_bytes = model.dim * sink.kv.itemsize
    bytes_max = data.draw(st.integers(row_bytes, 200 * row_bytes))
    names = ("latent",) if model.latent else PLANES

    for heads, source in sources:
        pieces = chunks(sink.layout, 1, first_token, tokens, heads, bytes_max)
        for piece in pieces:
            wire = bytearray(chunk_bytes(source.layout, piece))
            assert len(wire) <= bytes_max
            gather(source.pool, source.table, piece, wire)
            plane = names.index(piece.plane)
            assert wire == source.wire(1, plane, piece.first_token, piece.tokens, piece.heads)
            scatter(sink.pool, sink.table, piece, bytes(wire))
        carry_over(source, sink, first_token, tokens, heads, 1)
        covered = [
            (piece.plane, head, token)
            for piece in pieces
            for head in range(piece.heads[0], sum(piece.heads))
            for token in range(piece.first_token, piece.first_token + piece.tokens)
        ]
        wanted = itertools.product(names, range(heads[0], sum(heads)), range(first_token, first_token + tokens))
        assert sorted(covered) == sorted(wanted)
    assert sink.is_as_expected()


@pytest.mark.parametrize(
    ("packing", "dtype"),
    # There is no float32 for AMX.
    [("vec", "float32"), *itertools.product(("vec", "amx"), ("bfloat16", "float8_e4m3"))],
)
@pytest.mark.parametrize("first_token", [0, 5, 15, 33])
def test_packed_blocks_begin_and_end_anywhere(packing: str, dtype: str, first_token: int) -> None:
    """Tails of tiles are code of their own, which random layouts seldom meet."""
    layout = Layout.parse(
        f"layers=1 kv_heads=2 dim=48 dtype={dtype} order=HND form=fused packing={packing} block_tokens=32 tp=0/1"
    )
    source = Cache(layout, blocks=(4, 1, 2), seed=2)
    for tokens in range(1, 96 - first_token):
        sink = Cache(layout, blocks=(0, 5, 3))
        for plane, name in enumerate(PLANES):
            chunk = Chunk(layer=0, plane=name, first_token=first_token, tokens=tokens, heads=(0, 2))  # pyright: ignore[reportArgumentType]
            wire = bytearray(chunk_bytes(layout, chunk))
            gather(source.pool, source.table, chunk, wire)
            assert wire == source.wire(0, plane, first_token, tokens, (0, 2))
            scatter(sink.pool, sink.table, chunk, wire)
        carry_over(source, sink, first_token, tokens, (0, 2), 0)
        assert sink.is_as_expected()


@given(st.data())
def test_a_plan_is_the_tokens_in_order_in_as_few_moves_as_the_tables_allow(data: st.DataObject) -> None:
    model = data.draw(models)
    first_token, tokens = data.draw(ranges())
    source = data.draw(layouts(model).flatmap(lambda layout: caches(layout, first_token, tokens, 1)))
    sink = data.draw(layouts(model).flatmap(lambda layout: caches(layout, first_token, tokens, 2)))

    moves = plan(source.layout, source.table, sink.layout, sink.table, first_token, tokens)

    pairs = list(zip(source.slots(first_token, tokens), sink.slots(first_token, tokens), strict=True))
    walked = [
        (move.source_block * source.layout.block_tokens + move.source_token + step,
         move.sink_block * sink.layout.block_tokens + move.sink_token + step)
        for move in moves
        for step in range(move.tokens)
    ]  # fmt: skip
    assert walked == pairs
    breaks = sum((b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in itertools.pairwise(pairs))
    whole = sum(move.whole for move in moves)
    # Runs of whole blocks stand apart from what is before and behind them.
    assert len(moves) <= 1 + breaks + 2 * whole
    assert not whole or breaks + 1 <= len(moves)
    for move in moves:
        if move.whole:
            assert move.source_token == move.sink_token == move.tokens % sink.layout.block_tokens == 0


@pytest.mark.parametrize(
    ("kv_heads", "sink_ranks", "source_ranks"),
    [
        (heads, sink, source)
        for heads, sink, source in itertools.product((1, 2, 6, 12), RANKS, RANKS)
        if fits(heads, sink) and fits(heads, source)
    ],
)
def test_every_head_comes_to_every_sink_once(kv_heads: int, source_ranks: int, sink_ranks: int) -> None:
    sizes = f"layers=1 kv_heads={kv_heads} dim=8 dtype=bfloat16"
    source = Layout.parse(f"{sizes} order=NHD form=split packing=plain block_tokens=16 tp=0/{source_ranks}")
    asked: list[int] = []
    for tp_rank in range(sink_ranks):
        sink = Layout.parse(f"{sizes} order=HND form=fused packing=plain block_tokens=32 tp={tp_rank}/{sink_ranks}")
        shares = agree(source, sink)
        heads = [head for share in shares for head in range(share.heads[0], sum(share.heads))]
        assert heads == list(range(sink.heads[0], sum(sink.heads)))
        for share in shares:
            held = rank(source, share.source_rank).heads
            assert held[0] <= share.heads[0] and sum(share.heads) <= sum(held)
        asked += [share.source_rank for share in shares]
    # No rank of the source is idle while another that holds the same heads is asked by several sinks.
    assert max(map(asked.count, asked)) - min(map(asked.count, range(source_ranks))) <= 1 or sink_ranks < source_ranks


def test_latent_rows_are_whole_on_every_rank_and_sinks_spread_over_them() -> None:
    def latent(tp_rank: int, tp_size: int) -> Layout:
        return Layout(
            layers=1, kv_heads=1, dim=576, dtype="bfloat16", order="NHD", form="latent", block_tokens=16,
            tp_rank=tp_rank, tp_size=tp_size,
        )  # fmt: skip

    shares = [agree(latent(0, 4), latent(sink, 8)) for sink in range(8)]
    assert [[(share.source_rank, share.heads) for share in one] for one in shares] == [
        [(sink % 4, (0, 1))] for sink in range(8)
    ]


@pytest.mark.parametrize(
    "change",
    [
        "packing=amx",
        "block_tokens=16",
        "order=NHD form=fused packing=plain",
        "order=HND form=fused packing=plain",
        "order=HND form=split packing=plain",
    ],
)
def test_a_cache_that_is_read_by_a_wrong_descriptor_gives_other_bytes(change: str) -> None:
    """The oracle can fail: it tells layouts apart that have the same number of bytes."""
    words = "layers=1 kv_heads=4 dim=16 dtype=bfloat16 order=HND form=fused packing=vec block_tokens=32 tp=1/2"
    truth = Cache(Layout.parse(words), blocks=(5, 2, 3))
    wrong = {word.partition("=")[0]: word for word in (words + " " + change).split()}
    claimed = Layout.parse(" ".join(wrong.values()))
    memory = truth.memory[0]
    ratio = truth.layout.block_tokens // claimed.block_tokens
    table = Table([ratio * block + part for block in truth.blocks for part in range(ratio)])
    pool = Pool(claimed, [memory.ctypes.data] * claimed.tensors, 8 * ratio, claimed.block_bytes)
    wire = bytearray(50 * 2 * 16 * 2)
    gather(pool, table, Chunk(layer=0, plane="k", first_token=7, tokens=50, heads=(2, 2)), wire)
    assert wire != truth.wire(0, 0, 7, 50, (2, 2))
