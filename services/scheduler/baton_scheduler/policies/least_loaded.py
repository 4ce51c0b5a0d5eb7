"""Least work ahead: prompts to be computed, then slots and KV in use."""

from __future__ import annotations

from collections.abc import Iterable

from baton_scheduler.policies.protocol import OrderPolicy, Question, by_work_ahead
from baton_scheduler.prediction import Leg


class LeastLoaded(OrderPolicy):
    def order(self, leg: Leg, question: Question) -> Iterable[int]:
        return by_work_ahead(leg)
