"""The less loaded of two random workers: no two schedulers choose the same one for long."""

from __future__ import annotations

from collections.abc import Iterable

from baton_scheduler.policies.protocol import OrderPolicy, Question, by_work_ahead
from baton_scheduler.prediction import Leg


class PowerOfTwo(OrderPolicy):
    def order(self, leg: Leg, question: Question) -> Iterable[int]:
        shuffled = question.random.sample(range(len(leg)), len(leg))
        two = set(shuffled[:2])
        return [*(index for index in by_work_ahead(leg) if index in two), *shuffled[2:]]
