"""A cold store that is unavailable, emptied or damaged: memory answers, and lost blocks are resynced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from baton_kvindex.counters import ResyncReason
from baton_kvindex.indexed_worker import SyncState

from baton.messages.base import WorkerAddress
from baton.messages.index import BlocksRemoved
from tests.harness.index.cold import PATH, World, cold_prompt
from tests.harness.index.worker import MODEL, Cache
from tests.harness.index.worker import chain as prompt


async def test_while_it_is_away_memory_answers_and_a_worker_waits_until_it_is_back() -> None:
    world, cache = await cold_prompt()
    world.store.away = True
    world.remove(cache, prompt(PATH)[-16:])
    waiting = asyncio.create_task(world.reload())
    await world.clock.advance(1.0)
    assert await world.match(prompt(PATH)) == {}
    assert not waiting.done()
    world.store.away = False
    await world.clock.advance(0.2)
    await waiting
    assert world.is_true(cache)
    assert world.reconciler.counters.resyncs[ResyncReason.COLD] == 0


async def test_when_it_is_away_for_long_the_worker_is_resynced() -> None:
    world, cache = await cold_prompt()
    world.reconciler.on_heartbeat(cache.heartbeat(), 0.0)
    world.store.away = True
    world.remove(cache, prompt(PATH)[-16:])
    waiting = asyncio.create_task(world.reload())
    await world.clock.advance(world.settings.cold_patience_s + 0.5)
    await waiting
    assert world.reconciler.counters.resyncs[ResyncReason.COLD] == 1
    assert world.state(cache) is SyncState.NEEDED
    (address,) = world.reconciler.due_resyncs(world.clock.now_s())
    world.reconciler.on_pages(address, cache.pages())
    assert world.is_true(cache)


async def test_what_it_wrote_without_an_answer_does_not_stay_there_for_ever() -> None:
    world, cache = World(), Cache()
    world.tell(cache, PATH)
    world.store.loses_answers = True
    for _ in range(3):
        await world.spill.make_room()
    world.store.loses_answers = False
    world.tell(cache, PATH)
    await world.spill.make_room()
    assert world.index.branches == len(world.store.branches)


def without_a_block(packed: bytes) -> bytes:
    """Return a branch one of whose ids is missing, though all is said of who holds it."""
    end = 4 + 16 * len(PATH)
    return (len(PATH) - 1).to_bytes(4, "little") + packed[4 : end - 16] + packed[end:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "half of it is there": lambda packed: packed[:30],
    "its end is missing": lambda packed: packed[:-3],
    "a block is missing": without_a_block,
}


@pytest.mark.parametrize("damage", ["lost", *DAMAGES])
async def test_what_it_lost_or_damaged_is_resynced(damage: str) -> None:
    world, cache = World(), Cache()
    world.tell(cache, PATH)
    world.reconciler.on_heartbeat(cache.heartbeat(), 0.0)
    await world.spill.make_room()
    stored, world.store.branches = world.store.branches, {}
    if damage != "lost":
        world.store.branches = {name: DAMAGES[damage](packed) for name, packed in stored.items()}
    assert await world.match(prompt(PATH)) == {}
    assert (world.reconciler.counters.resyncs[ResyncReason.COLD], world.state(cache)) == (1, SyncState.NEEDED)
    assert world.reconciler.due_resyncs(0.0) == [WorkerAddress(worker="w", generation=1)]


async def test_an_older_branch_of_the_same_blocks_is_not_taken_for_the_newer() -> None:
    world, cache = await cold_prompt()
    old = dict(world.store.branches)
    await world.match(prompt(PATH))
    world.remove(cache, prompt(PATH)[-16:])
    await world.spill.make_room()
    world.store.branches |= old
    assert await world.match(prompt(PATH)) == {"w": len(PATH) - 1}


async def test_a_restarted_worker_does_not_wait_for_what_the_old_one_needed() -> None:
    world, cache = await cold_prompt()
    world.remove(cache, prompt(PATH)[-16:])
    due = world.reconciler.due_reloads()
    cache.restart()
    world.tell(cache, "new")
    assert world.reconciler.match(MODEL, prompt("new")).held == {"w": 3}
    for address, wanted in due:
        await world.spill.reload(address, wanted)
    assert world.is_true(cache)
    gone = cache.changed(BlocksRemoved(blocks=b"broken"))
    world.reconciler.on_events(gone, 99, 0.0)
    assert world.reconciler.counters.malformed == 1


async def test_a_loss_is_seen_before_anybody_asks() -> None:
    world, cache = await cold_prompt()
    world.store.branches.clear()
    world.tell(cache, "meanwhile, something else is stored")
    await world.spill.make_room()
    assert (world.reconciler.counters.resyncs[ResyncReason.COLD], world.state(cache)) == (1, SyncState.NEEDED)
