"""Maps a rank to the peer's ranks that it exchanges KV with, and to their keys; the two sides may differ in size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.transfer import rank_key
from baton.transfer.layout import Layout, agree, on_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One tensor-parallel rank. With equal numbers of ranks, each pairs with its equal under the lease's own key."""

    rank: int = 0
    size: int = 1
    layout: Layout | None = None
    """KV layout; None requires equal tensor-parallel sizes."""

    def readers(self, key: bytes, sink_ranks: int) -> tuple[bytes, ...]:
        """Return the keys of what this rank leases: one for each rank of the sink that reads it, perhaps none."""
        if sink_ranks in (0, self.size):
            return (key,)
        layout = self._divisible(sink_ranks)
        return tuple(
            rank_key(key, self.rank, sink)
            for sink in range(sink_ranks)
            if any(share.source_rank == self.rank for share in agree(layout, on_rank(layout, sink, sink_ranks)))
        )

    def parts(self, key: bytes, endpoints: Sequence[str]) -> dict[bytes, str]:
        """Return what this rank pulls: keys, and endpoints of the source's ranks that have its heads."""
        if len(endpoints) == self.size:
            return {key: endpoints[self.rank]}
        layout = self._divisible(len(endpoints))
        shares = agree(on_rank(layout, 0, len(endpoints)), layout)
        return {rank_key(key, share.source_rank, self.rank): endpoints[share.source_rank] for share in shares}

    def _divisible(self, ranks: int) -> Layout:
        if self.layout is None or ranks < 1:
            raise ValueError(f"a peer with {ranks} tensor-parallel ranks, but this cache is divided over {self.size}")
        return self.layout
