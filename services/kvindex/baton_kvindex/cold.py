"""Index with a bounded memory: idle branches are cold, kept in external storage, and reloaded when used. Pure.

    hot    the tree of `radix.py`
    cold   branches that were evicted from it, each under a name of its own. A **stub** of each stays here, under its
           first block: the name, and the number of blocks for each set of holders. Per holder, the sum of all cold
           blocks stays as well

    evict   idle branch ──pack──▶ written to storage ──▶ unchanged here? ──▶ a stub in its place
    reload  a prompt or stored run that reaches a stub, the removal of a cold block, a cold parent
             ──Cold, read from storage──▶ added to the tree, without the holders that were cleared meanwhile

All that is known of a block is hot, or in exactly one cold branch. A branch never changes while it is cold: a call that
would change it raises `Cold` before it changes anything, and is repeated after `reload` has taken in the branches that
were found. Only clearing a worker needs no reload: it is taken out of the stubs, and a branch that is reloaded gets
only the holders that its stub names. So sizes and fingerprints are exact without reading cold branches.

If there are too many stubs, or nothing can be evicted, the idlest branch is **forgotten**: its holders keep it in their
sums, so fingerprints stay exact, but no match finds it until it is stored again or the worker is resynced. The removal
of an unknown block then counts as one of a forgotten block, and a run whose parent is unknown is stored detached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Final

from baton.messages.workers import Fingerprint
from baton_kvindex.index import ID_BYTES, IndexSize, Run, Tier, UnknownParent, check_ids, check_run, split_ids
from baton_kvindex.packing import COUNT_BYTES, DamagedBranch, EvictedBranch, Holder, holders_of, trees, unpack
from baton_kvindex.radix import Branch, RadixIndex

BRANCH_BLOCKS_MAX: Final = 4096
"""Most blocks of a cold branch: 64 KiB of ids. Larger branches are evicted in parts, from the ends."""
BLOCK_BYTES, NODE_BYTES, STUB_BYTES = 40, 48, 200
"""Approximate memory of each; an idle branch that takes less than its stub stays."""
SHAPE_BYTES, HOLDERS_BYTES, HOLDER_BYTES = 270, 320, 120
"""Memory of shared `Parts` beside the stubs: of each shape, each set of holders, and each holder in a set."""
ABSENT_MAX: Final = 1 << 16
"""Size of the negative cache, in blocks."""
SPARE_SHAPES: Final = 64
"""Shapes that are kept beyond twice the number of stubs, before unused ones are dropped."""

Parts = tuple[tuple[int, frozenset[Holder]], ...]
"""Shape of a branch: number of blocks for each set of holders."""


class Cold(Exception):  # Not an error: the call needs blocks that are cold, or may be.
    """Asks the caller to look for `blocks`, to `reload` the branches found, and to repeat the call."""

    def __init__(self, index: ColdIndex, blocks: bytes) -> None:
        super().__init__(f"{len(blocks) // ID_BYTES} blocks may be cold")
        self.index = index
        self.blocks = blocks


@dataclass(frozen=True, slots=True)
class _Stub:
    name: bytes
    parts: Parts


class ColdIndex(RadixIndex):
    """Radix index with cold branches; `stub_bytes` is the memory that a stub is taken to need."""

    def __init__(self, *, counts_copies: bool = False, stub_bytes: int = STUB_BYTES) -> None:
        super().__init__(counts_copies=counts_copies)
        self._stub_bytes = stub_bytes
        self._stubs: dict[bytes, _Stub] = {}
        self._parts: dict[Parts, Parts] = {}
        """Shapes of all stubs, each once, and some that no stub has any more."""
        self._sets: dict[frozenset[Holder], frozenset[Holder]] = {}
        """Sets of holders in all shapes, each once."""
        self._shared_bytes = 0
        """Memory of shapes and sets."""
        self._sums: dict[Holder, tuple[int, int]] = {}
        """Holder → sum of the ids, and number, of its cold and forgotten blocks."""
        self._forgotten: dict[Holder, int] = {}
        """Holder → number of its forgotten blocks."""
        self._absent: set[bytes] = set()
        """Negative cache: blocks that were looked for and are not cold."""
        self._names = count(1)
        self._counts_copies = counts_copies
        self.cold_blocks = 0
        self.evictions = 0
        """Branches evicted since the start."""
        self.garbage: list[bytes] = []
        """Names of branches that can be deleted from storage."""

    @property
    def branches(self) -> int:
        """Number of cold branches."""
        return len(self._stubs)

    @property
    def used_bytes(self) -> int:
        """Memory of tree and stubs, without what the allocator keeps for later."""
        size = self.footprint()
        return (size.blocks + size.ghosts) * BLOCK_BYTES + size.nodes * NODE_BYTES + self.stubs_bytes

    @property
    def stubs_bytes(self) -> int:
        """Memory of all stubs, a part of `used_bytes`."""
        return len(self._stubs) * self._stub_bytes + self._shared_bytes

    @property
    def forgotten(self) -> int:
        """Number of forgotten blocks, summed over their holders."""
        return sum(self._forgotten.values())

    def has_forgotten(self, worker: str) -> bool:
        return any((worker, tier) in self._forgotten for tier in Tier)

    # ------------------------------------------------------------ the protocol of an index

    def store(self, worker: str, parent: bytes, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
        if self._stubs:
            check_run(parent, blocks)
            # The first block that is not hot decides: an id covers its whole prefix, so no other block leads into a
            # cold branch.
            self._need(parent if self._may_be_cold(worker) else b"")
            if not self._stubs.keys().isdisjoint(ids := split_ids(blocks)):
                raise Cold(self, b"".join(block for block in ids if block in self._stubs))
        try:
            return super().store(worker, parent, blocks, tier)
        except UnknownParent:
            if not self.has_forgotten(worker):
                raise
            names = [[worker] if each is tier else list[str]() for each in Tier]
            return self.add([Branch(parent, blocks, names)])

    def remove(self, worker: str, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
        if self._stubs and (worker, tier) in self._sums:
            self._need(blocks)
        if (worker, tier) not in self._forgotten:
            return super().remove(worker, blocks, tier)
        check_ids(blocks)
        held = 0
        for block in split_ids(blocks):
            held += super().remove(worker, block, tier) or self._remove_forgotten((worker, tier), block)
        return held

    def clear(self, worker: str) -> int:
        cold = self._clear_cold({(worker, tier) for tier in Tier})
        return cold + super().clear(worker)

    def dump(self, worker: str, tier: Tier = Tier.DEVICE) -> list[Run]:
        if (holder := (worker, tier)) in self._sums:
            stubs = self._stubs.items()
            if mine := [first for first, stub in stubs if any(holder in holders for _, holders in stub.parts)]:
                raise Cold(self, b"".join(mine))
        return super().dump(worker, tier)

    def fingerprint(self, worker: str, tier: Tier = Tier.DEVICE) -> Fingerprint:
        hot, (ids, blocks) = super().fingerprint(worker, tier), self._sums.get((worker, tier), (0, 0))
        return Fingerprint.of(int.from_bytes(hot.ids, "little") + ids, hot.blocks + blocks) if blocks else hot

    def load(self, worker: str, runs: Sequence[Run], tier: Tier = Tier.DEVICE) -> None:
        if self._stubs:
            for run in runs:
                check_run(run.parent, run.blocks)
            self._need(*(run.blocks for run in runs))
        self._clear_cold({(worker, tier)})
        super().load(worker, runs, tier)
        if len(self._absent) > ABSENT_MAX:
            self._absent.clear()

    def size(self) -> IndexSize:
        hot = super().size()
        only_cold = {worker for worker, _ in self._sums if not self._is_hot(worker)}
        return IndexSize(
            workers=hot.workers + len(only_cold),
            blocks=hot.blocks + self.cold_blocks,
            holdings=hot.holdings + sum(blocks for _, blocks in self._sums.values()),
        )

    def behind(self, blocks: bytes, reach: int) -> bytes:
        """Return the first block of each cold branch that continues a prompt after `reach` hot blocks."""
        if blocks[reach * ID_BYTES : (reach + 1) * ID_BYTES] not in self._stubs:
            return b""
        return b"".join(block for block in split_ids(blocks[reach * ID_BYTES :]) if block in self._stubs)

    # ------------------------------------------------------------ eviction

    def idlest(self, blocks: int) -> list[bytes]:
        """Return the first blocks of the idlest branches, which have about this many blocks together or more."""
        return [] if self._counts_copies else split_ids(self.idle(self.age_of(blocks), BRANCH_BLOCKS_MAX))

    def pack(self, first: bytes) -> list[EvictedBranch]:
        """Return a block and all that follows it as branches to be written to storage; none if they are too small."""
        rows = self.dump_behind(first)
        if sum(len(row.blocks) // ID_BYTES * BLOCK_BYTES + NODE_BYTES for row in rows) < self._stub_bytes:
            return []
        return [self._evicted_branch(tree) for tree in trees(rows)]

    def evict(self, branch: EvictedBranch) -> bool:
        """Replace a branch that was written by a stub; return False, and keep it, if it has changed meanwhile."""
        rows = branch.rows
        first = rows[0].blocks[:ID_BYTES]
        now = {row.blocks: row for row in self.dump_behind(first)}
        if any(now.get(row.blocks) != row for row in rows):
            return False
        parts: dict[frozenset[Holder], int] = {}
        for row in rows:
            holders = self._take_out(row)
            parts[holders] = parts.get(holders, 0) + len(row.blocks) // ID_BYTES
        shape: Parts = tuple((blocks, holders) for holders, blocks in parts.items())
        if len(self._parts) > 2 * len(self._stubs) + SPARE_SHAPES:
            self._tidy()
        self._stubs[first] = _Stub(branch.name, self._share(shape))
        self.cold_blocks += sum(blocks for blocks, _ in shape)
        self.evictions += 1
        self._absent.clear()
        return True

    def _take_out(self, row: Branch) -> frozenset[Holder]:
        """Move a row from the tree to the sums of its holders; return the holders."""
        holders = holders_of(row)
        for worker, tier in holders:
            super().remove(worker, row.blocks, tier)
        self._count_cold(row.blocks, holders, 1)
        return holders

    def _evicted_branch(self, rows: Sequence[Branch]) -> EvictedBranch:
        # Different models have different ids, so names are unique among all indexes of a process.
        name = (next(self._names) % (1 << 32)).to_bytes(4, "little") + rows[0].blocks[:8]
        return EvictedBranch(name, b"".join(row.blocks for row in rows), rows)

    # ------------------------------------------------------------ forgetting

    def forget_stubs(self, excess_bytes: int) -> None:
        """Forget the branches that have been cold for longest, until about this much memory is free."""
        count = -(-len(self._stubs) * excess_bytes // self.stubs_bytes) if self._stubs else 0
        for first, stub in list(islice(self._stubs.items(), count)):
            for blocks, holders in stub.parts:
                self._note_forgotten(holders, blocks)
            self._drop(first, stub)
        self._tidy()

    def forget_behind(self, first: bytes) -> None:
        """Forget a block and all that follows it."""
        for row in self.dump_behind(first):
            self._note_forgotten(self._take_out(row), len(row.blocks) // ID_BYTES)

    def _note_forgotten(self, holders: frozenset[Holder], blocks: int) -> None:
        for holder in holders:
            self._forgotten[holder] = self._forgotten.get(holder, 0) + blocks

    def _remove_forgotten(self, holder: Holder, block: bytes) -> int:
        """Remove an unknown block as one of the holder's forgotten ones; return 1, or 0 if it has none."""
        left = self._forgotten.pop(holder, 0)
        if not left:
            return 0
        if left > 1:
            self._forgotten[holder] = left - 1
        self._count_cold(block, frozenset([holder]), -1)
        return 1

    # ------------------------------------------------------------ reload

    def reload(self, found: Mapping[bytes, bytes], blocks: bytes, evictions: int) -> bool:
        """Add the branches that were found for these blocks; `evictions` is the counter when the search began.

        Returns False if a branch is missing or damaged.
        """
        for name, packed in found.items():
            first = packed[COUNT_BYTES : COUNT_BYTES + ID_BYTES]
            stub = self._stubs.get(first)
            if stub is None or stub.name != name:
                continue
            try:
                branches = unpack(packed, frozenset[Holder]().union(*(holders for _, holders in stub.parts)))
            except DamagedBranch:
                return False
            for row in branches:
                self._count_cold(row.blocks, holders_of(row), -1)
            self._drop(first, stub)
            self.add(branches)
        if evictions != self.evictions:
            return True  # Branches evicted meanwhile were not looked for.
        if len(self._absent) > ABSENT_MAX:
            self._absent.clear()
        self._absent.update(split_ids(blocks))
        return self._stubs.keys().isdisjoint(split_ids(blocks))

    def forget_cold(self) -> set[str]:
        """Give up all cold branches; return the workers that held blocks in them."""
        stubs = self._stubs.values()
        workers = {worker for stub in stubs for _, holders in stub.parts for worker, _ in holders}
        self._clear_cold({(worker, tier) for worker in workers for tier in Tier})
        return workers

    def _drop(self, first: bytes, stub: _Stub) -> None:
        del self._stubs[first]
        self.garbage.append(stub.name)
        self.cold_blocks -= sum(blocks for blocks, _ in stub.parts)
        if not self._stubs:
            self._tidy()
            self._absent.clear()

    def _share(self, parts: Parts) -> Parts:
        """Return an equal shape that all stubs share."""
        if parts in self._parts:
            return self._parts[parts]
        for _, holders in parts:
            if holders not in self._sets:
                self._sets[holders] = holders
                self._shared_bytes += HOLDERS_BYTES + HOLDER_BYTES * len(holders)
        self._shared_bytes += SHAPE_BYTES
        shared = tuple((blocks, self._sets[holders]) for blocks, holders in parts)
        self._parts[shared] = shared
        return shared

    def _tidy(self) -> None:
        """Drop the shapes that no stub has any more."""
        self._parts = {stub.parts: stub.parts for stub in self._stubs.values()}
        self._sets = {holders: holders for parts in self._parts for _, holders in parts}
        self._shared_bytes = len(self._parts) * SHAPE_BYTES
        self._shared_bytes += sum(HOLDERS_BYTES + HOLDER_BYTES * len(holders) for holders in self._sets)

    # ------------------------------------------------------------ hot or cold

    def _may_be_cold(self, worker: str) -> bool:
        return any((worker, tier) in self._sums for tier in Tier)

    def _is_hot(self, worker: str) -> bool:
        return any(super(ColdIndex, self).fingerprint(worker, tier).blocks for tier in Tier)

    def _need(self, *runs: bytes) -> None:
        """Raise Cold for blocks that may be cold: not hot, and not in the negative cache."""
        unheld = (block for run in runs for block in split_ids(self.unheld(run)))
        if wanted := [block for block in unheld if block not in self._absent]:
            raise Cold(self, b"".join(wanted))

    def _count_cold(self, blocks: bytes, holders: frozenset[Holder], sign: int) -> None:
        number = len(blocks) // ID_BYTES
        ids = sum(int.from_bytes(block, "little") for block in split_ids(blocks))
        for holder in holders:
            ids_before, before = self._sums.get(holder, (0, 0))
            if before + sign * number:
                self._sums[holder] = (ids_before + sign * ids, before + sign * number)
            else:
                self._sums.pop(holder, None)

    def _clear_cold(self, gone: set[Holder]) -> int:
        """Remove holders from all cold and forgotten blocks; return how many they held."""
        blocks = sum(self._sums.pop(holder, (0, 0))[1] for holder in gone)
        if not blocks:
            return 0
        for holder in gone:
            self._forgotten.pop(holder, None)
        left: dict[int, Parts] = {}
        for first, stub in list(self._stubs.items()):
            parts = left.get(id(stub.parts))
            if parts is None:
                rest = tuple((number, holders - gone) for number, holders in stub.parts if not holders <= gone)
                parts = left[id(stub.parts)] = self._share(rest)
            if not parts:
                self._drop(first, stub)
            elif parts is not stub.parts:
                self.cold_blocks -= sum(number for number, _ in stub.parts) - sum(number for number, _ in parts)
                self._stubs[first] = _Stub(stub.name, parts)
        self._tidy()
        return blocks
