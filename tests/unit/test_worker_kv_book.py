"""The book of KV blocks: prefixes that attempts share count once, and only where the engine really shares them."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from baton.worker.kv_book import SHARED_TOKENS, Holding, KvBook, prefix_ids


def test_a_shared_prefix_counts_once() -> None:
    book = KvBook()
    first, second = Holding(7, "ABCD"), Holding(6, "ABCD")
    book.take(first)
    book.settle(first, 0)
    assert book.lacking(second) == 2
    book.take(second)
    assert book.used == 9
    book.release(first)
    assert book.used == 6
    book.release(second)
    assert book.used == 0


def test_prompts_under_computation_share_nothing() -> None:
    book = KvBook()
    first, second = Holding(4, "ABC"), Holding(4, "ABC")
    book.take(first)
    assert book.lacking(second) == 4
    book.take(second)
    book.settle(first, 0)
    book.settle(second, 0)
    assert book.used == 8
    # The second one's blocks are copies, which no later attempt finds.
    book.release(first)
    assert book.lacking(Holding(4, "ABC")) == 4


def test_what_the_engine_did_not_have_is_not_shared() -> None:
    book = KvBook()
    first, second = Holding(4, "ABC"), Holding(4, "ABC")
    book.take(first)
    book.settle(first, 0)
    book.take(second)
    assert book.used == 5
    book.settle(second, 1)
    assert book.used == 7


def test_ids_stand_for_several_blocks() -> None:
    book = KvBook(blocks_per_id=16)
    first = Holding(40, "AB")
    book.take(first)
    book.settle(first, 0)
    assert book.lacking(Holding(50, "ABC")) == 18


def test_the_share_of_cached_prefixes_that_take_no_room_is_learned() -> None:
    book = KvBook()
    assert book.shared_share == 0
    for _ in range(100):
        idle = Holding(4, "ABC")
        book.take(idle)
        book.settle(idle, 3)
        book.release(idle)
    assert book.shared_share == 0
    running = Holding(4, "ABC")
    book.take(running)
    book.settle(running, 3)
    for _ in range(300):
        other = Holding(4, "ABC")
        book.take(other)
        book.settle(other, 3)
        book.release(other)
    assert book.shared_share > 0.9


def test_ids_name_whole_parts_without_the_last_token() -> None:
    tokens = list(range(3 * SHARED_TOKENS))
    assert len(prefix_ids("m", "", tokens, 16)) == 2
    assert prefix_ids("m", "", [*tokens, 1], 16)[:2] == prefix_ids("m", "", tokens, 16)
    assert prefix_ids("m", "salt", tokens, 16) != prefix_ids("m", "", tokens, 16)
    # An engine's block must not hold parts of two.
    assert prefix_ids("m", "", tokens, 2 * SHARED_TOKENS) == ()


@given(st.integers(0, 1 << 32))
def test_it_never_counts_less_than_distinct_blocks_and_never_more_than_all(seed: int) -> None:
    random = Random(seed)
    book = KvBook()
    held: list[Holding] = []
    for _ in range(80):
        match random.choice(["take", "settle", "release"]):
            case "take":
                ids = [f"{random.randrange(2)}:{n}" for n in range(1)] * random.randrange(2)
                ids += [f"{ids[0]}:{n}" for n in range(random.randrange(5))] if ids else []
                held.append(Holding(len(ids) + random.randrange(3), ids))
                book.take(held[-1])
            case "settle" if held:
                book.settle(random.choice(held), random.randrange(6))
            case "release" if held:
                book.release(held.pop(random.randrange(len(held))))
            case _:
                pass
        counts = Counter(each for holding in held for each in holding.ids)
        alone = sum(holding.blocks - len(holding.ids) for holding in held)
        assert len(counts) + alone <= book.used <= sum(holding.blocks for holding in held)
    for holding in held:
        book.release(holding)
    assert book.used == 0
