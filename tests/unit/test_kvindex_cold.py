"""Cold branches: their eviction, their reload, and changes of a worker's blocks meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from baton_kvindex.cold import BRANCH_BLOCKS_MAX, STUB_BYTES, Cold, ColdIndex
from baton_kvindex.config import IndexSettings
from baton_kvindex.counters import ResyncReason
from baton_kvindex.index import IndexSize, split_ids
from baton_kvindex.indexed_worker import SyncState

from baton.messages.index import BlocksStored
from baton.messages.workers import Goodbye
from tests.contract.index_world import block, chain
from tests.harness.index.cold import PATH, World, cold_prompt
from tests.harness.index.worker import MODEL, Cache
from tests.harness.index.worker import chain as prompt

# ---------------------------------------------------------------- eviction and reload


async def test_a_cold_prompt_matches_after_one_round_trip_and_then_from_memory() -> None:
    world, cache = await cold_prompt()
    assert world.reconciler.match(MODEL, prompt(PATH)).held == {}
    assert world.is_true(cache)
    assert world.reconciler.size() == IndexSize(workers=1, blocks=len(PATH), holdings=len(PATH))
    assert await world.match(prompt(PATH)) == {"w": len(PATH)}
    assert (world.store.asked, world.index.branches) == (1, 0)
    assert await world.match(prompt(PATH)) == {"w": len(PATH)}
    assert await world.match(prompt("some other")) == {}
    assert world.store.asked == 1, "what ends in memory asks no store"


async def test_what_came_back_is_forgotten_elsewhere() -> None:
    world, _ = await cold_prompt()
    await world.match(prompt(PATH))
    await world.make_spill(IndexSettings(memory_bytes_max=1 << 20)).make_room()
    assert world.store.branches == {}


async def test_memory_is_bounded_and_a_scan_pushes_nothing_out_that_is_asked_for_again() -> None:
    limit = 200_000
    world, cache = World(limit), Cache()
    shared = [f"system prompt {number} " + "s" * 40 for number in range(20)]
    for path in shared:
        world.tell(cache, path)
        assert await world.match(prompt(path)) == {"w": len(path)}
    for number in range(400):
        world.tell(cache, chr(0x4E00 + number) + " is asked for once, and long enough to take something")
        if number % 10 == 0:
            await world.spill.make_room()
            world.index.tick()
            assert world.index.used_bytes < limit
    assert world.index.branches > 250
    assert world.index.footprint().bytes < 4_000_000, "a chunk of slots and of nodes, and the table"
    asked = world.store.asked
    for path in shared:
        assert world.reconciler.match(MODEL, prompt(path)).held == {"w": len(path)}
    assert world.store.asked == asked
    assert world.is_true(cache)


async def test_no_more_leaves_than_must() -> None:
    limit = 200_000
    world, cache = World(limit), Cache()
    for number in range(200):
        world.tell(cache, chr(0x4E00 + number) + " is stored at the same time as all the others")
    await world.spill.make_room()
    assert limit / 2 < world.index.used_bytes <= limit


async def test_a_branch_that_changed_while_it_was_written_stays() -> None:
    world, cache = World(), Cache()
    world.tell(cache, PATH)
    changes: list[Callable[[], None]] = [
        lambda: world.tell(cache, PATH + " and goes on"),
        lambda: world.tell(other, PATH),
        lambda: world.remove(cache, prompt(PATH)[-16:]),
    ]
    other = Cache(name="other")
    for change in changes:
        world.store.may_end.clear()
        world.store.written.clear()
        evicted = asyncio.create_task(world.spill.make_room())
        await world.store.written.wait()
        change()
        world.store.may_end.set()
        await evicted
        assert world.index.branches == 0
        assert world.is_true(cache)
    await world.spill.make_room()
    assert len(world.store.branches) == world.index.branches == 1, "nothing is left of what did not leave"


def test_a_branch_that_left_again_while_it_was_looked_for_is_not_lost() -> None:
    index = ColdIndex(stub_bytes=0)
    index.store("a", b"", chain("abc"))

    def evict() -> dict[bytes, bytes]:
        (evicted,) = index.pack(block("a"))
        assert index.evict(evicted)
        return {evicted.name: evicted.packed()}

    found, evictions = evict(), index.evictions
    assert index.reload(found, block("a"), evictions)
    index.remove("a", block("abc"))
    newer = evict()
    assert index.reload(found, block("a") + block("ab"), evictions), "to be looked for again"
    with pytest.raises(Cold) as cold:
        index.remove("a", block("ab"))
    assert cold.value.blocks == block("ab")
    assert index.reload(newer, block("ab"), index.evictions)
    assert index.match(chain("abc")) == {"a": 2}


async def test_a_match_beside_a_branch_that_leaves_is_right() -> None:
    world, cache = World(), Cache()
    world.tell(cache, PATH)
    world.store.may_end.clear()
    evicted = asyncio.create_task(world.spill.make_room())
    await world.store.written.wait()
    assert await world.match(prompt(PATH)) == {"w": len(PATH)}
    world.store.may_end.set()
    await evicted
    assert world.index.branches == 1
    assert await world.match(prompt(PATH)) == {"w": len(PATH)}


def test_a_large_branch_leaves_in_parts_and_only_what_is_on_the_way_comes_back() -> None:
    index = ColdIndex()
    trunk = "t" * 3000
    paths = [trunk + letter * 3000 for letter in "xyz"]
    for path in paths:
        index.store("a", b"", chain(path))
    stored: dict[bytes, bytes] = {}
    for parts in (3, 1):
        evicted = [each for first in index.idlest(1) for each in index.pack(first)]
        assert all(len(each.blocks) <= 16 * BRANCH_BLOCKS_MAX for each in evicted)
        assert [index.evict(each) for each in evicted] == [True] * parts
        stored |= {each.name: each.packed() for each in evicted}
    assert (index.branches, index.cold_blocks, index.footprint().nodes) == (4, 12_000, 0)
    wanted = index.behind(chain(paths[1]), 0)
    assert wanted == block("t") + block(trunk + "y")
    found = {name: packed for name, packed in stored.items() if packed[4:20] in split_ids(wanted)}
    assert index.reload(found, wanted, index.evictions)
    assert index.match(chain(paths[1])) == {"a": 6000}
    assert (index.branches, index.cold_blocks) == (2, 6000)


def test_branches_behind_unheld_blocks_leave_one_by_one() -> None:
    index = ColdIndex(stub_bytes=0)
    for path in ("abcd", "abce"):
        index.store("a", b"", chain(path))
    index.remove("a", block("a") + block("ab") + block("abc"))
    evicted = [each for first in index.idlest(1) for each in index.pack(first)]
    assert {each.blocks for each in evicted} == {block("abcd"), block("abce")}
    assert all(index.evict(each) for each in evicted)
    assert (index.branches, index.footprint().nodes) == (2, 0)


async def test_memory_is_freed_though_all_was_asked_for_at_the_same_time_behind_one_prefix() -> None:
    limit = 200_000
    world, cache = World(limit), Cache()
    for number in range(200):
        path = "shared by all " + chr(0x4E00 + number) * 50
        world.tell(cache, path)
        assert await world.match(prompt(path)) == {"w": len(path)}
    await world.spill.make_room()
    assert limit / 2 < world.index.used_bytes <= limit
    assert world.reconciler.match(MODEL, prompt("shared by all ")).held == {"w": 14}


def test_what_takes_less_than_its_stub_stays() -> None:
    index = ColdIndex()
    index.store("a", b"", chain("shy"))
    assert index.used_bytes < STUB_BYTES
    assert index.pack(block("s")) == []


# ---------------------------------------------------------------- changes of what is cold


async def test_a_removal_of_cold_blocks_waits_for_them_and_others_do_not() -> None:
    world, cache = await cold_prompt()
    other = Cache(name="other")
    world.remove(cache, prompt(PATH)[-32:])
    world.tell(cache, "later")
    world.tell(other, PATH[:2])
    assert not world.is_true(cache)
    assert world.reconciler.match(MODEL, prompt("later")).held == {}, "in order"
    await world.reload()
    assert world.is_true(cache)
    assert world.reconciler.match(MODEL, prompt("later")).held == {"w": 5}
    assert world.reconciler.match(MODEL, prompt(PATH)).held == {"w": len(PATH) - 2, "other": 2}
    assert (world.reconciler.counters.resyncs[ResyncReason.GAP], world.reconciler.counters.unknown_blocks) == (0, 0)


async def test_half_of_a_message_is_not_taken_for_drift() -> None:
    world, cache = await cold_prompt()
    before = cache.heartbeat()
    cache.stored("new")
    removed = cache.removed(prompt(PATH)[-16:]).events
    cache.sequence = 1
    world.reconciler.on_events(cache.changed(BlocksStored(parent=b"", blocks=prompt("new")), *removed), 2, 0.0)
    world.reconciler.on_heartbeat(before, 0.0)
    assert world.reconciler.counters.resyncs[ResyncReason.DRIFT] == 0
    await world.reload()
    world.reconciler.on_heartbeat(cache.heartbeat(), 0.0)
    assert world.is_true(cache)
    assert world.reconciler.workers()[cache.name].agreed_sequence == 2


async def test_a_prompt_goes_on_behind_what_is_cold() -> None:
    world, cache = await cold_prompt()
    world.tell(cache, PATH + " and goes on")
    await world.reload()
    assert world.is_true(cache)
    assert world.reconciler.match(MODEL, prompt(PATH + " and goes on")).held == {"w": len(PATH) + 12}


async def test_a_removal_of_what_is_nowhere_is_looked_for_once() -> None:
    world, cache = await cold_prompt()
    for _ in range(3):
        world.remove(cache, prompt("never stored"))
        await world.reload()
    assert world.store.asked == 1
    assert world.is_true(cache)


async def test_a_cleared_workers_cold_blocks_are_gone_at_once_and_do_not_come_back() -> None:
    world, cache, other = World(), Cache(), Cache(name="other")
    world.tell(cache, PATH)
    world.tell(other, PATH[:10])
    await world.spill.make_room()
    cache.restart()
    world.tell(cache, "x")
    assert world.is_true(cache)
    assert world.is_true(other)
    assert world.reconciler.size() == IndexSize(workers=2, blocks=11, holdings=11)
    assert await world.match(prompt(PATH)) == {"other": 10}
    world.reconciler.on_goodbye(Goodbye(address=other.address), 0.0)
    world.reconciler.on_goodbye(Goodbye(address=cache.address), 0.0)
    assert world.reconciler.size() == IndexSize(workers=0, blocks=0, holdings=0)


async def test_an_unheld_cold_branch_is_forgotten_elsewhere_too() -> None:
    world, cache = await cold_prompt()
    world.reconciler.on_events(cache.cleared(), 9, 0.0)
    assert (world.index.branches, world.index.cold_blocks) == (0, 0)
    await world.spill.make_room()
    assert world.store.branches == {}


async def test_cold_branches_of_a_model_without_workers_are_forgotten_elsewhere_too() -> None:
    world, cache = await cold_prompt()
    world.reconciler.on_goodbye(Goodbye(address=cache.address), 0.0)
    assert world.reconciler.models() == {}
    await world.spill.make_room()
    assert world.store.branches == {}


async def test_a_resync_replaces_what_is_cold() -> None:
    world, cache = await cold_prompt()
    world.reconciler.on_heartbeat(cache.heartbeat(), 0.0)
    known = world.reconciler.workers()[cache.name]
    known.on_cold_lost()
    (address,) = world.reconciler.due_resyncs(0.0)
    cache.held = {}
    cache.stored(PATH[:5])
    with pytest.raises(Cold):
        world.reconciler.on_pages(address, cache.pages())
    await world.spill.until_here(lambda: world.reconciler.on_pages(address, cache.pages()))
    assert world.state(cache) is SyncState.SYNCED
    assert world.is_true(cache)
    assert world.reconciler.match(MODEL, prompt(PATH)).held == {"w": 5}


async def test_a_worker_is_written_as_a_whole_with_what_is_cold() -> None:
    world, cache = await cold_prompt()
    world.reconciler.go_on_from({})
    batch = await world.spill.until_here(world.reconciler.take_batch)
    change = batch.workers[cache.name]
    assert change is not None
    assert change.runs is not None
    assert sum(len(run.blocks) // 16 for run in change.runs) == len(PATH)
