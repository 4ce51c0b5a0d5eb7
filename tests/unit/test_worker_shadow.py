"""The shadow map against an engine's prefix cache played out block by block, for every ratio of block sizes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.blocks import hash_blocks, root_key, split_ids
from baton.engines.engine import (
    EngineBlockEvent,
    EngineBlocksCleared,
    EngineBlocksRemoved,
    EngineBlocksStored,
    EngineEventBatch,
)
from baton.errors import ConfigurationError
from baton.messages.base import pack_tokens
from baton.messages.index import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, Tier
from baton.messages.workers import Fingerprint
from baton.worker.shadow import ShadowMap

DIGEST = "ab" * 32
CANONICAL = 32


def ids_of(tokens: list[int], salt: str = "") -> list[bytes]:
    return split_ids(hash_blocks(root_key(DIGEST, salt=salt), pack_tokens(tokens), CANONICAL))


def shadow_map(engine_block_tokens: int) -> ShadowMap:
    return ShadowMap(model_digest=DIGEST, engine_block_tokens=engine_block_tokens, block_tokens=CANONICAL)


def stored(
    tokens: list[int], names: list[str], size: int, *, parent: str | None = None, salt: str = ""
) -> EngineBlocksStored:
    return EngineBlocksStored(
        parent=parent.encode() if parent else None,
        hashes=tuple(name.encode() for name in names),
        tokens=tuple(tokens),
        block_tokens=size,
        cache_salt=salt,
    )


def removed(*names: str) -> EngineBlocksRemoved:
    return EngineBlocksRemoved(hashes=tuple(name.encode() for name in names))


class Feed:
    """Numbers the batches, and follows the published events as an index would."""

    def __init__(self, shadow: ShadowMap) -> None:
        self.shadow = shadow
        self.sequence = 0
        self.index: dict[bytes, bytes] = {}
        """Blocks on the device."""
        self.pooled: dict[bytes, bytes] = {}
        self.filed: dict[bytes, bytes] = {}

    def on(self, tier: Tier) -> dict[bytes, bytes]:
        return (self.index, self.pooled, self.filed)[tier]

    def __call__(self, *events: EngineBlockEvent) -> list[BlockEvent]:
        self.sequence += 1
        changes = self.shadow.apply(EngineEventBatch(sequence=self.sequence, events=events))
        for change in changes:
            match change:
                case BlocksStored(parent=parent, blocks=blocks, tier=tier):
                    assert not parent or any(parent in self.on(each) for each in Tier), "an index would refuse it"
                    for block in split_ids(blocks):
                        assert block not in self.on(tier), "stored twice"
                        self.on(tier)[block] = parent
                        parent = block
                case BlocksRemoved(blocks=blocks, tier=tier):
                    for block in split_ids(blocks):
                        del self.on(tier)[block]
                case BlocksCleared(tier=tier):
                    for each in Tier if tier is None else (tier,):
                        self.on(each).clear()
        return changes


def test_equal_sizes_and_a_run_that_continues_its_parent() -> None:
    tokens = list(range(96))
    feed = Feed(shadow_map(32))
    a, b, c = ids_of(tokens)
    assert feed(stored(tokens[:64], ["e1", "e2"], 32)) == [BlocksStored(parent=b"", blocks=a + b)]
    assert feed(stored(tokens[64:], ["e3"], 32, parent="e2")) == [BlocksStored(parent=b, blocks=c)]
    assert feed(removed("e3", "e2")) == [BlocksRemoved(blocks=c + b)]
    assert a in feed.shadow
    assert len(feed.shadow) == 1


def test_an_engine_block_of_two_canonical_ones() -> None:
    tokens = list(range(128))
    feed = Feed(shadow_map(64))
    ids = ids_of(tokens)
    feed(stored(tokens[:64], ["e1"], 64))
    feed(stored(tokens[64:], ["e2"], 64, parent="e1"))
    assert list(feed.index) == ids
    feed(removed("e2"))
    assert list(feed.index) == ids[:2]


def test_a_canonical_block_of_two_engine_ones_is_held_while_both_are() -> None:
    tokens = list(range(64))
    feed = Feed(shadow_map(16))
    first, second = ids_of(tokens)
    feed(stored(tokens[:48], ["e1", "e2", "e3"], 16))
    assert list(feed.index) == [first]
    feed(stored(tokens[48:], ["e4"], 16, parent="e3"))
    assert list(feed.index) == [first, second]
    feed(removed("e1"))
    assert list(feed.index) == [second]
    feed(stored(tokens[:16], ["e1"], 16))
    assert set(feed.index) == {first, second}
    assert feed.index[second] == first


def test_two_second_halves_share_a_first_half() -> None:
    feed = Feed(shadow_map(16))
    left, right = list(range(32)), [*range(16), *range(100, 116)]
    feed(stored(left, ["e1", "e2"], 16))
    feed(stored(right[16:], ["e2x"], 16, parent="e1"))
    assert set(feed.index) == {*ids_of(left), *ids_of(right)}
    feed(removed("e1"))
    assert feed.index == {}
    feed(removed("e2"), stored(left[:16], ["e1"], 16))
    assert set(feed.index) == set(ids_of(right))


def test_a_hash_stored_twice_is_held_until_it_was_removed_twice() -> None:
    tokens = list(range(32))
    feed = Feed(shadow_map(32))
    feed(stored(tokens, ["e1"], 32))
    assert feed(stored(tokens, ["e1"], 32)) == []
    assert feed(removed("e1")) == []
    assert len(feed.index) == 1
    feed(removed("e1"))
    assert feed.index == {}
    assert feed(removed("e1")) == [], "a third removal means nothing"


def test_two_hashes_of_the_same_content_are_one_block_until_both_are_gone() -> None:
    tokens = list(range(32))
    feed = Feed(shadow_map(32))
    feed(stored(tokens, ["e1"], 32), stored(tokens, ["other"], 32))
    assert list(feed.index) == ids_of(tokens)
    assert feed(removed("e1")) == []
    feed(removed("other"))
    assert feed.index == {}


def test_the_salt_enters_the_root_and_children_inherit_it() -> None:
    tokens = list(range(64))
    feed = Feed(shadow_map(32))
    feed(stored(tokens[:32], ["e1"], 32, salt="tenant"), stored(tokens[32:], ["e2"], 32, parent="e1"))
    assert list(feed.index) == ids_of(tokens, "tenant")
    assert not set(feed.index) & set(ids_of(tokens))


def test_a_lost_batch_clears_everything_and_unknown_parents_are_ignored() -> None:
    tokens = list(range(64))
    feed = Feed(shadow_map(32))
    feed(stored(tokens[:32], ["e1"], 32))
    feed.sequence += 1
    changes = feed(stored(tokens[32:], ["e2"], 32, parent="e1"))
    assert changes == [BlocksCleared()]
    assert feed.shadow.ignored_blocks == 1
    feed(stored(tokens[:32], ["e1"], 32))
    assert list(feed.index) == ids_of(tokens[:32])


def test_a_cleared_cache_is_empty_and_fills_again() -> None:
    tokens = list(range(32))
    feed = Feed(shadow_map(32))
    assert feed(EngineBlocksCleared()) == [], "there was nothing to clear"
    feed(stored(tokens, ["e1"], 32))
    assert feed(EngineBlocksCleared(), stored(tokens, ["e1"], 32))[0] == BlocksCleared()
    assert list(feed.index) == ids_of(tokens)


def test_blocks_of_an_unexpected_size_are_ignored() -> None:
    feed = Feed(shadow_map(32))
    assert feed(stored(list(range(64)), ["e1"], 64), stored(list(range(40)), ["e2"], 32)) == []
    assert feed.shadow.ignored_blocks == 2


def test_runs_give_everything_back_parents_first() -> None:
    feed = Feed(shadow_map(32))
    trunk, branch = list(range(32 * 5)), [*range(64), *range(500, 564)]
    feed(stored(trunk, ["t1", "t2", "t3", "t4", "t5"], 32))
    feed(stored(branch[64:], ["b3", "b4"], 32, parent="t2"))
    for run_blocks_max in (1, 2, 100):
        seen: dict[bytes, bytes] = {}
        for run in feed.shadow.runs(run_blocks_max):
            parent = run.parent
            blocks = split_ids(run.blocks)
            assert 1 <= len(blocks) <= run_blocks_max
            assert parent == b"" or parent in seen
            for block in blocks:
                assert block not in seen
                seen[block], parent = parent, block
        assert seen == feed.index


def pool_stored(ids: list[bytes], tokens: list[int], size: int, first: int, end: int) -> EngineBlocksStored:
    """Return the event of pool blocks [first, end) of a prompt, keyed by the canonical ids at their ends."""
    keys = ids[size // CANONICAL - 1 :: size // CANONICAL]
    return EngineBlocksStored(
        parent=keys[first - 1] if first else None,
        hashes=tuple(keys[first:end]),
        tokens=tuple(tokens[first * size : end * size]),
        block_tokens=size,
        tier=Tier.POOL,
    )


def file_stored(parent: bytes | None, ids: list[bytes]) -> EngineBlocksStored:
    return EngineBlocksStored(parent=parent, hashes=tuple(ids), tokens=(), block_tokens=CANONICAL, tier=Tier.FILE)


def file_removed(ids: list[bytes]) -> EngineBlocksRemoved:
    return EngineBlocksRemoved(hashes=tuple(ids), tier=Tier.FILE)


def test_the_file_names_canonical_blocks_and_counts_those_of_two_engine_blocks() -> None:
    ids, feed = ids_of(list(range(256))), Feed(shadow_map(64))
    other = ids_of([*range(224), *[9] * 32])[7]
    assert feed(file_stored(None, ids[:6])) == [BlocksStored(parent=b"", blocks=b"".join(ids[:6]), tier=Tier.FILE)]
    # Two engine blocks of 64 tokens share their first half.
    feed(file_stored(ids[5], ids[6:8]))
    feed(file_stored(ids[5], [ids[6], other]))
    assert set(feed.filed) == {*ids, other}
    feed(file_removed(ids[6:8]))
    assert set(feed.filed) == {*ids[:7], other}
    feed(file_removed([ids[6], other]))
    assert list(feed.filed) == ids[:6]
    assert feed.shadow.fingerprint(Tier.FILE).blocks == 6
    assert [run.tier for run in feed.shadow.runs(100)] == [Tier.FILE]
    assert feed(file_stored(b"unknown", ids[7:])) == []
    assert feed.shadow.ignored_blocks == 1


def test_the_pool_continues_what_only_the_device_holds_and_not_what_nothing_holds() -> None:
    tokens = list(range(256))
    ids, feed = ids_of(tokens), Feed(shadow_map(64))
    feed(stored(tokens[:64], ["e1"], 64))
    assert feed(pool_stored(ids, tokens, 64, 1, 2)) == [
        BlocksStored(parent=ids[1], blocks=ids[2] + ids[3], tier=Tier.POOL)
    ]
    feed(removed("e1"))
    assert (list(feed.index), list(feed.pooled)) == ([], ids[2:4])
    assert feed(pool_stored(ids, tokens, 64, 3, 4)) == [], "its parent is on no tier"
    assert feed.shadow.ignored_blocks == 1
    feed(pool_stored(ids, tokens, 64, 0, 1), EngineBlocksRemoved(hashes=(ids[3],), tier=Tier.POOL))
    assert set(feed.pooled) == set(ids[:2])
    assert {run.tier for run in feed.shadow.runs(100)} == {Tier.POOL}
    feed(EngineBlocksCleared())
    assert feed.shadow.fingerprint(Tier.POOL) == Fingerprint()
    assert feed.shadow.engine_blocks == 0


def test_an_engine_that_clears_its_device_keeps_its_pool() -> None:
    tokens = list(range(64))
    ids, feed = ids_of(tokens), Feed(shadow_map(32))
    feed(stored(tokens, ["e1", "e2"], 32))
    assert feed(EngineBlocksCleared(tier=Tier.DEVICE)) == [BlocksCleared()], "what older indexes know, without a pool"
    feed(stored(tokens, ["e1", "e2"], 32), pool_stored(ids, tokens, 32, 0, 1))
    assert feed(EngineBlocksCleared(tier=Tier.DEVICE)) == [BlocksCleared(tier=Tier.DEVICE)]
    assert (list(feed.index), list(feed.pooled)) == ([], ids[:1])
    assert feed.shadow.fingerprint(Tier.POOL).blocks == 1


@given(
    size=st.sampled_from([32, 64]),
    choices=st.lists(st.tuples(st.sampled_from(["device", "pool", "evict", "drop"]), st.integers(0, 7)), max_size=60),
)
def test_both_tiers_equal_a_recount(size: int, choices: list[tuple[str, int]]) -> None:
    """The blocks of one prompt are computed on the device, saved to the pool, and evicted from either, in any order."""
    tokens = list(range(size * 8))
    ids, feed = ids_of(tokens), Feed(shadow_map(size))
    device, pool = set[int](), set[int]()
    for what, number in choices:
        if what == "device" and number not in device and (not number or number - 1 in device):
            parent = str(number - 1) if number else None
            feed(stored(tokens[number * size :][:size], [str(number)], size, parent=parent))
            device.add(number)
        elif what == "pool" and number not in pool and (not number or number - 1 in device | pool):
            feed(pool_stored(ids, tokens, size, number, number + 1))
            pool.add(number)
        elif what == "evict" and number in device:
            feed(removed(str(number)))
            device.remove(number)
        elif what == "drop" and number in pool:
            feed(EngineBlocksRemoved(hashes=(ids[(number + 1) * size // CANONICAL - 1],), tier=Tier.POOL))
            pool.remove(number)
        for tier, expected in ((Tier.DEVICE, device), (Tier.POOL, pool)):
            held = {each for n in expected for each in ids[n * size // CANONICAL : (n + 1) * size // CANONICAL]}
            assert set(feed.on(tier)) == held
            assert feed.shadow.fingerprint(tier).blocks == len(held)
    runs = {tier: [run for run in feed.shadow.runs(3) if run.tier is tier] for tier in Tier}
    for tier in Tier:
        assert {each for run in runs[tier] for each in split_ids(run.blocks)} == set(feed.on(tier))


@pytest.mark.parametrize("size", [48, 20, 0])
def test_sizes_that_do_not_divide_are_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match="multiple or a divisor"):
        shadow_map(size)


@given(
    size=st.sampled_from([16, 32, 64]),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6),
    choices=st.lists(st.integers(0, 10**6), max_size=60),
)
def test_the_map_equals_a_recount_of_the_engines_blocks(
    size: int, prompts: list[list[int]], choices: list[int]
) -> None:
    """Blocks of few distinct contents come and go; a canonical block is held iff the engine holds all of it."""
    feed = Feed(shadow_map(size))
    copies: Counter[tuple[int, ...]] = Counter()
    for choice in choices:
        contents = prompts[choice % len(prompts)]
        chain = [tuple(contents[: n + 1]) for n in range(len(contents))]
        held = sorted(prefix for prefix, count in copies.items() if count)
        if choice % 3 and held:
            victim = held[choice % len(held)]
            copies[victim] -= 1
            feed(removed(str(victim)))
            continue
        # An engine stores what it lacks of a chain, and its parent is there by then; sometimes a copy more.
        first = 0 if choice % 2 else next((n for n, prefix in enumerate(chain) if not copies[prefix]), len(chain) - 1)
        if first and not copies[chain[first - 1]]:
            continue
        run = chain[first:]
        tokens = [content for prefix in run for content in [prefix[-1]] * size]
        copies.update(run)
        feed(stored(tokens, [str(p) for p in run], size, parent=str(chain[first - 1]) if first else None))
    expected: set[bytes] = set()
    for contents in {prefix for prefix, count in copies.items() if count}:
        tokens = [content for content in contents for _ in range(size)]
        ids = ids_of(tokens)
        for number, block in enumerate(ids):
            covering = range(number * CANONICAL // size, -(-(number + 1) * CANONICAL // size))
            if all(copies[contents[: e + 1]] for e in covering):
                expected.add(block)
    assert set(feed.index) == expected
    assert {block for block in expected if block in feed.shadow} == expected
    assert feed.shadow.fingerprint() == Fingerprint.of(
        sum(int.from_bytes(each, "little") for each in expected), len(expected)
    )
    for prefix, count in copies.items():
        for _ in range(count):
            feed(removed(str(prefix)))
    assert feed.shadow.fingerprint() == Fingerprint()
    assert (len(feed.shadow), feed.shadow.engine_blocks) == (0, 0), "nothing is remembered of what is gone"
