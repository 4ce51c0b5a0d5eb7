"""The gateway's metrics: outcomes and durations of requests, answers and attempts.

They are recorded at phase changes and at ends, never per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Final

from baton.clock import Clock
from baton.errors import BatonError, ClientGone, Overloaded
from baton.telemetry import Metrics, Reading, catalogue
from baton_gateway.attempt import AttemptMachine
from baton_gateway.order import Order, Outcome
from baton_gateway.timeline import Change, Timeline
from baton_gateway.tracing import PROVIDER, RequestTrace

RESULTS: Final = ("attained", "missed_ttft", "missed_tpot", "refused")
ROUTES: Final = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/models",
        "/v1/responses", "/tokenize", "/detokenize", "/health", "/ready",
    }
)  # fmt: skip


class GatewayMetrics:
    """Metrics of one gateway."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self.observe = metrics.observe
        self._clock = clock
        self.answers = Counter[str]()
        self.attempts = Counter[str]()
        self.objectives = Counter[tuple[str, str]]()
        """Answers by model and result."""
        self._by_worker = Counter[tuple[str, str]]()
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.cached_tokens_predicted = 0
        self._responses = Counter[tuple[str, str]]()
        metrics.read(self._readings)

    def responded(self, path: str, status: int) -> None:
        """Count a response that begins. Clients choose paths, so only the gateway's own become labels."""
        self._responses[path if path in ROUTES else "other", str(status)] += 1

    def note_objectives(self, result: str, model: str, workers: Iterable[str] = ()) -> None:
        """Count an answer that met its objectives or did not; that of a pair counts for both workers."""
        self.objectives[model, result] += 1
        self._by_worker.update((worker, result) for worker in workers)

    def by_worker(self, live: Set[str]) -> Mapping[tuple[str, str], int]:
        """Return the answers of live workers by worker and result, and forget the others."""
        for labels in [labels for labels in self._by_worker if labels[0] not in live]:
            del self._by_worker[labels]
        return {(worker, result): 0 for worker in live for result in RESULTS[:-1]} | self._by_worker

    def note_request(self, trace: RequestTrace) -> None:
        """Record the duration of a generation request that has ended."""
        labels = (trace.operation, PROVIDER, trace.model, trace.error_type)
        duration_s = self._clock.now_s() - trace.began_at_s
        self.observe(catalogue.REQUEST_DURATION, duration_s, *labels, trace=trace.trace)

    def _readings(self) -> Iterator[Reading]:
        yield Reading(catalogue.PROMPT_TOKENS, self.prompt_tokens)
        yield Reading(catalogue.OUTPUT_TOKENS, self.output_tokens)
        yield Reading(catalogue.CACHED_ACTUAL, self.cached_tokens)
        yield Reading(catalogue.CACHED_PREDICTED, self.cached_tokens_predicted)
        for labels, count in self._responses.items():
            yield Reading(catalogue.HTTP_RESPONSES, count, labels)
        for end, count in self.answers.items():
            yield Reading(catalogue.ANSWERS, count, (end,))
        for end, count in self.attempts.items():
            yield Reading(catalogue.ATTEMPTS, count, (end,))


class AnswerMetrics:
    """Metrics of one answer."""

    def __init__(self, figures: GatewayMetrics, machine: AttemptMachine, timeline: Timeline, order: Order) -> None:
        self._figures = figures
        self._machine = machine
        self._timeline = timeline
        self._order = order

    def note(self, change: Change) -> None:
        machine, observe, trace = self._machine, self._figures.observe, self._order.trace
        if change.new_attempt and machine.setback is not None:
            self._end_attempt(machine.setback)
        if change.queued_s is not None:
            observe(catalogue.ADMISSION_WAIT, change.queued_s, trace=trace)
        predicted_s = 0.0 if machine.placement is None else machine.placement.predicted.predicted_ttft_s
        if change.ttft_s is not None and predicted_s > 0:
            observe(catalogue.TTFT_PREDICTION, change.ttft_s / predicted_s, trace=trace)

    def end(self, outcome: Outcome | None, error: Exception | None) -> None:
        """Record the end of the answer: complete, with an `outcome`, or by an error."""
        if outcome is None:
            error = error or ClientGone("the gateway gave up")
            self._figures.answers[_code(error)] += 1
            if isinstance(error, Overloaded):
                self._figures.note_objectives("refused", self._order.model.name)
        else:
            self._figures.answers[outcome.reason] += 1
            self._note_whole(outcome)
        # An attempt without workers does not count.
        if self._machine.placement is not None:
            self._end_attempt(error)

    def _end_attempt(self, error: Exception | None) -> None:
        end = "done" if error is None else "busy" if isinstance(error, Overloaded) else _code(error)
        self._figures.attempts[end] += 1

    def _note_whole(self, outcome: Outcome) -> None:
        figures, order, placement = self._figures, self._order, self._machine.placement
        figures.prompt_tokens += order.prompt_tokens
        figures.output_tokens += outcome.completion_tokens
        figures.cached_tokens += outcome.cached_tokens
        if placement is not None:
            predicted = max(placement.predicted.cached_tokens, placement.predicted.decode_cached_tokens)
            figures.cached_tokens_predicted += min(predicted, order.prompt_tokens)
        labels = (order.operation, PROVIDER, order.model.name)
        ttft_s = self._timeline.first_token_at_s - order.received_at_s
        figures.observe(catalogue.TIME_TO_FIRST_TOKEN, ttft_s, *labels, trace=order.trace)
        tpot_s = 0.0
        if outcome.completion_tokens > 1:
            tpot_s = (self._timeline.changed_at_s - self._timeline.first_token_at_s) / (outcome.completion_tokens - 1)
            figures.observe(catalogue.TIME_PER_OUTPUT_TOKEN, tpot_s, *labels, trace=order.trace)
        objectives = order.objectives
        late = "missed_tpot" if tpot_s > objectives.tpot_s else "attained"
        result = "missed_ttft" if ttft_s > objectives.ttft_s else late
        workers = [] if placement is None else [address.worker for address in placement.addresses]
        figures.note_objectives(result, order.model.name, workers)


def _code(error: Exception) -> str:
    return error.code if isinstance(error, BatonError) else BatonError.code
