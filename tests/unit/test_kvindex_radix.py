"""The radix tree's own features: branches, recency, shape and size; and hostile input."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import baton_native
import pytest
from baton_kvindex.index import IndexSize, Tier
from baton_kvindex.radix import Branch, RadixIndex, Survey

from baton.errors import MalformedMessage
from tests.contract.index_world import block, chain, links
from tests.harness.index.table import TableIndex


@pytest.fixture
def index() -> RadixIndex:
    return RadixIndex()


def split(blocks: bytes) -> list[bytes]:
    return [blocks[at : at + 16] for at in range(0, len(blocks), 16)]


# ---------------------------------------------------------------- shape


def test_a_survey_shows_the_depth_and_what_most_workers_hold(index: RadixIndex) -> None:
    assert index.survey(10) == Survey(0, [])
    for worker in "abc":
        index.store(worker, b"", chain("system" + worker * 3))
    index.store("d", b"", chain("sys"))
    index.store("d", b"", chain("s"), Tier.POOL)
    index.store("e", b"", chain("alone" * 3), Tier.POOL)
    survey = index.survey(3)
    assert survey.depth == 15
    shared = [(block("sys"), 3, 4), (block("system"), 6, 3), (block("alone" * 3), 15, 1)]
    assert survey.prefixes == shared, "by workers on either tier, then by length"
    assert index.survey(0).prefixes == []
    index.clear("e")
    assert index.survey(1) == Survey(9, shared[:1])


def test_a_survey_looks_behind_unheld_blocks(index: RadixIndex) -> None:
    index.store("a", b"", chain("abcd"))
    index.remove("a", block("ab"))
    assert index.survey(5) == Survey(4, [(block("abcd"), 4, 1), (block("a"), 1, 1)])


# ---------------------------------------------------------------- branches


def test_a_branch_moves_with_all_its_holders(index: RadixIndex) -> None:
    index.store("a", b"", chain("abcdef"))
    index.store("b", b"", chain("abcx"))
    index.store("b", block("abc"), block("abcd"), Tier.POOL)
    branches = index.dump_behind(block("abc"))
    assert branches[0] == Branch(block("ab"), block("abc"), [["a", "b"], [], []])
    copy = RadixIndex()
    copy.store("a", b"", chain("ab"))
    copy.store("b", b"", chain("ab"))
    assert copy.add(branches) == 4 + 2 + 1
    for path in ("abcdef", "abcx"):
        assert copy.match_tiers(chain(path)) == index.match_tiers(chain(path))
    assert copy.add(branches) == 0


def test_a_branch_may_come_before_what_it_hangs_behind(index: RadixIndex) -> None:
    index.store("a", b"", chain("abcd"))
    copy = RadixIndex()
    copy.add(index.dump_behind(block("abc")))
    assert (copy.match(chain("abcd")), copy.footprint().ghosts) == ({}, 1)
    copy.store("a", b"", chain("ab"))
    assert (copy.match(chain("abcd")), copy.footprint().ghosts) == ({"a": 4}, 0)


def test_what_is_not_there_is_an_empty_branch(index: RadixIndex) -> None:
    assert index.dump_behind(block("abc")) == []
    with pytest.raises(MalformedMessage):
        index.dump_behind(b"")
    with pytest.raises(MalformedMessage):
        index.add([Branch(b"", chain("a"), [["a"], [], []]), Branch(b"", b"short", [["a"], [], []])])
    assert index.size() == IndexSize(workers=0, blocks=0, holdings=0)


# ---------------------------------------------------------------- recency


def test_what_is_not_matched_is_idle_from_its_top(index: RadixIndex) -> None:
    prompts = [chain(path) for path in ("abc", "abxy", "old")]
    for prompt in prompts:
        index.store("a", b"", prompt)
        index.match(prompt)
    index.tick()
    index.tick()
    assert index.idle(3) == b""
    assert set(split(index.idle(2))) == {block("a"), block("o")}
    index.match(chain("abx"))
    assert set(split(index.idle(1))) == {block("abc"), block("o")}
    assert [index.age_of(blocks) for blocks in (1, 4, 5, 100)] == [2, 2, 0, 0]


def test_what_is_stored_and_not_asked_for_again_is_idle_first(index: RadixIndex) -> None:
    index.store("a", b"", chain("shared"))
    index.match(chain("shared"))
    for _ in range(500):
        index.tick()
    index.store("a", b"", chain("once"))
    index.store("b", b"", chain("once"))
    index.store("a", block("once"), chain("once, in several parts")[64:])
    assert split(index.idle(index.age_of(1))) == [block("o")]
    # What hangs behind a prompt does not make it new either, and being asked for does.
    index.store("a", block("shared"), chain("shared, and then")[96:])
    assert set(split(index.idle(500))) == {block("o"), block("s")}
    index.match(chain("once"))
    assert set(split(index.idle(500))) == {block("once,"), block("s")}


def test_unheld_blocks_are_reported(index: RadixIndex) -> None:
    index.store("a", b"", chain("abcd"))
    index.remove("a", block("ab"))
    assert index.unheld(chain("abcx")) == block("ab") + block("abcx")
    with pytest.raises(MalformedMessage):
        index.unheld(b"short")


# ---------------------------------------------------------------- size


def test_a_long_run_is_one_node_and_costs_what_its_ids_cost(index: RadixIndex) -> None:
    blocks = 100_000
    runs = [bytes(8) + number.to_bytes(8, "big") for number in range(blocks)]
    index.store("a", b"", b"".join(runs))
    footprint = index.footprint()
    assert footprint.nodes <= blocks // 4096 + 8
    assert footprint.bytes / blocks < 60


def test_a_thousand_workers_share_one_set(index: RadixIndex) -> None:
    for number in range(1000):
        index.store(f"w{number}", b"", chain("shared"))
    footprint = index.footprint()
    assert (footprint.nodes, footprint.sets, footprint.holdings) == (1, 1, 6000)


def test_workers_that_hold_nothing_leave_their_numbers_to_others(index: RadixIndex) -> None:
    for number in range(25_000):
        index.store(f"w{number}", b"", block("a"))
        index.clear(f"w{number}")
    index.store("new", b"", block("a"))
    assert index.match(block("a")) == {"new": 1}
    assert index.footprint().bytes < 600_000


# ---------------------------------------------------------------- threads


def test_a_match_beside_a_writer_never_loses_what_is_held(index: RadixIndex) -> None:
    shared = chain("s" * 2000)
    index.store("always", b"", shared)
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            for name in ("x", "y"):
                index.store(name, b"", shared)
                index.remove(name, shared[16_000:])
                index.clear(name)

    writers = [threading.Thread(target=come_and_go) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(500):
            held = index.match(shared)
            assert held.pop("always") == 2000
            assert held.keys() <= {"x", "y"}
    finally:
        stop.set()
        for writer in writers:
            writer.join(timeout=10)
    assert index.size() == IndexSize(workers=1, blocks=2000, holdings=2000)


# ---------------------------------------------------------------- hostile input

HOSTILE: list[Any] = [None, 7, "text", 1.5, [b"x" * 16], bytearray(16), memoryview(bytes(16)), {}, object()]


@pytest.mark.parametrize("wrong", HOSTILE, ids=lambda value: type(value).__name__)
def test_wrong_types_are_refused_and_change_nothing(index: RadixIndex, wrong: Any) -> None:
    index.store("a", b"", chain("ab"))
    calls: list[Callable[[], object]] = [
        lambda: index.store("a", b"", wrong),
        lambda: index.store("a", wrong, chain("x")),
        lambda: index.remove("a", wrong),
        lambda: index.match(wrong),
        lambda: index.dump_behind(wrong),
        lambda: index.unheld(wrong),
        lambda: index.add([Branch(b"", wrong, [["a"], [], []])]),
    ]
    if not isinstance(wrong, str):
        calls.append(lambda: index.store(wrong, b"", chain("x")))
        calls.append(lambda: index.clear(wrong))
        calls.append(lambda: index.add([Branch(b"", chain("x"), [[wrong], [], []])]))
    for call in calls:
        with pytest.raises(TypeError):
            call()
    assert index.match(chain("ab")) == {"a": 2}
    assert index.size() == IndexSize(workers=1, blocks=2, holdings=2)


@pytest.mark.parametrize("name", ["", "\ud800", "w" * 1_000_000, "naïve.worker 7\0"])
def test_any_text_is_a_name(index: RadixIndex, name: str) -> None:
    index.store(name, b"", chain("ab"))
    assert index.match(chain("ab")) == {name: 2}


def test_an_index_cannot_be_pickled_nor_made_without_its_state() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(baton_native.RadixTree())
    # What a pickle that somebody wrote by hand would make.
    unmade = pickle.loads(b"\x80\x04cbaton_native\nRadixTree\n)\x81.")
    with pytest.warns(RuntimeWarning, match="uninitialized"), pytest.raises(TypeError):
        unmade.match(b"", False)


def test_random_bytes_are_ids_like_others_or_refused(index: RadixIndex) -> None:
    table = TableIndex()
    seed = b"\x01"
    for number in range(2000):
        seed = chain(seed.hex())[-16:]
        blocks = (seed * 4)[: number % 70]
        parent = seed[: number % 17]
        answers: list[object] = []
        for each in (index, table):
            try:
                answers.append(each.store("ab"[number % 2], parent, blocks))
            except Exception as error:  # noqa: BLE001  # Whatever it is, both must say it.
                answers.append((type(error), str(error)))
        assert answers[0] == answers[1]
    assert index.size() == table.size()
    assert links(index.dump("a")).keys() == links(table.dump("a")).keys()
