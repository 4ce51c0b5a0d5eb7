"""The rank's side of the KV pool: carries out a step's orders with this rank's copier."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from baton.connectors.handoff import PullOutcome, StepPlan
from baton.connectors.place import RankPlace
from baton.connectors.pool_filing import FilePlan, FileProgress
from baton.connectors.pool_plan import KeepStep, PoolPlan, PoolProgress
from baton.connectors.pool_report import Borrowed
from baton.connectors.rank import HandoffRank, RankResults
from baton.errors import ConfigurationError
from baton.pool.cells import CellTable
from baton.pool.copier import CellSharing, Copier, CopyJob
from baton.pool.file import KvFile
from baton.pool.file_io import FileIo, FileTier
from baton.pool.memory import KvPool

FOUND_MAX: Final = 4096
"""Blocks of an old file that are told with one step."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Arrival:
    """A request that waits for a promotion, and for a pull where `pulling`."""

    copying: bool
    pulling: bool
    failed: bool = False


def open_file(path: str, budget_bytes: int, pool: KvPool, place: RankPlace) -> FileIo | None:
    """Return this rank's part of the pool's file; None if there is to be none, or it cannot be had.

    `budget_bytes`: of all ranks. Files of further ranks have their number after the path.
    """
    if not path:
        return None
    cache = pool.pool
    content = (
        f"{cache.fingerprint}, {cache.layout or 'layout not described'}, rank {place.rank} of {place.size}, "
        f"{pool.tensors} tensors of {cache.block_bytes} bytes for {cache.block_tokens} tokens"
    )
    own = Path(f"{path}.{place.rank}" if place.rank else path)
    try:
        return FileIo(KvFile(own, pool, budget_bytes // place.size, content=content))
    except ConfigurationError as refusal:
        _log.warning("this engine's KV pool has no file: %s", refusal)
        return None


class PoolRank:
    def __init__(
        self,
        slots: int,
        copier: Copier | None,
        lending: HandoffRank | None = None,
        file: FileTier | None = None,
        now_s: Callable[[], float] = time.monotonic,
        *,
        cells: CellTable | None = None,
        sharing: CellSharing | None = None,
        events_heard: bool = True,
    ) -> None:
        """`copier`: None where this rank got no memory; then `slots` is 0. `lending`: the pool's agent, which lends and
        borrows slots as an engine's agent leases and pulls blocks. `file`: the tier below the pool. `cells` and
        `sharing`: where hand-offs are staged in the pool's memory. `events_heard`: see there."""
        self.slots = slots
        self.events_heard = events_heard
        """Whether the engine's events reach somebody. An engine steps before that and its publisher drops what nobody
        hears, so the blocks of an old file are told later."""
        self.lending = lending
        self._cells = CellTable(slots) if cells is None else cells
        self._sharing = sharing
        self._keeps: dict[str, KeepStep] = {}
        self._copier = copier
        self._saves: tuple[CopyJob, ...] = ()
        self._arrivals: dict[str, _Arrival] = {}
        self._requests: dict[int, str] = {}
        """Request by promotion."""
        self._running = 0
        self._file = file
        self._now_s = now_s
        self._scanning = file is not None
        self._filing = 0
        """Number of jobs of the file that run."""
        self._late_s: dict[int, float] = {}
        """Instants at which loads of the file are late, by job."""
        self._progress = PoolProgress(slots=(slots,), filing=FileProgress(slots=(file.slots if file else 0,)))

    def begin(self, plan: PoolPlan, computing: Collection[bytes] = ()) -> None:
        """Start the step's promotions: their blocks are no part of it. Saves wait until it has computed.

        Called before the step's pulls begin. `computing`: keys of leases of what the step computes, where the
        saves of it come with the next plan.
        """
        self._saves = plan.saves
        if self._sharing is not None:
            for job in plan.saves:
                self._sharing.expect(job)
            self._sharing.hold(computing)
        for step in plan.keeps:
            assert self._sharing is not None
            self._keeps[step.request] = step
            self._sharing.keep(step.copy.key, step.copy)
        for step in plan.promotions:
            self._arrivals[step.request] = _Arrival(copying=True, pulling=step.with_pull)
            self._requests[step.copy.job] = step.request
            self._submit(step.copy)
        self._begin_filing(plan.filing)
        if self.lending is not None:
            orders, cells = plan.lending, self._cells
            leases = tuple(replace(step, blocks=cells.of(step.blocks)) for step in orders.leases)
            pulls = tuple(replace(step, blocks=cells.renew(step.blocks)) for step in orders.pulls)
            self.lending.begin(StepPlan(leases=leases, cancel=orders.cancel, pulls=pulls))
            # A lease's end is reported once nothing else uses its blocks; of a loan's, nothing does.
            self.lending.begin(StepPlan(held=tuple(step.key for step in orders.leases)))

    @property
    def is_active(self) -> bool:
        """Whether there is news to come: of copies, of the file, or of loans."""
        files = self._scanning or self._filing > 0
        return files or self._running > 0 or (self.lending is not None and self.lending.is_active)

    def end(self, results: RankResults) -> None:
        """Start the step's saves, and put into `results` the requests whose KV has now arrived in full."""
        if self._copier is None:
            return
        for job in self._saves:
            self._submit(job)
        self._saves = ()
        self._take_ended()
        self._take_kept(results)
        if self._file is not None:
            self._take_filed(self._file)
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
        return progress if progress.jobs or progress.loans or progress.slots or progress.filing else None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
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

    def _take_kept(self, results: RankResults) -> None:
        for request in results.received & self._keeps.keys():
            assert self._sharing is not None
            job = self._keeps.pop(request).copy
            failed = frozenset[int]() if self._sharing.kept(job.key) else frozenset({job.job})
            self._progress = self._progress.joined(PoolProgress(jobs=Counter({job.job: 1}), failed=failed))

    def _begin_filing(self, plan: FilePlan) -> None:
        for job in (*plan.writes, *(load.job for load in plan.loads)):
            assert self._file is not None
            self._filing += 1
            if not job.writes:
                self._cells.renew(job.pool_slots)
            self._file.submit(job)
        now_s = self._now_s()
        self._late_s |= {load.job.job: now_s + load.budget_s for load in plan.loads}

    def _take_filed(self, file: FileTier) -> None:
        found, scanned = file.take_found(FOUND_MAX) if self._scanning and self.events_heard else ([], False)
        self._scanning = self._scanning and not scanned
        ended = file.poll()
        self._filing -= len(ended)
        for end in ended:
            self._late_s.pop(end.job.job, None)
        now_s = self._now_s()
        late = frozenset(job for job, late_s in self._late_s.items() if late_s <= now_s)
        for job in late:
            del self._late_s[job]
        filing = FileProgress(
            found=tuple(found),
            scanned=int(scanned),
            jobs=Counter(end.job.job for end in ended),
            done={end.job.job: end.done for end in ended},
            moving_s={end.job.job: end.moving_s for end in ended},
            late=late,
        )
        if filing:
            self._progress = self._progress.joined(PoolProgress(filing=filing))

    def _take_loans(self, lending: HandoffRank) -> None:
        ended, report = lending.end(), lending.report()
        borrowed: dict[bytes, Borrowed] = {}
        for outcome in report.pulls if report is not None else ():
            if outcome.failed:
                _log.info("a loan did not arrive (%s): %s", outcome.cause, outcome.detail)
            elif outcome.groups:
                borrowed[outcome.key] = _borrowed(outcome)
        if ended.sent or ended.received:
            progress = PoolProgress(
                loans=Counter(bytes.fromhex(name) for name in (*ended.sent, *ended.received)),
                failed_loans=frozenset(map(bytes.fromhex, ended.failed)),
                borrowed=borrowed,
            )
            self._progress = self._progress.joined(progress)


def _borrowed(outcome: PullOutcome) -> Borrowed:
    return Borrowed(
        tokens=outcome.tokens,
        moved_bytes=outcome.moved_bytes,
        moving_s=outcome.moving_s,
        began_s=min(group.began_s for group in outcome.groups),
        ended_s=max(group.ended_s for group in outcome.groups),
        backend=outcome.groups[-1].backend,
    )
