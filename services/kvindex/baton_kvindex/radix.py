"""Index on the compressed radix tree of `native/radix`, which is drawn in `tree.h`. Only this module uses the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import baton_native

from baton.errors import MalformedMessage
from baton.messages.workers import Fingerprint
from baton_kvindex import index
from baton_kvindex.index import IndexSize, Run, Tier, UnknownParent


@dataclass(frozen=True, slots=True)
class Branch:
    """A run and its holders: the unit of `dump_behind` and `add`."""

    parent: bytes
    blocks: bytes
    holders: Sequence[Sequence[str]]
    """Workers that hold it, by tier."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Overview of the tree."""

    depth: int
    """Blocks of the longest prefix."""
    prefixes: Sequence[tuple[bytes, int, int]]
    """(last id, blocks, workers) of the prefixes that most workers hold, each as long as all of these hold it."""


class NativeIndex:
    """Calls that the tree shares with its baseline (`benchmarks/flat_index.py`).

    Thread-safe: a match waits for at most one batch, 64 blocks, of a change.
    """

    def __init__(self, native: baton_native.RadixTree) -> None:
        self._native = native

    def store(self, worker: str, parent: bytes, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
        try:
            return self._native.store(worker, tier, parent, blocks)
        except baton_native.UnknownBlock:
            raise UnknownParent(
                f"worker {worker} stored blocks behind {parent.hex()}, which it does not hold here"
            ) from None
        except baton_native.MalformedRun as error:
            raise MalformedMessage(str(error)) from None
        except baton_native.IndexFull as error:
            raise index.IndexFull(str(error)) from None

    def remove(self, worker: str, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
        try:
            return self._native.remove(worker, tier, blocks)
        except baton_native.MalformedRun as error:
            raise MalformedMessage(str(error)) from None

    def clear(self, worker: str) -> int:
        return self._native.clear(worker)

    def match(self, blocks: bytes, tier: Tier = Tier.DEVICE) -> dict[str, int]:
        try:
            return self._native.match(blocks, tier)
        except baton_native.MalformedRun as error:
            raise MalformedMessage(str(error)) from None

    def match_tiers(self, blocks: bytes) -> dict[str, tuple[int, int, int]]:
        try:
            return self._native.match_tiers(blocks)
        except baton_native.MalformedRun as error:
            raise MalformedMessage(str(error)) from None

    def dump(self, worker: str, tier: Tier = Tier.DEVICE) -> list[Run]:
        runs = self._native.dump(worker, tier)
        return [Run(parent=parent, blocks=blocks, tier=tier) for parent, blocks in runs]

    def fingerprint(self, worker: str, tier: Tier = Tier.DEVICE) -> Fingerprint:
        ids, blocks = self._native.sum(worker, tier)
        return Fingerprint(blocks=blocks, ids=ids)

    def load(self, worker: str, runs: Sequence[Run], tier: Tier = Tier.DEVICE) -> None:
        try:
            self._native.load(worker, tier, [(run.parent, run.blocks) for run in runs])
        except baton_native.MalformedRun as error:
            raise MalformedMessage(str(error)) from None
        except baton_native.IndexFull as error:
            raise index.IndexFull(str(error)) from None

    def size(self) -> IndexSize:
        size = self._native.size()
        return IndexSize(workers=self._native.workers, blocks=size.blocks, holdings=size.holdings)

    def footprint(self) -> baton_native.RadixSize:
        """Return the numbers of the index's parts, and its bytes."""
        return self._native.size()


class RadixIndex(NativeIndex):
    def __init__(self, *, counts_copies: bool = False) -> None:
        self._tree = baton_native.RadixTree(counts_copies)
        super().__init__(self._tree)

    def dump_behind(self, block: bytes) -> list[Branch]:
        """Return a block and all that follows it, with holders; each branch comes after its parent."""
        try:
            return [Branch(*branch) for branch in self._tree.dump_behind(block)]
        except baton_native.MalformedRun as error:
            raise MalformedMessage(str(error)) from None

    def add(self, branches: Sequence[Branch]) -> int:
        """Add branches from `dump_behind`; return how many blocks were new, summed over their holders."""
        rows = [(branch.parent, branch.blocks, branch.holders) for branch in branches]
        try:
            return self._tree.add(rows)
        except baton_native.MalformedRun as error:
            raise MalformedMessage(str(error)) from None
        except baton_native.IndexFull as error:
            raise index.IndexFull(str(error)) from None

    def survey(self, prefixes_max: int) -> Survey:
        """Visit every node of the tree; matches go on meanwhile, changes wait."""
        return Survey(*self._tree.survey(prefixes_max))

    def tick(self) -> None:
        """Advance the clock of `idle`."""
        self._tree.tick()

    def idle(self, ticks: int, blocks_max: int = 1 << 32) -> bytes:
        """Return the first blocks of branches, of at most `blocks_max` blocks, that were not matched for `ticks`.

        Only the topmost are returned: all that follows them is idle as well. A stored block begins as if it had not
        been matched for 600 ticks, so prompts that came only once are idler than those that are matched again.
        """
        return self._tree.idle(ticks, blocks_max)

    def age_of(self, blocks: int) -> int:
        """Return the ticks for which at least this many blocks are idle, or all of them."""
        return self._tree.age_of(blocks)

    def unheld(self, blocks: bytes) -> bytes:
        """Return the blocks that no worker holds. Raises MalformedMessage."""
        try:
            return self._tree.unheld(blocks)
        except baton_native.MalformedRun as error:
            raise MalformedMessage(str(error)) from None
