"""Most cached tokens of the prompt, unless that worker is overloaded; then least work ahead."""

from __future__ import annotations

from collections.abc import Iterable

from baton_scheduler.policies.protocol import OrderPolicy, Question, by_work_ahead, overloaded
from baton_scheduler.prediction import Leg


class PrefixAffinity(OrderPolicy):
    def order(self, leg: Leg, question: Question) -> Iterable[int]:
        busy = overloaded(leg)
        # Sorting is stable.
        return sorted(by_work_ahead(leg), key=lambda index: (index in busy, -leg.cached_tokens[index]))
