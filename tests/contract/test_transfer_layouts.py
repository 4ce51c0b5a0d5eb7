"""Pulls between caches with different layouts, compared with a naive oracle's memory."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
from fake_library import FakeVerbs
from transfer_caches import CacheNode, scattered
from transfer_rig import KEY, OPTIONS, MakeAgent, assert_nothing_left, wait_until
from ucx_library import ucx_library

from baton.errors import LayoutMismatch
from baton.transfer import (
    AgentStats,
    Cause,
    Corruption,
    EventKind,
    NativeAgent,
    TransferFaults,
    lease_key,
    pull_failure,
    rank_key,
)
from baton.transfer.layout import Layout, agree

MODEL: dict[str, Any] = {
    "layers": 3,
    "kv_heads": 4,
    "dim": 16,
    "dtype": "bfloat16",
    "order": "NHD",
    "form": "fused",
    "block_tokens": 16,
}
PACKED: dict[str, Any] = {"order": "HND", "block_tokens": 32}
LATENT = {"form": "latent", "kv_heads": 1, "dim": 72}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "16 to 32": ({}, {"block_tokens": 32}),
    "32 to 128": ({"block_tokens": 32}, {"block_tokens": 128}),
    "128 to 16": ({"block_tokens": 128}, {}),
    "64 to 1": ({"block_tokens": 64}, {"block_tokens": 1}),
    "NHD to HND": ({}, {"order": "HND"}),
    "split to fused": ({"form": "split"}, {"block_tokens": 64}),
    "fused to split": ({"order": "HND"}, {"form": "split"}),
    "split to split": ({"form": "split", "block_tokens": 32}, {"form": "split", "order": "HND"}),
    "vec to plain": (PACKED | {"packing": "vec"}, {"form": "split", "block_tokens": 1}),
    "plain to amx": ({}, PACKED | {"packing": "amx"}),
    "amx to vec": (PACKED | {"packing": "amx"}, PACKED | {"packing": "vec", "block_tokens": 64}),
    "latent": (LATENT, LATENT | {"block_tokens": 64}),
    "one rank of two": ({"tp_size": 2, "tp_rank": 1}, {"block_tokens": 32}),
}
LARGE = {"layers": 2, "kv_heads": 8, "dim": 128}
LARGE_TOKENS = 2048
"""8 MiB a layer: more chunks than can wait to be converted at a time."""


@pytest.fixture(params=["direct", "cma", "shm", "tcp", "tcp lanes", "memory"])
def way(request: pytest.FixtureRequest) -> str:
    """Name a backend that converts."""
    return request.param


@pytest.fixture
def make_cache(make_agent: MakeAgent, backend: str) -> MakeCache:
    return MakeCache(make_agent, shared=backend == "direct")


class MakeCache:
    def __init__(self, make_agent: MakeAgent, *, shared: bool) -> None:
        self._make_agent = make_agent
        self._shared = shared
        self._made = 0

    def __call__(self, tokens: int, **layout: Any) -> CacheNode:
        self._made += 1
        cache = scattered(Layout(**MODEL | layout), tokens, self._made)
        return CacheNode(self._make_agent(), cache, shared=self._shared)

    def large_pair(self) -> tuple[CacheNode, CacheNode]:
        return self(LARGE_TOKENS, **LARGE), self(LARGE_TOKENS, **LARGE, order="HND", block_tokens=32)


@pytest.mark.parametrize("pair", PAIRS)
def test_every_token_arrives_and_nothing_else_is_touched(make_cache: MakeCache, pair: str) -> None:
    of_source, of_sink = PAIRS[pair]
    source, sink = make_cache(300, **of_source), make_cache(300, **of_sink)
    choices = random.Random(pair)
    size = sink.cache.layout.block_tokens
    for attempt in range(4):
        tokens = choices.randint(1, 300)
        first = choices.randrange(-(-tokens // size)) * size
        source.offer(key := lease_key(pair, attempt), tokens)
        sink.pull(key, source, first, tokens)
        done = sink.wait_end(key)
        assert (done.kind, done.layers, done.tokens >= tokens - first) == (EventKind.PULL_DONE, 3, True), done
        sink.expect(source, first, tokens)
        assert sink.cache.is_as_expected(), (first, tokens)
    assert source.cache.is_as_expected()
    assert [event.layers for event in sink.rest()] == [1, 2, 3] * 4
    assert_nothing_left(source, sink)


def test_the_oracle_notices_one_wrong_bit(make_cache: MakeCache) -> None:
    source, sink = make_cache(40), make_cache(40, block_tokens=32)
    source.offer(KEY, 40)
    sink.pull(KEY, source, 0, 40)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    sink.expect(source, 0, 40)
    assert sink.cache.is_as_expected()
    sink.cache.memory[1][sink.cache.blocks[1], 5] ^= 1
    assert not sink.cache.is_as_expected()


def test_more_chunks_than_can_be_staged(make_cache: MakeCache) -> None:
    source, sink = make_cache.large_pair()
    keys = [lease_key("large", attempt) for attempt in range(3)]
    for key in keys:
        source.offer(key, LARGE_TOKENS)
        sink.pull(key, source, 0, LARGE_TOKENS)
    for key in keys:
        assert sink.wait_end(key).kind == EventKind.PULL_DONE
    sink.expect(source, 0, LARGE_TOKENS)
    assert sink.cache.is_as_expected()


def test_blocks_of_the_source_fill_while_the_pull_runs(make_cache: MakeCache) -> None:
    source, sink = make_cache(300, block_tokens=64), make_cache(300)
    generation = source.agent.open_lease(KEY)
    sink.pull(KEY, source, 48, 290)
    for number, block in enumerate(source.cache.blocks):
        source.agent.extend_lease(KEY, generation, [block])
        source.agent.post_ready(KEY, generation, -1, number * 64 + 17)
        wait_until(lambda number=number: sink.agent.stats().pulled_blocks == 3 * number)
    source.agent.post_ready(KEY, generation, -1, 290)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    sink.expect(source, 48, 290)
    assert sink.cache.is_as_expected()


def test_a_revoked_pull_takes_the_new_generation(make_cache: MakeCache) -> None:
    source, sink = make_cache(300, form="split"), make_cache(300, block_tokens=32)
    generation = source.lease(KEY, source.cache.blocks)
    source.agent.post_ready(KEY, generation, 0, 300)
    sink.pull(KEY, source, 32, 300)
    assert sink.wait(EventKind.PULL_PROGRESS).layers == 1
    source.agent.revoke_lease(KEY, final=False)
    # Other content, in other places.
    moved = scattered(source.cache.layout, 300, 99)
    for memory, content in zip(source.cache.memory, moved.memory, strict=True):
        memory[:] = content
    source.cache = replace(moved)
    source.offer(KEY, 300)
    done = sink.wait_end(KEY)
    assert (done.kind, done.restarts) == (EventKind.PULL_DONE, 1)
    sink.expect(source, 32, 300)
    assert sink.cache.is_as_expected()


@pytest.mark.parametrize("corruption", Corruption)
def test_a_corrupted_chunk_is_not_converted(make_cache: MakeCache, corruption: Corruption) -> None:
    source, sink = make_cache.large_pair()
    before = sink.snapshot()
    source.agent.set_faults(TransferFaults(corrupt_every=5, corruption=corruption))
    source.offer(KEY, LARGE_TOKENS)
    sink.pull(KEY, source, 0, LARGE_TOKENS)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.CHECKSUM)
    sink.expect(source, 0, LARGE_TOKENS)
    assert sink.is_part_of(before)


def test_nothing_is_written_after_a_cancel(make_cache: MakeCache) -> None:
    source, sink = make_cache.large_pair()
    before = sink.snapshot()
    source.offer(KEY, LARGE_TOKENS)
    sink.pull(KEY, source, 0, LARGE_TOKENS)
    wait_until(lambda: sink.agent.stats().pulled_blocks > 0)
    sink.agent.cancel_pull(KEY)
    ended = sink.wait_end(KEY)
    after = sink.snapshot()
    if ended.kind == EventKind.PULL_FAILED:  # Else the pull was faster.
        assert ended.cause == Cause.CANCELLED
    time.sleep(0.05)
    assert sink.snapshot() == after
    sink.expect(source, 0, LARGE_TOKENS)
    assert sink.is_part_of(before)
    # The connection is not left waiting for what was given up.
    source.offer(again := lease_key("again", 0), LARGE_TOKENS)
    sink.pull(again, source, 0, LARGE_TOKENS)
    assert sink.wait_end(again).kind == EventKind.PULL_DONE
    assert sink.cache.is_as_expected()
    assert_nothing_left(source, sink)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("changes", [{}, LATENT], ids=["heads", "latent"])
def test_ranks_of_different_number(make_cache: MakeCache, ranks: tuple[int, int], changes: dict[str, Any]) -> None:
    sources = [make_cache(200, tp_size=ranks[0], tp_rank=rank, **changes) for rank in range(ranks[0])]
    ours = changes or {"order": "HND"}
    sinks = [make_cache(200, tp_size=ranks[1], tp_rank=rank, block_tokens=32, **ours) for rank in range(ranks[1])]
    expected = 0
    for to, sink in enumerate(sinks):
        # One pull for each of the source's ranks that holds some of this one's heads, into the same blocks.
        for share in agree(sources[0].cache.layout, sink.cache.layout):
            key = rank_key(KEY, share.source_rank, to)
            sources[share.source_rank].offer(key, 180)
            sink.pull(key, sources[share.source_rank], 64, 180)
            sink.expect(sources[share.source_rank], 64, 180)
            expected += 1
    done = [event for sink in sinks for event in _ends(sink, sink.agent.stats())]
    assert [event.kind for event in done] == [EventKind.PULL_DONE] * expected
    assert all(sink.cache.is_as_expected() for sink in sinks)


def _ends(sink: CacheNode, stats: AgentStats) -> list[Any]:
    pulls = stats.pulls + stats.pulls_done + stats.pulls_failed
    return [sink.wait(EventKind.PULL_DONE, EventKind.PULL_FAILED) for _ in range(pulls)]


def test_adapters_that_need_registered_memory_are_passed_over(fake_verbs: FakeVerbs) -> None:
    options = replace(OPTIONS, backends=("verbs", "tcp"), verbs_library=fake_verbs.library)
    source = CacheNode(NativeAgent(options), scattered(Layout(**MODEL), 100, 1))
    sink = CacheNode(NativeAgent(options), scattered(Layout(**MODEL | PACKED), 100, 2))
    source.offer(KEY, 100)
    sink.pull(KEY, source, 0, 100)
    done = sink.wait_end(KEY)
    assert (done.kind, done.backend) == (EventKind.PULL_DONE, "tcp")
    assert "verbs: it reads into registered memory only, and the KV layouts differ" in done.declined
    sink.expect(source, 0, 100)
    assert sink.cache.is_as_expected()
    for node in (source, sink):
        node.agent.close()


@pytest.mark.parametrize("backend_only", ["verbs", "ucx"])
def test_a_pair_with_no_other_way_is_refused_and_the_adapter_named(fake_verbs: FakeVerbs, backend_only: str) -> None:
    libraries = {"verbs_library": fake_verbs.library} if backend_only == "verbs" else {"ucx_library": ucx_library()}
    options = replace(OPTIONS, backends=(backend_only,), **libraries)
    source = CacheNode(NativeAgent(options), scattered(Layout(**MODEL), 100, 1))
    sink = CacheNode(NativeAgent(options), scattered(Layout(**MODEL | PACKED), 100, 2))
    source.offer(KEY, 100)
    sink.pull(KEY, source, 0, 100)
    done = sink.wait_end(KEY)
    assert (done.kind, done.cause) == (EventKind.PULL_FAILED, Cause.LAYOUT)
    assert isinstance(pull_failure(done.cause, done.detail), LayoutMismatch), "the gateway then avoids the pair"
    assert f"{backend_only}: it reads into registered memory only, and the KV layouts differ" in done.detail
    for side in (source, sink):
        assert f"'{side.cache.layout}'" in done.detail
    for node in (source, sink):
        node.agent.close()
