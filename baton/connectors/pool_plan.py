"""What the KV pool's scheduler and its ranks tell each other: a step's orders, and what has ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.connectors.pool_filing import FilePlan, FileProgress
from baton.connectors.pool_lending import LendingPlan
from baton.connectors.pool_report import Borrowed
from baton.pool.copier import CopyJob


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteStep:
    request: str
    copy: CopyJob
    with_pull: bool
    """Whether further blocks of the request come from a peer; it has its KV when both are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepStep:
    """Blocks of a pull, staged in the pool's memory, that stay there."""

    request: str
    copy: CopyJob


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One step's orders."""

    promotions: tuple[PromoteStep, ...] = ()
    saves: tuple[CopyJob, ...] = ()
    """Copies of blocks that are written once this step has computed."""
    keeps: tuple[KeepStep, ...] = ()
    lending: LendingPlan = field(default_factory=LendingPlan)
    filing: FilePlan = field(default_factory=FilePlan)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProgress:
    """What ranks have done since their last step."""

    slots: tuple[int, ...] = ()
    """Slots of the pools that are now ready for use, one number for each rank."""
    jobs: Counter[int] = field(default_factory=Counter[int])
    """Number of ranks on which a job has ended."""
    failed: frozenset[int] = frozenset()
    copying_s: dict[int, float] = field(default_factory=dict[int, float])
    """Time that each promotion took, by job."""
    loans: Counter[bytes] = field(default_factory=Counter[bytes])
    """Number of ranks on which a loan has ended, by its key."""
    failed_loans: frozenset[bytes] = frozenset()
    borrowed: dict[bytes, Borrowed] = field(default_factory=dict[bytes, Borrowed])
    """What has arrived, by the key of its loan."""
    filing: FileProgress = field(default_factory=FileProgress)

    def joined(self, other: PoolProgress) -> PoolProgress:
        return PoolProgress(
            slots=self.slots + other.slots,
            jobs=self.jobs + other.jobs,
            failed=self.failed | other.failed,
            copying_s={
                job: max(self.copying_s.get(job, 0.0), other.copying_s.get(job, 0.0))
                for job in self.copying_s | other.copying_s
            },
            loans=self.loans + other.loans,
            failed_loans=self.failed_loans | other.failed_loans,
            borrowed={
                **self.borrowed,
                **{
                    key: self.borrowed[key].joined(each) if key in self.borrowed else each
                    for key, each in other.borrowed.items()
                },
            },
            filing=self.filing.joined(other.filing),
        )
