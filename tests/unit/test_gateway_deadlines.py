"""The request's deadline limits the time to the first token; from then on the progress limit holds."""

from __future__ import annotations

import msgspec
import pytest
from baton_gateway import attempt_events as ev
from baton_gateway.attempt import Phase
from baton_gateway.attempt_events import AttemptTimers

from baton.errors import DeadlineExceeded
from baton.messages.attempts import FinishReason, Sampling
from tests.harness.gateway.attempt_harness import AttemptHarness, placement

PROGRESS_S = AttemptTimers().progress_s
LONG = Sampling(max_tokens=1000, temperature=0.0)


def streaming(deadline_s: float = 60.0) -> AttemptHarness:
    bench = AttemptHarness(LONG, deadline_s=deadline_s)
    bench.run_on("d1", "p1")
    bench.frame(0, [10])
    return bench


def test_a_stream_that_makes_progress_outlives_the_deadline() -> None:
    bench = streaming()
    for index in range(1, 20):
        bench.wait(PROGRESS_S - 1)
        bench.frame(index, [10])
    assert bench.now_s > 500
    assert bench.machine.phase is Phase.STREAMING


def test_the_budget_is_the_deadline_until_the_first_token_and_then_the_progress_limit() -> None:
    bench = AttemptHarness(LONG, deadline_s=60.0)
    bench.now_s = 20.0
    assert bench.machine.budget_s(20.0) == 40.0
    assert bench.machine.budget_s(70.0) == 0.0
    bench.run_on("d1")
    bench.frame(0, [10])
    assert bench.machine.budget_s(1000.0) == PROGRESS_S


def test_an_answer_that_has_begun_goes_on_elsewhere_after_the_deadline() -> None:
    bench = streaming()
    bench.now_s = 61.0
    bench.frame(1, [11])
    assert bench.step(ev.WorkerGone("d1", 1, "died"))[-1] == ev.SendPlace(1, ("d1",), ())
    assert bench.machine.budget_s(bench.now_s) == PROGRESS_S
    bench.wait(0.2)
    bench.run_on("d2", "p1")
    assert bench.machine.budget_s(bench.now_s) == PROGRESS_S, "the time for a place is none of the worker's"
    bench.wait(PROGRESS_S - 1)
    bench.frame(0, [12])
    bench.wait(PROGRESS_S - 1)
    bench.frame(1, [13])
    assert bench.machine.output.tokens == [10, 11, 12, 13]


@pytest.mark.parametrize("late", ["silent", "said"])
def test_a_continuation_without_a_token_within_the_progress_limit_goes_elsewhere(late: str) -> None:
    bench = streaming()
    bench.step(ev.WorkerGone("d1", 1, "died"))
    bench.run_on("d2", "p1")
    bench.wait(PROGRESS_S - 0.1)
    assert bench.machine.phase is Phase.WAITING
    if late == "said":
        bench.frame(0, [], FinishReason.ERROR, error=DeadlineExceeded("the attempt's deadline passed on the worker"))
    else:
        bench.wait(0.1)
    assert bench.did(ev.SendPlace) == [ev.SendPlace(2, ("d1", "d2"), ())]


def test_a_worker_that_is_late_for_the_first_token_ends_the_request() -> None:
    bench = AttemptHarness(LONG)
    bench.run_on("d1")
    bench.frame(0, [], FinishReason.ERROR, error=DeadlineExceeded("the attempt's deadline passed on the worker"))
    assert isinstance(bench.error, DeadlineExceeded)


def test_a_moved_answer_has_the_progress_limit_too() -> None:
    bench = streaming()
    bench.now_s = 70.0
    bench.frame(1, [11])
    bench.step(ev.WorkerLeaving("d1", 1, leaves_in_s=5.0, token_interval_s=1.0))
    bench.step(ev.PlaceGranted(1, placement("d2", "p1")))
    assert bench.machine.phase is Phase.DISPATCHED
    assert bench.machine.budget_s(bench.now_s) == PROGRESS_S


def test_an_answer_that_starts_over_has_the_time_of_a_first_token() -> None:
    bench = AttemptHarness(msgspec.structs.replace(LONG, presence_penalty=0.5), deadline_s=60.0)
    bench.run_on("d1")
    bench.frame(0, [10])
    bench.now_s = 70.0
    bench.frame(1, [11])
    bench.step(ev.WorkerGone("d1", 1, "died"))
    assert bench.did(ev.StartOver)
    bench.run_on("d2")
    bench.wait(PROGRESS_S + 1)
    bench.frame(0, [10])
    assert bench.machine.phase is Phase.STREAMING
