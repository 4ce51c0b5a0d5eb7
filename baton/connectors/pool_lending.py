"""Loans between KV pools, as plain decisions: which slots are lent or borrowed, and for how long they are bound.

A borrower's request names a loan: a lease that another worker's pool has opened, or is about to open. Its blocks are
pulled into slots of this engine's pool, before the engine is promised anything.

    lend    asked ──slots pinned──▶ lent ──read, or its time is up──▶ unpinned
    borrow  wanted ──slots reserved──▶ pulling ──all of it is here──▶ READY, promoted like any other block
                                          └──failed, late or cancelled──▶ slots free again, the engine computes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from baton.connectors.handoff import LeaseStep, PullStep
from baton.connectors.pool_report import Borrowed
from baton.pool.directory import PoolDirectory

LENT_SHARE_MAX: Final = 0.5
"""Share of the slots that may be in use by readers when another loan is granted."""
UNCLAIMED_LOAN_TTL_S: Final = 2.0
"""Time after which a loan that was granted and is not read ends."""


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that a request may borrow, inside the engine's `kv_transfer_params`."""

    key: bytes
    endpoints: tuple[str, ...]
    """Addresses of the agents of the lender's pools, by tensor-parallel rank."""
    tokens: int
    """Leading tokens of the prompt that are lent."""
    lender: str = ""
    """Worker that lends."""
    deadline_s: float
    """Instant, on this machine's monotonic clock, after which computing them is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingPlan:
    """One step's orders for the pools' agents."""

    leases: tuple[LeaseStep, ...] = ()
    cancel: tuple[bytes, ...] = ()
    pulls: tuple[PullStep, ...] = ()


@dataclass(frozen=True, slots=True)
class _Lent:
    keys: tuple[bytes, ...]
    tokens: int


class PoolLending:
    """Decides each step's loans. Only with a directory in which all ranks agree."""

    def __init__(self, directory: PoolDirectory, block_tokens: int, ranks: int) -> None:
        self.lent_tokens = 0
        self.borrowed_tokens = 0
        self.borrows_failed = 0
        self._directory = directory
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._lent: dict[bytes, _Lent] = {}
        self._borrowed: dict[bytes, tuple[bytes, ...]] = {}
        """Reserved keys by the key of a loan that is being pulled."""
        self._coming: dict[bytes, bytes] = {}
        """Key of the loan by key of a block that it pulls."""
        self._ended = Counter[bytes]()
        """Ranks on which a loan has ended that still runs on others."""
        self._failed: set[bytes] = set()
        self._cancelled: set[bytes] = set()
        """Loans whose requests are gone."""
        self._arrived: dict[bytes, Borrowed] = {}
        """What loans have brought, until their requests ask."""
        self._leases: list[LeaseStep] = []
        self._cancel: list[bytes] = []
        self._pulls: list[PullStep] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._lent or self._borrowed)

    # Lender.

    def lend(self, key: bytes, chain: Sequence[bytes], sink_ranks: int) -> int:
        """Return how many leading tokens are lent under `key`: 0 where there are none, or too many readers already."""
        if (lent := self._lent.get(key)) is not None:
            return lent.tokens
        directory = self._directory
        blocks = directory.match(chain)
        if not blocks or directory.pinned + blocks > directory.slots * LENT_SHARE_MAX:
            return 0
        tokens = blocks * self._block_tokens
        slots = directory.pin(chain, 0, blocks)
        self._lent[key] = _Lent(tuple(chain[:blocks]), tokens)
        self.lent_tokens += tokens
        step = LeaseStep(
            request=key.hex(),
            key=key,
            opens=True,
            blocks=slots,
            ready_before=tokens,
            ready_after=tokens,
            tokens=tokens,
            sink_ranks=sink_ranks,
        )
        self._leases.append(step)
        return tokens

    # Borrower.

    def borrow(self, loan: Loan, chain: Sequence[bytes], first: int) -> range:
        """Order the pull of what a loan has from block `first` on into free slots; return these blocks."""
        end = min(loan.tokens // self._block_tokens, len(chain))
        if end <= first or loan.key in self._borrowed:
            return range(0)
        reserved = self._directory.reserve(chain[:end], first)
        run = sum(index == first + number for number, (index, _) in enumerate(reserved))
        self._directory.abandon([chain[index] for index, _ in reserved[run:]])
        if not run:
            return range(0)
        self._borrowed[loan.key] = tuple(chain[first : first + run])
        self._coming |= dict.fromkeys(chain[first : first + run], loan.key)
        step = PullStep(
            request=loan.key.hex(),
            key=loan.key,
            endpoints=loan.endpoints,
            first_token=first * self._block_tokens,
            tokens=(first + run) * self._block_tokens,
            blocks=tuple(slot for _, slot in reserved[:run]),
            deadline_s=loan.deadline_s,
        )
        self._pulls.append(step)
        return range(first, first + run)

    def pulls(self, loan: bytes) -> bool:
        return loan in self._borrowed

    @property
    def is_borrowing(self) -> bool:
        return bool(self._borrowed)

    def coming(self, key: bytes) -> bytes:
        """Return the key of the loan that is bringing a block; empty: none is."""
        return self._coming.get(key, b"")

    def cancel(self, loan: Loan) -> None:
        """Note that the request that borrows is gone."""
        self._arrived.pop(loan.key, None)
        if loan.key in self._borrowed:
            self._cancel.append(loan.key)
            self._cancelled.add(loan.key)

    # Both.

    def plan(self) -> LendingPlan:
        """Return this step's orders and forget them."""
        plan = LendingPlan(leases=tuple(self._leases), cancel=tuple(self._cancel), pulls=tuple(self._pulls))
        self._leases, self._cancel, self._pulls = [], [], []
        return plan

    def take_borrowed(self, loan: Loan) -> Borrowed | None:
        """Return what a loan has brought, once; None where it failed, or its agents cannot tell."""
        return self._arrived.pop(loan.key, None)

    def progress(
        self, ended: Counter[bytes], failed: frozenset[bytes], borrowed: Mapping[bytes, Borrowed] | None = None
    ) -> None:
        """Note the loans that have ended on ranks."""
        self._failed |= failed & self._borrowed.keys()
        for key, each in (borrowed or {}).items():
            if key in self._borrowed:
                known = self._arrived.get(key)
                self._arrived[key] = each if known is None else known.joined(each)
        for key, ranks in ended.items():
            self._ended[key] += ranks
            if self._ended[key] == self._ranks:
                del self._ended[key]
                self._end(key)

    def _end(self, key: bytes) -> None:
        if (lent := self._lent.pop(key, None)) is not None:
            self._directory.unpin(lent.keys)
        if (keys := self._borrowed.pop(key, None)) is None:
            return
        if key in self._failed or key in self._cancelled:
            self._arrived.pop(key, None)
        self._cancelled.discard(key)
        for block in keys:
            del self._coming[block]
        if key in self._failed:
            self._failed.remove(key)
            self.borrows_failed += 1
            self._directory.abandon(keys)
        else:
            self.borrowed_tokens += len(keys) * self._block_tokens
            self._directory.filled(keys)
