"""Format of a cold branch in storage: the number of its blocks, their ids, and their holders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import msgspec

from baton_kvindex.index import ID_BYTES, Tier
from baton_kvindex.radix import Branch

COUNT_BYTES: Final = 4

Holder = tuple[str, Tier]


class DamagedBranch(Exception):  # Not an error of the caller: the holders are resynced.
    """A packed branch cannot be unpacked."""


class _Shape(msgspec.Struct, frozen=True, array_like=True):
    """Parents and holders in a packed branch, beside the ids of its blocks."""

    rows: list[tuple[bytes, int, int]]
    """(parent, number of blocks, index in `holders`) of each row."""
    holders: list[list[list[str]]]
    """Workers with the row on each tier; tiers that a version did not know are left out at the end."""


@dataclass(frozen=True, slots=True)
class EvictedBranch:
    """A branch that is being evicted: hot until it is written to storage."""

    name: bytes
    blocks: bytes
    rows: Sequence[Branch]

    def packed(self) -> bytes:
        """Return the number of ids, the ids, and their holders, as bytes."""
        sets: dict[tuple[tuple[str, ...], ...], int] = {}
        rows = [
            (
                row.parent,
                len(row.blocks) // ID_BYTES,
                sets.setdefault(tuple(map(tuple, row.holders)), len(sets)),
            )
            for row in self.rows
        ]
        shape = _Shape(rows, [[list(workers) for workers in tiers] for tiers in sets])
        return (
            (len(self.blocks) // ID_BYTES).to_bytes(COUNT_BYTES, "little") + self.blocks + msgspec.msgpack.encode(shape)
        )


def holders_of(row: Branch) -> frozenset[Holder]:
    return frozenset((worker, tier) for tier, workers in zip(Tier, row.holders, strict=True) for worker in workers)


def unpack(packed: bytes, alive: frozenset[Holder]) -> list[Branch]:
    """Return the rows of a packed branch with those of their holders that are in `alive`. Raises DamagedBranch."""
    at = COUNT_BYTES
    blocks = int.from_bytes(packed[:at], "little")
    try:
        shape = msgspec.msgpack.decode(memoryview(packed)[at + blocks * ID_BYTES :], type=_Shape)
    except msgspec.DecodeError as error:
        raise DamagedBranch(str(error)) from error
    if sum(length for _, length, _ in shape.rows) != blocks:
        raise DamagedBranch("the runs do not cover all of the blocks")
    if any(not 0 <= number < len(shape.holders) for _, _, number in shape.rows):
        raise DamagedBranch("some of the blocks have no holders")
    branches: list[Branch] = []
    for parent, length, number in shape.rows:
        tiers = zip_longest(Tier, shape.holders[number], fillvalue=())
        holders = [[worker for worker in workers if (worker, tier) in alive] for tier, workers in tiers]
        branches.append(Branch(parent, packed[at : at + length * ID_BYTES], holders))
        at += length * ID_BYTES
    return branches


def trees(rows: Sequence[Branch]) -> Iterable[list[Branch]]:
    """Group rows, each of which comes after its parent, into connected trees: mostly one.

    A block that no worker holds separates what follows it into several.
    """
    trees: dict[bytes, list[Branch]] = {}
    for row in rows:
        tree = trees.get(row.parent) or []
        tree.append(row)
        trees[row.blocks[-ID_BYTES:]] = tree
    return {id(tree): tree for tree in trees.values()}.values()
