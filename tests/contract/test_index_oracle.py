"""Any implementation of the index answers like the dictionary after any sequence of operations."""

from __future__ import annotations

import pytest
from baton_kvindex.index import Tier, UnknownParent
from baton_kvindex.radix import RadixIndex
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.contract.index_world import (
    COUNTING,
    IMPLEMENTATIONS,
    Implementation,
    block,
    chain,
    copies,
    links,
    make,
    parameter,
)
from tests.harness.index.table import TableIndex

pytestmark = pytest.mark.usefixtures("spilling")
WORKERS = "ABC"
workers = st.sampled_from(WORKERS)
tiers = st.sampled_from(Tier)
paths = st.text(alphabet="ab", min_size=0, max_size=7)


class SameAsTable(RuleBasedStateMachine):
    implementation: Implementation
    counts_copies: bool

    def __init__(self) -> None:
        super().__init__()
        self.index = make(self.implementation, counts_copies=self.counts_copies)
        self.table = TableIndex(counts_copies=self.counts_copies)

    @rule(worker=workers, tier=tiers, path=paths, start=st.integers(0, 6))
    def store(self, worker: str, tier: Tier, path: str, start: int) -> None:
        parent, blocks = block(path[:start]), chain(path)[16 * start :]
        try:
            expected = self.table.store(worker, parent, blocks, tier)
        except UnknownParent:
            with pytest.raises(UnknownParent):
                self.index.store(worker, parent, blocks, tier)
        else:
            assert self.index.store(worker, parent, blocks, tier) == expected

    @rule(worker=workers, tier=tiers, removed=st.lists(paths, max_size=6))
    def remove(self, worker: str, tier: Tier, removed: list[str]) -> None:
        blocks = b"".join(block(path) for path in removed)
        assert self.index.remove(worker, blocks, tier) == self.table.remove(worker, blocks, tier)

    @rule(worker=workers, tier=tiers, path=paths, start=st.integers(0, 6), backwards=st.booleans())
    def remove_run(self, worker: str, tier: Tier, path: str, start: int, backwards: bool) -> None:
        ends = range(start + 1, len(path) + 1)
        blocks = b"".join(block(path[:end]) for end in (reversed(ends) if backwards else ends))
        assert self.index.remove(worker, blocks, tier) == self.table.remove(worker, blocks, tier)

    @rule(worker=workers)
    def clear(self, worker: str) -> None:
        assert self.index.clear(worker) == self.table.clear(worker)

    @rule(worker=workers, other=workers, source=tiers, sink=tiers, backwards=st.booleans())
    def load_what_another_holds(self, worker: str, other: str, source: Tier, sink: Tier, backwards: bool) -> None:
        for index in (self.index, self.table):
            runs = index.dump(other, source)
            index.load(worker, runs[::-1] if backwards else runs, sink)

    @rule(path=paths)
    def match(self, path: str) -> None:
        for tier in Tier:
            assert self.index.match(chain(path), tier) == self.table.match(chain(path), tier)
        assert self.index.match_tiers(chain(path)) == self.table.match_tiers(chain(path))

    @invariant()
    def holds_the_same(self) -> None:
        assert self.index.size() == self.table.size()
        for worker in WORKERS:
            for tier in Tier:
                mine, expected = self.index.dump(worker, tier), self.table.dump(worker, tier)
                assert links(mine) == links(expected)
                assert copies(mine) == copies(expected)
                assert self.index.fingerprint(worker, tier) == self.table.fingerprint(worker, tier)

    def teardown(self) -> None:
        """A tree without holders is empty: no ghost stays."""
        for worker in WORKERS:
            self.index.clear(worker)
        if isinstance(self.index, RadixIndex):
            footprint = self.index.footprint()
            assert (footprint.blocks, footprint.ghosts, footprint.nodes, footprint.sets) == (0, 0, 0, 0)


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("implementation", "counts_copies"),
    [
        parameter(kind, counts)
        for counts, kinds in ((False, IMPLEMENTATIONS), (True, COUNTING))
        for kind in kinds
        if kind is not TableIndex
    ],
)
def test_same_as_the_dictionary(implementation: Implementation, counts_copies: bool) -> None:
    attributes = {"implementation": implementation, "counts_copies": counts_copies}
    machine = type("Machine", (SameAsTable,), attributes)
    machine.TestCase.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=40)
    machine.TestCase().runTest()
