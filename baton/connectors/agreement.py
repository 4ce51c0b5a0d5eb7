"""Agreement of tensor-parallel ranks on the transfers that have ended, for engines with a scheduler on every rank.

Such schedulers receive the same requests and must take the same decisions in the same order, without asking each
other. Only the end of a transfer is seen by each rank at its own time. So before a step each rank votes on every open
transfer, the ranks take the minimum of their votes, and each acts on that alone:

    vote on a pull     (ended, unfailed)     0 while it runs, and from the first rank that it fails on
    vote on a lease    (ended,)              0 while a peer may read this rank's part
    the time           in milliseconds       for decisions on deadlines: ranks are processes of one host

The transfers themselves are listed by what was agreed before, so the lists are equal on all ranks.

What ranks' KV pools have done has no fixed list: it is gathered whole, in the steps in which some rank has news.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from baton.connectors.link import LendPrefix
from baton.connectors.pool_plan import PoolProgress
from baton.connectors.rank import RankResults

Vote = Callable[[list[int]], list[int]]
"""Returns the minimum over all ranks, for each place of a list. All ranks call it with lists of one length."""


@dataclass(frozen=True, slots=True)
class PoolNews:
    """What one rank's KV pool has done, and what it is asked for, since the last step in which this was gathered."""

    progress: PoolProgress | None
    asked: tuple[LendPrefix, ...] = ()


Gather = Callable[[PoolNews], Sequence[PoolNews]]
"""Returns the news of all ranks, by rank. All ranks call it in the same step."""


@dataclass(frozen=True, slots=True)
class AgreedResults:
    """Transfers that have ended on all ranks, in one order on all of them."""

    received: tuple[str, ...] = ()
    failed: frozenset[str] = field(default_factory=frozenset[str])
    """Pulls that have failed on some rank. Those that `received` lacks still run on others, and are to be cancelled."""
    sent: tuple[str, ...] = ()


class RankAgreement:
    def __init__(self, vote: Vote, now_s: Callable[[], float] = time.monotonic) -> None:
        self.agreed_s = 0.0
        """Time of the last vote, equal on all ranks. It stands still while no transfer is open or waited for."""
        self._vote = vote
        self._now_s = now_s
        self._here = RankResults()
        """Results of this rank that the others lack."""

    def settle(
        self, news: RankResults, pulls: Collection[str], leases: Collection[str], *, waiting: bool = False
    ) -> AgreedResults:
        """Add this rank's news, and return what has ended everywhere of the open `pulls` and `leases`.

        `waiting`: whether requests wait for a transfer, for which the time is needed.
        """
        here = self._here
        here.received |= news.received
        here.failed |= news.failed
        here.sent |= news.sent
        if not pulls and not leases and not waiting:
            return AgreedResults()
        votes = [int(pull in here.received) for pull in pulls]
        votes += [int(pull not in here.failed) for pull in pulls]
        votes += [int(lease in here.sent) for lease in leases]
        votes.append(int(self._now_s() * 1000))
        agreed = iter(self._vote(votes))
        received = tuple(pull for pull in pulls if next(agreed))
        failed = frozenset(pull for pull in pulls if not next(agreed))
        sent = tuple(lease for lease in leases if next(agreed))
        self.agreed_s = next(agreed) / 1000
        here.received.difference_update(received)
        here.failed.difference_update(received)
        here.sent.difference_update(sent)
        return AgreedResults(received, failed, sent)


class PoolAgreement:
    """Gives the KV pool's schedulers on all ranks the same news in the same step, so that they decide alike."""

    def __init__(self, vote: Vote = list[int], gather: Gather = lambda news: (news,)) -> None:
        """Without arguments, for one rank."""
        self._vote = vote
        self._gather = gather
        self._asked: dict[bytes, LendPrefix] = {}
        """Orders to lend that have reached this rank, and perhaps not all others."""

    def ask(self, order: LendPrefix) -> None:
        """Note an order, which comes to each rank at its own time."""
        self._asked[order.key] = order

    def settle(self, progress: PoolProgress | None) -> tuple[PoolProgress | None, tuple[LendPrefix, ...]]:
        """Return what all ranks have done, and the orders that have reached all of them. Called in each step."""
        (is_quiet,) = self._vote([int(progress is None and not self._asked)])
        if is_quiet:
            return None, ()
        news = self._gather(PoolNews(progress, tuple(self._asked.values())))
        joined: PoolProgress | None = None
        for each in news:
            if each.progress is not None:
                joined = each.progress if joined is None else joined.joined(each.progress)
        everywhere = set[bytes].intersection(*({order.key for order in each.asked} for each in news))
        orders = tuple(order for order in news[0].asked if order.key in everywhere)
        for order in orders:
            del self._asked[order.key]
        return joined, orders
