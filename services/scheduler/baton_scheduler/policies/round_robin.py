"""Workers in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from baton_scheduler.policies.protocol import OrderPolicy, Question
from baton_scheduler.prediction import Leg


class RoundRobin(OrderPolicy):
    def __init__(self) -> None:
        self._turns = Counter[tuple[str, str]]()
        """Next turn by model, and by what workers do: pull, or compute for themselves or for others."""

    def order(self, leg: Leg, question: Question) -> Iterable[int]:
        key = (question.predict.demand.model, f"{type(leg).__name__} {leg.load(0).role}")
        first = self._turns[key] % len(leg)
        self._turns[key] = first + 1
        return [*range(first, len(leg)), *range(first)]
