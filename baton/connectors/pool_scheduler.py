"""The scheduler's side of the KV pool, as plain decisions: what is saved, what is promoted, and when memory is free.

One `PoolScheduler` runs beside an engine's scheduler. Its directory stands for the pools of all ranks, which have the
same blocks in the same slots; `PoolRank` carries out its orders on each rank. It knows no engine.

    save     block full ──room──▶ FILLING, the engine's block is held ──copied on all ranks──▶ READY, block let go
    keep     pulled by way of the pool's memory ──room──▶ FILLING ──pulled on all ranks──▶ READY
    promote  prefix matched ──blocks allocated──▶ slots pinned ──copied on all ranks──▶ unpinned
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import msgspec

from baton.blocks import BLOCK_TOKENS_DEFAULT, root_key, split_ids
from baton.connectors.pool_filing import FilePlan, FileProgress, PoolFiling
from baton.connectors.pool_lending import LendingPlan, Loan, PoolLending
from baton.connectors.pool_plan import KeepStep, PoolPlan, PoolProgress, PromoteStep
from baton.connectors.pool_report import Borrowed, PoolReport, Promotion
from baton.connectors.pool_runs import StoredRun, StoredRuns
from baton.pool.chain import BlockChain
from baton.pool.copier import CopyJob
from baton.pool.directory import PoolDirectory, SlotState
from baton.pool.policy import PolicyName, make_policy

SAVING_SHARE_MAX: Final = 0.5
"""Share of the engine's blocks that saves may hold; what is full beyond that is saved later, or not at all."""


@dataclass(slots=True)
class _Sequence:
    """A request whose blocks may be saved and promoted."""

    chain: BlockChain
    salt: str
    saved: int = 0
    """Leading blocks for which saving was decided."""
    first: int = 0
    """First block of the prefix that was last offered."""
    offered_tokens: int = 0
    loan: Loan | None = None
    """None once it was used, or turned out to be of no use."""
    borrowing: bool = False
    others_loan: bytes = b""
    """Loan of another request that was to bring part of its prefix. It waits for one, so that it waits once."""
    borrowed: Borrowed | None = None
    """What the loan has brought, until it is told with the promotion."""
    token_s: float = 0.0
    """Predicted time to compute a token; 0: not known."""
    staged_key: bytes = b""
    load: int = 0
    """Job of the file for which the request waits."""
    loads: bool = True
    """Whether the file may hold more of it that is worth to read."""
    loaded: range = range(0)
    """Blocks that it had read from the file."""


@dataclass(frozen=True, slots=True)
class _Promoting:
    job: CopyJob
    keys: tuple[bytes, ...]
    """Keys of the pinned slots."""
    tokens: int
    """Tokens that count."""
    loaded_tokens: int


@dataclass(frozen=True, slots=True)
class _Save:
    job: CopyJob
    keys: tuple[bytes, ...]
    chain: BlockChain
    first: int
    end: int
    """The keys are among the chain's from `first` to `end`."""
    holds: bool
    """Whether the engine's blocks are read, and held."""


class PoolScheduler:
    """Decides the orders for each step. Requests go by the engine's ids."""

    def __init__(
        self,
        *,
        block_tokens: int,
        block_bytes: int,
        blocks: int,
        ranks: int,
        policy: PolicyName = PolicyName.S3_FIFO,
        has_file: bool = False,
    ) -> None:
        """`block_bytes`: one block, all layers and ranks. `blocks`: those of the engine's own cache. `has_file`:
        whether ranks look for an older file's blocks, which are told before the first request."""
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._saving_max = int(blocks * SAVING_SHARE_MAX)
        self._ranks = ranks
        self._policy = policy
        self._has_file = has_file
        self._slots: list[int] = []
        self.directory: PoolDirectory | None = None
        """None until the pools of all ranks are ready."""
        self.lending: PoolLending | None = None
        self.filing: PoolFiling | None = None
        """Like the directory; without files, it never has anything."""
        self._early_files = FileProgress()
        """What files have told before the pools of all ranks were ready."""
        self._sequences: dict[str, _Sequence] = {}
        self._numbers = count(1)
        self._saving: dict[int, _Save] = {}
        self._saving_blocks = 0
        self._promoting: dict[str, _Promoting] = {}
        """By request."""
        self._copying_s: dict[int, float] = {}
        self._promotions_ended: list[Promotion] = []
        self._runs = StoredRuns(block_tokens)
        self._ended = Counter[int]()
        """Ranks on which a save has ended that runs on others."""
        self._failed: set[int] = set()
        self._promotions: list[PromoteStep] = []
        self._saves: list[CopyJob] = []
        self._keeps: list[KeepStep] = []
        self._promotion_count = 0
        self._promoted_tokens = 0
        self._promoting_s = 0.0
        self._told = PoolReport()

    @property
    def is_busy(self) -> bool:
        """Whether the engine has to go on stepping: there are orders, or its blocks are held until they are copied."""
        lends = self.lending is not None and self.lending.is_busy
        # Of a rank without memory, nothing more comes.
        files = self._has_file and not self._slots if self.filing is None else self.filing.is_busy
        return lends or files or bool(self._promotions or self._saves or self._saving)

    def admit(
        self,
        request: str,
        model_digest: str,
        salt: str = "",
        loan: Loan | None = None,
        token_s: float = 0.0,
        staged_key: bytes = b"",
    ) -> None:
        """Note a new request.

        `token_s`: predicted time to compute one of its tokens; 0: not known. `staged_key`: key of its hand-off, where
        that is staged in the pool's memory.
        """
        chain = BlockChain(root_key(model_digest, salt=salt), self._block_tokens)
        self._sequences[request] = _Sequence(chain, salt, loan=loan, token_s=token_s, staged_key=staged_key)

    def finished(self, request: str) -> None:
        """Note that the engine is done with a request. Copies that run end by themselves."""
        sequence = self._sequences.pop(request, None)
        if sequence is not None and sequence.loan is not None and self.lending is not None:
            self.lending.cancel(sequence.loan)

    # Loans.

    def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        """Lease what the pool holds of a prefix to a peer; see `baton.engines.engine.Engine.lend`."""
        if self.lending is None:
            return 0
        per_block = self._block_tokens // BLOCK_TOKENS_DEFAULT
        return self.lending.lend(key, split_ids(blocks)[per_block - 1 :: per_block], sink_ranks)

    def may_borrow(self, request: str) -> bool:
        """Return whether `borrows` has to be asked."""
        if (sequence := self._sequences.get(request)) is None or self.lending is None:
            return False
        return sequence.loan is not None or self.lending.is_borrowing

    def borrows(self, request: str, tokens: Sequence[int], computed_tokens: int) -> bool:
        """Return whether a request waits for blocks that another worker's pool lends. Asked until it does not.

        It may be another request whose loan brings them.
        """
        sequence = self._sequences.get(request)
        if sequence is None or self.directory is None or self.lending is None or not self.may_borrow(request):
            return False
        loan = sequence.loan
        if not sequence.borrowing:
            if self.lending.pulls(sequence.others_loan):
                return True
            sequence.chain.extend(tokens)
            keys, first = sequence.chain.keys, computed_tokens // self._block_tokens
            first += self.directory.match(keys[first:])
            if not sequence.others_loan and first < len(keys):
                sequence.others_loan = self.lending.coming(keys[first])
                if sequence.others_loan:
                    return True
            borrowed = self.lending.borrow(loan, keys, first) if loan is not None else range(0)
            sequence.borrowing = bool(borrowed)
            self._runs.describe(keys, sequence.salt, tokens, borrowed)
        if loan is None or (sequence.borrowing and self.lending.pulls(loan.key)):
            return sequence.borrowing
        sequence.borrowed = self.lending.take_borrowed(loan)
        sequence.loan, sequence.borrowing = None, False
        return False

    def filed(self, request: str, tokens: Sequence[int]) -> bool:
        """Return whether the file holds the first block of a request's prompt."""
        sequence = self._sequences.get(request)
        if sequence is None or self.filing is None or self.filing.directory is None:
            return False
        sequence.chain.extend(tokens)
        return self.filing.directory.match(sequence.chain.keys[:1]) > 0

    def may_load(self, request: str) -> bool:
        """Return whether `loads` has to be asked."""
        if self.filing is None or self.filing.directory is None:
            return False
        return (sequence := self._sequences.get(request)) is not None and sequence.loads

    def loads(self, request: str, tokens: Sequence[int], computed_tokens: int) -> bool:
        """Return whether a request waits for blocks from the file. Asked until it does not, before `borrows`."""
        sequence = self._sequences.get(request)
        if sequence is None or self.directory is None or self.filing is None:
            return False
        while sequence.loads:
            if self.filing.loads(sequence.load):
                return True
            if self.filing.is_late(sequence.load):
                break
            sequence.chain.extend(tokens)
            first = computed_tokens // self._block_tokens
            first += self.directory.match(sequence.chain.keys[first:])
            sequence.load, added = self.filing.load(sequence.chain, first, sequence.token_s)
            self._runs.describe(sequence.chain.keys, sequence.salt, tokens, added)
            sequence.loaded = added or sequence.loaded
            if not sequence.load:
                break
        sequence.loads = False
        return False

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
        sequence.first, sequence.offered_tokens = first, offered
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
        if self.filing is not None:
            self.filing.touch(sequence.chain.keys[:end])
        counted_tokens = 0 if again else offered
        loaded_blocks = len(range(max(first, sequence.loaded.start), min(end, sequence.loaded.stop)))
        loaded_tokens = min(loaded_blocks * self._block_tokens, counted_tokens)
        self._promotion_count += 1
        self._promoted_tokens += counted_tokens
        job = CopyJob(job=next(self._numbers), promotes=True, blocks=tuple(table[first:end]), slots=slots)
        self._promoting[request] = _Promoting(job, keys, counted_tokens, loaded_tokens)
        self._promotions.append(PromoteStep(request=request, copy=job, with_pull=with_pull))

    def promotes(self, request: str) -> bool:
        """Return whether a promotion into a request's blocks has not ended on all ranks."""
        return request in self._promoting

    def received(self, request: str) -> None:
        """Note that all that a request waited for has ended on all ranks, promotions included."""
        if (promotion := self._promoting.pop(request, None)) is None:
            return
        assert self.directory is not None
        self.directory.unpin(promotion.keys)
        copying_s = self._copying_s.pop(promotion.job.job, 0.0)
        self._promoting_s += copying_s
        if promotion.tokens:
            sequence = self._sequences.get(request)
            ended = Promotion(
                request=request,
                tokens=promotion.tokens,
                copied_bytes=len(promotion.keys) * self._block_bytes,
                copying_s=copying_s,
                loaded_tokens=promotion.loaded_tokens,
                borrowed=sequence.borrowed if sequence is not None else None,
            )
            self._promotions_ended.append(ended)

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
        first, sequence.saved = sequence.saved, full
        job = self._store(sequence, tokens, table, first, full, holds=True)
        if job is None:
            return ()
        self._saving_blocks += len(job.blocks)
        self._saves.append(job)
        return job.blocks

    def keep(self, request: str, tokens: Sequence[int], table: Sequence[int], pulled: range) -> None:
        """Order that the full blocks of a pull are stored where they are staged. `pulled`: the tokens that come.

        The pull begins with this step's orders. What is left out is saved like what this engine computes.
        """
        sequence = self._sequences.get(request)
        if sequence is None or self.directory is None or not sequence.staged_key:
            return
        first, end = -(-pulled.start // self._block_tokens), pulled.stop // self._block_tokens
        if first >= end:
            return
        sequence.chain.extend(tokens)
        if first and self.directory.state(sequence.chain.keys[first - 1]) is SlotState.FREE:
            return
        if (job := self._store(sequence, tokens, table, first, end, holds=False)) is not None:
            self._keeps.append(KeepStep(request=request, copy=job))

    def _store(
        self, sequence: _Sequence, tokens: Sequence[int], table: Sequence[int], first: int, end: int, *, holds: bool
    ) -> CopyJob | None:
        """Reserve slots for the blocks from `first` to `end` that are not stored; return the job that fills them."""
        assert self.directory is not None
        sequence.chain.extend(tokens)
        keys = sequence.chain.keys[:end]
        if not (reserved := self.directory.reserve(keys, first)):
            return None
        self._runs.describe(sequence.chain.keys, sequence.salt, tokens, [index for index, _ in reserved])
        job = CopyJob(
            job=next(self._numbers),
            promotes=False,
            blocks=tuple(table[index] for index, _ in reserved),
            slots=tuple(slot for _, slot in reserved),
            key=sequence.staged_key,
        )
        stored = tuple(keys[index] for index, _ in reserved)
        first, end = reserved[0][0], reserved[-1][0] + 1
        self._saving[job.job] = _Save(job, stored, sequence.chain, first, end, holds)
        return job

    # Both.

    def plan(self) -> PoolPlan:
        """Return this step's orders and forget them."""
        plan = PoolPlan(
            promotions=tuple(self._promotions),
            saves=tuple(self._saves),
            keeps=tuple(self._keeps),
            lending=self.lending.plan() if self.lending is not None else LendingPlan(),
            filing=self.filing.plan() if self.filing is not None else FilePlan(),
        )
        self._promotions, self._saves, self._keeps = [], [], []
        return plan

    def progress(self, progress: PoolProgress) -> tuple[int, ...]:
        """Note what ranks have done; return the engine's blocks that are not read any more."""
        self._copying_s |= progress.copying_s
        self._slots.extend(progress.slots)
        if self.directory is None and len(self._slots) == self._ranks and (slots := min(self._slots)):
            self.directory = PoolDirectory(slots, make_policy(self._policy, slots))
            self.lending = PoolLending(self.directory, self._block_tokens, self._ranks)
            self.filing = PoolFiling(
                self.directory, block_tokens=self._block_tokens, ranks=self._ranks, policy=self._policy
            )
        if self.lending is not None:
            self.lending.progress(progress.loans, progress.failed_loans, progress.borrowed)
        files = self._early_files.joined(progress.filing)
        if self.filing is None:
            self._early_files = files
        else:
            self.filing.progress(files)
            self._early_files = FileProgress()
        self._failed |= progress.failed & self._saving.keys()
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
        save = self._saving.pop(number)
        held = save.job.blocks if save.holds else ()
        self._saving_blocks -= len(held)
        if number in self._failed:
            self._failed.remove(number)
            self.directory.abandon(save.keys)
        else:
            self.directory.filled(save.keys)
            if self.filing is not None:
                self.filing.write(save.chain, save.first, save.end)
        return held

    def take_changes(self) -> tuple[list[StoredRun], tuple[bytes, ...]]:
        """Return the blocks that the pool has stored since the last call, and the keys of those it has dropped."""
        return ([], ()) if self.directory is None else self._runs.take(self.directory)

    def report(self) -> PoolReport | None:
        """Return the figures if they have changed since the last report."""
        if self.directory is None or self.lending is None:
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
            lent_tokens=self.lending.lent_tokens,
            borrowed_tokens=self.lending.borrowed_tokens,
            borrows_failed=self.lending.borrows_failed,
            file=None if self.filing is None else self.filing.report(),
        )
        ended, self._promotions_ended = tuple(self._promotions_ended), []
        if report == self._told and not ended:
            return None
        self._told = report
        return msgspec.structs.replace(report, ended=ended)
