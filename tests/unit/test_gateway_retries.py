"""Limits of retries: the budget of a gateway, and requests that end workers."""

from __future__ import annotations

import pytest
from baton_gateway import attempt_events as ev
from baton_gateway.attempt_events import AttemptTimers
from baton_gateway.retry_budget import BEGUN_SHARE, FLOOR, SHARE, WINDOW_S, RetryBudget
from baton_gateway.search import Retries
from baton_gateway.suspects import CONFIRM_S, JUST_BEGUN_TOKENS, KEPT_S, LOSSES_MAX, STOPPED_MAX, Suspects, Verdict
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest, RequestStopped, RetriesLimited, WorkerLost
from baton.messages.attempts import Sampling
from tests.harness.gateway.attempt_harness import REQUEST, AttemptHarness, placement

TIMERS = AttemptTimers()

# ---------------------------------------------------------------- budget

EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "retry", "resume"]), st.floats(0.0, 0.3)), min_size=1, max_size=150
)


@given(EVENTS)
def test_retries_of_any_window_are_a_share_of_the_answers_that_ran_in_it(events: list[tuple[str, float]]) -> None:
    budget, now_s, running = RetryBudget(), 0.0, 0
    ended: list[float] = []
    retries: list[float] = []
    for kind, pause_s in events:
        now_s += pause_s

        def recent(instants: list[float]) -> int:
            return sum(int(each) > int(now_s) - WINDOW_S for each in instants)  # noqa: B023

        match kind:
            case "begin":
                budget.begin()
                running += 1
            case "end" if running:
                budget.end(now_s)
                running -= 1
                ended.append(now_s)
            case "retry" | "resume":
                share = BEGUN_SHARE if kind == "resume" else SHARE
                has_room = recent(retries) < FLOOR + share * (running + recent(ended))
                assert budget.take(now_s, begun=kind == "resume") is has_room
                if has_room:
                    retries.append(now_s)
            case _:
                pass
    assert len(budget._seconds) <= WINDOW_S  # pyright: ignore[reportPrivateUsage]


def taken(budget: RetryBudget, now_s: float, *, begun: bool = False) -> int:
    """Take all retries that there are."""
    retries = 0
    while budget.take(now_s, begun=begun):
        retries += 1
    return retries


def test_answers_count_while_they_run_and_for_a_window_after_it() -> None:
    budget = RetryBudget()
    for _ in range(100):
        budget.begin()
    assert taken(budget, 1000.0) == FLOOR + 100 * SHARE, "however long ago they began"
    for _ in range(50):
        budget.end(1001.0)
    assert taken(budget, 1005.0) == 0
    assert taken(budget, 1000.0 + WINDOW_S) == FLOOR + 100 * SHARE
    assert taken(budget, 1001.0 + 3 * WINDOW_S) == FLOOR + 50 * SHARE, "those that ended have left the window"


def test_answers_that_have_begun_come_first() -> None:
    budget = RetryBudget()
    for _ in range(100):
        budget.begin()
    taken(budget, 0.0)
    assert taken(budget, 0.0, begun=True) == 100 * (BEGUN_SHARE - SHARE)
    assert not budget.take(WINDOW_S - 0.1, begun=False)
    assert budget.take(WINDOW_S, begun=False)


def exhausted() -> Retries:
    retries = Retries()
    taken(retries.budget, 0.0, begun=True)
    return retries


def test_a_retry_without_budget_waits_for_it() -> None:
    bench = AttemptHarness(retries=exhausted())
    bench.run_on("d1")
    bench.step(ev.WorkerGone("d1", 1, "died"))
    assert not bench.did(ev.SendPlace)
    bench.wait(WINDOW_S - 0.5)
    assert len(bench.did_ever(ev.SendPlace)) == 1
    bench.wait(0.6)
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, ("d1",))]


def test_another_kind_of_worker_is_no_retry() -> None:
    bench = AttemptHarness(retries=exhausted())
    bench.step(ev.PlaceGranted(0, placement("d1")))
    bench.step(ev.TaskFailed(0, "d1", InvalidRequest("no such parameter")))
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, refused=("d1",))]


def test_a_retry_that_gets_no_budget_ends_with_a_time_to_come_back() -> None:
    bench = AttemptHarness(retries=exhausted(), now_s=WINDOW_S - 1.0)
    bench.run_on("d1")
    bench.step(ev.WorkerGone("d1", 1, "died"))
    while not bench.machine.ended:
        taken(bench.retries.budget, bench.now_s + 0.1, begun=True)  # Others are faster.
        bench.wait(0.1)
    assert isinstance(bench.error, RetriesLimited)
    assert (bench.error.http_status, bench.error.retry_after_s) == (503, 1.0)
    assert bench.now_s < WINDOW_S + 11.0


# ---------------------------------------------------------------- requests that end workers


def lose(suspects: Suspects, worker: str, *requests: str, now_s: float = 0.0) -> None:
    for request in requests:
        suspects.note_failed(request, (worker, 1), now_s)
    suspects.note_lost((worker, 1), now_s)


def verdict(suspects: Suspects, request: str, now_s: float = 0.0) -> Verdict:
    return suspects.judge(request, now_s)[0]


def test_a_request_that_ends_two_workers_is_stopped() -> None:
    suspects = Suspects()
    lose(suspects, "d1", "r")
    assert verdict(suspects, "r") is Verdict.FREE
    lose(suspects, "d2", "r", "other")
    assert suspects.judge("r", 0.0) == (Verdict.STOP, ("d1", "d2"))
    assert verdict(suspects, "other") is Verdict.FREE, "the losses are explained"


def test_all_choices_of_a_request_are_stopped() -> None:
    suspects = Suspects()
    lose(suspects, "d1", "r", "r", "r")
    lose(suspects, "d2", "r", "r")
    for _ in range(3):
        assert suspects.judge("r", 0.0) == (Verdict.STOP, ("d1", "d2"))
        suspects.clear("r")


def test_the_same_worker_twice_proves_nothing() -> None:
    suspects = Suspects()
    for generation in (1, 2, 3):
        suspects.note_failed("r", ("d1", generation), 0.0)
        suspects.note_lost(("d1", generation), 0.0)
    assert verdict(suspects, "r") is Verdict.FREE


def test_failures_of_live_workers_prove_nothing() -> None:
    suspects = Suspects()
    for worker in ("d1", "d2", "d3"):
        suspects.note_failed("r", (worker, 1), 0.0)
    assert verdict(suspects, "r") is Verdict.FREE


def test_a_suspect_waits_until_its_second_worker_is_known_to_live_or_not() -> None:
    suspects = Suspects()
    lose(suspects, "d1", "r")
    suspects.note_failed("r", ("d2", 1), 1.0)
    assert verdict(suspects, "r", 1.0) is Verdict.WAIT
    assert verdict(suspects, "r", 1.0 + CONFIRM_S) is Verdict.FREE, "it lives"
    suspects.note_lost(("d2", 1), 3.1)
    assert verdict(suspects, "r", 3.1) is Verdict.STOP


def test_suspects_of_the_same_two_losses_are_tried_one_by_one() -> None:
    suspects = Suspects()
    for worker in ("d1", "d2"):
        lose(suspects, worker, "innocent", "guilty", "last")
    assert verdict(suspects, "innocent") is Verdict.FREE
    assert verdict(suspects, "guilty") is Verdict.WAIT
    suspects.clear("innocent")
    assert verdict(suspects, "guilty") is Verdict.FREE
    assert verdict(suspects, "last") is Verdict.WAIT
    lose(suspects, "d3", "guilty")
    assert verdict(suspects, "guilty") is Verdict.STOP
    suspects.clear("guilty")
    assert verdict(suspects, "last") is Verdict.FREE


def test_where_workers_are_lost_anyway_a_request_is_not_to_blame() -> None:
    suspects = Suspects()
    lose(suspects, "d1", "r")
    lose(suspects, "p1")
    lose(suspects, "d2", "r")
    lose(suspects, "p2")
    assert verdict(suspects, "r") is Verdict.FREE
    assert verdict(suspects, "r", KEPT_S + 1) is Verdict.FREE


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.frozensets(st.sampled_from("rstu"))), max_size=30), st.data())
def test_only_those_that_were_on_two_lost_workers_are_ever_stopped(
    losses: list[tuple[str, frozenset[str]]], data: st.DataObject
) -> None:
    suspects, met = Suspects(), {request: set[str]() for request in "rstu"}
    for generation, (worker, requests) in enumerate(losses):
        for request in requests:
            suspects.note_failed(request, (worker, generation), generation)
            met[request].add(worker)
        if data.draw(st.booleans()):
            suspects.note_lost((worker, generation), generation)
        for request in met:
            if verdict(suspects, request, generation) is Verdict.STOP:
                assert len(met[request]) >= 2


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.frozensets(st.sampled_from("rstu"))), max_size=30))
def test_requests_that_get_tokens_between_losses_are_never_stopped_nor_held_up(
    losses: list[tuple[str, frozenset[str]]],
) -> None:
    suspects = Suspects()
    for generation, (worker, requests) in enumerate(losses):
        for request in requests:
            suspects.note_failed(request, (worker, generation), generation)
        suspects.note_lost((worker, generation), generation)
        for request in requests:
            assert verdict(suspects, request, generation) is Verdict.FREE
            suspects.clear(request)


@given(st.permutations(["innocent-1", "innocent-2", "guilty"]), st.integers(0, 3))
def test_whatever_ends_every_worker_is_stopped_and_others_are_not(order: list[str], shared: int) -> None:
    """All are retried as soon as they may; the guilty one ends each worker it comes to, with those that are there."""
    suspects, now_s, worker = Suspects(), 0.0, 0
    waiting, stopped = dict.fromkeys(order), list[str]()
    lose(suspects, "d0", *(each for each in order if each == "guilty" or int(each[-1]) <= shared))
    while waiting:
        now_s += 0.1
        verdicts = {each: verdict(suspects, each, now_s) for each in waiting}
        going = [each for each, said in verdicts.items() if said is Verdict.FREE]
        for each in (each for each, said in verdicts.items() if said is Verdict.STOP):
            stopped.append(each)
            suspects.clear(each)
            del waiting[each]
        if "guilty" in going:
            worker += 1
            lose(suspects, f"d{worker}", *going, now_s=now_s)
        else:
            for each in going:
                suspects.clear(each)
                del waiting[each]
    assert stopped == ["guilty"]
    assert worker <= 2, "three workers at most"


def test_what_is_kept_is_bounded() -> None:
    suspects = Suspects()
    for number in range(LOSSES_MAX * 2):
        lose(suspects, f"d{number}", "r")
    assert len(suspects._losses) == LOSSES_MAX  # pyright: ignore[reportPrivateUsage]
    for number in range(STOPPED_MAX * 2):
        for worker in ("d1", "d2"):
            lose(suspects, worker, f"r{number}", now_s=number * KEPT_S * 2)
        verdict(suspects, f"r{number}", number * KEPT_S * 2)
    assert len(suspects._stopped) == STOPPED_MAX  # pyright: ignore[reportPrivateUsage]


# ---------------------------------------------------------------- the attempt machine


def lose_worker(bench: AttemptHarness, worker: str) -> None:
    bench.retries.suspects.note_lost((worker, 1), bench.now_s)
    bench.step(ev.WorkerGone(worker, 1, "died"))


def test_the_machine_stops_after_two_workers() -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    lose_worker(bench, "d1")
    bench.run_on("d2")
    bench.frame(0, [10])
    lose_worker(bench, "d2")
    assert isinstance(bench.error, RequestStopped)
    assert bench.error.http_status == 422


def test_tokens_clear_a_request() -> None:
    bench = AttemptHarness(Sampling(max_tokens=100, temperature=0.0))
    bench.run_on("d1")
    lose_worker(bench, "d1")
    bench.run_on("d2")
    bench.frame(0, [10] * JUST_BEGUN_TOKENS)
    lose_worker(bench, "d2")
    assert not bench.machine.ended
    assert bench.retries.suspects.judge(REQUEST, bench.now_s) == (Verdict.FREE, ())


def test_a_worker_that_never_accepted_does_not_count() -> None:
    bench = AttemptHarness()
    for worker in ("d1", "d2", "d3"):
        bench.step(ev.PlaceGranted(bench.machine.attempt, placement(worker)))
        lose_worker(bench, worker)
        assert not bench.machine.ended
    assert bench.retries.suspects.judge(REQUEST, bench.now_s) == (Verdict.FREE, ())
    assert not bench.did_ever(ev.ReportFault), "it may be busy"


@pytest.mark.parametrize("gone", ["d1", "p1"])
def test_faults_are_reported(gone: str) -> None:
    bench = AttemptHarness()
    bench.run_on("d1", "p1")
    bench.step(ev.WorkerGone(gone, 1, "died"))
    (report,) = bench.did(ev.ReportFault)
    assert (report.attempt, report.workers, report.pair, type(report.error)) == (0, ((gone, 1),), None, WorkerLost)


# ---------------------------------------------------------------- workers without progress


def test_an_attempt_on_a_stuck_worker_is_given_up_before_the_limit_of_the_first_token() -> None:
    bench = AttemptHarness()
    bench.run_on("d1", "p1")
    for worker, generation in (("d1", 0), ("d2", 1)):
        assert bench.step(ev.WorkerStuck(worker, generation)) == []
    bench.wait(TIMERS.progress_s - 1)
    assert bench.step(ev.WorkerStuck("p1", 1)) == [], "it may have been given to the worker a moment ago"
    bench.wait(1.0)
    bench.step(ev.WorkerStuck("p1", 1))
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, ("p1",))]
    assert bench.now_s < TIMERS.first_token_s
