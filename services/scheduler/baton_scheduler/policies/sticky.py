"""A session stays on one worker, chosen by rendezvous hashing: when workers come or go, only their sessions move.

A request without a session goes where the least work is ahead, and so does the decode leg of a pair.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from baton_scheduler.policies.protocol import OrderPolicy, Question, by_work_ahead, overloaded
from baton_scheduler.prediction import Computing, Leg


class Sticky(OrderPolicy):
    def order(self, leg: Leg, question: Question) -> Iterable[int]:
        session, ordered = question.predict.demand.session, by_work_ahead(leg)
        if not (session and isinstance(leg, Computing)):
            return ordered
        busy = overloaded(leg)
        free = sorted((index for index in ordered if index not in busy), key=lambda index: _rank(session, leg, index))
        return [*free, *(index for index in ordered if index in busy)]


def _rank(session: str, leg: Leg, index: int) -> bytes:
    return blake2b(f"{session} {leg.load(index).worker}".encode(), digest_size=8).digest()
