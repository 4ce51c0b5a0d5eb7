"""Messages that no honest sender sends: each is counted, has bounded cost, and disturbs no other worker."""

from __future__ import annotations

import asyncio

import pytest
from baton_kvindex.config import IndexSettings
from baton_kvindex.durable import WORKERS_MAX, Journal
from baton_kvindex.radix import RadixIndex
from baton_kvindex.reconciler import PLACED_WORKERS_MAX, Reconciler
from baton_kvindex.service import RESYNC_BLOCKS_MAX, RESYNC_S_MAX, IndexService

from baton import subjects
from baton.bus import Delivery, MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.errors import MalformedMessage
from baton.messages.base import Context
from baton.messages.index import BlocksStored, ShadowPage, ShadowQuery
from baton.messages.placement import Audited, Placed
from baton.messages.workers import Goodbye
from baton.node.membership import MEMBERS_MAX
from baton.node.ports import deterministic_ports
from baton.node.service import Node, serve
from baton.stop import Stop
from baton.telemetry import Metrics, Tracing
from tests.harness.index.worker import MODEL, Cache, chain

PAGE_BLOCKS = 1 << 16


@pytest.fixture
def reconciler() -> Reconciler:
    return Reconciler(RadixIndex, IndexSettings(), Journal(1000))


def test_a_flood_of_names_is_bounded_and_those_who_were_there_are_not_pushed_out(reconciler: Reconciler) -> None:
    worker = Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    reconciler.on_events(worker.stored("abc"), 1, 0.0)
    for number in range(MEMBERS_MAX + 100):
        reconciler.on_events(Cache(f"flood {number}").stored("x"), 2, 0.0)
    assert reconciler.size().workers == MEMBERS_MAX
    assert reconciler.counters.stale == 101
    assert reconciler.match(MODEL, chain("abc")).held == {"w": 3}


def test_what_waits_to_be_written_is_bounded_however_many_workers_come_and_go(reconciler: Reconciler) -> None:
    worker = Cache()
    reconciler.on_events(worker.stored("abc"), 1, 0.0)
    written = {"gone": reconciler.state_of("w"), "w": reconciler.state_of("w")}
    for number in range(WORKERS_MAX + 1):
        other = Cache(f"{number}")
        reconciler.on_events(other.stored("x"), 2, 0.0)
        reconciler.on_goodbye(Goodbye(address=other.address), 0.0)
    assert not reconciler.journal.is_complete, "the writer must look at what is written"
    assert len(reconciler.take_batch().workers) <= WORKERS_MAX
    reconciler.go_on_from({name: state for name, state in written.items() if state is not None})
    assert reconciler.journal.is_complete
    assert reconciler.take_batch().workers == {"gone": None}


def test_a_placement_on_more_workers_than_one_can_have_is_refused(reconciler: Reconciler) -> None:
    workers = [Cache(f"w{number}") for number in range(PLACED_WORKERS_MAX + 1)]
    for worker in workers:
        reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    placed = Placed(
        context=Context(request="r", budget_s=60.0),
        model_digest=MODEL,
        blocks=chain("abc"),
        workers=tuple(worker.address for worker in workers),
    )
    with pytest.raises(MalformedMessage):
        reconciler.on_placed(placed, 0.0)
    assert reconciler.speculative_blocks == 0


@pytest.mark.parametrize(("predicted", "cached"), [(-1, 0), (0, -1)])
def test_an_audit_with_less_than_nothing_is_refused(reconciler: Reconciler, predicted: int, cached: int) -> None:
    worker = Cache()
    reconciler.on_heartbeat(worker.heartbeat(), 0.0)
    context = Context(request="r", budget_s=1.0)
    with pytest.raises(MalformedMessage):
        reconciler.on_audited(
            Audited(context=context, address=worker.address, predicted_tokens=predicted, cached_tokens=cached)
        )


# ---------------------------------------------------------------- a shadow map that does not end


class Endless:
    """A worker whose shadow map goes on and on, with pages of so many blocks, each after so long."""

    def __init__(self, bus: MemoryBus, clock: ManualClock, *, page_blocks: int, pause_s: float) -> None:
        self.cache = Cache(sequence=1)
        self.pages = 0
        self.begun = 0
        self._bus = bus
        self._clock = clock
        self._page_blocks = page_blocks
        self._pause_s = pause_s

    async def beat(self) -> None:
        await self._bus.subscribe(subjects.shadow(self.cache.name), self._answer)
        while True:
            await self._bus.publish(subjects.HEARTBEAT, self.cache.heartbeat())
            await self._clock.sleep(0.25)

    async def _answer(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, ShadowQuery)
        self.pages += 1
        self.begun += not delivery.message.cursor
        await self._clock.sleep(self._pause_s)
        run = BlocksStored(parent=b"", blocks=bytes(16 * self._page_blocks))
        page = ShadowPage(
            worker=self.cache.name,
            generation=1,
            model_digest=MODEL,
            sequence=1,
            runs=(run,),
            # It ends so late only for the sake of an index that would read it all.
            next_cursor=delivery.message.cursor + 1 if self.pages < 100 else 0,
        )
        await delivery.respond(page)


class World:
    """An index and such a worker, on a clock that the test moves."""

    def __init__(self, *, page_blocks: int, pause_s: float) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(clock=self.clock)
        self.worker = Endless(MemoryBus(self.network), self.clock, page_blocks=page_blocks, pause_s=pause_s)
        ports = deterministic_ports(MemoryBus(self.network), self.clock, seed=0)
        node = Node(ports=ports, tracing=Tracing("kvindex"), metrics=Metrics("kvindex"))
        self.service = IndexService(IndexSettings(redis_url=""), node, store=None)

    async def run(self, lasting_s: float) -> None:
        """Let both be for so long."""
        tasks = [asyncio.create_task(serve(self.service, Stop())), asyncio.create_task(self.worker.beat())]
        await self.clock.advance(lasting_s)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.network.close()


async def test_a_map_of_more_blocks_than_a_worker_can_have_is_given_up() -> None:
    world = World(page_blocks=PAGE_BLOCKS, pause_s=0.0)
    await world.run(0.3)
    assert world.service.reconciler.counters.malformed == 1
    assert world.worker.pages <= RESYNC_BLOCKS_MAX // PAGE_BLOCKS + 1
    assert world.service.reconciler.size().blocks == 0


async def test_a_map_that_is_read_for_too_long_is_given_up_so_that_others_have_their_turn() -> None:
    world = World(page_blocks=1, pause_s=0.9)
    await world.run(RESYNC_S_MAX + 2.0)
    assert world.worker.begun > 1, "it is resynced, after others"
