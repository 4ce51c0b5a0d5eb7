"""Baton's router: its choices are those of `choose` with what its parts know."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from baton_scheduler.loads import WorkerLoad
from baton_scheduler.placement import Demand, PlacementOptions, PrefixMatch, choose
from baton_simulator.routers.baton import MODEL, RUNNING_MAX, BatonOptions, BatonRouter
from baton_simulator.routers.prefix_index import PrefixIndex
from baton_simulator.routers.protocol import Arrival, Role, Route, WorkerSpec, WorkerState
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ContextLengthExceeded, Overloaded
from baton.messages.placement import Disaggregation
from baton.messages.workers import Heartbeat
from baton.messages.workers import Role as WorkerRole
from baton.worker.rates import Rates
from tests.harness.heartbeats import heartbeat

BLOCK_TOKENS = 512
BLOCKS = 100
LAG_S = 0.05


def make_specs(role: Role = "aggregated", count: int = 3) -> list[WorkerSpec]:
    return [WorkerSpec(f"{role}-{n}", role, BLOCKS, BLOCK_TOKENS) for n in range(count)]


def make_router(specs: list[WorkerSpec], seed: int = 1) -> BatonRouter:
    mode = Disaggregation.ALWAYS if any(spec.role == "prefill" for spec in specs) else Disaggregation.NEVER
    return BatonRouter(specs, BatonOptions(mode, index_lag_s=LAG_S), Random(seed))


def make_arrival(name: str, blocks: int, *, first: int = 0) -> Arrival:
    ids = tuple(range(first, first + blocks))
    return Arrival(name, "", BLOCK_TOKENS, ids, blocks * BLOCK_TOKENS + 1, output_tokens_max=1024)


def idle(spec: WorkerSpec, **changes: int) -> WorkerState:
    return replace(WorkerState(spec.name, spec.role, 0, 0, 0, 0, BLOCKS, 0), **changes)


def as_baton_beats(state: WorkerState) -> Heartbeat:
    rates = Rates()
    return heartbeat(
        state.name,
        WorkerRole.PREFILL if state.role == "prefill" else WorkerRole.DECODE,
        model=MODEL,
        block_tokens=BLOCK_TOKENS,
        engine_block_tokens=BLOCK_TOKENS,
        context_tokens_max=BLOCKS * BLOCK_TOKENS,
        running=state.running,
        waiting=state.waiting,
        running_max=RUNNING_MAX,
        kv_blocks_used=state.kv_blocks_used,
        kv_blocks_total=BLOCKS,
        prefill_tokens_per_s=rates.prefill_tokens_per_s.value,
        decode_tokens_per_s=rates.decode_tokens_per_s,
        transfer_bytes_per_s=rates.transfer_bytes_per_s.value,
        kv_bytes_per_token=131_072,
    )


@given(st.integers(0, 1 << 32), st.booleans())
def test_it_chooses_as_choose_does(seed: int, is_separated: bool) -> None:
    random = Random(seed)
    specs = make_specs("prefill") + make_specs("decode") if is_separated else make_specs()
    router = make_router(specs, seed)
    states = [
        idle(spec, running=random.randint(0, 9), waiting=random.randint(0, 3), kv_blocks_used=random.randint(0, 9))
        for spec in specs
    ]
    held = {spec.name: random.randint(1, 20) for spec in specs if random.random() < 0.5}
    for state in states:
        router.beat(state, 1.0)
    for worker, blocks in held.items():
        router.cached(worker, range(blocks), (), 1.0)
    arrival = make_arrival("r", random.randint(20, 30))
    demand = Demand(
        model=MODEL,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens_max=arrival.output_tokens_max,
        disaggregation=Disaggregation.ALWAYS if is_separated else Disaggregation.NEVER,
    )
    loads = [WorkerLoad(as_baton_beats(state)) for state in states]
    chosen = choose(demand, loads, PrefixMatch(held), PlacementOptions(), Random(seed)).predicted
    route = router.route(arrival, 1.1)
    assert route == Route(chosen.decode, chosen.prefill or None, chosen.predicted_ttft_s)


def test_a_prompt_that_is_under_way_attracts_the_next_one_like_it() -> None:
    router = make_router(make_specs())
    first = router.route(make_arrival("a", 20), 0.0)
    second = router.route(make_arrival("b", 20), 0.01)
    assert first is not None
    assert second is not None
    assert second.decode == first.decode


def test_requests_wait_first_in_first_out_while_all_workers_are_full() -> None:
    router = make_router(make_specs(count=1))
    assert router.route(make_arrival("a", 90), 0.0) is not None
    # It would fit beside the first one; the second one came before it.
    assert router.route(make_arrival("b", 50, first=1000), 0.1) is None
    assert router.route(make_arrival("c", 5, first=2000), 0.2) is None
    assert 0.1 < router.wake_at_s < 0.3
    assert router.wake(0.3) == []
    router.ended(make_arrival("a", 90), 1.0)
    router.beat(idle(make_specs()[0]), 1.0)
    assert [arrival.id for arrival, answer in router.wake(1.1) if isinstance(answer, Route)] == ["b", "c"]
    assert router.wake_at_s == inf


def test_requests_that_wait_for_too_long_are_refused() -> None:
    router = make_router(make_specs(count=1))
    router.route(make_arrival("a", 90), 0.0)
    router.route(make_arrival("b", 50), 1.0)
    router.beat(idle(make_specs()[0]), 10.8)
    assert router.wake(10.9) == []
    ((arrival, answer),) = router.wake(11.1)
    assert arrival.id == "b"
    assert isinstance(answer, Overloaded)


def test_a_prompt_for_which_no_worker_has_memory_is_refused_at_once() -> None:
    with pytest.raises(ContextLengthExceeded):
        make_router(make_specs()).route(make_arrival("a", BLOCKS + 1), 0.0)


@given(st.integers(0, 1 << 32))
def test_the_index_is_exact_but_for_its_lag(seed: int) -> None:
    random = Random(seed)
    names = ["a", "b", "c"]
    index = PrefixIndex(names, LAG_S)
    held: dict[str, set[int]] = {name: set() for name in names}
    placed: dict[str, list[list[int]]] = {name: [] for name in names}
    now_s = 0.0
    for _ in range(60):
        now_s += 2 * LAG_S
        name, blocks = random.choice(names), [100 * random.randrange(2) + n for n in range(random.randint(1, 8))]
        stored = [block for block in blocks if block not in held[name]]
        match random.choice(["store", "evict", "place", "settle"]):
            case "store":
                index.change(name, stored, (), now_s)
                held[name].update(stored)
            case "evict":
                evicted = [block for block in blocks if block in held[name]]
                index.change(name, (), evicted, now_s)
                held[name].difference_update(evicted)
            case "place":
                index.speculate(name, blocks)
                placed[name].append(blocks)
            case _ if placed[name]:
                index.settle(name, placed[name].pop(), now_s)
            case _:
                pass
        prompt = [100 * random.randrange(2) + n for n in range(8)]
        match = index.match(prompt, now_s + LAG_S)
        for each in names:
            coming = held[each].union(*placed[each])
            count = next((n for n, block in enumerate(prompt) if block not in held[each]), len(prompt))
            either = next((n for n, block in enumerate(prompt) if block not in coming), len(prompt))
            assert match.held.get(each, 0) == count
            assert max(match.speculative.get(each, 0), count) == either


def test_the_index_learns_of_events_after_its_lag() -> None:
    index = PrefixIndex(["w"], LAG_S)
    index.change("w", [1, 2], (), 1.0)
    assert index.match([1, 2], 1.0 + LAG_S / 2) == PrefixMatch()
    assert index.match([1, 2], 1.0 + LAG_S) == PrefixMatch({"w": 2})
