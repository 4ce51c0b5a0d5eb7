"""Memory too small even for the stubs of cold branches: the idlest are dropped, and the rest stays exact."""

from __future__ import annotations

from baton_kvindex.cold import SHAPE_BYTES, ColdIndex
from baton_kvindex.durable import WorkerState
from baton_kvindex.index import link
from baton_kvindex.reconciler import LocalMatch
from baton_kvindex.spill import MEMORY_BYTES_MIN

from baton.messages.index import BlocksStored
from tests.harness.index.cold import PATH, World
from tests.harness.index.worker import MODEL, Cache
from tests.harness.index.worker import chain as prompt


def is_nowhere(world: World, path: str) -> bool:
    return world.reconciler.match(MODEL, prompt(path)) == LocalMatch({})


async def test_memory_is_bounded_whatever_the_stubs_and_what_is_forgotten_is_still_accounted_for() -> None:
    limit = MEMORY_BYTES_MIN
    world, cache = World(limit), Cache()
    asked = "a system prompt that is asked for again and again"
    paths = [chr(0x4E00 + number) + " once" for number in range(12_000)]
    world.tell(cache, asked)
    for number, path in enumerate(paths):
        world.tell(cache, path)
        if number % 1000 == 999:
            assert world.reconciler.match(MODEL, prompt(asked)).held == {"w": len(asked)}
            await world.spill.make_room()
            assert world.index.used_bytes <= limit
            assert world.index.stubs_bytes <= limit // 2
    await world.spill.make_room()
    assert world.index.forgotten > 0
    assert len(world.store.branches) == world.index.branches, "what is forgotten is forgotten elsewhere too"
    assert world.is_true(cache)
    assert world.reconciler.size().holdings == len(cache.held)
    assert world.reconciler.state_of("w") == WorkerState(generation=1, model_digest=MODEL, sequence=0)
    forgotten = [path for path in paths if is_nowhere(world, path)]
    world.remove(cache, prompt(forgotten[0])[-16:])
    await world.reload()
    last, goes_on = prompt(forgotten[1])[-16:], prompt(forgotten[1] + " more")[-80:]
    cache.held |= dict(link(last, goes_on))
    world.reconciler.on_events(cache.changed(BlocksStored(parent=last, blocks=goes_on)), 1 << 20, 0.0)
    await world.reload()
    assert world.is_true(cache)
    counters = world.reconciler.counters
    assert (sum(counters.resyncs.values()), counters.unknown_blocks) == (0, 0)
    world.reconciler.on_events(cache.cleared(), 1 << 21, 0.0)
    assert (world.index.forgotten, world.index.branches) == (0, 0)
    assert world.is_true(cache)


async def test_what_is_forgotten_is_known_again_after_a_resync() -> None:
    world, cache = World(), Cache()
    world.tell(cache, PATH)
    world.reconciler.on_heartbeat(cache.heartbeat(), 0.0)
    world.index.forget_behind(prompt(PATH)[:16])
    assert world.reconciler.match(MODEL, prompt(PATH)).held == {}
    assert world.is_true(cache)
    world.reconciler.workers()[cache.name].on_cold_lost()
    (address,) = world.reconciler.due_resyncs(0.0)
    world.reconciler.on_pages(address, cache.pages())
    assert world.reconciler.match(MODEL, prompt(PATH)).held == {"w": len(PATH)}
    assert (world.index.forgotten, world.is_true(cache)) == (0, True)


async def test_while_nothing_can_leave_memory_is_bounded_too() -> None:
    world, cache = World(MEMORY_BYTES_MIN), Cache()
    world.store.away = True
    for number in range(1000):
        world.tell(cache, chr(0x4E00 + number) + " is stored while there is nowhere to go" * 2)
    await world.spill.make_room()
    assert MEMORY_BYTES_MIN * 0.9 < world.index.used_bytes <= MEMORY_BYTES_MIN
    assert (world.index.branches, world.is_true(cache)) == (0, True)


async def test_a_message_of_which_a_part_is_cold_is_not_applied_twice() -> None:
    world, cache = World(), Cache()
    for path in ("forgotten", PATH):
        world.tell(cache, path)
    world.index.forget_behind(prompt("forgotten")[:16])
    await world.spill.make_room()
    removals = [cache.removed(prompt(path)[-16:]).events[0] for path in ("forgotten", PATH)]
    cache.sequence = 2
    world.reconciler.on_events(cache.changed(*removals), 3, 0.0)
    for _ in removals:
        await world.reload()
    assert world.is_true(cache)


def test_shapes_that_no_stub_has_any_more_are_not_kept() -> None:
    index = ColdIndex()
    for length in range(10, 400):
        path = prompt(chr(0x4E00 + length) * length)
        index.store("w", b"", path)
        (evicted,) = index.pack(path[:16])
        assert index.evict(evicted)
        if length % 100:
            assert index.reload({evicted.name: evicted.packed()}, path, index.evictions)
            index.remove("w", path)
    assert index.branches == 3
    assert index.stubs_bytes < 100 * SHAPE_BYTES
