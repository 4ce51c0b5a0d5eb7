"""The scheduler's side of the KV pool, as plain decisions: what is saved, what is promoted, and when memory is free.

One `PoolScheduler` runs beside an engine's scheduler. Its directory stands for the pools of all ranks, which have the
same blocks in the same slots; `PoolRank` carries out its orders on each rank. It knows no engine.

    save     block full ──room──▶ FILLING, the engine's block is held ──copied on all ranks──▶ READY, block let go
    promote  prefix matched ──blocks allocated──▶ slots pinned ──copied on all ranks──▶ unpinned
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import msgspec

from baton.pool.chain import BlockChain
from baton.pool.copier import CopyJob
from baton.pool.directory import PoolDirectory
from baton.pool.events import PoolEvent, PoolEvents
from baton.pool.policy import PolicyName, make_policy

SAVING_SHARE_MAX: Final = 0.5
"""Share of the engine's blocks that saves may hold; what is full beyond that is saved later, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteStep:
    request: str
    copy: CopyJob
    with_pull: bool
    """Whether further blocks of the request come from a peer; it has its KV when both are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One step's orders."""

    promotions: tuple[PromoteStep, ...] = ()
    saves: tuple[CopyJob, ...] = ()
    """Copies of blocks that are written once this step has computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProgress:
    """What ranks have done since their last step."""

    slots: tuple[int, ...] = ()
    """Slots of the pools that are now ready for use, one number for each rank."""
    jobs: Counter[int] = field(default_factory=Counter[int])
    """Number of ranks on which a job has ended."""
    failed: frozenset[int] = frozenset()
    promoting_s: float = 0.0
    promoted_s: dict[int, float] = field(default_factory=dict[int, float])
    """Times of the promotions that have ended, by job."""

    def joined(self, other: PoolProgress) -> PoolProgress:
        return PoolProgress(
            slots=self.slots + other.slots,
            jobs=self.jobs + other.jobs,
            failed=self.failed | other.failed,
            promoting_s=max(self.promoting_s, other.promoting_s),
            promoted_s={
                job: max(self.promoted_s.get(job, 0.0), other.promoted_s.get(job, 0.0))
                for job in self.promoted_s | other.promoted_s
            },
        )


class PromotionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One promotion that has ended."""

    request: str
    tokens: int
    copying_s: float = 0.0


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an engine's KV pool. Slots and pins as of now, the others since the start."""

    slots: int = 0
    ready: int = 0
    pinned: int = 0
    saved_blocks: int = 0
    evicted_blocks: int = 0
    dropped_blocks: int = 0
    """Full blocks that were not saved: nothing could be evicted for them, or their predecessor is not in the pool."""
    stranded_blocks: int = 0
    promotions: int = 0
    promoted_tokens: int = 0
    promoting_s: float = 0.0
    """Time in which promotions were copied."""
    promoted: tuple[PromotionOutcome, ...] = ()
    """Those that ended since the report before."""


@dataclass(slots=True)
class _Sequence:
    """A request whose blocks may be saved and promoted."""

    chain: BlockChain
    salt: str
    name: str
    saved: int = 0
    """Leading blocks for which saving was decided."""
    first: int = 0
    """First block of the prefix that was last offered."""
    end: int = 0
    offered_tokens: int = 0


class PoolScheduler:
    """Decides the orders for each step. Requests go by the engine's ids."""

    def __init__(self, block_tokens: int, blocks: int, ranks: int, policy: PolicyName = PolicyName.S3_FIFO) -> None:
        self._block_tokens = block_tokens
        self._saving_max = int(blocks * SAVING_SHARE_MAX)
        self._ranks = ranks
        self._policy = policy
        self._slots: list[int] = []
        self.directory: PoolDirectory | None = None
        """None until the pools of all ranks are ready."""
        self._sequences: dict[str, _Sequence] = {}
        self._numbers = count(1)
        self._saving: dict[int, tuple[CopyJob, tuple[bytes, ...]]] = {}
        self._saving_blocks = 0
        self._promoting: dict[str, tuple[bytes, ...]] = {}
        """Pinned keys by request."""
        self._ended = Counter[int]()
        """Ranks on which a save has ended that runs on others."""
        self._failed: set[int] = set()
        self._promotions: list[PromoteStep] = []
        self._saves: list[CopyJob] = []
        self._promotion_count = 0
        self._promoted_tokens = 0
        self._promoting_s = 0.0
        self._told = PoolReport()
        self._events = PoolEvents()
        self._outcomes: dict[int, PromotionOutcome] = {}
        """Promotions that run on some ranks, by job."""
        self._promoted: list[PromotionOutcome] = []

    @property
    def is_busy(self) -> bool:
        """Whether the engine has to go on stepping: there are orders, or its blocks are held until they are copied."""
        return bool(self._promotions or self._saves or self._saving)

    def admit(self, request: str, root: bytes, salt: str = "", name: str = "") -> None:
        """Note a new request; `root` is the key of its block ids (`baton.blocks.root_key`).

        `name`: by which its promotion is reported, if not by the engine's id.
        """
        self._sequences[request] = _Sequence(BlockChain(root, self._block_tokens), salt, name or request)

    def finished(self, request: str) -> None:
        """Note that the engine is done with a request. Copies that run end by themselves."""
        self._sequences.pop(request, None)

    # Promotion.

    def offer(self, request: str, tokens: Sequence[int], computed_tokens: int) -> int:
        """Return how many tokens beyond `computed_tokens` the pool holds. Asked any number of times.

        The last token is always computed by the engine: its forward pass samples the next one.
        """
        sequence = self._sequences.get(request)
        if sequence is None or self.directory is None:
            return 0
        sequence.chain.extend(tokens)
        first = computed_tokens // self._block_tokens
        end = first + self.directory.match(sequence.chain.keys[first:])
        offered = max(min(end * self._block_tokens, len(tokens) - 1) - computed_tokens, 0)
        sequence.first, sequence.end, sequence.offered_tokens = first, end, offered
        return offered

    def offered_tokens(self, request: str) -> int:
        """Return the last `offer`."""
        return sequence.offered_tokens if (sequence := self._sequences.get(request)) else 0

    def promote(self, request: str, table: Sequence[int], *, with_pull: bool, again: bool) -> None:
        """Order the promotion that was offered into the request's blocks; `table` is the whole of them.

        `again`: the request was preempted; its tokens are counted once.
        """
        assert self.directory is not None
        sequence = self._sequences[request]
        first, offered = sequence.first, sequence.offered_tokens
        end = first + -(-offered // self._block_tokens)
        sequence.offered_tokens = 0
        keys = tuple(sequence.chain.keys[first:end])
        slots = self.directory.pin(sequence.chain.keys, first, end)
        self._promoting[request] = keys
        self._promotion_count += 1
        self._promoted_tokens += 0 if again else offered
        job = CopyJob(job=next(self._numbers), promotes=True, blocks=tuple(table[first:end]), slots=slots)
        self._outcomes[job.job] = PromotionOutcome(request=sequence.name, tokens=offered)
        self._promotions.append(PromoteStep(request=request, copy=job, with_pull=with_pull))

    def received(self, request: str) -> None:
        """Note that all that a request waited for has ended on all ranks, promotions included."""
        if (keys := self._promoting.pop(request, None)) is not None:
            assert self.directory is not None
            self.directory.unpin(keys)

    # Saving.

    def computes(
        self, request: str, tokens: Sequence[int], table: Sequence[int], computed_tokens: int
    ) -> tuple[int, ...]:
        """Order saves of the blocks that are full once a step has computed up to `computed_tokens`.

        Returns the engine's blocks that are read, to be held until `progress` lets them go. `tokens` are those that are
        known: an engine may compute ahead of them.
        """
        sequence = self._sequences.get(request)
        if sequence is None or self.directory is None:
            return ()
        full = min(computed_tokens, len(tokens)) // self._block_tokens
        full = min(full, sequence.saved + self._saving_max - self._saving_blocks)
        if full <= sequence.saved:
            return ()
        sequence.chain.extend(tokens)
        keys = sequence.chain.keys[:full]
        reserved = self.directory.reserve(keys, sequence.saved)
        sequence.saved = full
        if not reserved:
            return ()
        indexes = [index for index, _ in reserved]
        self._events.reserve(keys, indexes, tokens, self._block_tokens, sequence.salt)
        job = CopyJob(
            job=next(self._numbers),
            promotes=False,
            blocks=tuple(table[index] for index, _ in reserved),
            slots=tuple(slot for _, slot in reserved),
        )
        self._saving[job.job] = job, tuple(keys[index] for index, _ in reserved)
        self._saving_blocks += len(reserved)
        self._saves.append(job)
        return job.blocks

    # Both.

    def plan(self) -> PoolPlan:
        """Return this step's orders and forget them."""
        plan = PoolPlan(promotions=tuple(self._promotions), saves=tuple(self._saves))
        self._promotions, self._saves = [], []
        return plan

    def progress(self, progress: PoolProgress) -> tuple[int, ...]:
        """Note what ranks have done; return the engine's blocks that are not read any more."""
        self._promoting_s += progress.promoting_s
        self._slots.extend(progress.slots)
        if self.directory is None and len(self._slots) == self._ranks:
            slots = min(self._slots)
            self.directory = PoolDirectory(slots, make_policy(self._policy, slots)) if slots else None
        self._failed |= progress.failed & self._saving.keys()
        for number, copying_s in progress.promoted_s.items():
            if (outcome := self._outcomes.pop(number, None)) is not None:
                self._promoted.append(msgspec.structs.replace(outcome, copying_s=copying_s))
        free: list[int] = []
        for number, ranks in progress.jobs.items():
            if number not in self._saving:
                continue
            self._ended[number] += ranks
            if self._ended[number] == self._ranks:
                free.extend(self._end_save(number))
        return tuple(free)

    def _end_save(self, number: int) -> tuple[int, ...]:
        assert self.directory is not None
        del self._ended[number]
        job, keys = self._saving.pop(number)
        self._saving_blocks -= len(job.blocks)
        if number in self._failed:
            self._failed.remove(number)
            self.directory.abandon(keys)
        else:
            self.directory.filled(keys)
        return job.blocks

    def take_events(self) -> list[PoolEvent]:
        """Return the changes of the pool's contents since the last call."""
        return [] if self.directory is None else self._events.take(self.directory)

    def report(self) -> PoolReport | None:
        """Return the figures if they have changed since the last report."""
        if self.directory is None:
            return None
        counts = self.directory.counts
        report = PoolReport(
            slots=self.directory.slots,
            ready=self.directory.ready,
            pinned=self.directory.pinned,
            saved_blocks=counts.stored,
            evicted_blocks=counts.evicted,
            dropped_blocks=counts.dropped,
            stranded_blocks=counts.stranded,
            promotions=self._promotion_count,
            promoted_tokens=self._promoted_tokens,
            promoting_s=self._promoting_s,
        )
        promoted, self._promoted = tuple(self._promoted), []
        if report == self._told and not promoted:
            return None
        self._told = report
        return msgspec.structs.replace(report, promoted=promoted)
