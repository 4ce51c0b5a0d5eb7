"""Lowest cost: the predicted time, and what the placement does to other requests.

Among near-ties the candidate with the most cached tokens wins, then the one without a transfer, then the less loaded
of two random ones, so that several schedulers do not all choose the same worker.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Final

import numpy as np

from baton.messages.placement import Candidate
from baton.node.ports import Randomness
from baton_scheduler.policies.protocol import Policy, Pool, Question
from baton_scheduler.prediction import Computing, Leg, Receiving, tail_s
from baton_scheduler.team import Rows, Vector

TIE_SHARE: Final = 0.05
"""Costs within this share of the best are near-ties."""
TIE_S: Final = 0.001
"""Costs within this time of the best are near-ties, whatever the share."""
SHORTLIST: Final = 5
"""Workers of each role that are paired: the best by their own part of the cost."""
OTHERS_MAX: Final = 3
"""Placements returned beside the chosen one."""


Option = tuple[float, float, float, bool, float, int, int, Computing, Receiving | None]
"""One placement: cost; what decides between near-ties (tokens cached where the prompt is computed, and where it
decodes; no transfer); used share of the decode worker; indexes of the computing and the pulling worker; their legs.

A tuple, since some dozens are made for each decision.
"""


class Predicted(Policy):
    def rank(self, question: Question) -> list[Candidate]:
        random = question.random
        wholes = [] if question.whole is None else _wholes(question.whole, random)
        pairs = [pair for pool in question.pools for pair in _pairs(pool, question)]
        options = wholes + pairs
        if not options:
            return []
        chosen = _pick(options, random)
        best = sorted(options, key=_cost_s)[: OTHERS_MAX + 1]
        # The best placement of the other kind is what the chosen one is compared with.
        rivals = wholes if chosen[-1] is not None else pairs
        if rivals and not any((each[-1] is None) != (chosen[-1] is None) for each in best):
            best.append(min(rivals, key=_cost_s))
        return [_candidate(each, question) for each in (chosen, *(each for each in best if each is not chosen))]


_cost_s: Final[Callable[[Option], float]] = itemgetter(0)
_merit: Final[Callable[[Option], tuple[float, float, bool]]] = itemgetter(1, 2, 3)
_used_share: Final[Callable[[Option], float]] = itemgetter(4)


def _candidate(option: Option, question: Question) -> Candidate:
    *_, source_index, sink_index, source, sink = option
    if sink is None:
        return question.predict.whole(source, source_index)
    return question.predict.pair(source, source_index, sink, sink_index)


def _wholes(leg: Computing, random: Randomness) -> list[Option]:
    """Return the best workers that compute the prompt where they decode."""
    cost_s, cached_tokens, used_share = leg.cost_s.item, leg.cached_tokens.item, leg.figures.used_share.item
    return [
        (cost_s(row), cached_tokens(row), cached_tokens(row), True, used_share(row), row, -1, leg, None)
        for row in _shortlist(leg, leg.cost_s, SHORTLIST, random)
    ]


def _pairs(pool: Pool, question: Question) -> list[Option]:
    """Return the best pairs: costs nearly add up, so they consist of the best of each side."""
    source, sink = pool
    excluded = question.predict.demand.exclude_pairs
    # Each excluded pair may take one of the best from the list.
    count = SHORTLIST + len(excluded)
    sources = _shortlist(source, source.cost_s, count, question.random)
    # How much of a pull is left depends on the pair; with the best source it is about right.
    left_s = np.maximum(sink.pull_s - source.own_s.item(sources[0]), 0.0)
    sinks = _shortlist(sink, sink.cost_s + left_s, count, question.random)
    # Numbers one by one: with vectors, so few would take longer.
    computing = [
        (p, source.load(p), source.cost_s.item(p), source.own_s.item(p), source.cached_tokens.item(p)) for p in sources
    ]
    pairs: list[Option] = []
    for d in sinks:
        decode, sink_cost_s, missing_bytes = sink.load(d), sink.cost_s.item(d), sink.missing_bytes.item(d)
        sink_cached, share = sink.cached_tokens.item(d), sink.figures.used_share.item(d)
        for p, prefill, source_cost_s, compute_s, source_cached in computing:
            if not excluded or question.pairable(prefill, decode):
                cost_s = source_cost_s + sink_cost_s + tail_s(prefill, decode, missing_bytes, compute_s)
                pairs.append((cost_s, source_cached, sink_cached, False, share, p, d, source, sink))
    return pairs


def _shortlist(leg: Leg, cost_s: Vector, count: int, random: Randomness) -> list[int]:
    """Return the indexes of the lowest costs, the best first.

    Near-ties are ordered by cached tokens, then at random: a fixed order would be the same in every scheduler
    and at every request, and all requests would go to the same few workers.
    """
    best = cost_s.argpartition(count - 1)[:count].tolist() if len(cost_s) > count else list(range(len(cost_s)))
    best.sort(key=cost_s.item)
    limit_s = _near_s(cost_s.item(best[0]))
    # Only if the worst of these is a near-tie, there may be more near-ties than these.
    if cost_s.item(best[-1]) <= limit_s:
        near: Rows = (cost_s <= limit_s).nonzero()[0]
        if len(near) > count:
            shuffle = np.array([random.random() for _ in near])
            return near[np.lexsort((shuffle, -leg.cached_tokens[near]))[:count]].tolist()
    return best


def _near_s(best_s: float) -> float:
    """Return the highest cost in seconds that still ties with the best."""
    return best_s + max(best_s * TIE_SHARE, TIE_S)


def _pick(options: list[Option], random: Randomness) -> Option:
    """Return the best of all near-ties: most cached tokens, no transfer, the less loaded of two."""
    limit_s = _near_s(min(map(_cost_s, options)))
    ties = [option for option in options if option[0] <= limit_s]
    most = max(map(_merit, ties))
    equals = [option for option in ties if _merit(option) == most]
    # The least loaded of all is the same for every scheduler until the next heartbeat; of two random ones it rarely is.
    two = random.sample(equals, min(2, len(equals)))
    return min(two, key=_used_share)
