"""KV layouts and the conversions between them: the one module that knows `baton_native.layout`.

What a layout, the wire form, a table and a chunk are is said in `docs/wire-layout.md` and in the native
module's stub. Arguments that make no sense by themselves raise ValueError. What comes from a peer goes
through `read_layout` and `agree`, which raise Baton's own errors.
"""

from __future__ import annotations

from baton_native.layout import (
    Chunk,
    Invalid,
    Layout,
    Mismatch,
    Move,
    Pool,
    Share,
    Table,
    chunk_bytes,
    chunks,
    common_heads,
    convert,
    convert_tensor,
    gather,
    identical,
    plan,
    scatter,
    shares,
)

from baton.errors import LayoutMismatch, MalformedMessage

__all__ = [
    "Chunk",
    "Layout",
    "Move",
    "Pool",
    "Share",
    "Table",
    "agree",
    "chunk_bytes",
    "chunks",
    "convert",
    "convert_tensor",
    "gather",
    "identical",
    "matches",
    "on_rank",
    "plan",
    "read_layout",
    "scatter",
]


def read_layout(text: str) -> Layout:
    """Return the layout that a peer describes; MalformedMessage where it makes no sense."""
    try:
        return Layout.parse(text)
    except Invalid as failure:
        raise MalformedMessage(str(failure)) from failure


def agree(source: Layout, sink: Layout) -> list[Share]:
    """Return what the sink's rank asks of which of the source's ranks, every head once.

    Raises LayoutMismatch, naming both layouts in full, where one cannot be converted into the other.
    `source` may be any rank's.
    """
    try:
        return shares(source, sink)
    except Mismatch as failure:
        raise LayoutMismatch(str(failure)) from failure


def on_rank(layout: Layout, rank: int, ranks: int) -> Layout:
    """Return the layout of such a cache on one of a number of ranks. Raises ValueError where heads do not divide so."""
    return Layout(
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        dim=layout.dim,
        dtype=layout.dtype,
        order=layout.order,
        form=layout.form,
        packing=layout.packing,
        block_tokens=layout.block_tokens,
        tp_rank=rank,
        tp_size=ranks,
    )


def matches(source: Layout, sink: Layout) -> bool:
    """Return whether blocks of these two ranks can be moved whole, or else are to be converted.

    Raises LayoutMismatch, naming both layouts in full, where neither can be, or the ranks have no heads in common.
    """
    try:
        common_heads(source, sink)
        return identical(source, sink)
    except Mismatch as failure:
        raise LayoutMismatch(str(failure)) from failure
