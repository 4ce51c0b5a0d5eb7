"""A worker that refuses what a request asks: others are asked, and the client hears of it once all have refused."""

from __future__ import annotations

import pytest
from baton_gateway import attempt_events as ev

from baton.errors import EngineFailed, InvalidRequest, NoWorkers, PayloadTooLarge, WorkerLost
from baton.messages.attempts import FinishReason
from baton.messages.placement import REFUSALS_MAX
from tests.harness.gateway.attempt_harness import AttemptHarness, placement

REFUSAL = InvalidRequest("mode is one of fast, slow", param="mode")


def refuse(bench: AttemptHarness, decode: str, *, prefill: str = "", late: bool = False) -> None:
    """Refuse the current attempt: at once, or from within the engine."""
    attempt = bench.machine.attempt
    if late:
        bench.run_on(decode, prefill)
        bench.frame(0, [], FinishReason.ERROR, error=REFUSAL)
    else:
        bench.step(ev.PlaceGranted(attempt, placement(decode, prefill)))
        bench.step(ev.TaskFailed(attempt, decode, REFUSAL))


@pytest.mark.parametrize("late", [False, True])
def test_another_kind_of_worker_is_asked_and_prefill_let_go(late: bool) -> None:
    bench = AttemptHarness()
    refuse(bench, "d1", prefill="p1", late=late)
    assert {action.worker for action in bench.did(ev.SendCancel)} == {"d1", "p1"}
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, (), (), ("d1",))]
    bench.run_on("d2", "p1")
    bench.frame(0, [10, 2], FinishReason.STOP)
    assert bench.did(ev.Complete)


@pytest.mark.parametrize("late", [False, True])
def test_once_all_have_refused_the_client_hears_the_first_of_them(late: bool) -> None:
    bench = AttemptHarness()
    refuse(bench, "d1", late=late)
    refuse(bench, "d2", late=late)
    assert bench.did(ev.SendPlace)[0].refused == ("d1", "d2")
    bench.step(ev.PlaceRefused(2, InvalidRequest("every live decode worker refuses this request")))
    assert bench.error is REFUSAL or (bench.error.detail, bench.error.param) == (REFUSAL.detail, REFUSAL.param)


def test_refusals_use_up_no_attempts_and_are_bounded() -> None:
    bench = AttemptHarness()
    for number in range(REFUSALS_MAX):
        refuse(bench, f"d{number}")
        assert not bench.machine.ended
    refuse(bench, "one more")
    assert isinstance(bench.error, InvalidRequest)


def test_a_worker_that_failed_is_tried_again_rather_than_one_that_refused() -> None:
    bench = AttemptHarness()
    refuse(bench, "d1")
    bench.run_on("d2")
    bench.step(ev.WorkerGone("d2", 1, "died"))
    assert bench.did(ev.SendPlace) == [ev.SendPlace(2, ("d2",), (), ("d1",))]
    bench.step(ev.PlaceRefused(2, NoWorkers("d2 failed, d1 refused")))
    assert not bench.machine.ended
    assert bench.wait(0.3)[0] == ev.SendPlace(2, (), (), ("d1",))


def test_what_an_engine_fails_at_is_no_word_on_the_request() -> None:
    bench = AttemptHarness()
    for attempt in range(4):
        bench.run_on(f"d{attempt}")
        bench.frame(0, [], FinishReason.ERROR, error=EngineFailed("ValueError: broken inside"))
    assert isinstance(bench.error, EngineFailed)
    assert not isinstance(bench.error, InvalidRequest)


def test_a_request_that_is_too_long_for_the_bus_is_too_long_for_every_worker() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceGranted(0, placement("d1")))
    bench.step(ev.TaskFailed(0, "d1", PayloadTooLarge("too long")))
    assert isinstance(bench.error, PayloadTooLarge)


def test_a_lost_worker_after_a_refusal_ends_as_a_loss() -> None:
    bench = AttemptHarness()
    refuse(bench, "d1")
    for attempt in range(1, 5):
        bench.run_on("d2")
        bench.step(ev.TaskFailed(attempt, "d2", WorkerLost("not awaited")))
        bench.step(ev.WorkerGone("d2", 1, "died"))
    assert isinstance(bench.error, WorkerLost)
