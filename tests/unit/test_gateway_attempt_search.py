"""An attempt's search for workers: what is asked again, who is left out, who holds the request, and for how long."""

from __future__ import annotations

import pytest
from baton_gateway import attempt_events as ev
from baton_gateway.attempt import Phase
from msgspec.structs import replace

from baton.errors import (
    BatonError,
    BusUnavailable,
    InvalidRequest,
    ModelNotFound,
    NoResponders,
    NotResumable,
    NoWorkers,
    Overloaded,
    WorkerLost,
)
from baton.messages.attempts import FinishReason, Sampling
from tests.harness.gateway.attempt_harness import AttemptHarness, placement


def test_a_place_without_an_answer_is_asked_for_again() -> None:
    bench = AttemptHarness()
    for _ in range(3):
        bench.wait(0.25)
        assert len(bench.did(ev.SendPlace)) == 1
    assert bench.did_ever(ev.SendPlace) == [ev.SendPlace(0, (), ())] * 4


AWAY = [None, BusUnavailable("gone"), NoWorkers("all dead"), ModelNotFound("a scheduler that has just started")]


def search(bench: AttemptHarness, refusal: BatonError | None) -> float:
    """Refuse every place, or stay silent, until the machine ends; return how long it took."""
    started_s = bench.now_s
    while not bench.machine.ended:
        for action in bench.did(ev.SendPlace):
            if refusal is not None:
                bench.step(ev.PlaceRefused(action.attempt, refusal))
        bench.wait(0.05)
    return bench.now_s - started_s


@pytest.mark.parametrize("refusal", AWAY)
def test_placing_waits_for_bus_schedulers_and_workers_up_to_the_admission_wait(refusal: BatonError | None) -> None:
    bench = AttemptHarness()
    assert 10.0 <= search(bench, refusal) <= 11.1
    assert bench.error.http_status == 503
    assert 12 <= len(bench.did_ever(ev.SendPlace)) <= 16, "less often after the first tries"


@pytest.mark.parametrize("refusal", AWAY)
def test_an_answer_that_has_begun_waits_for_as_long_as_for_progress(refusal: BatonError | None) -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    bench.frame(0, [10])
    bench.step(ev.WorkerGone("d1", 1, "died"))
    assert 30.0 <= search(bench, refusal) <= 31.1
    assert bench.error.http_status == 503


@pytest.mark.parametrize("refusal", AWAY)
def test_a_worker_that_comes_back_ends_the_wait(refusal: BatonError | None) -> None:
    bench = AttemptHarness()
    for _ in range(8):
        if refusal is not None:
            bench.step(ev.PlaceRefused(0, refusal))
        assert bench.wait(1.0)
    bench.run_on("d1")
    bench.frame(0, [10] * 8, FinishReason.LENGTH)
    assert bench.machine.phase is Phase.DONE


def test_the_waits_before_a_worker_share_one_bound() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceRefused(0, NoWorkers("all dead")))
    bench.wait(6.0)
    bench.step(ev.PlaceHeld(0))
    bench.wait(3.0)
    search(bench, NoWorkers("all dead"))
    assert 10.0 <= bench.now_s <= 11.1


def test_a_worker_that_is_lost_after_it_accepted_begins_a_new_search() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceGranted(0, replace(placement("d1"), wait_s=5.0)))
    bench.step(ev.TaskAccepted(0, "d1"))
    bench.wait(15.0)
    bench.step(ev.WorkerGone("d1", 1, "died"))
    assert bench.machine.hold_s(1, bench.now_s) == 10.0, "d1 had room, and computed a long prompt"
    assert 10.0 <= search(bench, NoWorkers("all dead")) <= 11.1


def test_a_late_placement_counts() -> None:
    bench = AttemptHarness()
    bench.wait(0.6)
    bench.step(ev.PlaceGranted(0, placement()))
    assert bench.did(ev.SendTasks)
    assert bench.step(ev.PlaceGranted(0, placement("d2"))) == [], "the second answer is one too many"


def test_a_refusal_that_concerns_the_request_is_final() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceRefused(0, InvalidRequest("never")))
    assert isinstance(bench.error, InvalidRequest)


@pytest.mark.parametrize("silent", [("d1",), ("p1",), ("d1", "p1")])
def test_silence_after_dispatch_cancels_both_and_excludes(silent: tuple[str, ...]) -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceGranted(0, placement("d1", "p1")))
    for worker in {"d1", "p1"} - set(silent):
        bench.step(ev.TaskAccepted(0, worker))
    bench.wait(0.1)
    assert {action.worker for action in bench.did(ev.SendCancel)} == {"d1", "p1"}
    (place,) = bench.did(ev.SendPlace)
    assert (place.attempt, set(place.exclude)) == (1, set(silent))
    assert bench.step(ev.TaskAccepted(0, "d1")) == [], "an answer to the old attempt"


UNREACHED = [NoResponders("worker d1 does not listen"), BusUnavailable("gone")]


@pytest.mark.parametrize("error", UNREACHED)
def test_a_worker_that_the_bus_does_not_reach_is_excluded_for_that_try_only(error: BatonError) -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceGranted(0, placement("d1")))
    bench.step(ev.TaskFailed(0, "d1", error))
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, unavailable=("d1",))], "at once"
    bench.run_on("d2")
    bench.frame(0, [10])
    bench.step(ev.WorkerGone("d2", 1, "died"))
    assert bench.did(ev.SendPlace) == [ev.SendPlace(2, ("d2",), ())], "d1 was merely restarting"


@pytest.mark.parametrize("error", UNREACHED)
def test_the_only_worker_is_tried_until_the_bus_reaches_it(error: BatonError) -> None:
    bench = AttemptHarness()
    while bench.now_s < 9.0:
        attempt = bench.machine.attempt
        bench.step(ev.PlaceGranted(attempt, placement("d1")))
        bench.step(ev.TaskFailed(attempt, "d1", error))
        assert bench.did(ev.SendPlace) == [ev.SendPlace(attempt + 1, unavailable=("d1",))]
        bench.step(ev.PlaceHeld(attempt + 1))
        bench.wait(0.25)
    bench.run_on("d1")
    bench.frame(0, [10])
    for _ in range(3):
        assert not bench.machine.ended, "none of them was a failure"
        bench.step(ev.WorkerGone("d1", 1, "died"))
        bench.run_on("d1")
    bench.step(ev.WorkerGone("d1", 1, "died"))
    assert isinstance(bench.error, WorkerLost)


def test_a_worker_that_stays_unreached_ends_the_request_in_time() -> None:
    bench = AttemptHarness()
    while not bench.machine.ended:
        attempt = bench.machine.attempt
        bench.step(ev.PlaceGranted(attempt, placement("d1")))
        bench.step(ev.TaskFailed(attempt, "d1", NoResponders("worker d1 does not listen")))
        if not bench.machine.ended:
            bench.step(ev.PlaceHeld(attempt + 1))
            bench.wait(0.2)
    assert 10.0 <= bench.now_s <= 10.5
    assert isinstance(bench.error, Overloaded), "the scheduler held it for the last time"


def test_an_excluded_worker_is_tried_again_before_giving_up() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceGranted(0, placement("d1")))
    bench.wait(0.1)
    bench.step(ev.PlaceRefused(1, NoWorkers("all excluded")))
    assert not bench.machine.ended
    assert bench.wait(0.2)[-1] == ev.SendPlace(1, (), ())


def test_attempts_are_bounded() -> None:
    bench = AttemptHarness()
    for attempt in range(4):
        bench.step(ev.PlaceGranted(attempt, placement(f"d{attempt}")))
        bench.step(ev.TaskFailed(attempt, f"d{attempt}", WorkerLost("gone")))
    assert isinstance(bench.error, WorkerLost)
    assert "4 attempts" in str(bench.error)


# ---------------------------------------------------------------- overload


def test_a_held_request_waits_while_its_scheduler_repeats_that_it_holds_it() -> None:
    bench = AttemptHarness()
    for _ in range(20):
        assert bench.step(ev.PlaceHeld(0)) == []
        assert bench.machine.phase is Phase.QUEUED
        assert bench.wait(0.25) == []
    assert bench.step(ev.PlaceGranted(0, placement())) == [ev.SendTasks(0, placement())], "one scheduler was asked"


def test_another_scheduler_is_asked_once_the_one_that_holds_a_request_is_silent() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceHeld(0))
    assert bench.wait(0.9) == []
    assert bench.wait(0.1) == [ev.SendPlace(0)]
    assert bench.machine.phase is Phase.PLACING
    bench.step(ev.PlaceHeld(0))
    assert bench.machine.phase is Phase.QUEUED


def test_the_first_placement_wins_and_the_other_schedulers_are_told() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceHeld(0))
    bench.wait(1.0)
    bench.step(ev.PlaceHeld(0))
    won = bench.step(ev.PlaceGranted(0, placement("d1")))
    assert won == [ev.SendWithdraw(0), ev.SendTasks(0, placement("d1"))]
    assert bench.step(ev.PlaceGranted(0, placement("d2"))) == []
    assert bench.step(ev.PlaceHeld(0)) == []
    assert bench.step(ev.PlaceHandedBack(0)) == []
    assert bench.step(ev.PlaceRefused(0, InvalidRequest("late"))) == []
    assert bench.machine.phase is Phase.DISPATCHED


def test_what_a_leaving_scheduler_hands_back_is_asked_for_at_once() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceHeld(0))
    assert bench.step(ev.PlaceHandedBack(0)) == [ev.SendPlace(0)]


def test_a_busy_worker_has_not_failed_and_schedulers_are_told_of_it() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceGranted(0, placement("d1", "p1")))
    bench.step(ev.TaskBusy(0, "p1", "leases"))
    assert bench.did(ev.SendCancel) == [ev.SendCancel("d1", 0, "busy"), ev.SendCancel("p1", 0, "busy")]
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, unavailable=("p1",))]
    bench.step(ev.PlaceHeld(1))
    bench.wait(1.0)
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1)], "a worker that was busy a while ago may have room"


def test_workers_that_are_always_busy_end_the_request_in_time() -> None:
    bench = AttemptHarness()
    while not bench.machine.ended:
        attempt = bench.machine.attempt
        bench.step(ev.PlaceGranted(attempt, placement("d1")))
        bench.step(ev.TaskBusy(attempt, "d1", "full"))
        bench.wait(0.2)
    assert isinstance(bench.error, Overloaded)
    assert 10.0 <= bench.now_s <= 10.5, "one more after each wait of the test"


def test_a_full_queue_refuses_a_new_request_at_once() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceRefused(0, Overloaded("full", retry_after_s=3.0)))
    assert isinstance(bench.error, Overloaded)
    assert bench.error.retry_after_s == 3.0


def test_an_answer_that_has_begun_outlasts_a_full_queue() -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    bench.frame(0, [10])
    bench.step(ev.WorkerGone("d1", 1, "died"))
    bench.step(ev.PlaceRefused(1, Overloaded("full")))
    assert bench.wait(0.25) == [ev.SendPlace(1, ("d1",))]
    bench.run_on("d2")


@pytest.mark.parametrize(("begun", "patience_s"), [(False, 10.0), (True, 30.0)])
def test_a_request_is_held_up_to_its_limit(begun: bool, patience_s: float) -> None:
    bench = AttemptHarness()
    if begun:
        bench.run_on("d1")
        bench.frame(0, [10])
        bench.wait(15.0)
        bench.step(ev.WorkerGone("d1", 1, "died"))
    started_s, attempt = bench.now_s, bench.machine.attempt
    assert bench.machine.hold_s(attempt, started_s) == patience_s
    while not bench.machine.ended:
        bench.step(ev.PlaceHeld(attempt, 12, turn_s=7.5))
        bench.wait(0.25)
    assert bench.now_s - started_s == pytest.approx(patience_s, abs=0.3)
    assert isinstance(bench.error, Overloaded)
    assert "12 requests were before" in str(bench.error)
    assert bench.error.retry_after_s == 7.5
    assert bench.did_ever(ev.SendWithdraw) == [ev.SendWithdraw(attempt)]


def test_a_move_is_never_held() -> None:
    bench = AttemptHarness(Sampling(max_tokens=1000, temperature=0.0))
    bench.run_on("d1")
    bench.frame(0, [10])
    bench.step(ev.WorkerLeaving("d1", 1, 5.0, 10.0))
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, ("d1",))]
    assert bench.machine.hold_s(1, bench.now_s) == 0.0


def test_an_attempt_that_found_no_room_in_time_at_its_worker_is_placed_again_and_has_not_failed() -> None:
    bench = AttemptHarness()
    for attempt in range(6):
        bench.step(ev.PlaceGranted(attempt, replace(placement("d1"), wait_s=2.0)))
        bench.step(ev.TaskAccepted(attempt, "d1"))
        bench.wait(2.0)
        if not bench.machine.ended:
            bench.frame(0, [], FinishReason.ERROR, error=Overloaded("no room in time"))
    assert isinstance(bench.error, Overloaded), "its waits at workers share the limit of the search"
    assert bench.did_ever(ev.SendPlace)[1] == ev.SendPlace(1, unavailable=("d1",))
    assert bench.machine.attempt == 4


def test_an_overloaded_end_after_the_first_token_is_a_failure_that_starts_nothing_over() -> None:
    bench = AttemptHarness(Sampling(max_tokens=8, temperature=1.0, seed=7))
    bench.run_on("d1")
    bench.frame(0, [10])
    bench.step(ev.Shown())
    bench.frame(1, [], FinishReason.ERROR, error=Overloaded("no worker says this now"))
    assert isinstance(bench.error, NotResumable)
    assert not bench.did_ever(ev.StartOver)
