"""One behaviour suite for every implementation of the index protocol."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from baton_kvindex.index import RUN_BLOCKS_MAX, Index, IndexSize, Run, Tier, UnknownParent

from baton.errors import MalformedMessage
from baton.messages.workers import Fingerprint
from tests.contract.index_world import COUNTING, IMPLEMENTATIONS, block, chain, copies, links, make, parameter

pytestmark = pytest.mark.usefixtures("spilling")


@pytest.fixture(params=map(parameter, IMPLEMENTATIONS))
def index(request: pytest.FixtureRequest) -> Index:
    return make(request.param)


@pytest.fixture(params=map(parameter, COUNTING))
def counting(request: pytest.FixtureRequest) -> Index:
    return make(request.param, counts_copies=True)


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


@pytest.mark.parametrize("broken", [chain("xy")[:-1], b"\0", bytes(16 * (RUN_BLOCKS_MAX + 1))], ids=len)
def test_malformed_and_oversized_runs_change_nothing(index: Index, broken: bytes) -> None:
    index.store("a", b"", chain("ab"))
    calls: list[Callable[[], object]] = [
        lambda: index.store("a", b"", broken),
        lambda: index.store("new", b"", broken),
        lambda: index.store("a", b"short", chain("xy")),
        lambda: index.store("a", chain("ab"), chain("xy")),
        lambda: index.remove("a", broken),
        lambda: index.remove("unknown", broken),
        lambda: index.match(broken),
        lambda: index.match_tiers(broken),
        lambda: index.load("a", [Run(parent=b"", blocks=chain("x")), Run(parent=b"", blocks=broken)]),
        lambda: index.load("a", [Run(parent=b"short", blocks=chain("x"))]),
    ]
    for call in calls:
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


def test_a_fingerprint_is_of_the_set_and_not_of_the_way_to_it(index: Index) -> None:
    nothing = Fingerprint(blocks=0, ids=bytes(16))
    assert index.fingerprint("a") == nothing
    index.store("a", b"", chain("abc"))
    index.store("b", b"", chain("abcd"))
    assert index.fingerprint("a") != index.fingerprint("b")
    index.remove("b", block("abcd"))
    assert index.fingerprint("a") == index.fingerprint("b")
    index.remove("a", block("ab"))
    assert index.fingerprint("a").blocks == 2
    expected = (int.from_bytes(block("a"), "little") + int.from_bytes(block("abc"), "little")) % (1 << 128)
    assert index.fingerprint("a").ids == expected.to_bytes(16, "little")
    index.store("a", block("a"), block("ab"), Tier.POOL)
    assert index.fingerprint("a", Tier.POOL) == Fingerprint(blocks=1, ids=block("ab"))
    index.clear("b")
    index.load("a", [])
    assert index.fingerprint("a") == index.fingerprint("b") == nothing


# ---------------------------------------------------------------- tiers


def test_history_counts_behind_what_is_active(index: Index) -> None:
    index.store("a", b"", chain("abcd"))
    assert index.store("a", block("ab"), chain("abcd")[32:], Tier.POOL) == 2
    index.store("b", b"", chain("ab"), Tier.POOL)
    index.remove("a", chain("abcd")[32:])
    assert index.match(chain("abcd")) == {"a": 2}
    assert index.match(chain("abcd"), Tier.POOL) == {"a": 4, "b": 2}
    assert index.match_tiers(chain("abcd")) == {"a": (2, 4, 4), "b": (0, 2, 2)}
    assert index.size() == IndexSize(workers=2, blocks=4, holdings=6)


def test_a_hole_in_the_active_cache_is_bridged_by_history(index: Index) -> None:
    index.store("a", b"", chain("abc"))
    index.store("a", block("a"), block("ab"), Tier.POOL)
    index.remove("a", block("ab"))
    assert index.match_tiers(chain("abc")) == {"a": (1, 3, 3)}


def test_a_file_counts_behind_the_pool(index: Index) -> None:
    index.store("a", b"", chain("a"))
    index.store("a", b"", chain("abc"), Tier.FILE)
    index.store("a", block("ab"), block("abc"), Tier.POOL)
    index.store("a", block("abc"), block("abcd"), Tier.FILE)
    assert index.match(chain("abcd"), Tier.POOL) == {"a": 1}
    assert index.match_tiers(chain("abcd")) == {"a": (1, 1, 4)}
    assert index.remove("a", block("ab"), Tier.FILE) == 1
    assert index.match_tiers(chain("abcd")) == {"a": (1, 1, 1)}
    assert index.clear("a") == 5


def test_tiers_are_removed_dumped_and_loaded_apart(index: Index) -> None:
    index.store("a", b"", chain("ab"))
    index.store("a", b"", chain("ab"), Tier.POOL)
    assert index.remove("a", chain("ab"), Tier.POOL) == 2
    assert index.match_tiers(chain("ab")) == {"a": (2, 2, 2)}
    index.load("a", [Run(parent=b"", blocks=chain("xyz"))], Tier.POOL)
    assert links(index.dump("a")).keys() == {block("a"), block("ab")}
    assert links(index.dump("a", Tier.POOL)).keys() == {block("x"), block("xy"), block("xyz")}
    assert index.clear("a") == 5
    assert index.size() == IndexSize(workers=0, blocks=0, holdings=0)


def test_a_parent_may_be_on_the_other_tier(index: Index) -> None:
    index.store("a", b"", chain("ab"))
    assert index.store("a", block("ab"), block("abc"), Tier.POOL) == 1
    with pytest.raises(UnknownParent):
        index.store("b", block("ab"), block("abc"), Tier.POOL)


# ---------------------------------------------------------------- copies


def test_what_was_stored_twice_is_held_until_it_is_removed_twice(counting: Index) -> None:
    assert counting.store("a", b"", chain("abc")) == 3
    assert counting.store("a", b"", chain("ab")) == 0
    counting.store("b", b"", chain("abc"))
    assert counting.remove("a", chain("abc")) == 3
    assert counting.match(chain("abc")) == {"a": 2, "b": 3}
    assert counting.remove("a", chain("abc")) == 2
    assert counting.remove("a", chain("abc")) == 0
    assert counting.match(chain("abc")) == {"b": 3}


def test_copies_are_counted_on_each_tier(counting: Index) -> None:
    counting.store("a", b"", chain("a"))
    counting.store("a", b"", chain("a"), Tier.POOL)
    counting.remove("a", chain("a"))
    assert counting.match_tiers(chain("a")) == {"a": (0, 1, 1)}


def test_copies_survive_dump_and_load_and_end_with_clear(counting: Index) -> None:
    counting.store("a", b"", chain("abc"))
    counting.store("a", b"", chain("ab"))
    dumped = counting.dump("a")
    assert copies(dumped) == {block("a"): 2, block("ab"): 2, block("abc"): 1}
    counting.clear("a")
    counting.store("a", b"", chain("abc"))
    assert counting.remove("a", chain("abc")) == 3
    assert counting.match(chain("abc")) == {}
    counting.load("a", dumped)
    assert copies(counting.dump("a")) == copies(dumped)


def test_without_counting_one_removal_is_enough(index: Index) -> None:
    index.store("a", b"", chain("ab"))
    index.store("a", b"", chain("ab"))
    assert index.remove("a", chain("ab")) == 2
    assert index.match(chain("ab")) == {}


# ---------------------------------------------------------------- size


def test_long_runs_and_many_workers(index: Index) -> None:
    names = [f"w{number}" for number in range(100)]
    path = "abcdefghij" * 40
    for number, name in enumerate(names):
        index.store(name, b"", chain(path[: 4 * (number + 1)]))
    assert index.match(chain(path)) == {name: 4 * (number + 1) for number, name in enumerate(names)}
    assert index.remove("w99", chain(path)) == 400
    assert index.match(chain(path))["w98"] == 396
    for name in names:
        index.clear(name)
    assert index.size() == IndexSize(workers=0, blocks=0, holdings=0)
