"""KV events: numbered without gaps, stored once each, and a resync that fits what was published."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import subjects
from baton.blocks import hash_blocks, root_key, split_ids
from baton.bus import Delivery, MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.engines.engine import EngineBlocksCleared, EngineBlocksRemoved, EngineBlocksStored
from baton.engines.scripted import ScriptedEngine
from baton.messages.base import Refused, WorkerAddress, pack_tokens
from baton.messages.index import (
    BlockEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvents,
    ShadowPage,
    ShadowQuery,
)
from baton.messages.workers import Fingerprint
from baton.node.ports import deterministic_ports
from baton.worker import events
from baton.worker.events import EventPublisher, split_events
from baton.worker.shadow import ShadowMap

DIGEST = "cd" * 32


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(clock=self.clock)
        self.bus = MemoryBus(self.network)
        self.engine = ScriptedEngine()
        shadow = ShadowMap(model_digest=DIGEST, engine_block_tokens=32, block_tokens=32)
        address = WorkerAddress(worker="w0", generation=5)
        self.publisher = EventPublisher(deterministic_ports(self.bus, self.clock, seed=0), address, DIGEST, shadow)
        self.stored: list[KvEvents] = []
        self.message_ids: list[str] = []

    def publish(self, first: int, blocks: int, parent: bytes | None = None) -> None:
        """Let the engine store a run of blocks whose tokens are counted from `first`, so that runs differ."""
        tokens = tuple(range(first, first + 32 * blocks))
        hashes = tuple(b"%d" % (first + 32 * number) for number in range(blocks))
        self.engine.publish(EngineBlocksStored(parent=parent, hashes=hashes, tokens=tokens, block_tokens=32))

    async def settle(self) -> None:
        """Wait until threads, which do not follow the clock, are done too, and what was gathered is stored."""
        for _ in range(40):
            await asyncio.sleep(0.002)
            await self.clock.advance(events.GATHER_S / 10)

    async def page(self, cursor: int = 0) -> ShadowPage | Refused:
        answer = await self.bus.request(subjects.shadow("w0"), ShadowQuery(cursor=cursor), timeout_s=5.0)
        assert isinstance(answer, ShadowPage | Refused)
        return answer


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    world = World()

    async def take(delivery: Delivery) -> None:
        assert isinstance(delivery.message, KvEvents)
        world.stored.append(delivery.message)

    await world.bus.follow(subjects.KV_STREAM, subjects.KV_EVENTS_ALL, take)
    await world.bus.subscribe(subjects.shadow("w0"), world.publisher.answer)
    tasks = [
        asyncio.create_task(world.publisher.follow(world.engine.events())),
        asyncio.create_task(world.publisher.publish()),
    ]
    yield world
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await world.bus.close()
    await world.network.close()


def ids_of(first: int, blocks: int) -> bytes:
    return hash_blocks(root_key(DIGEST), pack_tokens(range(first, first + 32 * blocks)), 32)


async def test_batches_become_numbered_messages(world: World) -> None:
    world.publish(0, 2)
    await world.settle()
    world.engine.publish(EngineBlocksRemoved(hashes=(b"unknown",)))
    await world.settle()
    world.engine.publish(EngineBlocksRemoved(hashes=(b"32",)))
    await world.settle()
    assert [message.sequence for message in world.stored] == [1, 2], "a batch that changes nothing makes no message"
    ids = ids_of(0, 2)
    assert world.stored[0].events == (BlocksStored(parent=b"", blocks=ids),)
    assert world.stored[1].events == (BlocksRemoved(blocks=ids[16:]),)
    assert {(m.worker, m.generation, m.model_digest) for m in world.stored} == {("w0", 5, DIGEST)}
    assert world.publisher.published_sequence == 2


async def test_the_fingerprint_is_that_after_the_newest_number(world: World) -> None:
    publisher = world.publisher
    assert (publisher.held, publisher.held_sequence) == (Fingerprint(), 0)
    world.publish(0, 1)
    await world.settle()
    world.publish(32, 500, parent=b"0")
    await world.settle()
    world.engine.publish(EngineBlocksRemoved(hashes=(b"0",)))
    await world.settle()
    held = split_ids(ids_of(0, 501))[1:]
    assert publisher.held == Fingerprint.of(sum(int.from_bytes(block, "little") for block in held), 500)
    assert publisher.held_sequence == world.stored[-1].sequence == 3


async def test_changes_of_some_milliseconds_are_one_message(world: World) -> None:
    world.publish(0, 2)
    world.publish(1000, 1)
    world.engine.publish(EngineBlocksRemoved(hashes=(b"32",)))
    await asyncio.sleep(0.01)
    await world.clock.advance(events.GATHER_S * 0.9)
    assert not world.stored
    # Heartbeats tell of numbered changes only: number and fingerprint belong together.
    assert (world.publisher.held, world.publisher.held_sequence) == (Fingerprint(), 0)
    await world.settle()
    (message,) = world.stored
    assert message.sequence == world.publisher.held_sequence == 1
    ids = ids_of(0, 2)
    assert message.events == (
        BlocksStored(parent=b"", blocks=ids),
        BlocksStored(parent=b"", blocks=ids_of(1000, 1)),
        BlocksRemoved(blocks=ids[16:]),
    )
    held = int.from_bytes(ids[:16], "little") + int.from_bytes(ids_of(1000, 1), "little")
    assert world.publisher.held == Fingerprint.of(held, 2)


async def test_a_resync_holds_changes_without_a_number(world: World) -> None:
    """The page and its sequence must fit each other, and what it holds must still be told to other indexes."""
    world.publish(0, 2)
    await asyncio.sleep(0.01)
    await world.clock.settle()
    page = await world.page()
    assert not world.stored
    assert isinstance(page, ShadowPage)
    assert (page.sequence, b"".join(run.blocks for run in page.runs)) == (1, ids_of(0, 2))
    world.publish(1000, 1)
    await world.settle()
    assert [message.sequence for message in world.stored] == [1, 2]
    assert world.publisher.held_sequence == 2


async def test_a_long_batch_is_hashed_on_a_thread_and_keeps_its_place(world: World) -> None:
    world.publish(0, 1)
    await world.settle()
    world.publish(32, 500, parent=b"0")
    await world.settle()
    world.publish(32 * 501, 1, parent=b"%d" % (32 * 500))
    await world.settle()
    assert [message.sequence for message in world.stored] == [1, 2, 3]
    assert b"".join(e.blocks for m in world.stored for e in m.events if isinstance(e, BlocksStored)) == ids_of(0, 502)


async def test_events_wait_while_the_stream_is_away_and_lose_nothing(world: World) -> None:
    world.network.reachable = False
    world.publish(0, 1)
    await world.settle()
    world.publish(1000, 1)
    await world.settle()
    assert world.publisher.published_sequence == 0
    world.network.reachable = True
    await world.clock.advance(2.0)
    await world.settle()
    assert [message.sequence for message in world.stored] == [1, 2]


async def test_a_lost_engine_batch_clears_the_index(world: World) -> None:
    world.publish(0, 1)
    world.engine.publish(lost=1)
    world.publish(1000, 1)
    await world.settle()
    assert [type(event) for message in world.stored for event in message.events] == [
        BlocksStored,
        BlocksCleared,
        BlocksStored,
    ]


async def test_waiting_changes_are_bounded_and_slow_the_reader(world: World) -> None:
    world.network.reachable = False
    for number in range(events.CHANGES_MAX // 2):
        world.publish(number * 1000, 1)
        world.engine.publish(EngineBlocksCleared())
    await world.settle()
    for number in range(100):
        world.publish(10**7 + number * 1000, 1)
    await world.settle()
    assert world.engine.batches_waiting > 90
    world.network.reachable = True
    await world.clock.advance(2.0)
    await world.settle()
    assert [message.sequence for message in world.stored] == list(range(1, len(world.stored) + 1))
    told = [type(event) for message in world.stored for event in message.events]
    assert told == [BlocksStored, BlocksCleared] * (events.CHANGES_MAX // 2) + [BlocksStored] * 100


async def test_a_resync_gives_one_state_page_by_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MESSAGE_IDS_MAX", 10)
    world.publish(0, 20)
    world.publish(10_000, 3)
    await world.settle()
    held: list[bytes] = []
    cursor, pages = 0, 0
    while True:
        page = await world.page(cursor)
        assert isinstance(page, ShadowPage)
        assert page.sequence == world.stored[-1].sequence or pages
        held += [block for run in page.runs for block in split_ids(run.blocks)]
        pages += 1
        # What changes meanwhile belongs to later events, not to this snapshot.
        world.publish(50_000 + pages * 1000, 1)
        await world.settle()
        cursor = page.next_cursor
        if not cursor:
            break
    assert pages > 2
    assert sorted(held) == sorted(split_ids(ids_of(0, 20) + ids_of(10_000, 3)))


async def test_an_empty_map_has_one_empty_page(world: World) -> None:
    page = await world.page()
    assert isinstance(page, ShadowPage)
    assert (page.runs, page.next_cursor, page.sequence) == ((), 0, 0)


@pytest.mark.parametrize("cursor", [1, 77 << 32, -1, (1 << 32) + 9])
async def test_an_unknown_cursor_is_refused(world: World, cursor: int) -> None:
    world.publish(0, 1)
    await world.settle()
    await world.page()
    answer = await world.page(cursor)
    assert isinstance(answer, Refused)
    assert "begin again at 0" in answer.error.detail


block_ids = st.integers(0, 30).map(lambda count: bytes(range(count)) * 16)
changes = st.one_of(
    st.builds(BlocksStored, parent=st.just(b"p" * 16), blocks=block_ids),
    st.builds(BlocksRemoved, blocks=block_ids),
    st.just(BlocksCleared()),
)


@given(st.lists(changes, max_size=8), st.integers(8, 40))
def test_split_changes_are_bounded_and_say_the_same(whole: list[BlockEvent], ids_max: int) -> None:
    parts = list(split_events(whole, ids_max))

    def flat(sequence: list[BlockEvent]) -> list[tuple[str, bytes, bytes]]:
        out: list[tuple[str, bytes, bytes]] = []
        for event in sequence:
            if isinstance(event, BlocksCleared):
                out.append(("cleared", b"", b""))
                continue
            parent = event.parent if isinstance(event, BlocksStored) else b""
            for block in split_ids(event.blocks):
                out.append((type(event).__name__, parent, block))
                parent = block if isinstance(event, BlocksStored) else b""
        return out

    assert flat([event for part in parts for event in part]) == flat(whole)
    for part in parts:
        assert sum(len(event.blocks) for event in part if not isinstance(event, BlocksCleared)) // 16 + len(part) > 0
        assert sum(len(event.blocks) // 16 for event in part if not isinstance(event, BlocksCleared)) <= ids_max
