"""The index protocol: which worker holds which prefix, in blocks of one model.

A block id is a hash over its whole prefix (see `baton.blocks`), so one id names one place, and a worker's
holdings are a set of ids, one on each tier. An index answers for leading blocks only: a worker that holds
blocks 0, 1 and 3 of a prompt holds two. Every call takes a run of ids in one byte string, 16 bytes each, so
that a native implementation is called once per batch.

Storing and removing are idempotent, as a resync requires: it applies events again that its pages contain already.
An index that follows an engine's own events, in which each copy of a block is stored and removed under the same hash,
must **count copies**: each store adds one, each removal takes one, per (worker, tier, block). Baton's workers count
copies in their shadow maps, so kvindex does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from baton.errors import BatonError, MalformedMessage
from baton.messages.index import BlocksStored, Tier
from baton.messages.workers import Fingerprint

ID_BYTES: Final = 16
RUN_BLOCKS_MAX: Final = 1 << 20
"""Blocks in one run, 16 MiB of ids: beyond any message and any prompt."""

Run = BlocksStored
"""Consecutive blocks and the id of the block before them: the unit of `dump` and `load`."""


class UnknownParent(BatonError):
    """A worker stored blocks whose parent it does not hold here: an event was lost, so it needs a resync."""

    code = "unknown_parent"


class IndexFull(BatonError):
    """The index cannot number more workers or blocks."""

    code = "index_full"


@dataclass(frozen=True, slots=True)
class IndexSize:
    workers: int
    blocks: int
    """Distinct blocks that at least one worker holds."""
    holdings: int
    """Blocks held, summed over workers and tiers."""


class Index(Protocol):
    """Holdings of all workers of one model.

    All calls raise MalformedMessage, and change nothing, if a run is no whole number of ids or too long.
    """

    def store(self, worker: str, parent: bytes, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
        """Note that `worker` holds `blocks`, each the child of the one before; return how many are new to the tier.

        `parent` is the id of the block before the first, empty at the root. Raises UnknownParent, and
        changes nothing, if `worker` holds it on no tier.
        """
        ...

    def remove(self, worker: str, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
        """Note that `worker` dropped `blocks`, in any order; return how many it held. Others are skipped."""
        ...

    def clear(self, worker: str) -> int:
        """Remove all blocks of `worker`, on all tiers; return their number."""
        ...

    def match(self, blocks: bytes, tier: Tier = Tier.DEVICE) -> dict[str, int]:
        """Return the leading blocks that each worker holds on `tier` or a nearer one; those with none are left out."""
        ...

    def match_tiers(self, blocks: bytes) -> dict[str, tuple[int, int, int]]:
        """Return the answers of `match` for every tier at once, the nearest first."""
        ...

    def dump(self, worker: str, tier: Tier = Tier.DEVICE) -> list[Run]:
        """Return the blocks of `worker` on a tier as runs, in any order; counted copies as runs of their own."""
        ...

    def fingerprint(self, worker: str, tier: Tier = Tier.DEVICE) -> Fingerprint:
        """Return the fingerprint of all blocks that `worker` holds on a tier, copies not counted."""
        ...

    def load(self, worker: str, runs: Sequence[Run], tier: Tier = Tier.DEVICE) -> None:
        """Replace the blocks of `worker` on a tier by `runs`, in any order; parents need not be among them."""
        ...

    def size(self) -> IndexSize: ...


class NewIndex(Protocol):
    """A class that implements `Index`."""

    def __call__(self, *, counts_copies: bool = False) -> Index: ...


def check_ids(blocks: bytes) -> int:
    """Return the number of ids in `blocks`. Raises MalformedMessage if that is no whole number or too large."""
    count, rest = divmod(len(blocks), ID_BYTES)
    if rest:
        raise MalformedMessage(f"{len(blocks)} bytes are no whole number of block ids of {ID_BYTES} bytes")
    if count > RUN_BLOCKS_MAX:
        raise MalformedMessage(f"a run of {count} blocks is longer than {RUN_BLOCKS_MAX}")
    return count


def check_run(parent: bytes, blocks: bytes) -> int:
    """Return the number of ids in `blocks`. Raises MalformedMessage for an invalid parent or run."""
    if len(parent) not in (0, ID_BYTES):
        raise MalformedMessage(f"a parent of {len(parent)} bytes is no block id")
    return check_ids(blocks)


def split_ids(blocks: bytes) -> list[bytes]:
    return [blocks[at : at + ID_BYTES] for at in range(0, len(blocks), ID_BYTES)]


def link(parent: bytes, blocks: bytes) -> Iterable[tuple[bytes, bytes]]:
    """Yield (id, parent id) for each block of a run."""
    for block in split_ids(blocks):
        yield block, parent
        parent = block
