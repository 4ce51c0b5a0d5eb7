"""The KV pool's directory: no pinned slot is reused, none leaks, prefixes are found as a naive copy finds them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.blocks import hash_blocks, root_key, split_ids
from baton.errors import ConfigurationError
from baton.pool.chain import BlockChain
from baton.pool.directory import PoolDirectory, SlotState
from baton.pool.policy import PolicyName, make_policy

BRANCHES, DEPTH = 6, 9


def chain_of(branch: int, length: int) -> list[bytes]:
    """Return one of a few chains, of which pairs share their first four blocks."""
    return [b"%d/%d" % (branch // 2 if depth < 4 else branch, depth) for depth in range(length)]


class Model:
    """Checks each step of a directory against plain sets."""

    def __init__(self, slots: int, policy: PolicyName) -> None:
        self.directory = PoolDirectory(slots, make_policy(policy, slots))
        self.ready: dict[bytes, int] = {}
        self.filling: dict[bytes, int] = {}
        self.pins: list[list[bytes]] = []
        self.reported: set[bytes] = set()

    def reserve(self, chain: Sequence[bytes], first: int) -> None:
        held = {key: self.ready[key] for pin in self.pins for key in pin}
        predecessors = {key: self.ready[key] for key in chain if key in self.ready}
        reserved = self.directory.reserve(chain, first)
        evicted = [key for key in self.ready if self.directory.state(key) is SlotState.FREE]
        assert not set(evicted) & (held.keys() | predecessors.keys())
        for key in evicted:
            del self.ready[key]
        for index, slot in reserved:
            assert index >= first
            assert chain[index] not in self.ready and chain[index] not in self.filling
            assert index == 0 or chain[index - 1] in self.ready or chain[index - 1] in self.filling
            assert slot not in self.ready.values() and slot not in self.filling.values()
            self.filling[chain[index]] = slot

    def fill(self, keys: Sequence[bytes]) -> None:
        self.directory.filled(keys)
        self.ready |= {key: self.filling.pop(key) for key in keys}

    def abandon(self, keys: Sequence[bytes]) -> None:
        self.directory.abandon(keys)
        for key in keys:
            del self.filling[key]

    def pin(self, chain: Sequence[bytes], first: int) -> None:
        end = self.directory.match(chain)
        assert end == next((number for number, key in enumerate(chain) if key not in self.ready), len(chain))
        if first < end:
            assert self.directory.pin(chain, first, end) == tuple(self.ready[key] for key in chain[first:end])
            self.pins.append(list(chain[first:end]))

    def unpin(self, number: int) -> None:
        self.directory.unpin(self.pins.pop(number % len(self.pins)))

    def check(self) -> None:
        directory = self.directory
        assert (directory.ready, directory.filling) == (len(self.ready), len(self.filling))
        assert directory.pinned == len({key for pin in self.pins for key in pin})
        assert directory.ready + directory.filling <= directory.slots
        changes = directory.take_changes()
        assert not set(changes.stored) & self.reported
        assert set(changes.removed) <= self.reported
        self.reported = (self.reported | set(changes.stored)) - set(changes.removed)
        assert self.reported == self.ready.keys()

    def act(self, action: str, branch: int, length: int, number: int) -> None:
        if action == "reserve":
            chain = chain_of(branch, length)
            self.reserve(chain, number % max(length, 1))
        elif action in ("fill", "abandon") and self.filling:
            keys = sorted(self.filling)[number % len(self.filling) :]
            (self.fill if action == "fill" else self.abandon)(keys)
        elif action == "pin":
            self.pin(chain_of(branch, length), number % DEPTH)
        elif action == "unpin" and self.pins:
            self.unpin(number)

    def finish(self) -> None:
        """End every use and check that the whole pool can be filled anew."""
        while self.pins:
            self.unpin(0)
        self.abandon(list(self.filling))
        fresh = [b"fresh %d" % number for number in range(self.directory.slots)]
        self.reserve(fresh, 0)
        assert sorted(self.filling.values()) == list(range(self.directory.slots))


ACTIONS = ("reserve", "reserve", "fill", "fill", "abandon", "pin", "unpin")


@pytest.mark.parametrize("policy", PolicyName)
@given(
    slots=st.integers(1, 20),
    steps=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, BRANCHES - 1), st.integers(0, DEPTH), st.integers(0, DEPTH)),
        max_size=80,
    ),
)
def test_directory_agrees_with_a_naive_model(
    policy: PolicyName, slots: int, steps: list[tuple[str, int, int, int]]
) -> None:
    model = Model(slots, policy)
    for step in steps:
        model.act(*step)
        model.check()
    model.finish()


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("operations", [5_000, pytest.param(1_000_000, marks=[pytest.mark.nightly])])
@pytest.mark.timeout(900)
def test_random_operations_leak_nothing(policy: PolicyName, operations: int) -> None:
    random = Random(operations)
    model = Model(24, policy)
    for _ in range(operations):
        model.act(random.choice(ACTIONS), random.randrange(BRANCHES), random.randint(0, DEPTH), random.randrange(DEPTH))
        if len(model.pins) > 4:
            model.unpin(random.randrange(5))
        model.check()
    model.finish()


def test_a_prompt_larger_than_the_pool_keeps_its_first_blocks() -> None:
    directory = PoolDirectory(4, make_policy(PolicyName.S3_FIFO, 4))
    chain = chain_of(0, DEPTH)
    for end in range(1, DEPTH + 1):
        directory.filled([chain[index] for index, _ in directory.reserve(chain[:end], end - 1)])
    assert directory.match(chain) == 4
    assert directory.counts.dropped == DEPTH - 4
    assert directory.counts.evicted == 0


def test_stranded_blocks_are_counted_and_found_again() -> None:
    directory = PoolDirectory(2, make_policy(PolicyName.LRU, 2))
    chain = chain_of(0, 2)
    for end in (1, 2):
        directory.filled([chain[index] for index, _ in directory.reserve(chain[:end], end - 1)])
    directory.filled([b"other" for _ in directory.reserve([b"other"], 0)])
    assert directory.counts.stranded == 1
    assert directory.match(chain) == 0
    directory.filled([chain[index] for index, _ in directory.reserve(chain, 0)])
    assert directory.match(chain) == 2


@given(
    tokens=st.lists(st.integers(0, 2**31), max_size=300),
    cuts=st.lists(st.integers(0, 300)),
    per_block=st.integers(1, 3),
)
def test_chain_grows_to_the_ids_of_the_whole(tokens: list[int], cuts: list[int], per_block: int) -> None:
    root = root_key("digest", salt="tenant")
    chain = BlockChain(root, 32 * per_block)
    for cut in sorted(cuts):
        chain.extend(tokens[:cut])
    chain.extend(tokens)
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert chain.keys == split_ids(hash_blocks(root, packed, 32))[per_block - 1 :: per_block]


def test_a_chain_refuses_blocks_without_an_id() -> None:
    with pytest.raises(ConfigurationError, match="multiple of 32 tokens, not of 16"):
        BlockChain(root_key("digest"), 16)
