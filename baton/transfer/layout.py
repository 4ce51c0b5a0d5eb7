"""KV layouts and the conversions between them: the one module that knows `baton_native.layout`.

`docs/wire-layout.md` and the native module's stub define layout, wire form, table and chunk. Invalid
arguments raise ValueError. Layouts from a peer go through `read_layout` and `agree`, which raise Baton's
own errors.
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
    """Return the layout that a peer describes. Raises MalformedMessage if it is invalid."""
    try:
        return Layout.parse(text)
    except Invalid as failure:
        raise MalformedMessage(str(failure)) from failure


def agree(source: Layout, sink: Layout) -> list[Share]:
    """Return the shares that the sink's rank pulls from each of the source's ranks, every head once.

    Raises LayoutMismatch, naming both layouts in full, if one cannot be converted into the other.
    `source` may be any rank's.
    """
    try:
        return shares(source, sink)
    except Mismatch as failure:
        raise LayoutMismatch(str(failure)) from failure


def on_rank(layout: Layout, rank: int, ranks: int) -> Layout:
    """Return `layout` for rank `rank` of `ranks`. Raises ValueError if the heads cannot be divided that way."""
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
    """Return whether blocks of these two ranks can be moved whole; if not, they must be converted.

    Raises LayoutMismatch, naming both layouts in full, if neither is possible or the ranks share no heads.
    """
    try:
        common_heads(source, sink)
        return identical(source, sink)
    except Mismatch as failure:
        raise LayoutMismatch(str(failure)) from failure
