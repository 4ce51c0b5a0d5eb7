"""Lowest cost: the predicted time, and what the placement does to other requests.

Among near-ties the candidate with the most cached tokens wins, then the one without a transfer, then the less loaded
of two random ones, so that several schedulers do not all choose the same worker.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np
from baton_native.placement import Options, shortlist, shortlist_pulls

from baton.messages.placement import Candidate
from baton.node.ports import Randomness
from baton_scheduler.policies.protocol import Policy, Pool, Question
from baton_scheduler.prediction import OWN, PULL_OVERLAP, Leg

if TYPE_CHECKING:
    from baton_native.placement import Option

TIE_SHARE: Final = 0.05
"""Costs within this share of the best are near-ties."""
TIE_S: Final = 0.001
"""Costs within this time of the best are near-ties, whatever the share."""
SHORTLIST: Final = 5
"""Workers of each role that are paired: the best by their own part of the cost."""
OTHERS: Final = 3
"""Placements returned beside the chosen one, at most: the best, and the best of the other kind."""


class Predicted(Policy):
    def rank(self, question: Question) -> list[Candidate]:
        random, whole = question.random, question.whole
        options = Options()
        if whole is not None:
            options.add_wholes(whole.columns, whole.table, _best(whole, SHORTLIST, random))
        for pool in question.pools:
            _add_pairs(options, pool, question)
        if not options:
            return []
        ties, best, best_whole, best_pair = options.rank(TIE_SHARE, TIE_S, OTHERS + 1)
        # The least loaded of all is the same for every scheduler until the next heartbeat; of two random ones it
        # rarely is.
        chosen = min(random.sample(ties, min(2, len(ties))), key=_used_share)
        others = [each for each in best if each != chosen][:OTHERS]
        # The best placement of the other kind is what the chosen one is compared with.
        rival = best_pair if _is_whole(chosen) else best_whole
        if rival is not None and rival not in others:
            others[-1] = rival
        return [_candidate(each, question) for each in (chosen, *others)]


_used_share: Final[Callable[[Option], float]] = itemgetter(0)


def _is_whole(option: Option) -> bool:
    return option[-1] < 0


def _candidate(option: Option, question: Question) -> Candidate:
    _, number, source, sink = option
    if sink < 0:
        assert question.whole is not None
        return question.predict.whole(question.whole, source)
    computing, receiving = question.pools[number - (question.whole is not None)]
    return question.predict.pair(computing, source, receiving, sink)


def _add_pairs(options: Options, pool: Pool, question: Question) -> None:
    """Add the best pairs: costs nearly add up, so they consist of the best of each side."""
    source, sink = pool
    excluded = question.predict.demand.exclude_pairs
    # Each excluded pair may take one of the best from the list.
    count = SHORTLIST + len(excluded)
    sources = _best(source, count, question.random)
    # How much of a pull is left depends on the pair; with the best source it is about right.
    nearest = shortlist_pulls(sink.columns, source.columns.item(OWN, sources[0]), count, TIE_SHARE, TIE_S)
    sinks = _among(sink, nearest, count, question.random)
    prefills = [source.load(each).worker for each in sources]
    bandwidth: list[float] = []
    for each in sinks:
        decode = sink.load(each)
        bandwidth += [
            0.0 if (prefill, decode.worker) in excluded else decode.bandwidths.get(prefill, decode.bandwidth)
            for prefill in prefills
        ]
    options.add_pairs(source.columns, sink.columns, sink.table, sources, sinks, bandwidth, PULL_OVERLAP)


def _best(leg: Leg, count: int, random: Randomness) -> list[int]:
    """Return the indexes of a leg's lowest costs, the best first."""
    return _among(leg, shortlist(leg.columns, count, TIE_SHARE, TIE_S), count, random)


def _among(leg: Leg, found: tuple[list[int], bool], count: int, random: Randomness) -> list[int]:
    """Return `count` of the indexes that a shortlist has found.

    Near-ties are ordered by cached tokens, then at random: a fixed order would be the same in every scheduler
    and at every request, and all requests would go to the same few workers.
    """
    best, is_crowded = found
    if not is_crowded:
        return best
    near = np.array(best)
    shuffle = np.array([random.random() for _ in best])
    return near[np.lexsort((shuffle, -leg.cached_tokens[near]))[:count]].tolist()
