"""One behaviour suite for every implementation of the index protocol."""

from __future__ import annotations

import hashlib

import pytest
from baton_kvindex.index import Index, IndexSize, Run, UnknownParent, link
from baton_kvindex.radix import RadixIndex
from baton_kvindex.table import TableIndex
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.errors import MalformedMessage

IMPLEMENTATIONS = [TableIndex, RadixIndex]


def chain(path: str) -> bytes:
    """Return the chained ids of a prompt with one block for each letter of `path`."""
    return b"".join(hashlib.blake2b(path[:end].encode(), digest_size=16).digest() for end in range(1, len(path) + 1))


def block(path: str) -> bytes:
    """Return the id of the last block of `path`; empty for the empty path."""
    return chain(path)[-16:]


def links(runs: list[Run]) -> dict[bytes, bytes]:
    return {each: parent for run in runs for each, parent in link(run.parent, run.blocks)}


@pytest.fixture(params=IMPLEMENTATIONS)
def index(request: pytest.FixtureRequest) -> Index:
    return request.param()


def test_match_counts_leading_blocks_of_each_worker(index: Index) -> None:
    assert index.store("a", b"", chain("sys1")) == 4
    assert index.store("b", b"", chain("sys2")) == 4
    assert index.store("c", b"", chain("s")) == 1
    assert index.match(chain("sys1")) == {"a": 4, "b": 3, "c": 1}
    assert index.match(chain("sys2xyz")) == {"a": 3, "b": 4, "c": 1}
    assert index.match(chain("t")) == {}
    assert index.match(b"") == {}
    assert index.size() == IndexSize(workers=3, blocks=5, holdings=9)


def test_a_prompt_grows_behind_its_parent(index: Index) -> None:
    index.store("a", b"", chain("ab"))
    assert index.store("a", block("ab"), chain("abcd")[32:]) == 2
    assert index.match(chain("abcde")) == {"a": 4}


def test_storing_again_changes_nothing(index: Index) -> None:
    index.store("a", b"", chain("abc"))
    assert index.store("a", b"", chain("abc")) == 0
    assert index.store("a", b"", chain("abcd")) == 1
    assert index.size() == IndexSize(workers=1, blocks=4, holdings=4)


def test_a_block_removed_from_the_middle_hides_what_is_behind_it_until_it_is_back(index: Index) -> None:
    index.store("a", b"", chain("abcd"))
    index.store("b", b"", chain("abcd"))
    assert index.remove("a", block("ab")) == 1
    assert index.match(chain("abcd")) == {"a": 1, "b": 4}
    assert index.store("a", block("a"), block("ab")) == 1
    assert index.match(chain("abcd")) == {"a": 4, "b": 4}


def test_removal_takes_any_order_and_skips_what_is_not_held(index: Index) -> None:
    index.store("a", b"", chain("abcdef"))
    assert index.remove("a", block("abcdef") + block("x") + block("abc") + block("abcd") + block("abc")) == 3
    assert index.match(chain("abcdef")) == {"a": 2}
    assert index.remove("nobody", chain("abc")) == 0


def test_an_unknown_parent_is_refused_and_changes_nothing(index: Index) -> None:
    index.store("a", b"", chain("ab"))
    with pytest.raises(UnknownParent):
        index.store("b", block("ab"), block("abc"))
    index.remove("a", block("ab"))
    with pytest.raises(UnknownParent):
        index.store("a", block("ab"), block("abc"))
    assert index.match(chain("abc")) == {"a": 1}
    assert index.size() == IndexSize(workers=1, blocks=1, holdings=1)


def test_clear_forgets_one_worker_only(index: Index) -> None:
    index.store("a", b"", chain("abc"))
    index.store("b", b"", chain("abd"))
    assert index.clear("a") == 3
    assert index.clear("a") == 0
    assert index.match(chain("abd")) == {"b": 3}
    assert index.dump("a") == []
    assert index.size() == IndexSize(workers=1, blocks=3, holdings=3)


def test_malformed_runs_change_nothing(index: Index) -> None:
    index.store("a", b"", chain("ab"))
    broken = chain("xy")[:-1]
    for call in (
        lambda: index.store("a", b"", broken),
        lambda: index.store("a", b"short", chain("xy")),
        lambda: index.remove("a", broken),
        lambda: index.match(broken),
        lambda: index.load("a", [Run(parent=b"", blocks=chain("x")), Run(parent=b"", blocks=broken)]),
    ):
        with pytest.raises(MalformedMessage):
            call()
    assert index.match(chain("ab")) == {"a": 2}
    assert index.size() == IndexSize(workers=1, blocks=2, holdings=2)


def test_empty_runs_leave_no_trace(index: Index) -> None:
    assert index.store("a", b"", b"") == 0
    assert index.remove("a", b"") == 0
    index.load("a", [])
    assert index.size() == IndexSize(workers=0, blocks=0, holdings=0)


def test_a_dump_loads_into_an_empty_index_with_its_orphans(index: Index) -> None:
    index.store("b", b"", chain("abx"))
    index.store("a", b"", chain("abcd"))
    index.remove("a", block("ab"))
    copy = type(index)()
    copy.load("a", list(reversed(index.dump("a"))))
    assert links(copy.dump("a")) == links(index.dump("a"))
    copy.store("a", block("a"), block("ab"))
    assert copy.match(chain("abcd")) == {"a": 4}


def test_load_replaces(index: Index) -> None:
    index.store("a", b"", chain("old"))
    index.load("a", [Run(parent=b"", blocks=chain("new"))])
    assert index.match(chain("old")) == {}
    assert index.match(chain("new")) == {"a": 3}


def test_ids_that_contradict_their_chain_do_no_harm(index: Index) -> None:
    index.store("a", b"", chain("ab"))
    index.store("b", b"", block("x") + block("ab") + block("x"))
    assert index.match(block("x") + block("ab")) == {"b": 2}
    assert index.match(chain("ab")) == {"a": 2}
    assert index.clear("b") == 2
    assert index.clear("a") == 2
    assert index.size() == IndexSize(workers=0, blocks=0, holdings=0)


workers = st.sampled_from("ABC")
paths = st.text(alphabet="ab", min_size=0, max_size=7)


class SameAsTable(RuleBasedStateMachine):
    """Whatever is done to it, an implementation answers as the dictionary does."""

    implementation: type[Index]

    def __init__(self) -> None:
        super().__init__()
        self.index = self.implementation()
        self.table = TableIndex()

    @rule(worker=workers, path=paths, start=st.integers(0, 6))
    def store(self, worker: str, path: str, start: int) -> None:
        parent, blocks = block(path[:start]), chain(path)[16 * start :]
        try:
            expected = self.table.store(worker, parent, blocks)
        except UnknownParent:
            with pytest.raises(UnknownParent):
                self.index.store(worker, parent, blocks)
        else:
            assert self.index.store(worker, parent, blocks) == expected

    @rule(worker=workers, removed=st.lists(paths, max_size=6))
    def remove(self, worker: str, removed: list[str]) -> None:
        blocks = b"".join(block(path) for path in removed)
        assert self.index.remove(worker, blocks) == self.table.remove(worker, blocks)

    @rule(worker=workers, path=paths, start=st.integers(0, 6))
    def remove_run(self, worker: str, path: str, start: int) -> None:
        blocks = chain(path)[16 * start :]
        assert self.index.remove(worker, blocks) == self.table.remove(worker, blocks)

    @rule(worker=workers)
    def clear(self, worker: str) -> None:
        assert self.index.clear(worker) == self.table.clear(worker)

    @rule(worker=workers, other=workers)
    def load_what_another_holds(self, worker: str, other: str) -> None:
        self.index.load(worker, self.index.dump(other))
        self.table.load(worker, self.table.dump(other))

    @rule(path=paths)
    def match(self, path: str) -> None:
        assert self.index.match(chain(path)) == self.table.match(chain(path))

    @invariant()
    def holds_the_same(self) -> None:
        assert self.index.size() == self.table.size()
        for worker in "ABC":
            assert links(self.index.dump(worker)) == links(self.table.dump(worker))


@pytest.mark.parametrize("implementation", [kind for kind in IMPLEMENTATIONS if kind is not TableIndex])
def test_same_as_the_dictionary(implementation: type[Index]) -> None:
    machine = type("Machine", (SameAsTable,), {"implementation": implementation})
    machine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
    machine.TestCase().runTest()
