"""The one index that writes: writers with one bucket and store on a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import pytest
from baton_kvindex.config import IndexSettings
from baton_kvindex.durable import Batch, Journal, SavedWorker, WorkerState
from baton_kvindex.radix import RadixIndex
from baton_kvindex.reconciler import Reconciler
from baton_kvindex.spill import Spill
from baton_kvindex.store import ColdStore, StoreFenced
from baton_kvindex.writer import Writer

from baton.bus import Entry, MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.errors import BusUnavailable
from baton.messages.codec import AnyMessage
from baton.messages.index import BlocksStored, KvEvents
from baton.node.ports import deterministic_ports

SETTINGS = IndexSettings()
TTL_S = SETTINGS.writer_ttl_s


class Line(MemoryBus):
    """A connection that can be cut, unlike those of the others."""

    cut = False

    async def get(self, bucket: str, key: str) -> Entry | None:
        self._check()
        return await super().get(bucket, key)

    async def put(self, bucket: str, key: str, message: AnyMessage, *, revision: int) -> int:
        self._check()
        return await super().put(bucket, key, message, revision=revision)

    def _check(self) -> None:
        if self.cut:
            raise BusUnavailable("cut")


class Written:
    """A store in memory: what was written by which fence."""

    def __init__(self) -> None:
        self.fence = 0
        self.states: dict[str, WorkerState] = {}
        self.batches: list[tuple[int, frozenset[str]]] = []

    async def load(self, take: Callable[[str, SavedWorker], Awaitable[None]]) -> int:
        raise NotImplementedError

    def cold(self, instance: str) -> ColdStore:
        raise NotImplementedError

    async def claim(self, fence: int) -> Mapping[str, WorkerState]:
        if fence < self.fence:
            raise StoreFenced("late")
        self.fence = fence
        return dict(self.states)

    async def write(self, batch: Batch, fence: int) -> None:
        if fence < self.fence:
            raise StoreFenced("late")
        self.batches.append((fence, frozenset(batch.workers)))
        for worker, change in batch.workers.items():
            if change is None:
                self.states.pop(worker, None)
            else:
                self.states[worker] = change.state

    async def close(self) -> None: ...


class Peer:
    """One index: the same events as every other, a line and a writer of its own."""

    def __init__(self, network: MemoryNetwork, store: Written, number: int) -> None:
        self.line = Line(network)
        self.reconciler = Reconciler(RadixIndex, IndexSettings(), Journal(100))
        ports = deterministic_ports(self.line, network.clock, seed=number)
        spill = Spill(ports=ports, store=None, reconciler=self.reconciler, settings=SETTINGS)
        self.writer = Writer(ports=ports, store=store, reconciler=self.reconciler, spill=spill, settings=SETTINGS)
        self.task = asyncio.create_task(self.writer.run())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.line.close()


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(clock=self.clock)
        self.store = Written()
        self.peers = [Peer(self.network, self.store, number) for number in range(2)]
        self._sequences: dict[str, int] = {}

    def event(self, worker: str) -> None:
        """A worker stores a block, and every index hears of it."""
        sequence = self._sequences[worker] = self._sequences.get(worker, 0) + 1
        stored = BlocksStored(parent=b"", blocks=sequence.to_bytes(16, "big"))
        message = KvEvents(worker=worker, generation=1, model_digest="m", sequence=sequence, events=(stored,))
        for peer in self.peers:
            peer.reconciler.on_events(message, sequence, self.clock.now_s())

    async def writing(self) -> Peer:
        """Return the index that writes: the other one's changes still wait."""
        self.event("probe")
        await self.clock.advance(SETTINGS.write_interval_s * 2)
        (writes,) = [peer for peer in self.peers if not peer.reconciler.journal]
        return writes

    def other(self, peer: Peer) -> Peer:
        return self.peers[1 - self.peers.index(peer)]


@pytest.fixture
async def scene() -> AsyncGenerator[Scene]:
    made = Scene()
    yield made
    await asyncio.gather(*(peer.end() for peer in made.peers))


async def test_one_of_two_writes_all_the_time(scene: Scene) -> None:
    await scene.clock.advance(0.1)
    first = await scene.writing()
    for number in range(60):
        scene.event(f"w{number % 3}")
        await scene.clock.advance(0.1)
    assert await scene.writing() is first
    assert {fence for fence, _ in scene.store.batches} == {scene.store.fence}
    assert scene.store.states["w0"].sequence == 20


async def test_the_other_takes_over_from_one_that_is_cut_off_and_writes_what_is_missing(scene: Scene) -> None:
    await scene.clock.advance(0.1)
    for worker in ("a", "b"):
        scene.event(worker)
    first = await scene.writing()
    before = scene.store.fence
    first.line.cut = True
    cut_s = scene.clock.now_s()
    scene.event("b")
    await scene.clock.advance(TTL_S + 0.1)
    scene.event("b")
    while scene.store.fence == before:
        await scene.clock.advance(0.05)
    assert scene.clock.now_s() - cut_s < 2.0
    await scene.clock.advance(0.2)
    assert scene.store.states["b"].sequence == 3
    after = [workers for fence, workers in scene.store.batches if fence > before]
    assert all("a" not in workers for workers in after), "what was written already is not written again"
    first.line.cut = False
    await scene.clock.advance(1.0)
    assert await scene.writing() is scene.other(first), "who comes back waits"


async def test_one_that_leaves_hands_the_lease_over_at_once(scene: Scene) -> None:
    await scene.clock.advance(0.1)
    first = await scene.writing()
    scene.event("a")
    await first.end()
    assert scene.store.states["a"].sequence == 1, "the newest state is written"
    scene.event("a")
    await scene.clock.advance(TTL_S / 2)
    assert scene.store.states["a"].sequence == 2


async def test_a_writer_that_does_not_know_that_it_was_replaced_is_refused(scene: Scene) -> None:
    await scene.clock.advance(0.1)
    first = await scene.writing()
    await scene.store.claim(scene.store.fence + 1000)
    scene.event("a")
    await scene.clock.advance(0.3)
    assert "a" not in scene.store.states
    assert first.reconciler.journal


async def test_without_the_bus_no_index_writes_and_with_it_one_does(scene: Scene) -> None:
    await scene.clock.advance(0.1)
    await scene.writing()
    scene.network.reachable = False
    await scene.clock.advance(TTL_S)
    batches = len(scene.store.batches)
    scene.event("a")
    await scene.clock.advance(10.0)
    assert len(scene.store.batches) == batches
    scene.network.reachable = True
    await scene.clock.advance(2.0)
    assert scene.store.states["a"].sequence == 1
    await scene.writing()
