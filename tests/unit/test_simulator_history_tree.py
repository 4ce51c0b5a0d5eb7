"""The history tree against a list of all that was inserted."""

from __future__ import annotations

from collections.abc import Sequence

from baton_simulator.routers.history_tree import HistoryTree
from hypothesis import given
from hypothesis import strategies as st

BLOCK_TOKENS = 10
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
inserts = st.lists(st.tuples(prompts, st.sampled_from("abc"), st.integers(0, 3)), max_size=20)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(inserts, prompts)
def test_a_match_is_the_longest_prefix_that_was_sent_to_anyone(
    sent: list[tuple[tuple[int, ...], str, int]], prompt: tuple[int, ...]
) -> None:
    tree = HistoryTree(BLOCK_TOKENS, 1000)
    for blocks, worker, tail in sent:
        tree.insert(blocks, len(blocks) * BLOCK_TOKENS + tail, worker)

    node, matched_tokens = tree.match(prompt)

    longest = max((common(blocks, prompt) for blocks, _, _ in sent), default=0)
    holders = [worker for blocks, worker, _ in sent if longest and common(blocks, prompt) == longest]
    assert matched_tokens == longest * BLOCK_TOKENS
    if longest:
        assert set(node.used) == set(holders)
        assert tree.name(node) == holders[0]


@given(inserts, st.integers(0, 60))
def test_an_eviction_keeps_each_worker_within_its_bound(
    sent: list[tuple[tuple[int, ...], str, int]], tokens_max: int
) -> None:
    tree = HistoryTree(BLOCK_TOKENS, tokens_max)
    for blocks, worker, tail in sent:
        tree.insert(blocks, len(blocks) * BLOCK_TOKENS + tail, worker)

    tree.evict()

    nodes = list(tree)
    for worker, tokens in tree.worker_tokens.items():
        assert tokens == sum(node.tokens for node in nodes if worker in node.used)
        assert tokens <= tokens_max
    assert all(node.used for node in nodes)
    assert all(
        set(node.used) <= set(node.parent.used) for node in nodes if node.parent is not None and node.parent.used
    )


def test_an_eviction_drops_the_least_recently_used_prompts() -> None:
    tree = HistoryTree(BLOCK_TOKENS, 50)
    tree.insert((1, 2, 3), 30, "a")
    tree.insert((1, 2, 4), 30, "a")
    tree.insert((5, 6), 20, "a")
    tree.insert((1, 2, 3), 30, "a")

    tree.evict()

    # Sixty tokens: the leaf 4 goes, then fifty are left.
    assert tree.match((1, 2, 4))[1] == 20
    assert tree.match((1, 2, 3))[1] == 30
    assert tree.match((5, 6))[1] == 20


def test_every_eighth_use_of_the_clock_refreshes_a_match() -> None:
    tree = HistoryTree(BLOCK_TOKENS, 20)
    tree.insert((1, 2), 20, "a")
    for block in range(10, 17):
        tree.insert((block,), 10, "a")

    tree.name(tree.match((1, 2))[0])
    tree.evict()

    assert tree.match((1, 2))[1] == 20
    assert tree.worker_tokens == {"a": 20}


def test_the_nodes_of_a_busy_tree_are_bounded() -> None:
    tree = HistoryTree(BLOCK_TOKENS, 1000)
    for n in range(2000):
        tree.insert((0, n % 7, 1000 + n), 35, "ab"[n % 2])
        if n % 50 == 0:
            tree.evict()

    tree.evict()

    # Each worker keeps at most 1,000 tokens; each prompt has 15 of its own.
    assert sum(1 for _ in tree) <= 2 * 1000 / 15 + 8
