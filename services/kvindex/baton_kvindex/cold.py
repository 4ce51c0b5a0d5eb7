"""The index with room for less than it knows: idle branches are cold, kept elsewhere, and come back when used. Pure.

    hot    the tree of `radix.py`
    cold   branches that were cut off from it, each under a name of its own. A **stub** of each is here, under its first
           block: the name, how many blocks it has for each set of holders; and per holder the sum of all that is cold

    evict   idle ──pack──▶ written elsewhere ──▶ still the same here? ──▶ a stub in its place
    reload  a stub on the way of a prompt or of a run that is stored, a block to be removed, a parent
             ──Cold, read from elsewhere──▶ added to the tree, without the holders that were cleared meanwhile

All that is known of a block is hot, or in exactly one cold branch. A branch never changes while it is cold: what would
change it raises `Cold` before it changes anything, and is to be repeated once `reload` was given what was found. Only
clearing a worker needs nothing: it is taken from the stubs, which say who counts when a branch comes back. So sizes and
fingerprints are exact without a look at what is cold.

Where even stubs are too many, or nothing can leave, the idlest is **forgotten**: its holders keep it in their sums, so
fingerprints stay exact, but no match finds it until it is stored anew or the worker is read anew. A removal of what is
nowhere is then taken for one of what was forgotten, and a run behind what is nowhere hangs loose.
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
"""Size of a cold branch: 64 KiB of ids. Parts of a larger one are evicted one after the other, from the ends."""
BLOCK_BYTES, NODE_BYTES, STUB_BYTES = 40, 48, 200
"""What each takes in memory, about; an idle branch that takes less than its stub stays."""
SHAPE_BYTES, HOLDERS_BYTES, HOLDER_BYTES = 270, 320, 120
"""What different `Parts` and sets of holders take beside stubs: each of them, each set, and each holder in a set."""
ABSENT_MAX: Final = 1 << 16
"""Size of the negative cache, in blocks."""
SPARE_SHAPES: Final = 64
"""Shapes that may be kept beyond twice those of all stubs, before unused ones are dropped."""

Parts = tuple[tuple[int, frozenset[Holder]], ...]
"""The shape of a branch: how many of its blocks are held by whom."""


class Cold(Exception):  # Not an error: what was asked for is cold, or may be.
    """Look for these blocks, `reload` what is found, and repeat the call."""

    def __init__(self, index: ColdIndex, blocks: bytes) -> None:
        super().__init__(f"{len(blocks) // ID_BYTES} blocks may be cold")
        self.index = index
        self.blocks = blocks


@dataclass(frozen=True, slots=True)
class _Stub:
    name: bytes
    parts: Parts


class ColdIndex(RadixIndex):
    """`stub_bytes`: what a stub is taken to cost."""

    def __init__(self, *, counts_copies: bool = False, stub_bytes: int = STUB_BYTES) -> None:
        super().__init__(counts_copies=counts_copies)
        self._stub_bytes = stub_bytes
        self._stubs: dict[bytes, _Stub] = {}
        self._parts: dict[Parts, Parts] = {}
        """The shapes of all stubs, each once, and some that no stub has any more."""
        self._sets: dict[frozenset[Holder], frozenset[Holder]] = {}
        """The sets of holders in all shapes, likewise."""
        self._shared_bytes = 0
        """Memory that shapes and sets take."""
        self._sums: dict[Holder, tuple[int, int]] = {}
        """Holder → the sum of the ids, and the number, of its blocks that are cold or forgotten."""
        self._forgotten: dict[Holder, int] = {}
        """Holder → how many of these blocks are forgotten."""
        self._absent: set[bytes] = set()
        """Blocks that were looked for, and are not cold."""
        self._names = count(1)
        self._counts_copies = counts_copies
        self.cold_blocks = 0
        self.evictions = 0
        """Branches that have left, ever."""
        self.garbage: list[bytes] = []
        """Names of branches that are not needed elsewhere any more."""

    @property
    def branches(self) -> int:
        """How many branches are cold."""
        return len(self._stubs)

    @property
    def used_bytes(self) -> int:
        """What all that is here takes, without what the allocator keeps for later."""
        size = self.footprint()
        return (size.blocks + size.ghosts) * BLOCK_BYTES + size.nodes * NODE_BYTES + self.stubs_bytes

    @property
    def stubs_bytes(self) -> int:
        """What all stubs take of that."""
        return len(self._stubs) * self._stub_bytes + self._shared_bytes

    @property
    def forgotten(self) -> int:
        """How many blocks are held but not known here, summed over their holders."""
        return sum(self._forgotten.values())

    def has_forgotten(self, worker: str) -> bool:
        return any((worker, tier) in self._forgotten for tier in Tier)

    # ------------------------------------------------------------ the protocol of an index

    def store(self, worker: str, parent: bytes, blocks: bytes, tier: Tier = Tier.ACTIVE) -> int:
        if self._stubs:
            check_run(parent, blocks)
            # The first block that is not hot tells: an id names all that is before it, so nothing else leads into what
            # is cold.
            self._need(parent if self._may_be_cold(worker) else b"")
            if not self._stubs.keys().isdisjoint(ids := split_ids(blocks)):
                raise Cold(self, b"".join(block for block in ids if block in self._stubs))
        try:
            return super().store(worker, parent, blocks, tier)
        except UnknownParent:
            if not self.has_forgotten(worker):
                raise
            names = [[worker] if each is tier else list[str]() for each in Tier]
            return self.add([Branch(parent, blocks, *names)])

    def remove(self, worker: str, blocks: bytes, tier: Tier = Tier.ACTIVE) -> int:
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

    def dump(self, worker: str, tier: Tier = Tier.ACTIVE) -> list[Run]:
        if (holder := (worker, tier)) in self._sums:
            stubs = self._stubs.items()
            if mine := [first for first, stub in stubs if any(holder in holders for _, holders in stub.parts)]:
                raise Cold(self, b"".join(mine))
        return super().dump(worker, tier)

    def fingerprint(self, worker: str, tier: Tier = Tier.ACTIVE) -> Fingerprint:
        hot, (ids, blocks) = super().fingerprint(worker, tier), self._sums.get((worker, tier), (0, 0))
        return Fingerprint.of(int.from_bytes(hot.ids, "little") + ids, hot.blocks + blocks) if blocks else hot

    def load(self, worker: str, runs: Sequence[Run], tier: Tier = Tier.ACTIVE) -> None:
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
        """Return which cold branches are on the way of a prompt of which `reach` blocks are held here; mostly none."""
        if blocks[reach * ID_BYTES : (reach + 1) * ID_BYTES] not in self._stubs:
            return b""
        return b"".join(block for block in split_ids(blocks[reach * ID_BYTES :]) if block in self._stubs)

    # ------------------------------------------------------------ eviction

    def idlest(self, blocks: int) -> list[bytes]:
        """Return where the branches begin that have been idle for longest, of about so many blocks or more."""
        return [] if self._counts_copies else split_ids(self.idle(self.age_of(blocks), BRANCH_BLOCKS_MAX))

    def pack(self, first: bytes) -> list[EvictedBranch]:
        """Return what hangs behind a block, itself included, as branches to be written elsewhere; none: it stays."""
        rows = self.dump_behind(first)
        if sum(len(row.blocks) // ID_BYTES * BLOCK_BYTES + NODE_BYTES for row in rows) < self._stub_bytes:
            return []
        return [self._evicted_branch(tree) for tree in trees(rows)]

    def evict(self, branch: EvictedBranch) -> bool:
        """Let go of a branch that was written; return whether it did, which it does not where it has changed."""
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
        """Keep of a row no more than the sums of its holders, which are returned."""
        holders = holders_of(row)
        for worker, tier in holders:
            super().remove(worker, row.blocks, tier)
        self._count_cold(row.blocks, holders, 1)
        return holders

    def _evicted_branch(self, rows: Sequence[Branch]) -> EvictedBranch:
        # Ids of other models are other ids, so names are unique among all indexes of a process.
        name = (next(self._names) % (1 << 32)).to_bytes(4, "little") + rows[0].blocks[:8]
        return EvictedBranch(name, b"".join(row.blocks for row in rows), rows)

    # ------------------------------------------------------------ being forgotten

    def forget_stubs(self, excess_bytes: int) -> None:
        """Forget what has been cold for longest, until about so much is free."""
        count = -(-len(self._stubs) * excess_bytes // self.stubs_bytes) if self._stubs else 0
        for first, stub in list(islice(self._stubs.items(), count)):
            for blocks, holders in stub.parts:
                self._note_forgotten(holders, blocks)
            self._drop(first, stub)
        self._tidy()

    def forget_behind(self, first: bytes) -> None:
        """Forget what hangs behind a block, itself included."""
        for row in self.dump_behind(first):
            self._note_forgotten(self._take_out(row), len(row.blocks) // ID_BYTES)

    def _note_forgotten(self, holders: frozenset[Holder], blocks: int) -> None:
        for holder in holders:
            self._forgotten[holder] = self._forgotten.get(holder, 0) + blocks

    def _remove_forgotten(self, holder: Holder, block: bytes) -> int:
        """Take a block that is nowhere from what was forgotten; return whether there is any, as a number."""
        left = self._forgotten.pop(holder, 0)
        if not left:
            return 0
        if left > 1:
            self._forgotten[holder] = left - 1
        self._count_cold(block, frozenset([holder]), -1)
        return 1

    # ------------------------------------------------------------ coming back

    def reload(self, found: Mapping[bytes, bytes], blocks: bytes, evictions: int) -> bool:
        """Take in what was found when these blocks were looked for, `evictions` having come before.

        Returns whether all that must be there was there, and whole.
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
            return True  # What left meanwhile was not looked for.
        if len(self._absent) > ABSENT_MAX:
            self._absent.clear()
        self._absent.update(split_ids(blocks))
        return self._stubs.keys().isdisjoint(split_ids(blocks))

    def forget_cold(self) -> set[str]:
        """Give up all that is cold; return the workers that held some of it."""
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
        """Return the same parts, kept once for all stubs."""
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
        """Let go of the shapes that no stub has any more."""
        self._parts = {stub.parts: stub.parts for stub in self._stubs.values()}
        self._sets = {holders: holders for parts in self._parts for _, holders in parts}
        self._shared_bytes = len(self._parts) * SHAPE_BYTES
        self._shared_bytes += sum(HOLDERS_BYTES + HOLDER_BYTES * len(holders) for holders in self._sets)

    # ------------------------------------------------------------ what is where

    def _may_be_cold(self, worker: str) -> bool:
        return any((worker, tier) in self._sums for tier in Tier)

    def _is_hot(self, worker: str) -> bool:
        return any(super(ColdIndex, self).fingerprint(worker, tier).blocks for tier in Tier)

    def _need(self, *runs: bytes) -> None:
        """Raise Cold for blocks that may be cold: no worker holds them here, and they were not looked for."""
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
        """Take holders from all that is not here; return how many blocks they held there."""
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
