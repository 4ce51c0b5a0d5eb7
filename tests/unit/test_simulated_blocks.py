"""The simulated engine's block cache."""

from __future__ import annotations

import pytest

from baton.engines.engine import EngineBlocksRemoved, EngineBlocksStored
from baton.engines.simulated.blocks import BlockCache


def make_cache(blocks: int = 4, nonce: bytes = b"nonce") -> BlockCache:
    return BlockCache(blocks=blocks, block_tokens=2, nonce=nonce)


def store(cache: BlockCache, tokens: list[int], salt: str = "") -> tuple[list[int], list[bytes]]:
    """Take blocks for a whole context and register them; they stay held."""
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, tokens, salt)
    table = cache.take_fresh(len(hashes))
    cache.register(table, hashes, tokens, 0, salt)
    return table, hashes


def test_a_prefix_is_found_up_to_where_it_differs() -> None:
    cache = make_cache()
    table, _ = store(cache, [1, 2, 3, 4, 5, 6])
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, [1, 2, 3, 4, 9, 9], "")
    assert cache.match(hashes) == table[:2]


def test_hashes_differ_between_salts_and_between_nonces() -> None:
    found: set[bytes] = set()
    for nonce, salt in ((b"one", ""), (b"one", "tenant"), (b"two", "")):
        hashes: list[bytes] = []
        make_cache(nonce=nonce).extend_hashes(hashes, [1, 2], salt)
        found.update(hashes)
    assert len(found) == 3


def test_hashes_grow_as_tokens_do() -> None:
    cache = make_cache()
    whole: list[bytes] = []
    cache.extend_hashes(whole, [1, 2, 3, 4, 5], "s")
    grown: list[bytes] = []
    for length in range(6):
        cache.extend_hashes(grown, [1, 2, 3, 4, 5][:length], "s")
    assert grown == whole
    assert len(whole) == 2


def test_what_was_used_longest_ago_is_evicted_first_and_tails_before_heads() -> None:
    cache = make_cache(blocks=4)
    old, old_hashes = store(cache, [1, 2, 3, 4])
    new, new_hashes = store(cache, [5, 6, 7, 8])
    cache.give_back(old)
    cache.give_back(new)
    cache.drain_events()
    assert cache.take_fresh(3) == [old[1], old[0], new[1]]
    assert cache.drain_events() == (EngineBlocksRemoved(hashes=(old_hashes[1], old_hashes[0], new_hashes[1])),)
    assert cache.match(new_hashes) == [new[0]]


def test_held_blocks_are_never_taken() -> None:
    cache = make_cache(blocks=4)
    table, hashes = store(cache, [1, 2, 3, 4])
    assert not cache.can_take([], 3)
    assert cache.can_take(table, 2)
    cache.give_back(table)
    assert cache.can_take(table, 2)
    assert not cache.can_take(table, 3), "a cached block that is taken back is no free block any more"
    cache.take(cache.match(hashes))
    assert cache.used_blocks == 2


def test_references_count() -> None:
    cache = make_cache()
    table, _ = store(cache, [1, 2])
    cache.take(table)
    cache.give_back(table)
    assert cache.used_blocks == 1
    cache.give_back(table)
    assert cache.used_blocks == 0
    with pytest.raises(AssertionError):
        cache.give_back(table)


def test_copies_are_reported_and_evicted_one_by_one() -> None:
    cache = make_cache(blocks=6)
    first, hashes = store(cache, [1, 2, 3, 4])
    stored = cache.drain_events()
    second, _ = store(cache, [1, 2, 3, 4])
    assert cache.drain_events() == stored
    cache.give_back(first)
    cache.take_fresh(4)
    assert cache.drain_events() == (EngineBlocksRemoved(hashes=(hashes[1], hashes[0])),)
    assert cache.match(hashes) == second


def test_events_name_the_parent_and_the_tokens() -> None:
    cache = make_cache()
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, [1, 2, 3, 4, 5, 6], "salt")
    table = cache.take_fresh(3)
    cache.register(table, hashes[:1], [1, 2, 3, 4, 5, 6], 0, "salt")
    cache.register(table, hashes, [1, 2, 3, 4, 5, 6], 1, "salt")
    assert cache.drain_events() == (
        EngineBlocksStored(parent=None, hashes=(hashes[0],), tokens=(1, 2), block_tokens=2, cache_salt="salt"),
        EngineBlocksStored(
            parent=hashes[0], hashes=tuple(hashes[1:]), tokens=(3, 4, 5, 6), block_tokens=2, cache_salt="salt"
        ),
    )
