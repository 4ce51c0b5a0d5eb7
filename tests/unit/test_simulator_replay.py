"""Replays: every request ends once, memory is never exceeded, and the seed decides everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest
from baton_simulator.capacity import at_load, ideal_cached_tokens, least_time_s, pooled_cached_share, works_of
from baton_simulator.links import Links, Pull
from baton_simulator.policies import POLICIES, on_fleet
from baton_simulator.replay import IDLE_BEATS, EventQueue, Fleet, Outcome, Replay
from baton_simulator.report import percentile, refusals, summarise
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec, WorkerState
from baton_simulator.steps import MockerSteps, rough_steps
from baton_simulator.traffic.overlay import held_out_part, overlay, tuning_part
from baton_simulator.traffic.trace import Request, Trace
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, Overloaded

BLOCK_TOKENS = 512


def make_trace(seed: int, count: int = 60, duration_s: float = 10.0) -> Trace:
    """Return independent requests with shared prefixes, and sessions that wait for their answers."""
    random = Random(seed)
    times = sorted(random.uniform(0, duration_s) for _ in range(count))
    newest: dict[str, int] = {}
    requests: list[Request] = []
    for number, at_s in enumerate(times):
        session = random.choice(["", "a", "b"])
        shared, own = random.randint(0, 20), random.randint(0, 10)
        blocks = (*range(shared), *range(1000 * (number + 1), 1000 * (number + 1) + own))
        prompt_tokens = max(len(blocks) * BLOCK_TOKENS + random.randint(0, BLOCK_TOKENS - 1), 1)
        after = newest.get(session) if session else None
        requests.append(Request(at_s, blocks, prompt_tokens, random.randint(1, 400), session, after, 0.5))
        newest[session] = number
    return Trace("test", BLOCK_TOKENS, requests)


class AnyWorker:
    """A router that places, holds or refuses by chance, and checks what the replay tells it."""

    def __init__(self, workers: Sequence[WorkerSpec], random: Random) -> None:
        self.wake_at_s = float("inf")
        self.calls = Counter[tuple[str, str]]()
        self.cached_blocks: dict[str, set[int]] = {spec.name: set() for spec in workers}
        self._prefills = [spec.name for spec in workers if spec.role == "prefill"]
        self._decodes = [spec.name for spec in workers if spec.role != "prefill"]
        self._held: list[Arrival] = []
        self._random = random
        self._beats: dict[str, float] = {}
        self._now_s = 0.0

    def route(self, arrival: Arrival, now_s: float) -> Route | None:
        self._pass_time(now_s)
        self.calls["route", arrival.id] += 1
        chance = self._random.random()
        if chance < 0.1:
            raise Overloaded("refused by chance")
        if chance < 0.3:
            self._held.append(arrival)
            self.wake_at_s = min(self.wake_at_s, now_s + self._random.random())
            return None
        return self._choose()

    def wake(self, now_s: float) -> list[tuple[Arrival, Route | BatonError]]:
        self._pass_time(now_s)
        held, self._held, self.wake_at_s = self._held, [], float("inf")
        return [(arrival, self._choose() if n else Overloaded("held for too long")) for n, arrival in enumerate(held)]

    def _choose(self) -> Route:
        prefill = self._random.choice([*self._prefills, None])
        return Route(self._random.choice(self._decodes), prefill)

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        self._pass_time(now_s)
        self.calls["prefilled", arrival.id] += 1

    def ended(self, arrival: Arrival, now_s: float) -> None:
        self._pass_time(now_s)
        self.calls["ended", arrival.id] += 1

    def cached(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        self._pass_time(now_s)
        blocks = self.cached_blocks[worker]
        assert blocks.isdisjoint(stored), "a block is stored twice"
        assert blocks.issuperset(evicted), "a block leaves that was not there"
        blocks.update(stored)
        blocks.difference_update(evicted)

    def beat(self, state: WorkerState, now_s: float) -> None:
        assert state.kv_blocks_used <= state.kv_blocks_total
        assert min(state.running, state.waiting, state.prefill_tokens_queued, state.active_decode_blocks) >= 0
        assert now_s > self._beats.get(state.name, -1.0)
        self._beats[state.name] = now_s

    def _pass_time(self, now_s: float) -> None:
        assert now_s >= self._now_s
        self._now_s = now_s


FLEETS = (
    Fleet(aggregated=3, kv_tokens_in_use=64 * BLOCK_TOKENS, kv_tokens=96 * BLOCK_TOKENS),
    Fleet(prefill=2, decode=2, kv_tokens_in_use=64 * BLOCK_TOKENS, kv_tokens=96 * BLOCK_TOKENS, link_bytes_per_s=2e9),
)


def replay(trace: Trace, fleet: Fleet, policy: str, seed: int = 1) -> list[Outcome]:
    return Replay(trace, fleet, POLICIES[policy], seed=seed).run()


@given(st.integers(0, 1 << 32), st.sampled_from(FLEETS))
def test_every_request_ends_once_and_memory_is_given_back(seed: int, fleet: Fleet) -> None:
    trace = make_trace(seed, count=30, duration_s=5.0)
    routers: list[AnyWorker] = []

    def new_router(workers: Sequence[WorkerSpec], random: Random) -> AnyWorker:
        routers.append(AnyWorker(workers, random))
        return routers[0]

    run = Replay(trace, fleet, new_router, seed=seed, steps_of=rough_steps)
    outcomes = run.run()
    (router,) = routers
    assert [outcome.request for outcome in outcomes] == list(trace.requests)
    for number, outcome in enumerate(outcomes):
        served = outcome.last_s is not None
        assert served != bool(outcome.refused)
        counts = [router.calls[call, str(number)] for call in ("route", "prefilled", "ended")]
        assert counts == [1, served, served]
        if outcome.first_s is not None and outcome.last_s is not None and outcome.placed_s is not None:
            assert outcome.arrived_s <= outcome.placed_s < outcome.first_s <= outcome.last_s
            assert 0 <= outcome.cached_tokens < outcome.request.prompt_tokens
        if outcome.request.after is not None:
            before = outcomes[outcome.request.after]
            if before.last_s is not None:
                assert outcome.arrived_s == pytest.approx(before.last_s + 0.5)
    for name, worker in run.workers.items():
        assert worker.cache.in_use == 0
        assert len(worker.cache) == len(router.cached_blocks[name])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", FLEETS, ids=str)
def test_the_seed_decides_everything(policy: str, fleet: Fleet) -> None:
    trace = make_trace(7, count=24, duration_s=4.0)
    first = replay(trace, fleet, policy, seed=3)
    assert first == replay(trace, fleet, policy, seed=3)
    assert sum(outcome.last_s is not None for outcome in first) > 20


def test_another_seed_gives_another_replay() -> None:
    trace = make_trace(7)
    assert replay(trace, FLEETS[0], "baton", seed=3) != replay(trace, FLEETS[0], "baton", seed=4)


def test_a_prompt_that_fits_no_worker_is_refused() -> None:
    request = Request(0.0, tuple(range(65)), 65 * BLOCK_TOKENS, 10)
    (outcome,) = replay(Trace("test", BLOCK_TOKENS, [request]), FLEETS[0], "round-robin")
    assert outcome.refused == "context_length_exceeded"


def test_a_pull_overlaps_with_prefill_and_decode_samples_the_first_token() -> None:
    fleet = Fleet(prefill=1, decode=1)
    request = Request(0.0, tuple(range(40)), 40 * BLOCK_TOKENS, 10)
    (outcome,) = replay(Trace("test", BLOCK_TOKENS, [request]), fleet, "round-robin")
    model = MockerSteps()
    chunks = -(-request.prompt_tokens // fleet.prefill_chunk_tokens)
    prefill_s = model.prompt_s(0, request.prompt_tokens) + chunks * model.step_s(0.0, 0, 1)
    tail_bytes = fleet.prefill_chunk_tokens * fleet.kv_bytes_per_token / fleet.layers
    step_s = model.step_s(41 / 1000, 1, 0)
    assert outcome.ttft_s == pytest.approx(prefill_s + tail_bytes / fleet.link_bytes_per_s + step_s, rel=1e-3)
    assert outcome.tpot_s == pytest.approx(step_s)


def test_pulls_share_a_link_evenly() -> None:
    queue, ended = EventQueue(), dict[str, float]()
    links = Links(queue, 100.0)
    for sink, size_bytes in (("d1", 100), ("d2", 300)):
        pull = Pull("p", sink, size_bytes, 0, lambda pull: ended.update({pull.sink: queue.now_s}), tail_exists=True)
        links.begin(pull)
    while queue.step():
        pass
    assert ended == {"d1": pytest.approx(2.0), "d2": pytest.approx(4.0)}


def test_a_pull_measures_only_the_time_in_which_it_moved() -> None:
    queue, measured = EventQueue(), list[float]()
    links = Links(queue, 100.0)
    pull = Pull("p", "d", 300, 100, lambda pull: measured.append(pull.moving_s))
    links.begin(pull)
    queue.add(10.0, lambda _: links.release_tail(pull))
    while queue.step():
        pass
    assert queue.now_s == pytest.approx(11.0)
    assert measured == [pytest.approx(3.0)]


def test_an_idle_worker_goes_on_beating_when_a_change_comes_with_its_last_heartbeat() -> None:
    fleet = Fleet(aggregated=1)
    on, new_router = on_fleet("round-robin", fleet)
    idle = Replay(make_trace(1), on, new_router, seed=1)
    (worker,) = idle.workers.values()
    worker.idle_beats, worker.beat_at_s = IDLE_BEATS - 1, 0.0
    idle.before_change(worker)
    assert worker.beat_at_s < inf


def test_load_is_relative_to_what_the_fleet_can_do() -> None:
    fleet, trace = Fleet(aggregated=2), make_trace(1, count=900)
    half, whole = at_load(trace, fleet, 0.5), at_load(trace, fleet, 1.0)
    works = works_of(trace, fleet, MockerSteps(), 150)
    needed_s = sum(least_time_s(works[first : first + 150], fleet, MockerSteps()) for first in range(0, 900, 150))
    assert whole.requests[-1].at_s == pytest.approx(needed_s, rel=1e-6)
    assert half.requests[-1].at_s == pytest.approx(2 * needed_s, rel=1e-6)
    assert all(one.at_s <= next_one.at_s for one, next_one in pairwise(half.requests))
    assert [request.blocks for request in half.requests] == [request.blocks for request in trace.requests]


def test_the_ideal_cache_forgets_nothing() -> None:
    requests = [Request(0.0, blocks, 3 * BLOCK_TOKENS, 1) for blocks in ((1, 2, 3), (1, 2, 4), (1, 2, 3), (9, 2, 3))]
    cached = list(ideal_cached_tokens(Trace("test", BLOCK_TOKENS, requests)))
    assert cached == [0, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS - 1, 0]


def test_a_pooled_cache_forgets_what_was_used_longest_ago() -> None:
    fleet = Fleet(aggregated=2, kv_tokens_in_use=BLOCK_TOKENS, kv_tokens=2 * BLOCK_TOKENS)
    requests = [
        Request(0.0, blocks, 2 * BLOCK_TOKENS, 1) for blocks in ((1, 2), (3, 4), (1, 2), (5, 6), (3, 4), (1, 2))
    ]
    assert pooled_cached_share(Trace("test", BLOCK_TOKENS, requests), fleet) == pytest.approx(2 / 12, rel=1e-3)


def test_the_bound_computes_each_prefix_once_on_any_number_of_workers() -> None:
    trace = make_trace(5, count=300, duration_s=1000.0)
    fleet, new_router = on_fleet("bound", FLEETS[0])
    outcomes = Replay(trace, fleet, new_router, seed=1).run()
    assert [outcome.cached_tokens for outcome in outcomes if not outcome.request.session] == [
        cached
        for cached, request in zip(ideal_cached_tokens(trace), trace.requests, strict=True)
        if not request.session
    ]


def test_copies_share_nothing_and_keep_their_sessions() -> None:
    trace = make_trace(2)
    copied = overlay(trace, 3, Random(1))
    assert len(copied.requests) == 3 * len(trace.requests)
    assert len({block for request in copied.requests for block in request.blocks}) == 3 * len(
        {block for request in trace.requests for block in request.blocks}
    )
    for request in copied.requests:
        if request.after is not None:
            before = copied.requests[request.after]
            assert before.session == request.session
            assert before.at_s <= request.at_s


def test_the_two_parts_are_the_whole_trace() -> None:
    for trace in (make_trace(2), replace(make_trace(3, duration_s=1800.0), name="long")):
        parts = [tuning_part(trace), held_out_part(trace)]
        assert sum(len(part.requests) for part in parts) == len(trace.requests)
        sessions = [{request.session for request in part.requests} for part in parts]
        assert sessions[0].isdisjoint(sessions[1])


def test_a_summary_counts_what_was_asked_not_only_what_was_served() -> None:
    request = Request(0.0, (), 1000, 11)
    outcomes = [Outcome(request, float(n), placed_s=float(n), decode="w", first_s=n + 1.0) for n in range(10)]
    for number, outcome in enumerate(outcomes):
        assert outcome.first_s is not None
        # Every other one is too slow between tokens.
        outcome.last_s = outcome.first_s + (0.4 if number % 2 else 0.6)
    outcomes[9] = Outcome(replace(request, prompt_tokens=100_000), 9.0, refused="overloaded")
    summary = summarise(outcomes, Fleet(aggregated=1))
    assert (summary.requests, summary.refused) == (9, 1)
    assert summary.goodput == pytest.approx(4 / 9)
    assert summary.ttft_p50_s == pytest.approx(1.0)
    assert summary.tpot_p50_ms == pytest.approx(40.0)
    assert summary.refused_share_by_length == {"≤ 2k": 0.0, "≤ 128k": 1.0}
    assert refusals({"p": summary}) == [["refused, by prompt tokens", "≤ 2k", "≤ 128k"], ["p", "0.0%", "100.0%"]]
    assert refusals({"p": replace(summary, refused=0)}) == []


def test_percentiles_are_nearest_ranks() -> None:
    ranks = [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.25, 0.5, 0.99, 1.0)]
    assert ranks == [1.0, 1.0, 2.0, 4.0, 4.0]
