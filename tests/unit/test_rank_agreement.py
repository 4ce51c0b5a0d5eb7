"""Ranks that see transfers end at different times act on them together, in one order, and lose none."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from hypothesis import given
from hypothesis import strategies as st

from baton.connectors.agreement import AgreedResults, PoolAgreement, PoolNews, RankAgreement
from baton.connectors.link import LendPrefix
from baton.connectors.pool_plan import PoolProgress
from baton.connectors.rank import RankResults

WAIT_S = 10.0
News = TypeVar("News")


class Ballot:
    """The minimum over ranks that are threads, and what all of them say."""

    def __init__(self, ranks: int) -> None:
        self._said: list[object] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=WAIT_S)

    def cast(self, rank: int, votes: list[int]) -> list[int]:
        return [min(places) for places in zip(*self.gather(rank, votes), strict=True)]

    def gather(self, rank: int, news: News) -> list[News]:
        self._said[rank] = news
        self._barrier.wait()
        said = cast("list[News]", list(self._said))
        self._barrier.wait()
        return said


def test_one_rank_acts_on_its_own_news_in_the_order_of_the_pulls() -> None:
    agreement = RankAgreement(lambda votes: votes)
    news = RankResults(sent={"s"}, received={"b", "a"}, failed={"a"})
    assert agreement.settle(news, ["a", "c", "b"], ["s", "t"]) == AgreedResults(("a", "b"), frozenset("a"), ("s",))
    assert agreement.settle(RankResults(), ["c"], ["t"]) == AgreedResults()


def test_ranks_without_open_transfers_do_not_vote() -> None:
    def vote(_votes: list[int]) -> list[int]:
        raise AssertionError("an engine that hands nothing over pays nothing")

    assert RankAgreement(vote).settle(RankResults(), [], []) == AgreedResults()


def test_a_pull_that_failed_on_one_rank_is_known_to_all_while_others_still_run() -> None:
    ballot = Ballot(2)
    ranks = [RankAgreement(lambda votes, rank=rank: ballot.cast(rank, votes)) for rank in range(2)]

    def both(*news: RankResults) -> list[AgreedResults]:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(rank.settle, one, ["p"], []) for rank, one in zip(ranks, news, strict=True)]
            return [one.result() for one in asked]

    failed = RankResults(received={"p"}, failed={"p"})
    assert both(RankResults(), failed) == [AgreedResults(failed=frozenset("p"))] * 2
    assert both(RankResults(), RankResults()) == [AgreedResults(failed=frozenset("p"))] * 2
    ended = RankResults(received={"p"})
    assert both(ended, RankResults()) == [AgreedResults(received=("p",), failed=frozenset("p"))] * 2


def test_ranks_agree_on_the_time_of_the_one_that_is_behind() -> None:
    ballot = Ballot(2)
    ranks = [
        RankAgreement(lambda votes, rank=rank: ballot.cast(rank, votes), lambda rank=rank: 5.0 - rank)
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        for asked in [pool.submit(rank.settle, RankResults(), ["p"], []) for rank in ranks]:
            asked.result()
    assert [rank.agreed_s for rank in ranks] == [4.0, 4.0]


Ends = list[tuple[int, bool]]
"""When each rank's part of a transfer ends, as a step, and whether it fails."""


@st.composite
def transfers(draw: st.DrawFn) -> tuple[int, list[Ends], list[Ends]]:
    ranks = draw(st.integers(1, 3))
    ends = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=ranks, max_size=ranks)
    return ranks, draw(st.lists(ends, max_size=5)), draw(st.lists(ends, max_size=5))


@given(transfers())
def test_all_ranks_act_alike_as_soon_as_the_last_one_has_ended(drawn: tuple[int, list[Ends], list[Ends]]) -> None:
    ranks, pulls, leases = drawn
    ballot = Ballot(ranks)

    def run(rank: int) -> list[tuple[int, AgreedResults]]:
        agreement = RankAgreement(lambda votes: ballot.cast(rank, votes))
        open_pulls = [f"pull {number}" for number in range(len(pulls))]
        open_leases = [f"lease {number}" for number in range(len(leases))]
        acted: list[tuple[int, AgreedResults]] = []
        for step in range(8):
            news = RankResults(
                sent={f"lease {number}" for number, ends in enumerate(leases) if ends[rank][0] == step},
                received={f"pull {number}" for number, ends in enumerate(pulls) if ends[rank][0] == step},
                failed={f"pull {number}" for number, ends in enumerate(pulls) if ends[rank] == (step, True)},
            )
            agreed = agreement.settle(news, open_pulls, open_leases)
            open_pulls = [pull for pull in open_pulls if pull not in agreed.received]
            open_leases = [lease for lease in open_leases if lease not in agreed.sent]
            acted.append((step, agreed))
        assert not open_pulls
        assert not open_leases
        return acted

    with ThreadPoolExecutor(ranks) as pool:
        first, *others = pool.map(run, range(ranks))
    assert all(other == first for other in others)
    for step, agreed in first:
        assert list(agreed.received) == [f"pull {n}" for n, ends in enumerate(pulls) if max(ends)[0] == step]
        assert list(agreed.sent) == [f"lease {n}" for n, ends in enumerate(leases) if max(ends)[0] == step]
        assert agreed.failed == {
            f"pull {n}"
            for n, ends in enumerate(pulls)
            if max(ends)[0] >= step and any(failed and at <= step for at, failed in ends)
        }


def order(key: bytes) -> LendPrefix:
    return LendPrefix(key=key, blocks=b"", sink_ranks=1)


def test_one_rank_takes_its_own_pools_news() -> None:
    agreement, progress = PoolAgreement(), PoolProgress(jobs=Counter({1: 1}))
    agreement.ask(order(b"k"))
    assert agreement.settle(progress) == (progress, (order(b"k"),))
    assert agreement.settle(None) == (None, ())


def test_pools_without_news_are_not_gathered() -> None:
    def gather(_news: PoolNews) -> list[PoolNews]:
        raise AssertionError("a step without news pays for one vote only")

    assert PoolAgreement(list[int], gather).settle(None) == (None, ())


@st.composite
def pool_news(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Draw for each rank the steps in which its jobs end, and in which orders reach it."""
    ranks = draw(st.integers(1, 3))
    steps = st.lists(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks), max_size=4)
    return [list(each) for each in draw(steps)], [list(each) for each in draw(steps)]


@given(pool_news())
def test_pools_of_all_ranks_hear_the_same_in_the_same_step(drawn: tuple[list[list[int]], list[list[int]]]) -> None:
    jobs, orders = drawn
    ranks = max([len(each) for each in (*jobs, *orders)], default=1)
    ballot = Ballot(ranks)

    def run(rank: int) -> list[tuple[PoolProgress | None, tuple[LendPrefix, ...]]]:
        agreement = PoolAgreement(lambda votes: ballot.cast(rank, votes), lambda news: ballot.gather(rank, news))
        heard: list[tuple[PoolProgress | None, tuple[LendPrefix, ...]]] = []
        for step in range(6):
            for number, steps in enumerate(orders):
                if steps[rank] == step:
                    agreement.ask(order(bytes([number])))
            ended = Counter(number for number, steps in enumerate(jobs) if steps[rank] == step)
            heard.append(agreement.settle(PoolProgress(jobs=ended) if ended else None))
        return heard

    with ThreadPoolExecutor(ranks) as pool:
        first, *others = pool.map(run, range(ranks))
    assert all(other == first for other in others)
    for step, (progress, asked) in enumerate(first):
        ended = Counter(number for number, steps in enumerate(jobs) for at in steps if at == step)
        assert (progress.jobs if progress is not None else Counter()) == ended
        assert {each.key[0] for each in asked} == {n for n, steps in enumerate(orders) if max(steps) == step}
