"""Circuit breakers of workers and pairs."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any

from baton_scheduler.breakers import (
    FORGET_S,
    JITTER,
    OPEN_S,
    OPEN_S_MAX,
    PAIRS_MAX,
    RESTARTS,
    TRIAL_S,
    WORKER_FAILURES,
    Breakers,
    Cause,
)
from hypothesis import given
from hypothesis import strategies as st

from baton.messages.attempts import Fault
from baton.messages.base import Context, WorkerAddress
from baton.messages.placement import Candidate, Placed
from baton.messages.workers import Heartbeat
from baton.node.membership import MEMBERS_MAX
from tests.harness.heartbeats import heartbeat

PAIR = ("p", "d")
NUMBERS = count()


def beat(worker: str = "d", generation: int = 1, **changes: Any) -> Heartbeat:
    return heartbeat(worker, generation=generation, **changes)


def fault(worker: str = "d", generation: int = 1, request: str = "") -> Fault:
    address = WorkerAddress(worker=worker, generation=generation)
    return Fault(request=request or f"r{next(NUMBERS)}", attempt=0, workers=(address,))


def pair_fault(pair: tuple[str, str] = PAIR) -> Fault:
    return Fault(request=f"r{next(NUMBERS)}", attempt=0, pair=pair)


def placed(decode: str = "d", prefill: str = "") -> Placed:
    predicted = Candidate(decode=decode, prefill=prefill, predicted_ttft_s=0.1)
    return Placed(
        context=Context(request="r", budget_s=1.0), model_digest="", blocks=b"", workers=(), predicted=predicted
    )


class World:
    def __init__(self, *workers: str) -> None:
        self.now_s = 0.0
        self.tokens = self.completed = 0
        self.breakers = Breakers(Random(1))
        for worker in workers or ("d",):
            self.breakers.hear(beat(worker), 0.0)

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.breakers.note_fault(fault(), self.now_s)

    def fail_pair(self, times: int = 1) -> None:
        for _ in range(times):
            self.breakers.note_fault(pair_fault(), self.now_s)

    def progress(self) -> None:
        self.tokens += 1
        self.hear()

    def hear(self, **changes: Any) -> None:
        self.breakers.hear(beat(progress_tokens=self.tokens, completed=self.completed, **changes), self.now_s)

    def wait(self, seconds: float, *, stuck: bool = False) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.25
            self.hear(computing=int(stuck))
            self.breakers.tick(self.now_s)

    @property
    def avoided(self) -> dict[Any, Cause]:
        return self.breakers.avoided(self.now_s)


def opened() -> World:
    world = World("d", "p")
    world.fail(WORKER_FAILURES)
    assert world.avoided == {"d": Cause.FAILURES}
    return world


def half_open() -> World:
    world = opened()
    world.wait(OPEN_S * (1 + JITTER))
    assert not world.avoided
    assert world.breakers.counts(world.now_s)["worker", "half_open"] == 1
    return world


def test_failures_in_a_row_open_a_breaker() -> None:
    world = World()
    world.fail(WORKER_FAILURES - 1)
    assert not world.avoided
    world.fail()
    assert world.avoided == {"d": Cause.FAILURES}
    assert world.breakers.counts(0.0) == {
        ("worker", "open"): 1,
        ("worker", "half_open"): 0,
        ("pair", "open"): 0,
        ("pair", "half_open"): 0,
    }


def test_failures_that_are_rare_or_few_among_many_do_not() -> None:
    world = World()
    for _ in range(10):
        world.fail()
        world.wait(20.0)
    assert not world.breakers.opened
    world = World()
    for _ in range(50):
        world.fail()
        world.completed += 2
        world.wait(0.25)
    assert not world.breakers.opened


def test_one_request_that_fails_again_and_again_is_one_failure() -> None:
    world = World()
    for _ in range(10):
        world.breakers.note_fault(fault(request="the same"), 0.0)
    assert not world.avoided


def test_faults_of_others_do_not_count() -> None:
    world = World()
    for _ in range(5):
        world.breakers.note_fault(fault("unknown"), 0.0)
        world.breakers.note_fault(fault("d", generation=0), 0.0)
        world.breakers.note_fault(pair_fault(), 0.0)
    assert not world.avoided


def test_one_request_at_a_time_tries_a_worker_and_its_tokens_restore_it() -> None:
    world = half_open()
    world.breakers.note_placed(placed("other"), world.now_s)
    assert not world.avoided
    world.breakers.note_placed(placed(), world.now_s)
    assert world.avoided == {"d": Cause.FAILURES}, "one is enough"
    world.progress()
    assert not world.avoided
    assert not sum(world.breakers.counts(world.now_s).values())
    world.fail(WORKER_FAILURES - 1)
    assert not world.avoided, "the old failures are forgotten"


def test_a_failure_of_that_request_doubles_the_back_off() -> None:
    world = half_open()
    world.breakers.note_placed(placed(), world.now_s)
    world.fail()
    world.wait(OPEN_S * (1 + JITTER))
    assert world.avoided
    world.wait(OPEN_S * (1 + JITTER))
    assert not world.avoided


def test_a_request_that_gets_no_token_does_so_too() -> None:
    world = half_open()
    world.breakers.note_placed(placed(), world.now_s)
    world.wait(TRIAL_S, stuck=True)
    assert world.breakers.counts(world.now_s)["worker", "open"] == 1
    assert world.breakers.opened[Cause.FAILURES] == 2


def test_after_a_request_that_never_came_another_one_may_try() -> None:
    world = half_open()
    world.breakers.note_placed(placed(), world.now_s)
    assert world.avoided
    world.wait(TRIAL_S)
    assert not world.avoided
    assert world.breakers.opened[Cause.FAILURES] == 1


def test_late_failures_of_earlier_requests_change_nothing() -> None:
    world = half_open()
    world.fail(5)
    assert not world.avoided


def test_the_back_off_is_bounded_and_begins_anew_after_a_calm_time() -> None:
    world = opened()
    for _ in range(12):
        world.wait(OPEN_S_MAX * (1 + JITTER))
        assert not world.avoided
        world.breakers.note_placed(placed(), world.now_s)
        world.fail()
    world.wait(OPEN_S_MAX * (1 + JITTER))
    world.breakers.note_placed(placed(), world.now_s)
    world.progress()
    world.wait(FORGET_S)
    world.fail(WORKER_FAILURES)
    world.wait(OPEN_S * (1 + JITTER))
    assert not world.avoided


def test_a_worker_without_progress_is_taken_out_and_its_progress_restores_it_at_once() -> None:
    world = World()
    world.wait(6.0, stuck=True)
    assert world.avoided == {"d": Cause.NO_PROGRESS}
    world.progress()
    assert not world.avoided


def test_a_worker_that_stays_stuck_gets_one_request_now_and_then() -> None:
    world = World()
    world.wait(6.0, stuck=True)
    tried = 0
    for _ in range(100):
        if not world.avoided:
            tried += 1
            world.breakers.note_placed(placed(), world.now_s)
            assert world.avoided
        world.wait(1.0, stuck=True)
    assert 2 <= tried <= 5


def test_restarts_in_a_row_open_a_breaker_unless_the_worker_drained() -> None:
    crashing, drained = World(), World()
    for generation in range(2, 2 + RESTARTS):
        assert not crashing.avoided
        crashing.breakers.hear(beat(generation=generation), crashing.now_s)
        drained.breakers.hear(beat(generation=generation - 1, draining=True), drained.now_s)
        drained.breakers.hear(beat(generation=generation), drained.now_s)
    assert crashing.avoided == {"d": Cause.RESTARTS}
    assert not drained.avoided


def test_the_attempts_that_ended_with_a_worker_do_not_count_for_the_next_generation() -> None:
    world = opened()
    world.breakers.hear(beat(generation=2), world.now_s)
    assert not world.avoided
    world.breakers.note_fault(fault(generation=2), world.now_s)
    assert not world.avoided


def test_a_restart_ends_what_the_worker_was_taken_out_for() -> None:
    world = World()
    world.wait(6.0, stuck=True)
    world.breakers.hear(beat(generation=2), world.now_s)
    assert not world.avoided


def test_a_pair_is_taken_out_without_its_workers() -> None:
    world = World("p", "d")
    world.fail_pair()
    assert not world.avoided
    world.fail_pair()
    assert world.avoided == {PAIR: Cause.FAILURES}
    world.wait(OPEN_S * (1 + JITTER))
    assert not world.avoided
    world.breakers.note_placed(placed("d", "p"), world.now_s)
    assert world.avoided == {PAIR: Cause.FAILURES}
    world.wait(TRIAL_S)
    assert not sum(world.breakers.counts(world.now_s).values()), "it did not fail"


def test_a_worker_that_is_gone_is_forgotten() -> None:
    world = opened()
    world.breakers.tick(FORGET_S + 1)
    assert not sum(world.breakers.counts(FORGET_S + 1).values())


def test_schedulers_that_hear_the_same_agree() -> None:
    worlds = [World() for _ in range(2)]
    for world in worlds:
        world.fail(WORKER_FAILURES)
    assert worlds[0].avoided == worlds[1].avoided != {}


def test_what_is_kept_is_bounded() -> None:
    world = World()
    for number in range(MEMBERS_MAX + 10):
        world.breakers.hear(beat(f"w{number}"), 0.0)
    for number in range(PAIRS_MAX + 10):
        pair = (f"w{number % 2000 + 20}", f"w{number // 2000 + 2100}")
        for _ in range(2):
            world.breakers.note_fault(pair_fault(pair), 0.0)
    assert len(world.avoided) <= PAIRS_MAX
    sizes = (len(world.breakers._workers), len(world.breakers._pairs))  # pyright: ignore[reportPrivateUsage]
    assert sizes == (MEMBERS_MAX, PAIRS_MAX)


STEPS = st.sampled_from(["fail", "fail pair", "place", "place pair", "progress", "wait", "stick"])


@given(st.lists(STEPS, max_size=40))
def test_whatever_happens_a_healthy_worker_comes_back(steps: list[str]) -> None:
    world = World("d", "p")
    for step in steps:
        match step:
            case "fail":
                world.fail()
            case "fail pair":
                world.fail_pair()
            case "place" | "place pair":
                world.breakers.note_placed(placed("d", "p" if "pair" in step else ""), world.now_s)
            case "progress":
                world.progress()
            case _:
                world.wait(6.0, stuck=step == "stick")
    for _ in range(3):
        world.wait(OPEN_S_MAX * (1 + JITTER))
        world.breakers.note_placed(placed("d", "p"), world.now_s)
        world.progress()
    world.wait(TRIAL_S)
    assert not world.avoided
