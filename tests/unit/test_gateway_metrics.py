"""The figures of answers and attempts, from machines that go through what they count."""

from __future__ import annotations

from typing import Protocol

import pytest
from baton_gateway import attempt_events as ev
from baton_gateway.metrics import RESULTS, AnswerMetrics, GatewayMetrics
from baton_gateway.objectives import Objectives
from baton_gateway.order import Order, Outcome
from baton_gateway.timeline import Change, Timeline
from baton_gateway.workers import Model

from baton.errors import BatonError, ClientGone, NoWorkers, Overloaded, WorkerLost
from baton.messages.attempts import FinishReason, Sampling
from baton.telemetry import Metrics
from tests.harness.gateway.attempt_harness import GREEDY, AttemptHarness, placement
from tests.unit.test_telemetry_metrics import SAMPLED, scrape

CHAT = 'gen_ai_operation_name="chat",gen_ai_provider_name="baton",gen_ai_request_model="tiny"'


class Observer(Protocol):
    def note(self, change: Change) -> None: ...


class Watched(AttemptHarness):
    """A machine whose every step is observed, as its driver does it."""

    answer: Observer | None = None
    timeline: Timeline | None = None

    def step(self, event: ev.Event) -> list[ev.Action]:
        actions = super().step(event)
        self.observe()
        return actions

    def observe(self) -> None:
        if self.answer is not None and self.timeline is not None and (change := self.timeline.observe()) is not None:
            self.answer.note(change)


class Stage:
    """One answer at a time: its machine, and a gateway's figures."""

    def __init__(self) -> None:
        self.metrics = Metrics("gateway")
        self.figures = GatewayMetrics(self.metrics, self)  # pyright: ignore[reportArgumentType]
        self.bench: Watched
        self.answer: AnswerMetrics
        self.order: Order

    def now_s(self) -> float:
        return self.bench.now_s

    def begin(self, sampling: Sampling = GREEDY) -> Watched:
        self.bench = Watched(sampling)
        model = Model(name="tiny", path="", digest="", block_tokens=32, context_tokens_max=100)
        order = self.order = Order(
            request="r",
            client_request="r",
            model=model,
            tokens=b"",
            prompt_tokens=40,
            root=b"",
            blocks=b"",
            sampling=sampling,
            tenant="",
            objectives=Objectives(ttft_s=1.0, tpot_s=0.1),
            eos_tokens=frozenset(),
            cache_salt="",
            disaggregation=None,
            session="",
            received_at_s=-0.2,
            deadline_at_s=300.0,
            operation="chat",
            trace=SAMPLED,
        )
        timeline = self.bench.timeline = Timeline(self.bench.machine, self)  # pyright: ignore[reportArgumentType]
        self.answer = self.bench.answer = AnswerMetrics(self.figures, self.bench.machine, timeline, order)
        self.bench.observe()
        return self.bench

    def whole(self, tokens: int, cached_tokens: int = 0) -> None:
        self.answer.end(Outcome(FinishReason.LENGTH, tokens, cached_tokens), None)

    def shown(self, name: str, labels: str = "") -> float:
        series = name + (f"{{{labels}}}" if labels else "")
        lines = [line for line in scrape(self.metrics) if line.startswith(series + " ")]
        assert len(lines) == 1, f"{series} is not shown"
        return float(lines[0].rpartition(" ")[2])


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_times_run_from_the_arrival_and_between_tokens(stage: Stage) -> None:
    bench = stage.begin()
    bench.run_on()
    bench.now_s = 0.3
    bench.frame(0, [5])
    bench.now_s = 0.9
    bench.frame(1, [6, 7, 8], FinishReason.LENGTH)
    stage.whole(4, cached_tokens=32)
    assert stage.shown("gen_ai_server_time_to_first_token_seconds_sum", CHAT) == pytest.approx(0.5)
    assert stage.shown("gen_ai_server_time_per_output_token_seconds_sum", CHAT) == pytest.approx(0.2)
    # Predicted were 0.1 s, from the placement on.
    assert stage.shown("baton_ttft_prediction_ratio_sum") == pytest.approx(3.0)
    assert stage.shown("baton_attempts_total", 'end="done"') == 1
    assert stage.shown("baton_answers_total", 'end="length"') == 1
    assert stage.shown("baton_prompt_tokens_total") == 40
    assert stage.shown("baton_output_tokens_total") == 4
    assert stage.shown("baton_cached_tokens_total") == 32
    assert stage.figures.objectives == {("tiny", "missed_tpot"): 1}, "0.2 s per token is too much"


def test_an_answer_in_one_frame_has_a_first_token(stage: Stage) -> None:
    bench = stage.begin()
    bench.run_on()
    bench.now_s = 0.1
    bench.frame(0, [5], FinishReason.LENGTH)
    stage.whole(1)
    assert stage.shown("gen_ai_server_time_to_first_token_seconds_sum", CHAT) == pytest.approx(0.3)
    assert not any("time_per_output_token_seconds_count{" in line for line in scrape(stage.metrics))
    assert stage.figures.objectives == {("tiny", "attained"): 1}


def test_each_attempt_ends_once_by_its_cause(stage: Stage) -> None:
    bench = stage.begin()
    bench.run_on()
    bench.step(ev.WorkerGone("d1", 1, "died"))
    bench.step(ev.PlaceGranted(1, placement("d2")))
    bench.step(ev.TaskBusy(1, "d2", "full"))
    bench.step(ev.PlaceGranted(2, placement("d3")))
    bench.step(ev.TaskAccepted(2, "d3"))
    bench.frame(0, [1], FinishReason.LENGTH)
    stage.whole(1)
    assert {end: count for end, count in stage.figures.attempts.items() if count} == {
        "worker_lost": 1,
        "busy": 1,
        "done": 1,
    }


def test_an_answer_that_starts_over_has_the_times_of_its_final_run(stage: Stage) -> None:
    bench = stage.begin(Sampling(max_tokens=8, seed=1))
    bench.run_on()
    bench.now_s = 0.1
    bench.frame(0, [5, 6])
    bench.step(ev.WorkerGone("d1", 1, "died"))
    bench.run_on("d2")
    bench.now_s = 0.8
    bench.frame(0, [5])
    bench.now_s = 1.0
    bench.frame(1, [6, 7], FinishReason.LENGTH)
    stage.whole(3)
    assert stage.shown("gen_ai_server_time_to_first_token_seconds_sum", CHAT) == pytest.approx(1.0)
    assert stage.shown("gen_ai_server_time_per_output_token_seconds_sum", CHAT) == pytest.approx(0.1)
    assert stage.shown("baton_output_tokens_total") == 3


@pytest.mark.parametrize(("error", "code"), [(WorkerLost(""), "worker_lost"), (None, "client_gone")])
def test_an_answer_that_fails_counts_with_its_attempt(stage: Stage, error: BatonError | None, code: str) -> None:
    bench = stage.begin()
    bench.run_on()
    stage.answer.end(None, error)
    assert stage.figures.answers == {code: 1}
    assert stage.figures.attempts == {code: 1}
    assert stage.shown("baton_prompt_tokens_total") == 0
    assert stage.shown("baton_answers_total", f'end="{code}"') == 1


def test_an_attempt_that_found_no_successor_counts_once(stage: Stage) -> None:
    bench = stage.begin()
    bench.step(ev.PlaceGranted(0, placement("d1")))
    bench.step(ev.TaskBusy(0, "d1", "full"))
    stage.answer.end(None, NoWorkers("none"))
    assert stage.figures.attempts == {"busy": 1}
    assert stage.figures.answers == {"no_workers": 1}


def test_what_got_no_worker_is_no_attempt(stage: Stage) -> None:
    stage.begin()
    stage.answer.end(None, NoWorkers("none"))
    assert not stage.figures.attempts


def test_a_bug_is_an_internal_error(stage: Stage) -> None:
    stage.begin()
    stage.answer.end(None, ZeroDivisionError())
    assert stage.figures.answers == {"internal_error": 1}


def test_the_wait_for_a_worker_ends_with_its_word_or_with_the_answer(stage: Stage) -> None:
    bench = stage.begin()
    for now_s in (0.0, 1.5):
        bench.now_s = now_s
        bench.step(ev.PlaceHeld(0))
        bench.now_s = now_s + 0.5
        bench.step(ev.PlaceHandedBack(0))
    bench.run_on()
    assert stage.shown("baton_admission_wait_seconds_sum") == pytest.approx(2.0)
    bench = stage.begin()
    bench.step(ev.PlaceHeld(0))
    bench.now_s = 3.0
    bench.step(ev.Aborted(ClientGone("left")))
    stage.answer.end(None, ClientGone("left"))
    assert stage.shown("baton_admission_wait_seconds_count") == 2
    assert stage.shown("baton_admission_wait_seconds_sum") == pytest.approx(5.0)


def test_each_answer_has_one_result_and_counts_for_its_workers(stage: Stage) -> None:
    for first_token_s, tokens, last_token_s in ((0.1, 1, 0.1), (0.9, 2, 0.9), (0.1, 3, 0.4)):
        bench = stage.begin()
        bench.run_on()
        bench.now_s = first_token_s
        bench.frame(0, [5])
        bench.now_s = last_token_s
        bench.frame(1, [6] * (tokens - 1), FinishReason.LENGTH)
        stage.whole(tokens)
    stage.begin()
    stage.answer.end(None, Overloaded("full"))
    stage.begin()
    stage.answer.end(None, NoWorkers("none"))
    counted = {"attained": 1, "missed_ttft": 1, "missed_tpot": 1}
    assert stage.figures.objectives == {("tiny", result): 1 for result in RESULTS}
    assert stage.figures.by_worker({"d1", "new"}) == {
        **{("d1", result): count for result, count in counted.items()},
        **{("new", result): 0 for result in counted},
    }


def test_workers_that_are_gone_are_forgotten(stage: Stage) -> None:
    for number in range(1000):
        stage.figures.note_objectives("attained", "tiny", [f"d{number}"])
    assert len(stage.figures.by_worker({"d1"})) == len(RESULTS) - 1
    assert stage.figures.by_worker({"d2"})["d2", "attained"] == 0


def test_a_path_of_a_client_becomes_no_label(stage: Stage) -> None:
    for path in ("/v1/completions", "/etc/passwd", "/v1/models/../x", "/v1/models"):
        stage.figures.responded(path, 404)
    assert stage.shown("baton_http_responses_total", 'route="other",status="404"') == 2
