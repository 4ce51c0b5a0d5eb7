"""Answers whose worker leaves: moved while they run on, or left to end where they are."""

from __future__ import annotations

import pytest
from baton_gateway import attempt_events as ev
from baton_gateway.attempt import MOVE_S, Phase

from baton.errors import NoWorkers
from baton.messages.attempts import Sampling
from tests.harness.gateway.attempt_harness import GREEDY, AttemptHarness, frame, placement

LONG = Sampling(max_tokens=1000, temperature=0.0)


def leaving(
    worker: str = "d1", generation: int = 1, *, leaves_in_s: float = 5.0, rate: float = 10.0
) -> ev.WorkerLeaving:
    return ev.WorkerLeaving(worker, generation, leaves_in_s, token_interval_s=0.1)


def streaming(sampling: Sampling = LONG) -> AttemptHarness:
    bench = AttemptHarness(sampling)
    bench.run_on("d1", "p1")
    bench.frame(0, [10, 11])
    return bench


def test_an_answer_that_would_outlast_its_worker_is_placed_while_it_runs_on_and_then_moved() -> None:
    bench = streaming()
    assert bench.step(leaving()) == [ev.SendPlace(1, ("d1",), ())]
    bench.frame(2, [12])
    assert bench.did(ev.Deliver), "it runs on"
    assert bench.step(ev.PlaceGranted(1, placement("d2", "p1"))) == [
        ev.SendCancel("d1", 0, "moved"),
        ev.SendCancel("p1", 0, "moved"),
        ev.SendTasks(1, placement("d2", "p1")),
    ]
    assert (bench.machine.phase, bench.machine.output.tokens) == (Phase.DISPATCHED, [10, 11, 12])
    late = frame(0, 3, [13])
    assert bench.step(ev.FrameArrived("d1", 1, late)) == [], "the old attempt is fenced"
    for worker in ("d2", "p1"):
        bench.step(ev.TaskAccepted(1, worker))
    bench.frame(0, [13])
    assert bench.machine.output.tokens == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("leaves_in_s", "moved"),
    # Six tokens are left, which are 0.6 s.
    [(0.6 + MOVE_S + 0.01, False), (0.6 + MOVE_S - 0.01, True), (0.0, True)],
)
def test_an_answer_that_ends_in_time_stays(leaves_in_s: float, moved: bool) -> None:
    bench = streaming(GREEDY)
    assert bool(bench.step(leaving(leaves_in_s=leaves_in_s))) is moved


def test_without_a_place_it_stays_and_each_heartbeat_asks_again() -> None:
    bench = streaming()
    assert bench.step(leaving())
    assert bench.step(leaving()) == [], "an answer is under way"
    assert bench.step(ev.PlaceRefused(1, NoWorkers("nobody else"))) == []
    assert bench.machine.phase is Phase.STREAMING
    bench.wait(0.3)
    assert bench.step(leaving()) == [ev.SendPlace(1, ("d1",), ())]
    bench.frame(2, [12])
    assert bench.machine.output.tokens == [10, 11, 12]


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=1000, seed=1), Sampling(max_tokens=1000, presence_penalty=1)])
def test_what_cannot_go_on_exactly_stays_but_before_something_is_shown_it_moves(sampling: Sampling) -> None:
    shown = streaming(sampling)
    shown.step(ev.Shown())
    assert shown.step(leaving()) == []
    late = streaming(sampling)
    assert late.step(leaving()) == [ev.SendPlace(1, ("d1",), ())]
    late.step(ev.Shown())
    assert late.step(ev.PlaceGranted(1, placement("d2"))) == [], "it was shown before the place came"
    moved = streaming(sampling)
    moved.step(leaving())
    moved.step(ev.PlaceGranted(1, placement("d2")))
    assert moved.did(ev.StartOver)
    moved.step(ev.TaskAccepted(1, "d2"))
    moved.frame(0, [20])
    assert moved.machine.output.tokens == [20]


def test_only_this_generation_of_the_decode_worker_counts_as_leaving() -> None:
    bench = streaming()
    for event in (leaving("p1"), leaving("d2"), leaving(generation=2)):
        assert bench.step(event) == []


def test_a_placement_that_comes_after_the_worker_has_left_is_taken() -> None:
    bench = streaming()
    bench.step(leaving())
    bench.step(ev.WorkerGone("d1", 1, "left"))
    assert (bench.machine.phase, bench.machine.attempt) == (Phase.PLACING, 1)
    assert bench.step(ev.PlaceGranted(1, placement("d2"))) == [ev.SendTasks(1, placement("d2"))]


def test_a_move_is_no_failure_and_a_busy_target_is_placed_again() -> None:
    bench = streaming()
    bench.step(leaving())
    bench.step(ev.PlaceGranted(1, placement("d2")))
    bench.step(ev.TaskBusy(1, "d2", "full"))
    assert bench.did(ev.SendPlace) == [ev.SendPlace(2, unavailable=("d2",))]
    bench.run_on("d3")
    bench.frame(0, [12])
    assert bench.machine.output.tokens == [10, 11, 12]
