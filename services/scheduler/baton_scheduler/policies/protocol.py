"""The interface of a policy, and what the simple ones share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final, Protocol

import msgspec
import numpy as np

from baton.messages.placement import Candidate
from baton.node.ports import Randomness
from baton_scheduler.prediction import Computing, Leg, Prediction, Receiving
from baton_scheduler.worker_load import WorkerLoad

OVERLOAD_S: Final = 2.0
"""Seconds of prompts, more than the least loaded worker has, above which a worker is avoided whatever it holds."""


class PolicyName(StrEnum):
    PREDICTED = "predicted"
    """Lowest cost: predicted time, and what the placement does to others."""
    PREFIX_AFFINITY = "prefix-affinity"
    """Most cached tokens, unless that worker is much busier than others."""
    STICKY = "sticky"
    """All requests of a session on one worker, by rendezvous hashing, unless it is overloaded."""
    LEAST_LOADED = "least-loaded"
    """Least work ahead."""
    POWER_OF_TWO = "power-of-two"
    """Less work ahead of two random ones."""
    ROUND_ROBIN = "round-robin"
    """In turn."""


Pool = tuple[Computing, Receiving]
"""Prefill workers and decode workers that can hand over to each other."""


class Question(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One attempt and the placements that are allowed. No leg is empty."""

    predict: Prediction
    whole: Computing | None
    """Decode workers that may compute the prompt themselves; None: the prompt is to be computed elsewhere."""
    pools: Sequence[Pool]
    random: Randomness

    def free_share(self, candidate: Candidate) -> float:
        """Return which share of the workers that may compute the prompt are free, in pairs or not as the candidate."""
        legs = [source for source, _ in self.pools] if candidate.prefill else [self.whole]
        computing = [leg for leg in legs if leg is not None]
        return sum(map(self.predict.free, computing)) / sum(map(len, computing))

    def is_idle(self, candidate: Candidate) -> bool:
        """Return whether the worker that would decode runs nothing, and nothing was placed on it."""
        legs = (self.whole, *(sink for _, sink in self.pools))
        team = next(leg.team for leg in legs if leg is not None)
        load = team.loads[team.rows[candidate.decode]]
        return load.slots_free >= load.running_max

    def pairable(self, prefill: WorkerLoad, decode: WorkerLoad) -> bool:
        """Return whether the two agents can reach each other, as far as this attempt knows."""
        return (prefill.worker, decode.worker) not in self.predict.demand.exclude_pairs


class Policy(Protocol):
    """Ranks placements. An instance belongs to one scheduler and may keep state between decisions."""

    def rank(self, question: Question) -> list[Candidate]:
        """Return the chosen placement and after it the best others, a few; empty if none is allowed."""
        ...


class OrderPolicy(Policy, Protocol):
    """Orders the workers of each leg, and takes the first of each that can be paired.

    Where a request may run either way, the prediction decides between the best pair and the best whole worker.
    """

    @abstractmethod
    def order(self, leg: Leg, question: Question) -> Iterable[int]:
        """Return the indexes of a leg's workers, the preferred one first."""
        ...

    def rank(self, question: Question) -> list[Candidate]:
        return sorted(self._best(question), key=lambda candidate: candidate.predicted_ttft_s)

    def _best(self, question: Question) -> Iterator[Candidate]:
        predict, whole = question.predict, question.whole
        if whole is not None:
            yield predict.whole(whole, self._with_room(whole, question)[0])
        for source, sink in question.pools:
            sources, sinks = self._with_room(source, question), self._with_room(sink, question)
            pairs = ((p, d) for p in sources for d in sinks if question.pairable(source.load(p), sink.load(d)))
            pair = next(pairs, None)
            if pair is not None:
                yield predict.pair(source, pair[0], sink, pair[1])

    def _with_room(self, leg: Leg, question: Question) -> list[int]:
        """Return the workers in the policy's order, those without room last."""
        # Sorting is stable.
        return sorted(self.order(leg, question), key=lambda index: leg.waiting_s[index] > 0)


def by_work_ahead(leg: Leg) -> list[int]:
    """Return a leg's workers, those with the least work ahead first: prompts to compute, then slots and KV in use."""
    queue_s = leg.queue_s if isinstance(leg, Computing) else np.zeros(len(leg))
    return np.lexsort((leg.figures.used_share, queue_s)).tolist()


def overloaded(leg: Leg) -> frozenset[int]:
    """Return the workers that have much more work ahead than the one with the least."""
    if not isinstance(leg, Computing):
        return frozenset()
    return frozenset(np.flatnonzero(leg.queue_s > leg.queue_s.min() + OVERLOAD_S).tolist())
