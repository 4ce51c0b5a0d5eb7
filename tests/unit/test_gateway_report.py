"""Reports of attempts, from machines that go through what is reported."""

from __future__ import annotations

import pytest
from baton_gateway import attempt_events as ev
from baton_gateway.order import Outcome
from baton_gateway.report import POSITIONS_MAX, AnswerReport
from baton_gateway.timeline import Timeline

from baton import subjects
from baton.errors import NoWorkers
from baton.messages.attempts import FinishReason, Sampling
from baton.messages.decisions import AttemptReport
from tests.harness.gateway.attempt_harness import GREEDY, placement
from tests.unit.test_gateway_metrics import Stage, Watched


class Reporting(Stage):
    """A stage whose answer is reported. It arrived 0.2 s before it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[AttemptReport] = []
        self.report: AnswerReport

    def wall_s(self) -> float:
        return 1e9 + self.bench.now_s

    def begin(self, sampling: Sampling = GREEDY) -> Watched:
        bench = super().begin(sampling)
        bench.timeline = Timeline(bench.machine, self)  # pyright: ignore[reportArgumentType]
        clock = self
        self.report = bench.answer = AnswerReport(
            self.post,
            bench.machine,
            self.order,
            clock,  # pyright: ignore[reportArgumentType]
            gateway="gw",
        )
        bench.observe()
        return bench

    def post(self, subject: str, report: AttemptReport) -> None:
        assert subject == subjects.decisions("r")
        self.posted.append(report)


@pytest.fixture
def stage() -> Reporting:
    return Reporting()


def test_a_whole_answer_is_reported_with_its_times(stage: Reporting) -> None:
    bench = stage.begin()
    bench.now_s = 0.3
    bench.step(ev.PlaceHeld(0, 2))
    bench.now_s = 1.0
    bench.run_on("d1", "p1")
    bench.step(ev.PromptComputed(0, 32))
    bench.now_s = 1.5
    bench.frame(0, [5, 6])
    bench.now_s = 1.9
    bench.frame(2, [7, 8], FinishReason.LENGTH)
    assert stage.posted == []
    stage.report.end(Outcome(FinishReason.LENGTH, 4, 32), None)
    (report,) = stage.posted
    assert (report.attempt, report.end, report.prefill, report.decode) == (0, "length", "p1", "d1")
    assert (report.output_tokens, report.cached_tokens) == (4, 32)
    assert report.ttft_s == pytest.approx(0.5)
    assert report.token_interval_s == pytest.approx(0.2), "0.4 s for the two tokens after the first frame"
    assert (report.scheduler, report.predicted) == ("s1", placement("d1", "p1").predicted)
    spent = {phase: pytest.approx(seconds) for phase, seconds in report.spent}
    assert spent == {"read": 0.2, "placing": 0.3, "queued": 0.7, "dispatched": 0.0, "waiting": 0.5, "streaming": 0.4}


def test_each_attempt_is_reported_when_it_has_ended(stage: Reporting) -> None:
    bench = stage.begin()
    bench.run_on("d1")
    bench.now_s = 0.5
    bench.frame(0, [5])
    bench.now_s = 0.55
    bench.frame(1, [6, 7])
    bench.now_s = 0.6
    bench.step(ev.WorkerGone("d1", 1, "died"))
    (lost,) = stage.posted
    assert (lost.attempt, lost.end, lost.decode, lost.output_tokens) == (0, "worker_lost", "d1", 3)
    assert "d1 died" in lost.detail
    assert lost.token_interval_s is None, "a silence before the loss is no interval"
    bench.now_s = 0.7
    bench.run_on("d2")
    bench.now_s = 0.9
    bench.frame(0, [8], FinishReason.LENGTH)
    stage.report.end(Outcome(FinishReason.LENGTH, 4, 0), None)
    last = stage.posted[-1]
    assert (last.attempt, last.end, last.decode, last.output_tokens) == (1, "length", "d2", 1)
    assert dict(last.spent)["placing"] == pytest.approx(0.1)
    assert "read" not in dict(last.spent)


def test_an_answer_that_moves_keeps_the_facts_of_both_attempts(stage: Reporting) -> None:
    bench = stage.begin()
    bench.run_on("d1")
    bench.step(ev.PromptComputed(0, 16))
    bench.frame(0, [5, 6])
    bench.step(ev.WorkerLeaving("d1", 1, 0.1, 1.0))
    bench.step(ev.PlaceGranted(1, placement("d2")))
    (moved,) = stage.posted
    assert (moved.attempt, moved.decode, moved.output_tokens, moved.cached_tokens) == (0, "d1", 2, 16)
    bench.step(ev.TaskAccepted(1, "d2"))
    bench.frame(0, [7], FinishReason.LENGTH)
    stage.report.end(Outcome(FinishReason.LENGTH, 3, 0), None)
    assert (stage.posted[-1].attempt, stage.posted[-1].decode, stage.posted[-1].output_tokens) == (1, "d2", 1)


def test_a_request_without_workers_is_reported_with_its_error(stage: Reporting) -> None:
    stage.begin()
    stage.report.end(None, NoWorkers("none is live"))
    (report,) = stage.posted
    assert (report.end, report.detail, report.decode, report.ttft_s) == ("no_workers", "none is live", "", None)


def test_positions_are_reported_at_each_change_and_stay_bounded(stage: Reporting) -> None:
    bench = stage.begin()
    for number in range(10 * POSITIONS_MAX):
        bench.now_s = float(number)
        for _ in range(3):
            stage.report.note_position(1000 - number)
    stage.report.end(None, None)
    positions = stage.posted[0].positions
    assert len(positions) <= POSITIONS_MAX
    assert positions[0] == (pytest.approx(0.2), 1000)
    assert positions[-1] == (pytest.approx(10 * POSITIONS_MAX - 1 + 0.2), 1000 - 10 * POSITIONS_MAX + 1)
    assert list(positions) == sorted(positions)
