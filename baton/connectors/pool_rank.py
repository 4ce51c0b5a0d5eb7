"""The rank's side of the KV pool: carries out a step's orders with this rank's copier."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from baton.connectors.handoff import StepPlan
from baton.connectors.pool_scheduler import PoolPlan, PoolProgress
from baton.connectors.rank import HandoffRank, RankResults
from baton.pool.copier import Copier, CopyJob

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Arrival:
    """A request that waits for a promotion, and for a pull where `pulling`."""

    copying: bool
    pulling: bool
    failed: bool = False


class PoolRank:
    def __init__(self, slots: int, copier: Copier | None, lending: HandoffRank | None = None) -> None:
        """`copier`: None where this rank got no memory; then `slots` is 0. `lending`: the pool's agent, which lends and
        borrows slots as an engine's agent leases and pulls blocks."""
        self.slots = slots
        self.lending = lending
        self._copier = copier
        self._saves: tuple[CopyJob, ...] = ()
        self._arrivals: dict[str, _Arrival] = {}
        self._requests: dict[int, str] = {}
        """Request by promotion."""
        self._running = 0
        self._progress = PoolProgress(slots=(slots,))

    def begin(self, plan: PoolPlan) -> None:
        """Start the step's promotions: their blocks are no part of it. Saves wait until it has computed."""
        self._saves = plan.saves
        for step in plan.promotions:
            self._arrivals[step.request] = _Arrival(copying=True, pulling=step.with_pull)
            self._requests[step.copy.job] = step.request
            self._submit(step.copy)
        if self.lending is not None:
            orders = plan.lending
            self.lending.begin(
                StepPlan(held=orders.held, leases=orders.leases, cancel=orders.cancel, pulls=orders.pulls)
            )

    @property
    def is_active(self) -> bool:
        """Whether there is news to come: of copies, or of loans."""
        return self._running > 0 or (self.lending is not None and self.lending.is_active)

    def end(self, results: RankResults) -> None:
        """Start the step's saves, and put into `results` the requests whose KV has now arrived in full."""
        if self._copier is None:
            return
        for job in self._saves:
            self._submit(job)
        self._saves = ()
        self._take_ended()
        if self.lending is not None:
            self._take_loans(self.lending)
        for request in results.received & self._arrivals.keys():
            arrival = self._arrivals[request]
            arrival.pulling = False
            arrival.failed |= request in results.failed
            results.received.remove(request)
            results.failed.discard(request)
        for request, arrival in list(self._arrivals.items()):
            if not arrival.copying and not arrival.pulling:
                del self._arrivals[request]
                results.received.add(request)
                if arrival.failed:
                    results.failed.add(request)

    def take_progress(self) -> PoolProgress | None:
        """Return what has ended since the last call."""
        progress, self._progress = self._progress, PoolProgress()
        return progress if progress.jobs or progress.loans or progress.slots else None

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()
        if self.lending is not None:
            self.lending.agent.close()

    def _submit(self, job: CopyJob) -> None:
        assert self._copier is not None
        self._running += 1
        self._copier.submit(job)

    def _take_ended(self) -> None:
        assert self._copier is not None
        ended = self._copier.poll()
        self._running -= len(ended)
        for end in ended:
            if (request := self._requests.pop(end.job.job, None)) is not None:
                arrival = self._arrivals[request]
                arrival.copying = False
                arrival.failed |= end.failed
        if ended:
            progress = PoolProgress(
                jobs=Counter(end.job.job for end in ended),
                failed=frozenset(end.job.job for end in ended if end.failed),
                copying_s={end.job.job: end.copying_s for end in ended if end.job.promotes},
            )
            self._progress = self._progress.joined(progress)

    def _take_loans(self, lending: HandoffRank) -> None:
        ended = lending.end()
        if ended.sent or ended.received:
            progress = PoolProgress(
                loans=Counter(bytes.fromhex(name) for name in (*ended.sent, *ended.received)),
                failed_loans=frozenset(map(bytes.fromhex, ended.failed)),
            )
            self._progress = self._progress.joined(progress)
        if (report := lending.report()) is not None:
            for outcome in report.pulls:
                if outcome.failed:
                    _log.info("a loan did not arrive (%s): %s", outcome.cause, outcome.detail)
