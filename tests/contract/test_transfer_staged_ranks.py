"""Staging with another number of ranks on the peer's side, over the stand-in for GPUs: bytes, copies, and failures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fake_library import FakeGpu
from test_transfer_layouts import MODEL
from transfer_caches import CacheNode, scattered
from transfer_rig import KEY, OPTIONS, assert_nothing_left, wait_until

from baton.pool.staging import StagedAgent
from baton.transfer import Cause, EventKind, NativeAgent, Whole, lease_key, rank_key
from baton.transfer.device import cuda_copies
from baton.transfer.layout import Layout, agree
from tests.harness.limits import HANG_S

LAYERS, SOURCE_BLOCK, SINK_BLOCK = MODEL["layers"], 16, 32
TOKENS, FIRST = 192, 64
SLOTS = TOKENS // SOURCE_BLOCK
"""Room for one prompt, so that two leases of it cannot be staged at a time."""


@dataclass
class Side:
    """The ranks of one engine."""

    nodes: list[CacheNode]

    @property
    def layout(self) -> Layout:
        return self.nodes[0].cache.layout


@dataclass
class Ranks:
    source: Side
    sink: Side
    gpu: FakeGpu

    def parts(self) -> list[tuple[bytes, int, int]]:
        """Return key, source's rank and sink's rank of each part."""
        return [
            (rank_key(KEY, share.source_rank, to), share.source_rank, to)
            for to, sink in enumerate(self.sink.nodes)
            for share in agree(self.source.layout, sink.cache.layout)
        ]

    def offer(self, rank: int) -> list[bytes]:
        """Lease all that one rank of the source holds to all ranks that read it; return their keys."""
        keys = [key for key, of_rank, _ in self.parts() if of_rank == rank]
        node, generations = self.source.nodes[rank], dict.fromkeys(keys, 0)
        for key in keys:
            generations[key] = node.agent.open_lease(key, tokens=TOKENS, whole=Whole(key=KEY, parts=len(keys)))
            node.agent.extend_lease(key, generations[key], node.cache.blocks)
            node.agent.complete_lease(key, generations[key], TOKENS)
        for key, generation in generations.items():
            node.agent.post_ready(key, generation, -1, TOKENS)
        return keys

    def pull(self, rank: int, *, last_endpoint: str = "") -> list[bytes]:
        """Pull from all ranks of the source that have heads of one rank of the sink; return the parts' keys."""
        parts = [(key, of_rank) for key, of_rank, to in self.parts() if to == rank]
        node = self.sink.nodes[rank]
        for key, of_rank in parts:
            source = self.source.nodes[of_rank]
            node.agent.pull(
                key,
                last_endpoint if last_endpoint and key == parts[-1][0] else source.agent.endpoint,
                first_token=FIRST,
                tokens=TOKENS,
                blocks=node.cache.blocks[FIRST // SINK_BLOCK : TOKENS // SINK_BLOCK],
                budget_s=HANG_S,
                whole=Whole(key=KEY, parts=len(parts)),
            )
            node.expect(source, FIRST, TOKENS)
        return [key for key, _ in parts]

    def copies(self) -> int:
        return self.gpu.counts()["copies"]

    def assert_nothing_left(self) -> None:
        assert_nothing_left(*self.source.nodes, *self.sink.nodes)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, fake_gpu: FakeGpu) -> Iterator[Ranks]:
    """Provide two engines of as many ranks as the parameter says, both staged."""

    def node(seed: int, **changes: Any) -> CacheNode:
        agent = StagedAgent(NativeAgent(OPTIONS), cuda_copies(0, library=fake_gpu.library), SLOTS)
        return CacheNode(agent, scattered(Layout(**MODEL | changes), TOKENS, seed))

    sizes: tuple[int, int] = request.param
    sources = [node(rank, tp_size=sizes[0], tp_rank=rank) for rank in range(sizes[0])]
    sinks = [
        node(9 + rank, tp_size=sizes[1], tp_rank=rank, order="HND", block_tokens=SINK_BLOCK) for rank in range(sizes[1])
    ]
    yield Ranks(Side(sources), Side(sinks), fake_gpu)
    fake_gpu.set(hold_copies=0)
    for each in (*sources, *sinks):
        each.agent.close()
    gc.collect()


def over(*sizes: tuple[int, int]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ranks", sizes, indirect=True, ids=lambda size: f"{size[0]} to {size[1]}")


@over((2, 1), (1, 2), (4, 2))
def test_all_heads_arrive_and_each_block_is_copied_once_on_each_side(ranks: Ranks) -> None:
    for rank in range(len(ranks.source.nodes)):
        ranks.offer(rank)
    keys = {rank: ranks.pull(rank) for rank in range(len(ranks.sink.nodes))}
    for rank, sink in enumerate(ranks.sink.nodes):
        assert {sink.wait_end(key).kind for key in keys[rank]} == {EventKind.PULL_DONE}
        assert sink.cache.is_as_expected()
        layers = [event.layers for event in sink.rest() if event.kind is EventKind.PULL_PROGRESS]
        assert sorted(layers) == sorted([1, 2, 3] * len(keys[rank]))
    for source in ranks.source.nodes:
        source.wait(EventKind.LEASE_STAGED)
        assert EventKind.LEASE_STAGED not in [event.kind for event in source.rest()]
    source_copies = LAYERS * len(ranks.source.nodes) * (TOKENS // SOURCE_BLOCK)
    sink_copies = LAYERS * len(ranks.sink.nodes) * ((TOKENS - FIRST) // SINK_BLOCK)
    assert ranks.copies() == source_copies + sink_copies
    ranks.assert_nothing_left()


@over((2, 1))
def test_a_layer_is_not_copied_before_all_its_heads_are_there(ranks: Ranks) -> None:
    (sink,) = ranks.sink.nodes
    before = sink.snapshot()
    ranks.offer(0)
    first, second = ranks.pull(0)
    ranks.source.nodes[0].wait(EventKind.LEASE_RELEASED, key=first)
    assert (sink.rest(), sink.snapshot()) == ([], before)
    ranks.offer(1)
    for key in (first, second):
        assert sink.wait_end(key).kind is EventKind.PULL_DONE
    assert sink.cache.is_as_expected()


@over((2, 1))
@pytest.mark.parametrize("other", ["has arrived", "is waited for"])
def test_a_part_that_fails_fails_all_and_frees_the_slots(ranks: Ranks, other: str) -> None:
    (sink,) = ranks.sink.nodes
    first, second = ranks.pull(0)
    if other == "has arrived":
        ranks.offer(0)
        ranks.source.nodes[0].wait(EventKind.LEASE_RELEASED, key=first)
    ranks.source.nodes[1].agent.revoke_lease(second, final=True)
    assert (sink.wait_end(second).cause, sink.wait_end(first).cause) == (Cause.REVOKED, Cause.CANCELLED)
    again = lease_key("again", 0)
    ranks.source.nodes[0].offer(again, TOKENS)
    blocks = sink.cache.blocks
    sink.agent.pull(
        again, ranks.source.nodes[0].agent.endpoint, first_token=0, tokens=TOKENS, blocks=blocks, budget_s=HANG_S
    )
    assert sink.wait_end(again).kind is EventKind.PULL_DONE


@over((2, 1))
def test_a_part_that_is_refused_ends_those_that_run(ranks: Ranks) -> None:
    (sink,) = ranks.sink.nodes
    first, second = ranks.pull(0, last_endpoint="no endpoint")
    assert (sink.wait_end(second).cause, sink.wait_end(first).cause) == (Cause.REFUSED, Cause.CANCELLED)
    wait_until(lambda: sink.agent.stats().pulls == 0)


@over((1, 2))
def test_slots_stay_until_no_rank_reads_them(ranks: Ranks) -> None:
    """One reader's end frees nothing; a reader that is opened after the copies have ended finds them."""
    (source,) = ranks.source.nodes
    parts = [key for key, _, _ in ranks.parts()]
    whole = Whole(key=KEY, parts=2)
    for number, key in enumerate(parts):
        generation = source.agent.open_lease(key, tokens=TOKENS, whole=whole)
        source.agent.extend_lease(key, generation, source.cache.blocks)
        source.agent.post_ready(key, generation, -1, TOKENS)
        source.agent.complete_lease(key, generation, TOKENS)
        if number == 0:
            source.wait(EventKind.LEASE_STAGED, key=key)
    ranks.pull(0)
    source.wait(EventKind.LEASE_RELEASED, key=parts[0])
    other = lease_key("other", 0)
    generation = source.agent.open_lease(other, tokens=TOKENS)
    source.agent.extend_lease(other, generation, source.cache.blocks)
    source.agent.post_ready(other, generation, -1, TOKENS)
    source.agent.complete_lease(other, generation, TOKENS)
    assert ranks.copies() <= LAYERS * (TOKENS // SOURCE_BLOCK + (TOKENS - FIRST) // SINK_BLOCK)
    ranks.pull(1)
    source.wait(EventKind.LEASE_STAGED, key=other)
    for key, sink in zip(parts, ranks.sink.nodes, strict=True):
        assert sink.wait_end(key).kind is EventKind.PULL_DONE
        assert sink.cache.is_as_expected()


@over((1, 2))
def test_a_revoked_lease_is_staged_anew_for_all(ranks: Ranks) -> None:
    (source,) = ranks.source.nodes
    ranks.gpu.set(hold_copies=1)
    keys = ranks.offer(0)
    for rank, key in enumerate(keys):
        ranks.pull(rank)
        source.agent.revoke_lease(key, final=False)
    # Other content, in other places.
    cache, source.cache = source.cache, scattered(source.cache.layout, TOKENS, 99)
    for memory, content in zip(cache.memory, source.cache.memory, strict=True):
        memory[:] = content
    ranks.offer(0)
    ranks.gpu.set(hold_copies=0)
    for key, sink in zip(keys, ranks.sink.nodes, strict=True):
        sink.expect(source, FIRST, TOKENS)
        assert sink.wait_end(key).kind is EventKind.PULL_DONE
        assert sink.cache.is_as_expected()
    ranks.assert_nothing_left()


@over((1, 2))
def test_a_copy_that_fails_ends_the_leases_of_all_readers(ranks: Ranks) -> None:
    (source,) = ranks.source.nodes
    ranks.gpu.set(fail_start=1)
    keys = ranks.offer(0)
    ends = [source.wait(EventKind.LEASE_ENDED) for _ in range(2 * len(keys))]
    assert {end.key for end in ends if end.cause is Cause.COPY} == set(keys)
