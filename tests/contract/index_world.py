"""Shared code of the tests of every index: the implementations, and prompts as letters."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import cache

import pytest
from baton_kvindex.index import Run, link
from baton_kvindex.radix import RadixIndex

from benchmarks.flat_index import CannotBuild, FlatIndex, flat_table
from tests.contract.spilled_index import SpilledIndex
from tests.harness.index.table import TableIndex

Implementation = type[TableIndex] | type[FlatIndex] | type[RadixIndex]
COUNTING: list[Implementation] = [TableIndex, FlatIndex, RadixIndex]
"""Cold branches have no copies: kvindex follows workers that count copies themselves."""
IMPLEMENTATIONS: list[Implementation] = [*COUNTING, SpilledIndex]


def parameter(kind: Implementation, *more: object) -> object:
    """Return a parameter of a test. The first test of the flat table compiles it, or `make test-fast` beforehand."""
    return pytest.param(kind, *more, marks=[pytest.mark.timeout(300)] if kind is FlatIndex else [])


def make(kind: Implementation, *, counts_copies: bool = False) -> TableIndex | FlatIndex | RadixIndex:
    """Return an empty index; skip the test if it cannot be compiled."""
    if kind is FlatIndex:
        try:
            flat_table()
        except CannotBuild as why:
            pytest.skip(str(why))
    return kind(counts_copies=counts_copies)


@cache
def chain(path: str) -> bytes:
    """Return the chained ids of a prompt with one block for each letter of `path`."""
    ids: list[bytes] = []
    digest = hashlib.blake2b(digest_size=16)
    for letter in path:
        digest.update(letter.encode())
        ids.append(digest.digest())
    return b"".join(ids)


def block(path: str) -> bytes:
    """Return the id of the last block of `path`; empty for the empty path."""
    return chain(path)[-16:]


def links(runs: list[Run]) -> dict[bytes, bytes]:
    return {each: parent for run in runs for each, parent in link(run.parent, run.blocks)}


def copies(runs: list[Run]) -> Counter[bytes]:
    return Counter(each for run in runs for each, _ in link(run.parent, run.blocks))
