"""Eviction policies of the KV pool, against naive oracles that search plain lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.pool.policy import (
    SMALL_SHARE,
    SMALL_SHARE_MAX,
    SMALL_SHARE_MIN,
    EvictionPolicy,
    Lru,
    PolicyName,
    S3Fifo,
    make_policy,
)


@dataclass
class NaiveS3Fifo:
    """The algorithm of the paper with shares that follow what comes back; lists of (key, uses), oldest first."""

    capacity: int
    adapts: bool
    small_max: int
    evicted: bool = False
    small: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    main: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    small_ghosts: list[int] = field(default_factory=list[int])
    main_ghosts: list[int] = field(default_factory=list[int])

    def insert(self, key: int) -> None:
        if key in self.small_ghosts:
            self.small_ghosts.remove(key)
            self.main.append((key, 0))
            if self.adapts and self.small_max < int(self.capacity * SMALL_SHARE_MAX):
                self.small_max += 1
        elif key in self.main_ghosts:
            self.main_ghosts.remove(key)
            self.main.append((key, 0))
            if self.small_max > int(self.capacity * SMALL_SHARE_MIN):
                self.small_max -= 1
        elif not self.evicted and len(self.small) >= self.small_max:
            self.main.append((key, 0))
        else:
            self.small.append((key, 0))

    def touch(self, key: int) -> None:
        for queue in (self.small, self.main):
            for place, (other, uses) in enumerate(queue):
                if other == key:
                    queue[place] = (key, min(uses + 1, 3))

    def remove(self, key: int) -> None:
        self.small = [item for item in self.small if item[0] != key]
        self.main = [item for item in self.main if item[0] != key]

    def evict(self, pinned: Callable[[int], bool]) -> int | None:
        self.evicted = True
        main_max = self.capacity - self.small_max
        for queue in ("main", "small") if len(self.main) > main_max else ("small", "main"):
            victim = self._evict_small(pinned) if queue == "small" else self._evict_main(pinned)
            if victim is not None:
                return victim
        return None

    def _evict_small(self, pinned: Callable[[int], bool]) -> int | None:
        while self.small:
            key, uses = self.small.pop(0)
            if uses == 0 and not pinned(key):
                self.small_ghosts = [*self.small_ghosts, key][-self.capacity :]
                return key
            self.main.append((key, 0))
        return None

    def _evict_main(self, pinned: Callable[[int], bool]) -> int | None:
        while any(not pinned(key) for key, _ in self.main):
            key, uses = self.main.pop(0)
            if uses == 0 and not pinned(key):
                if self.adapts:
                    self.main_ghosts = [*self.main_ghosts, key][-self.capacity :]
                return key
            self.main.append((key, uses if pinned(key) else max(uses - 1, 0)))
        return None


class NaiveLru:
    def __init__(self) -> None:
        self.keys: list[int] = []

    def insert(self, key: int) -> None:
        self.keys.append(key)

    def touch(self, key: int) -> None:
        self.keys.remove(key)
        self.keys.append(key)

    def remove(self, key: int) -> None:
        self.keys.remove(key)

    def evict(self, pinned: Callable[[int], bool]) -> int | None:
        for key in self.keys:
            if not pinned(key):
                self.keys.remove(key)
                return key
        return None


Policies = tuple[EvictionPolicy[int], EvictionPolicy[int]]


def lru(capacity: int) -> Policies:
    return Lru(), NaiveLru()


def s3_fifo(capacity: int, *, adapts: bool = True) -> Policies:
    return S3Fifo(capacity, adapts=adapts), NaiveS3Fifo(capacity, adapts, int(capacity * SMALL_SHARE))


@pytest.mark.parametrize("pair", [lru, s3_fifo, partial(s3_fifo, adapts=False)], ids=["lru", "s3-fifo", "fixed shares"])
@given(
    capacity=st.integers(1, 12),
    steps=st.lists(st.tuples(st.sampled_from("ituue"), st.integers(0, 30), st.sets(st.integers(0, 30))), max_size=120),
)
def test_policy_chooses_what_its_oracle_chooses(
    pair: Callable[[int], Policies], capacity: int, steps: list[tuple[str, int, set[int]]]
) -> None:
    policy, oracle = pair(capacity)
    here: set[int] = set()
    for action, key, pinned in steps:
        if action == "e" or (key not in here and len(here) == capacity):
            victim = policy.evict(pinned.__contains__)
            assert victim == oracle.evict(pinned.__contains__)
            assert (victim is None) == here.issubset(pinned)
            here.discard(-1 if victim is None else victim)
        elif key not in here:
            policy.insert(key)
            oracle.insert(key)
            here.add(key)
        elif action == "u":
            policy.touch(key)
            oracle.touch(key)
        elif action == "t":
            policy.remove(key)
            oracle.remove(key)
            here.discard(key)


def hit_ratio(name: PolicyName, capacity: int, keys: list[bytes]) -> float:
    policy = make_policy(name, capacity)
    here: set[bytes] = set()
    hits = 0
    for key in keys:
        if key in here:
            hits += 1
            policy.touch(key)
            continue
        if len(here) == capacity:
            victim = policy.evict(lambda _: False)
            assert victim is not None
            here.remove(victim)
        policy.insert(key)
        here.add(key)
    return hits / len(keys)


def test_a_scan_costs_s3_fifo_less_than_lru() -> None:
    random = Random(7)
    keys: list[bytes] = []
    for number in range(40_000):
        # Popular keys by Zipf's law; every second access is of a key that never comes again.
        keys.append(b"hot %d" % int(random.paretovariate(0.9)))
        keys.append(b"once %d" % number)
    assert hit_ratio(PolicyName.S3_FIFO, 200, keys) > hit_ratio(PolicyName.LRU, 200, keys) + 0.01


def test_a_used_key_that_leaves_the_small_queue_is_found_in_the_main_one() -> None:
    policy = S3Fifo[str](5)
    for key in "abcde":
        policy.insert(key)
    assert policy.evict(lambda _: False) == "a"
    policy.insert("a")
    policy.touch("b")
    # The main queue is longer than its share, all of it is pinned, and the small queue's only key is in use.
    assert policy.evict(lambda key: key != "b") == "b"
