"""Speculative blocks: the next match sees a placement at once, until real events replace it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from baton_kvindex.config import IndexSettings
from baton_kvindex.counters import ResyncReason
from baton_kvindex.durable import Journal
from baton_kvindex.radix import RadixIndex
from baton_kvindex.reconciler import Reconciler
from baton_kvindex.service import IndexService
from baton_kvindex.speculation import Speculation, SpeculativePrompt
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.service import SchedulerService
from hypothesis import given
from hypothesis import strategies as st

from baton import subjects
from baton.bus import Bus, MemoryBus, MemoryNetwork
from baton.errors import MalformedMessage
from baton.messages.base import Context
from baton.messages.placement import Disaggregation, Place, Placed, Placement
from baton.messages.workers import Role
from tests.harness.heartbeats import heartbeat
from tests.harness.index.worker import MODEL, Cache, chain
from tests.harness.limits import HANG_S
from tests.harness.nodes import living, make_node


def make_speculation(blocks_max: int = 1000) -> Speculation:
    return Speculation(RadixIndex, blocks_max=blocks_max)


def a_prompt(path: str, *, attempt: int = 0, placed_s: float = 0.0, until_s: float = 60.0) -> SpeculativePrompt:
    return SpeculativePrompt(attempt, MODEL, chain(path), placed_s, until_s)


def placed(worker: Cache, path: str, *, request: str = "r", budget_s: float = 60.0) -> Placed:
    return Placed(
        context=Context(request=request, budget_s=budget_s),
        model_digest=MODEL,
        blocks=chain(path),
        workers=(worker.address,),
    )


@pytest.fixture
def worker() -> Cache:
    return Cache()


@pytest.fixture
def reconciler(worker: Cache) -> Reconciler:
    made = Reconciler(RadixIndex, IndexSettings(lost_after_s=10.0), Journal(1000))
    made.on_heartbeat(worker.heartbeat(), 0.0)
    return made


def test_a_placement_is_seen_at_once_and_is_no_holding(reconciler: Reconciler, worker: Cache) -> None:
    reconciler.on_placed(placed(worker, "abc"), 0.0)
    assert reconciler.speculative(MODEL, chain("abcd"), {}) == {"w": 3}
    assert reconciler.speculative("another model", chain("abcd"), {}) == {}
    assert reconciler.match(MODEL, chain("abcd")).held == {}
    assert reconciler.size().holdings == 0
    assert reconciler.take_batch().workers["w"] is not None
    assert reconciler.dump("w") == [], "nothing of it is written down"
    reconciler.on_heartbeat(worker.heartbeat(), 0.1)
    assert reconciler.counters.resyncs[ResyncReason.DRIFT] == 0, "nor part of a fingerprint"


def test_it_ends_with_its_attempt(reconciler: Reconciler, worker: Cache) -> None:
    reconciler.on_placed(placed(worker, "abc"), 0.0)
    reconciler.on_heartbeat(worker.heartbeat(), 0.2)
    assert reconciler.speculative(MODEL, chain("abc"), {}), "the task may still be on its way"
    listing = heartbeat("w", Role.PREFILL, attempts=(("r", 0),))
    reconciler.on_heartbeat(listing, 0.3)
    assert reconciler.speculative(MODEL, chain("abc"), {})
    reconciler.on_heartbeat(heartbeat("w", Role.PREFILL, attempts=(("r", 1),)), 0.4)
    assert reconciler.speculative(MODEL, chain("abc"), {}) == {}, "finished or cancelled"
    reconciler.on_placed(placed(worker, "abc", budget_s=1.0), 1.0)
    reconciler.on_heartbeat(listing, 1.9)
    assert reconciler.speculative(MODEL, chain("abc"), {})
    reconciler.on_heartbeat(listing, 2.0)
    assert reconciler.speculative(MODEL, chain("abc"), {}) == {}, "its deadline has passed"


def test_it_ends_with_a_real_store_or_removal(reconciler: Reconciler, worker: Cache) -> None:
    for number, (event, is_left) in enumerate(
        [
            (worker.stored("ab"), True),
            (worker.stored("abc"), False),
            (worker.removed(chain("abc")[32:]), False),
            (worker.removed(chain("x")), True),
            (worker.cleared(), False),
        ]
    ):
        reconciler.on_placed(placed(worker, "abc", request=f"r{number}"), 0.0)
        reconciler.on_events(event, 0, 0.0)
        assert bool(reconciler.speculative(MODEL, chain("abc"), {})) is is_left, event


def test_it_ends_with_the_workers_generation(reconciler: Reconciler, worker: Cache) -> None:
    reconciler.on_placed(placed(worker, "abc"), 0.0)
    old = placed(worker, "abc")
    worker.restart()
    reconciler.on_heartbeat(worker.heartbeat(), 0.1)
    assert reconciler.speculative(MODEL, chain("abc"), {}) == {}
    reconciler.on_placed(old, 0.2)
    reconciler.on_placed(placed(Cache("nobody"), "abc"), 0.2)
    assert reconciler.speculative(MODEL, chain("abc"), {}) == {}
    assert reconciler.counters.unknown_workers == 2
    with pytest.raises(MalformedMessage):
        reconciler.on_placed(Placed(context=old.context, model_digest=MODEL, blocks=b"odd", workers=()), 0.2)


def test_the_oldest_make_room() -> None:
    speculation = make_speculation(blocks_max=10)
    speculation.add("a", "r1", a_prompt("abcd"))
    speculation.add("b", "r2", a_prompt("abcde"))
    assert speculation.match(MODEL, chain("abcdef")) == {"a": 4, "b": 5}
    speculation.add("a", "r3", a_prompt("xyz"))
    assert (speculation.blocks, len(speculation)) == (8, 2)
    assert speculation.match(MODEL, chain("abcdef")) == {"b": 5}
    speculation.add("a", "r4", a_prompt("q" * 11))
    speculation.add("a", "r5", a_prompt(""))
    assert speculation.match(MODEL, chain("qqq")) == {}, "what exceeds the bound by itself is left out"


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("ESRHD"), st.sampled_from("vw"), st.integers(0, 3), st.text("ab", max_size=5)),
        max_size=40,
    )
)
def test_it_equals_a_list_of_what_is_expected(steps: list[tuple[str, str, int, str]]) -> None:
    speculation, expected = make_speculation(), dict[tuple[str, str], str]()
    for what, worker, number, path in steps:
        request = f"r{number}"
        mine = {key: its for key, its in expected.items() if key[0] == worker}
        ended: list[tuple[str, str]] = []
        if what == "E":
            speculation.add(worker, request, a_prompt(path))
            expected.pop((worker, request), None)
            if path:
                expected[worker, request] = path
        elif what == "S":
            speculation.on_stored(worker, chain(path))
            ended = [key for key, its in mine.items() if path.startswith(its)]
        elif what == "R":
            speculation.on_removed(worker, chain(path))
            ended = [key for key, its in mine.items() if path[:1] == its[:1]]
        elif what == "H":
            speculation.on_heartbeat(worker, [(request, 0)], 1.0)
            ended = [key for key in mine if key[1] != request]
        else:
            speculation.drop(worker)
            ended = list(mine)
        for key in ended:
            del expected[key]
        assert (len(speculation), speculation.blocks) == (len(expected), sum(map(len, expected.values())))
        for asked in ("aabab", "abbbb", "babab", "bbaaa"):
            leading = {
                name: max((common(asked, its) for (of, _), its in expected.items() if of == name), default=0)
                for name in "vw"
            }
            assert speculation.match(MODEL, chain(asked)) == {name: count for name, count in leading.items() if count}


def common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# ---------------------------------------------------------------- between services


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    """Two schedulers and two indexes on one network, and three workers that say nothing of attempts."""
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        for _ in range(2):
            settings = IndexSettings(redis_url="", settle_s=0.01)
            index = IndexService(settings, make_node("kvindex", MemoryBus(network)), store=None)
            await stack.enter_async_context(living(index))
            patient = SchedulerSettings(learn_s=0.001, lost_after_s=30.0, index_timeout_s=HANG_S)
            scheduler = SchedulerService(patient, make_node("scheduler", MemoryBus(network)))
            await stack.enter_async_context(living(scheduler))
        made = MemoryBus(network)
        yield made
        await made.close()
    await network.close()


async def beat(bus: Bus) -> None:
    for name, role in (("p1", Role.PREFILL), ("p2", Role.PREFILL), ("d1", Role.DECODE)):
        await bus.publish(subjects.HEARTBEAT, heartbeat(name, role))
    await asyncio.sleep(0.02)


async def place(bus: Bus, request: str, path: str) -> Placement:
    answer = await bus.request(
        subjects.PLACE,
        Place(
            context=Context(request=request, budget_s=30.0),
            model="tiny",
            blocks=chain(path),
            prompt_tokens=32 * len(path) + 1,
            output_tokens_max=16,
            disaggregation=Disaggregation.ALWAYS,
        ),
        timeout_s=HANG_S,
    )
    assert isinstance(answer, Placement), answer
    return answer


async def test_equal_prompts_in_a_row_go_to_the_same_worker_from_any_scheduler(bus: MemoryBus) -> None:
    """Four in a row are placed by both schedulers, which ask both indexes."""
    await beat(bus)
    prompt = "the same long system prompt"
    first = await place(bus, "r0", prompt)
    assert first.prefill is not None
    assert first.predicted.cached_tokens == 0
    for number in range(1, 4):
        again = await place(bus, f"r{number}", prompt)
        assert again.prefill == first.prefill
        assert again.predicted.cached_tokens == again.predicted.speculative_tokens == 32 * len(prompt)
    other = await place(bus, "other", prompt.upper())
    assert other.prefill != first.prefill, "the other worker is free"
    await asyncio.sleep(0.3)
    await beat(bus)
    cancelled = await place(bus, "later", prompt)
    assert cancelled.predicted.cached_tokens == 0, "no worker lists any of them: they were cancelled"
