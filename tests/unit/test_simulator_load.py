"""Promises under load of the default policy, on virtual time: batches, unequal workers, long prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from baton_simulator.replay import Fleet, Outcome, Replay, StepsOf
from baton_simulator.report import percentile
from baton_simulator.routers.baton import BatonOptions, BatonRouter
from baton_simulator.routers.protocol import WorkerSpec
from baton_simulator.steps import RoughSteps, StepModel, mocker_steps
from baton_simulator.traffic.tenants import Tenant, generate
from baton_simulator.traffic.trace import Request, Trace

from baton.messages.placement import Disaggregation

BLOCK_TOKENS = 512


def replay(requests: Sequence[Request], fleet: Fleet, steps_of: StepsOf = mocker_steps) -> list[Outcome]:
    options = BatonOptions(Disaggregation.NEVER if fleet.aggregated else Disaggregation.ALWAYS)
    trace = Trace("load", BLOCK_TOKENS, list(requests))
    return Replay(
        trace, fleet, lambda specs, random: BatonRouter(specs, options, random), seed=1, steps_of=steps_of
    ).run()


def test_throughput_rises_with_the_batch() -> None:
    per_s: list[float] = []
    for batch in (1, 4, 16, 64):
        outcomes = replay([Request(0.0, (), 64, 256) for _ in range(batch)], Fleet(aggregated=1))
        per_s.append(batch * 256 / max(outcome.last_s or 0.0 for outcome in outcomes))
    assert all(more > 1.5 * fewer for fewer, more in pairwise(per_s)), per_s


def test_a_worker_of_half_the_speed_gets_half_the_work_of_the_others() -> None:
    def steps_of(spec: WorkerSpec, random: Random) -> StepModel:
        return RoughSteps(random, speed=0.5 if spec.name == "aggregated-0" else 1.0, noise=0.05)

    fleet = Fleet(aggregated=4)
    # Where there is room for all, faster workers are preferred; a share is one of the capacity.
    trace = generate([Tenant("t", 1.0, 1.5)], fleet, 30.0, seed=1)
    work: dict[str, int] = {}
    for outcome in replay(trace.requests, fleet, steps_of):
        work[outcome.decode] = work.get(outcome.decode, 0) + outcome.request.prompt_tokens
    slow = work.pop("aggregated-0")
    mean = sum(work.values()) / len(work)
    assert slow == pytest.approx(0.5 * mean, rel=0.25), (slow, work)
    assert max(work.values()) <= 1.2 * mean


@pytest.mark.parametrize(("fleet", "is_kept"), [(Fleet(prefill=2, decode=2), True), (Fleet(aggregated=4), False)])
def test_long_prompts_leave_the_token_intervals_of_others_where_prefill_is_apart(fleet: Fleet, is_kept: bool) -> None:
    """The long prompts' KV makes steps of decode longer as well, by a tenth here; that is no matter of prefill."""
    answers = [Request(0.1 * number, (), 256, 20) for number in range(200)]
    long = [Request(1.0 + number, (), 8000, 2) for number in range(18)]
    p99_s: list[float] = []
    for requests in (answers, sorted((*answers, *long), key=lambda request: request.at_s)):
        outcomes = replay(requests, fleet)
        tpots = [each.tpot_s for each in outcomes if each.request.prompt_tokens == 256 and each.tpot_s is not None]
        p99_s.append(percentile(tpots, 0.99))
    unloaded_s, loaded_s = p99_s
    assert (loaded_s <= 1.2 * unloaded_s) is is_kept, p99_s
