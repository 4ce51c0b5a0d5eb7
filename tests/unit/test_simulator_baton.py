"""Baton's router: its choices are those of `choose` with what its parts know."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import msgspec
import pytest
from baton_scheduler.admission import Objectives
from baton_scheduler.loads import Loads, LoadsOptions
from baton_scheduler.placement import PlacementOptions, choose
from baton_scheduler.policies import POLICIES, PolicyName
from baton_scheduler.prediction import Demand, PrefixMatch
from baton_simulator.routers.baton import JUDGE_S, BatonOptions, BatonRouter
from baton_simulator.routers.ledgers import MODEL, RUNNING_MAX, Attempt, Ledgers
from baton_simulator.routers.prefix_index import PrefixIndex
from baton_simulator.routers.protocol import Arrival, Event, Measured, Role, Route, WorkerSpec, WorkerState
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ContextLengthExceeded, Overloaded
from baton.messages.placement import Disaggregation
from baton.messages.workers import Heartbeat
from baton.messages.workers import Role as WorkerRole
from baton.worker.rates import STEP_GUESS
from tests.harness.heartbeats import heartbeat

BLOCK_TOKENS = 512
BLOCKS = 100
LAG_S = 0.05


def make_specs(role: Role = "aggregated", count: int = 3) -> list[WorkerSpec]:
    return [WorkerSpec(f"{role}-{n}", role, BLOCKS, BLOCK_TOKENS) for n in range(count)]


def make_router(specs: list[WorkerSpec], seed: int = 1, policy: PolicyName = PolicyName.PREDICTED) -> BatonRouter:
    mode = Disaggregation.ALWAYS if any(spec.role == "prefill" for spec in specs) else Disaggregation.NEVER
    return BatonRouter(specs, BatonOptions(mode, policy, index_lag_s=LAG_S), Random(seed))


def make_arrival(name: str, blocks: int, *, first: int = 0) -> Arrival:
    ids = tuple(range(first, first + blocks))
    return Arrival(name, "", BLOCK_TOKENS, ids, blocks * BLOCK_TOKENS + 1, output_tokens_max=1024)


def idle(spec: WorkerSpec, **changes: int) -> WorkerState:
    return msgspec.structs.replace(WorkerState(spec.name, spec.role, 0, 0, 0, 0, BLOCKS, 0), **changes)


def as_baton_beats(state: WorkerState) -> Heartbeat:
    return heartbeat(
        state.name,
        WorkerRole.PREFILL if state.role == "prefill" else WorkerRole.DECODE,
        model=MODEL,
        engine_kind="simulated",
        block_tokens=BLOCK_TOKENS,
        engine_block_tokens=BLOCK_TOKENS,
        context_tokens_max=BLOCKS * BLOCK_TOKENS,
        running=state.running,
        waiting=state.waiting,
        running_max=RUNNING_MAX,
        kv_blocks_used=state.kv_blocks_used,
        kv_blocks_total=BLOCKS,
        step_tokens_max=2048,
        steps=STEP_GUESS,
        transfers=(),
        kv_bytes_per_token=131_072,
    )


@given(st.integers(0, 1 << 32), st.booleans(), st.sampled_from(PolicyName))
def test_it_chooses_as_choose_does(seed: int, is_separated: bool, policy: PolicyName) -> None:
    random = Random(seed)
    specs = make_specs("prefill") + make_specs("decode") if is_separated else make_specs()
    router = make_router(specs, seed, policy)
    states = [
        idle(spec, running=random.randint(0, 9), waiting=random.randint(0, 3), kv_blocks_used=random.randint(0, 9))
        for spec in specs
    ]
    held = {spec.name: random.randint(1, 20) for spec in specs if random.random() < 0.5}
    loads = Loads(LoadsOptions())
    for state in states:
        router.beat(state, 1.0)
        loads.take(as_baton_beats(state), 1.0)
    for worker, blocks in held.items():
        router.cached(worker, range(blocks), (), 1.0)
    arrival = make_arrival("r", random.randint(20, 30))
    demand = Demand(
        model=MODEL,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens_max=arrival.output_tokens_max,
        disaggregation=Disaggregation.ALWAYS if is_separated else Disaggregation.NEVER,
        session="(1,)",
    )
    serving, options = loads.serving(MODEL, 1.1), PlacementOptions()
    placement = choose(demand, serving, PrefixMatch(held), POLICIES[policy](), options, Random(seed), 1.1)
    chosen = placement.predicted
    assert router.route(arrival, 1.1) == Route(chosen.decode, chosen.prefill or None, chosen.predicted_ttft_s, 1.1)


def test_a_prompt_that_is_under_way_attracts_the_next_one_like_it() -> None:
    router = make_router(make_specs())
    first = router.route(make_arrival("a", 20), 0.0)
    second = router.route(make_arrival("b", 20), 0.01)
    assert first is not None
    assert second is not None
    assert second.decode == first.decode


def test_what_must_wait_for_long_is_held_and_judged_anew() -> None:
    (spec,) = specs = make_specs(count=1)
    router = make_router(specs)
    assert router.route(make_arrival("a", 90), 0.0) is not None
    assert router.route(make_arrival("b", 50, first=1000), 0.1) is None
    assert router.wake_at_s == pytest.approx(0.1 + JUDGE_S)
    router.beat(idle(spec, kv_blocks_used=90), 0.25)
    assert router.wake(0.3) == []
    router.ended(make_arrival("a", 90), 1.0)
    router.beat(idle(spec), 1.0)
    ((arrival, answer),) = router.wake(1.1)
    assert arrival.id == "b"
    assert isinstance(answer, Route)
    assert router.wake_at_s == inf


def test_what_begins_soon_waits_at_its_worker_and_starts_when_it_has_room() -> None:
    router = make_router(make_specs(count=1))
    assert router.route(make_arrival("a", 90), 0.0) is not None
    # It lacks 2 of 100 blocks: a wait of 0.2 s, as predicted.
    assert router.route(make_arrival("b", 9, first=1000), 0.1) is None
    assert router.wake(0.15) == []
    router.ended(make_arrival("a", 90), 0.2)
    assert router.wake_at_s == -inf
    ((arrival, answer),) = router.wake(0.2)
    assert arrival.id == "b"
    assert isinstance(answer, Route)
    assert answer.predicted_at_s == 0.1


def test_what_waits_at_its_worker_for_too_long_is_placed_anew() -> None:
    (spec,) = specs = make_specs(count=1)
    router = make_router(specs)
    router.route(make_arrival("a", 90), 0.0)
    router.route(make_arrival("b", 9, first=1000), 0.1)
    router.beat(idle(spec, kv_blocks_used=90), 2.0)
    assert router.wake(2.2) == []
    router.ended(make_arrival("a", 90), 2.3)
    router.beat(idle(spec), 2.3)
    ((arrival, answer),) = router.wake(2.4)
    assert arrival.id == "b"
    assert isinstance(answer, Route)
    assert answer.predicted_at_s == 2.4


def test_requests_that_are_held_for_too_long_are_refused() -> None:
    (spec,) = specs = make_specs(count=1)
    router = make_router(specs)
    router.route(make_arrival("a", 90), 0.0)
    router.route(make_arrival("b", 50, first=1000), 1.0)
    router.beat(idle(spec, kv_blocks_used=90), 10.8)
    assert router.wake(10.9) == []
    ((arrival, answer),) = router.wake(11.1)
    assert arrival.id == "b"
    assert isinstance(answer, Overloaded)


def test_an_objective_bounds_how_long_a_request_is_held() -> None:
    (spec,) = specs = make_specs(count=1)
    options = BatonOptions(Disaggregation.NEVER, objectives=Objectives(ttft_s=2.0))
    router = BatonRouter(specs, options, Random(1))
    assert router.route(make_arrival("a", 90), 0.0) is not None
    assert router.route(make_arrival("b", 50, first=1000), 1.0) is None
    router.beat(idle(spec, kv_blocks_used=90), 1.4)
    assert router.wake(1.4) == []
    ((arrival, answer),) = router.wake(1.5)
    assert arrival.id == "b"
    assert isinstance(answer, Overloaded)


def test_a_prompt_for_which_no_worker_has_memory_is_refused_at_once() -> None:
    with pytest.raises(ContextLengthExceeded):
        make_router(make_specs()).route(make_arrival("a", BLOCKS + 1), 0.0)


def make_attempt(name: str, blocks: int, prefill: str = "prefill-0", decode: str = "decode-0") -> Attempt:
    tokens = blocks * BLOCK_TOKENS
    return Attempt(name, (), decode, prefill, tokens, tokens, 0, until_s=2.0)


def test_an_idle_worker_repeats_its_heartbeat_until_an_attempt_is_placed_there() -> None:
    (spec,) = specs = make_specs(count=1)
    ledgers, state = Ledgers(specs), idle(spec)
    first = ledgers.beat(state, 1.0)
    assert ledgers.beat(state, 1.25) is first
    ledgers.place(make_attempt("a", 20, prefill="", decode=spec.name))
    assert ledgers.beat(state, 1.5).attempts == (("a", 0),)
    ledgers.end("a")
    assert ledgers.beat(state, 1.75) == first == Ledgers(specs).beat(state, 1.75)


def test_a_pair_starts_on_both_workers_or_on_neither() -> None:
    ledgers = Ledgers([*make_specs("prefill", 2), *make_specs("decode", 1)])
    # Prefill leases at most 40 of its 100 blocks.
    assert ledgers.place(make_attempt("a", 40))
    assert not ledgers.place(make_attempt("b", 30))
    # Decode has room for it, and gives it to no one else first: the next one has to wait behind it there.
    assert not ledgers.place(make_attempt("c", 30, prefill="prefill-1"))
    assert ledgers.end_late(1.9) == ([], [])
    assert [each.request for each in ledgers.prefilled("a")] == ["b"]
    assert [each.request for each in ledgers.end("a")] == ["c"]
    assert not ledgers.is_any_waiting()


def test_what_waited_too_long_gives_up_its_place() -> None:
    ledgers = Ledgers([*make_specs("prefill", 2), *make_specs("decode", 1)])
    ledgers.place(make_attempt("a", 40))
    ledgers.place(make_attempt("b", 30))
    # As late, but it can start once the one before it is gone.
    ledgers.place(make_attempt("c", 30, prefill="prefill-1"))
    given_up, started = ledgers.end_late(2.0)
    assert [each.request for each in given_up] == ["b"]
    assert [each.request for each in started] == ["c"]
    assert [each.request for each in ledgers.end("c")] == []


def test_a_worker_fits_its_rates_to_what_it_measures() -> None:
    (spec,) = specs = make_specs(count=1)
    ledgers = Ledgers(specs)
    speed_s = 3e-4
    for number in range(40):
        tokens, began_s = 512 + 37 * number, float(number)
        ledgers.place(Attempt(str(number), (), spec.name, "", tokens, tokens, 0, until_s=inf))
        ended_s = began_s + speed_s * tokens
        events = [
            Event(began_s, "entered", str(number)),
            Event(ended_s, "computed", str(number), tokens, tokens),
            Event(ended_s, "first_token", str(number)),
            Event(ended_s, "ended", str(number)),
        ]
        # It may have ended before the heartbeat.
        ledgers.end(str(number))
        ledgers.beat(msgspec.structs.replace(idle(spec), measured=Measured(events)), began_s + 0.9)
    beat = ledgers.beat(idle(spec), 41.0)
    per_token_s = beat.steps.prompt_step_s / 2048 + beat.steps.prompt_token_s + beat.steps.prompt_pair_s * 1000
    assert per_token_s == pytest.approx(speed_s, rel=0.25)


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


def test_shares_of_a_past_overload_are_forgotten() -> None:
    (spec,) = specs = make_specs(count=1)
    router = BatonRouter(specs, BatonOptions(Disaggregation.NEVER, objectives=Objectives(ttft_s=2.0)), Random(1))
    waits, small, large, busy, later = (
        replace(make_arrival(name, blocks, first=1000 * number), tenant=tenant)
        for number, (name, tenant, blocks) in enumerate(
            (
                ("waits", "other", 30),
                ("small", "guest", 3),
                ("large", "flood", 90),
                ("busy", "guest", 6),
                ("later", "flood", 3),
            )
        )
    )
    router.beat(idle(spec, kv_blocks_used=99), 1.0)
    assert [router.route(each, 1.0) is None for each in (waits, small, large)] == [True, False, True]
    router.beat(idle(spec), 1.05)
    assert [arrival.id for arrival, _ in router.wake(1.1)] == ["large"]
    assert [arrival.id for arrival, _ in router.wake(1.5)] == ["waits"]
    for each in (small, large):
        router.ended(each, 1.6)
    router.beat(idle(spec), 20.0)
    assert router.route(busy, 20.0) is not None
    assert router.route(later, 20.0) is not None, "the worker computes a prompt, and there is nobody to leave room to"
