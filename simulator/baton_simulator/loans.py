"""Loans between the KV pools of simulated workers: asked for, granted, pulled over the links, given up when late.

The product's `PoolLending` decides what is lent and borrowed, its scheduler whether to borrow. Here is the rest: the
time to ask, the pull, and the end of a loan that takes longer than computing its tokens is predicted to take.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from baton_scheduler.lenders import ASK_S

from baton.connectors import pool_lending
from baton_simulator.events import EventQueue
from baton_simulator.links import Links, Pull
from baton_simulator.worker import Leg, Worker


@dataclass(slots=True, eq=False)
class _Loan:
    leg: Leg
    borrower: Worker
    lender: Worker
    key: bytes
    began_s: float
    deadline_s: float
    blocks: int = 0
    """Blocks that are pulled."""
    pull: Pull | None = None
    is_over: bool = False


class Loans:
    def __init__(self, queue: EventQueue, links: Links, changed: Callable[[Worker], None]) -> None:
        """`changed`: is called when a worker's pool may have changed."""
        self._queue = queue
        self._links = links
        self._changed = changed
        self._joined: defaultdict[bytes, list[tuple[Leg, Worker]]] = defaultdict(list)
        """Legs that wait for another one's loan, by its key."""

    def submit(self, leg: Leg, borrower: Worker, lender: Worker | None, worth_s: float) -> None:
        """Submit a leg to `borrower` with a loan of `lender`, or with what other loans are bringing.

        `worth_s`: predicted time to compute what is lent.
        """
        now_s = self._queue.now_s
        if lender is None:
            if not self._join(leg, borrower):
                borrower.submit(leg)
            return
        loan = _Loan(leg, borrower, lender, leg.request.encode(), now_s, now_s + worth_s)
        self._queue.add(now_s + ASK_S, self._on_answer, loan)

    def _on_answer(self, loan: _Loan) -> None:
        leg, source, sink = loan.leg, loan.lender.pool, loan.borrower.pool
        assert source is not None
        assert sink is not None
        chain = sink.keys(leg.blocks)
        tokens = source.lending.lend(loan.key, chain, 1) if loan.deadline_s > self._queue.now_s else 0
        terms = pool_lending.Loan(
            key=loan.key, endpoints=(loan.lender.spec.name,), tokens=tokens, deadline_s=loan.deadline_s
        )
        if self._join(leg, loan.borrower):
            self._end(loan)
            return
        first = sink.match(leg.blocks, loan.borrower.cache.match(leg.blocks))
        loan.blocks = len(sink.lending.borrow(terms, chain, first))
        # The room for them.
        self._changed(loan.borrower)
        if not loan.blocks:
            self._end(loan)
            loan.borrower.submit(leg)
            return
        leg.is_borrowing = True
        loan.borrower.submit(leg)
        loan.pull = Pull(
            source=loan.lender.spec.name,
            sink=loan.borrower.spec.name,
            size_bytes=loan.blocks * sink.block_bytes,
            tail_bytes=0,
            done=lambda pull: self._on_pulled(loan, pull),
            tail_exists=True,
        )
        self._links.begin(loan.pull)
        self._queue.add(loan.deadline_s, self._on_deadline, loan)

    def _join(self, leg: Leg, worker: Worker) -> bool:
        """Submit a leg that waits for another one's loan, if that brings the next part of its prefix."""
        pool = worker.pool
        if pool is None or not pool.lending.is_borrowing:
            return False
        first = pool.match(leg.blocks, worker.cache.match(leg.blocks))
        key = pool.lending.coming(pool.keys(leg.blocks[first : first + 1])[0]) if first < len(leg.blocks) else b""
        if not key:
            return False
        self._joined[key].append((leg, worker))
        leg.is_borrowing = True
        worker.submit(leg)
        return True

    def _on_pulled(self, loan: _Loan, pull: Pull) -> None:
        self._end(loan)
        loan.leg.borrowed_tokens = loan.blocks * loan.borrower.spec.block_tokens
        loan.borrower.loan_ended(
            loan.leg, pull.source, pull.size_bytes, pull.moving_s, waited_s=self._queue.now_s - loan.began_s
        )
        self._release_joined(loan)

    def _on_deadline(self, loan: _Loan) -> None:
        if loan.is_over:
            return
        assert loan.pull is not None
        self._links.cancel(loan.pull)
        self._end(loan, failed=True)
        loan.borrower.loan_ended(loan.leg)
        self._release_joined(loan)

    def _release_joined(self, loan: _Loan) -> None:
        for leg, worker in self._joined.pop(loan.key, ()):
            worker.loan_ended(leg)

    def _end(self, loan: _Loan, *, failed: bool = False) -> None:
        """Unpin what was lent; keep or drop what was borrowed."""
        loan.is_over = True
        for worker in (loan.lender, loan.borrower):
            assert worker.pool is not None
            worker.pool.lending.progress(Counter({loan.key: 1}), frozenset({loan.key} if failed else ()))
            worker.pool.lending.plan()
        self._changed(loan.borrower)
