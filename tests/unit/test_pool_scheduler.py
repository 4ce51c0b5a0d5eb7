"""Saves and promotions of the KV pool around a toy engine, with copies that end late and in any order.

The toy engine writes a pattern of its own into each block that it computes, and into each that it reuses. A copy reads
and writes when it ends, as late as its order allows: a block that is freed or promised too early shows wrong bytes.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

import pytest

from baton.blocks import hash_blocks, root_key, split_ids
from baton.connectors.pool_lending import Loan
from baton.connectors.pool_plan import PoolPlan, PoolProgress
from baton.connectors.pool_rank import PoolRank
from baton.connectors.pool_report import Borrowed
from baton.connectors.pool_scheduler import PoolScheduler
from baton.connectors.rank import RankResults
from baton.errors import ConfigurationError
from baton.pool.copier import CopyEnd, CopyJob, copy
from baton.pool.directory import SlotState
from baton.pool.memory import KvPool, available_bytes, slot_bytes
from baton.transfer import Pool

LAYERS, BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 3, 24, 32, 256
ROOT = root_key("digest")


def make_scheduler(ranks: int) -> PoolScheduler:
    block_bytes = LAYERS * BLOCK_BYTES * ranks
    return PoolScheduler(block_tokens=BLOCK_TOKENS, block_bytes=block_bytes, blocks=BLOCKS, ranks=ranks)


class HeldCopier:
    """A copier whose jobs end when `end_some` says so, in random order."""

    def __init__(self, pool: KvPool, random: Random) -> None:
        self._pool = pool
        self._random = random
        self.jobs: list[CopyJob] = []
        self._ended: list[CopyEnd] = []

    def submit(self, job: CopyJob) -> None:
        self.jobs.append(job)

    def end_some(self) -> None:
        for _ in range(self._random.randint(0, len(self.jobs))):
            job = self.jobs.pop(self._random.randrange(len(self.jobs)))
            copy(self._pool, job)
            self._ended.append(CopyEnd(job=job))

    def fileno(self) -> int:
        raise NotImplementedError

    def poll(self) -> list[CopyEnd]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None: ...


class PromisesEarly(PoolRank):
    """Planted fault: a request counts as received before its promotion is copied."""

    def end(self, results: RankResults) -> None:
        for arrival in self._arrivals.values():
            arrival.copying = False
        super().end(results)

    def _take_ended(self) -> None:
        assert isinstance(self._copier, HeldCopier)
        self._requests.clear()
        super()._take_ended()


@dataclass
class Running:
    tokens: list[int]
    computed: int
    table: list[int]
    waits: bool = False
    checked: int = 0
    """Leading blocks whose content was checked."""


@dataclass
class ToyEngine:
    random: Random
    slots: int = 16
    rank_class: type[PoolRank] = PoolRank
    holds: bool = True
    """False is a planted fault: blocks are free although a copy still reads them."""
    running: dict[str, Running] = field(default_factory=dict[str, Running])
    promoted: int = 0

    def __post_init__(self) -> None:
        self.memory = ctypes.create_string_buffer(LAYERS * BLOCKS * BLOCK_BYTES)
        base = ctypes.addressof(self.memory)
        self.cache = Pool(
            layer_addresses=tuple(base + layer * BLOCKS * BLOCK_BYTES for layer in range(LAYERS)),
            blocks=BLOCKS,
            block_bytes=BLOCK_BYTES,
            block_stride_bytes=BLOCK_BYTES,
            block_tokens=BLOCK_TOKENS,
            fingerprint="toy",
        )
        pool = KvPool(self.cache, self.slots * slot_bytes(LAYERS, BLOCK_BYTES))
        self.copier = HeldCopier(pool, self.random)
        self.rank = self.make_rank(pool)
        self.scheduler = make_scheduler(ranks=1)
        self.users = [0] * BLOCKS
        self.names = 0
        self.told: set[bytes] = set()
        self.step(())

    def make_rank(self, pool: KvPool) -> PoolRank:
        return self.rank_class(pool.slots, self.copier)

    def write(self, block: int, content: bytes) -> None:
        for layer in range(LAYERS):
            at = (layer * BLOCKS + block) * BLOCK_BYTES
            self.memory[at : at + BLOCK_BYTES] = blake2b(content + bytes([layer])).digest() * (BLOCK_BYTES // 64)

    def check(self, block: int, content: bytes) -> None:
        for layer in range(LAYERS):
            at = (layer * BLOCKS + block) * BLOCK_BYTES
            expected = blake2b(content + bytes([layer])).digest() * (BLOCK_BYTES // 64)
            assert self.memory[at : at + BLOCK_BYTES] == expected, "a promoted block has other KV than was computed"

    def admit(self, tokens: list[int]) -> None:
        """Begin a request if there are blocks for it: promote what the pool has, compute the rest."""
        self.names += 1
        self.scheduler.admit(f"r{self.names}", "digest")
        self.begin(f"r{self.names}", tokens)

    def begin(self, name: str, tokens: list[int]) -> None:
        free = [block for block, users in enumerate(self.users) if not users]
        needed = -(-len(tokens) // BLOCK_TOKENS)
        if len(free) < needed:
            self.scheduler.finished(name)
            return
        table = self.random.sample(free, needed)
        offered = self.scheduler.offer(name, tokens, 0)
        for block in table:
            self.users[block] += 1
            self.write(block, b"garbage %d" % self.names)
        self.running[name] = Running(tokens, offered, table, waits=offered > 0)
        if offered:
            self.promoted += 1
            self.scheduler.promote(name, table, with_pull=False, again=False)

    def step(self, advance: Sequence[str]) -> None:
        """Compute a chunk of some requests, and exchange orders and news."""
        for name in advance:
            request = self.running[name]
            before = request.computed
            request.computed = min(before + self.random.randint(1, 3 * BLOCK_TOKENS), len(request.tokens))
            read = self.scheduler.computes(name, request.tokens, request.table, request.computed)
            if self.holds:
                for block in read:
                    self.users[block] += 1
        plan = self.scheduler.plan()
        self.rank.begin(plan)
        for name in advance:
            request = self.running[name]
            for number in range(request.checked, request.computed // BLOCK_TOKENS):
                self.write(request.table[number], repr(request.tokens[: (number + 1) * BLOCK_TOKENS]).encode())
            request.checked = max(request.checked, request.computed // BLOCK_TOKENS)
        results = RankResults()
        self.rank.end(results)
        self.copier.end_some()
        for name in results.received:
            request = self.running[name]
            request.waits = False
            for number in range(-(-request.computed // BLOCK_TOKENS)):
                self.check(request.table[number], repr(request.tokens[: (number + 1) * BLOCK_TOKENS]).encode())
            request.checked = request.computed // BLOCK_TOKENS
            self.scheduler.received(name)
        for block in self.scheduler.progress(self.rank.take_progress() or PoolProgress()):
            if self.holds:
                self.users[block] -= 1
        self.follow_changes()

    def follow_changes(self) -> None:
        """Keep a copy of the pool's content from what it tells, and compare."""
        runs, removed = self.scheduler.take_changes()
        self.told -= set(removed)
        for run in runs:
            packed = b"".join(token.to_bytes(4, "little") for token in run.tokens)
            assert run.keys == tuple(split_ids(hash_blocks(ROOT, packed, BLOCK_TOKENS, run.parent)))
            self.told |= set(run.keys)
        if (directory := self.scheduler.directory) is not None:
            assert len(self.told) == directory.ready
            assert all(directory.state(key) is SlotState.READY for key in self.told)

    def finish(self, name: str) -> None:
        request = self.running.pop(name)
        self.scheduler.finished(name)
        for block in request.table:
            self.users[block] -= 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.random.random() < 0.5:
                branch, length = self.random.randrange(4), self.random.randint(1, 8 * BLOCK_TOKENS)
                self.admit([branch if index >= 64 else 9 for index in range(length)])
            ready = [name for name, request in self.running.items() if not request.waits]
            self.step([name for name in ready if self.random.random() < 0.7])
            for name in ready:
                if self.running[name].computed == len(self.running[name].tokens) or self.random.random() < 0.05:
                    self.finish(name)


@pytest.mark.parametrize("seed", range(5))
def test_promoted_blocks_have_the_bytes_that_were_computed(seed: int) -> None:
    engine = ToyEngine(Random(seed))
    engine.run(600)
    assert engine.promoted > 20
    # At rest nothing is held: neither blocks of the engine nor slots of the pool.
    while engine.running or engine.scheduler.is_busy:
        for name in [name for name, request in engine.running.items() if not request.waits]:
            engine.finish(name)
        engine.step(())
    assert not any(engine.users)
    assert engine.scheduler.directory is not None
    assert (engine.scheduler.directory.pinned, engine.scheduler.directory.filling) == (0, 0)


@pytest.mark.parametrize("fault", [{"rank_class": PromisesEarly}, {"holds": False}], ids=["promise", "free"])
def test_planted_faults_are_found(fault: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match="other KV than was computed"):
        for seed in range(20):
            ToyEngine(Random(seed), **fault).run(600)  # pyright: ignore[reportArgumentType]


def test_a_pool_smaller_than_a_prompt_promotes_its_first_blocks() -> None:
    engine = ToyEngine(Random(1), slots=2)
    tokens = [1] * (6 * BLOCK_TOKENS + 5)
    for _ in range(2):
        engine.admit(tokens)
        (name,) = engine.running
        while engine.running[name].waits or engine.running[name].computed < len(tokens):
            engine.step([] if engine.running[name].waits else [name])
        engine.finish(name)
        while engine.scheduler.is_busy:
            engine.step(())
    report = engine.scheduler.report()
    assert report is not None
    assert (report.ready, report.promotions, report.promoted_tokens) == (2, 1, 2 * BLOCK_TOKENS)


def test_without_memory_on_one_rank_there_is_no_pool() -> None:
    scheduler = make_scheduler(ranks=2)
    scheduler.progress(PoolProgress(slots=(8,)))
    assert scheduler.directory is None
    scheduler.progress(PoolProgress(slots=(0,)))
    assert scheduler.directory is None
    scheduler.admit("r", "digest")
    assert scheduler.computes("r", [1] * 64, [0, 1], 64) == ()
    assert scheduler.offer("r", [1] * 64, 0) == 0
    assert scheduler.plan() == PoolPlan()


def test_a_save_is_ready_when_all_ranks_have_copied_it() -> None:
    scheduler = make_scheduler(ranks=2)
    scheduler.progress(PoolProgress(slots=(8,)).joined(PoolProgress(slots=(9,))))
    scheduler.admit("r", "digest")
    tokens = [1] * 64
    assert scheduler.computes("r", tokens, [5, 7], 64) == (5, 7)
    (save,) = scheduler.plan().saves
    assert scheduler.progress(PoolProgress(jobs=_once(save))) == ()
    assert scheduler.offer("r", tokens, 0) == 0
    assert scheduler.progress(PoolProgress(jobs=_once(save))) == (5, 7)
    assert scheduler.offer("r", tokens, 0) == 63


def test_a_failed_save_is_no_hit() -> None:
    scheduler = make_scheduler(ranks=1)
    scheduler.progress(PoolProgress(slots=(8,)))
    scheduler.admit("r", "digest")
    scheduler.computes("r", [1] * 64, [5, 7], 64)
    (save,) = scheduler.plan().saves
    assert scheduler.progress(PoolProgress(jobs=_once(save), failed=frozenset({save.job}))) == (5, 7)
    assert scheduler.offer("r", [1] * 64, 0) == 0
    assert scheduler.directory is not None
    assert scheduler.directory.filling == 0


def test_a_pool_beyond_the_machines_memory_is_refused() -> None:
    engine = ToyEngine(Random(0))
    with pytest.raises(ConfigurationError, match="is not available"):
        KvPool(engine.cache, available_bytes() * 2)
    with pytest.raises(ConfigurationError, match="holds no block"):
        KvPool(engine.cache, 100)


def _once(save: CopyJob) -> Counter[int]:
    return Counter({save.job: 1})


BORROWED = Borrowed(tokens=96, moved_bytes=960, moving_s=0.1, began_s=1.0, ended_s=1.2, backend="tcp")


@dataclass
class Lending:
    """A pool of twelve slots that holds four blocks of a prompt, and lends and borrows on one rank."""

    scheduler: PoolScheduler = field(default_factory=lambda: make_scheduler(ranks=1))
    tokens: list[int] = field(default_factory=lambda: [1] * 128)

    def __post_init__(self) -> None:
        self.scheduler.progress(PoolProgress(slots=(12,)))
        assert self.scheduler.directory is not None
        assert self.scheduler.lending is not None
        self.directory, self.lending = self.scheduler.directory, self.scheduler.lending
        self.scheduler.admit("first", "digest")
        self.scheduler.computes("first", self.tokens, [0, 1, 2, 3], 128)
        (save,) = self.scheduler.plan().saves
        self.scheduler.progress(PoolProgress(jobs=_once(save)))
        self.keys = split_ids(hash_blocks(ROOT, b"".join(token.to_bytes(4, "little") for token in self.tokens), 32))

    def end(self, key: bytes, *, failed: bool = False) -> None:
        progress = PoolProgress(
            loans=Counter({key: 1}),
            failed_loans=frozenset({key} if failed else ()),
            borrowed={} if failed else {key: BORROWED},
        )
        assert self.scheduler.progress(progress) == ()


def test_a_loan_pins_slots_until_it_ends_and_is_granted_once() -> None:
    pool = Lending()
    for _ in range(2):
        assert pool.lending.lend(b"k", pool.keys, 1) == 128
    assert pool.directory.pinned == 4
    plan = pool.scheduler.plan().lending
    assert [(step.key, step.tokens, len(step.blocks)) for step in plan.leases] == [(b"k", 128, 4)]
    assert not pool.scheduler.plan().lending.leases
    assert pool.scheduler.is_busy
    pool.end(b"k")
    assert (pool.directory.pinned, pool.scheduler.is_busy) == (0, False)


def test_more_than_half_of_the_pool_is_not_lent() -> None:
    pool = Lending()
    assert pool.lending.lend(b"unknown", [b"other"], 1) == 0
    assert [pool.lending.lend(bytes([number]), pool.keys, 1) for number in range(3)] == [128, 0, 0]


def loan(tokens: int, key: bytes = b"k") -> Loan:
    return Loan(key=key, endpoints=("a",), tokens=tokens, deadline_s=1.0)


def test_a_borrowed_prefix_is_promoted_once_it_is_here() -> None:
    pool = Lending()
    tokens = [*pool.tokens, *[2] * 100]
    pool.scheduler.admit("r", "digest", loan=loan(224))
    assert pool.scheduler.borrows("r", tokens, 0)
    (pull,) = pool.scheduler.plan().lending.pulls
    assert (pull.first_token, pull.tokens, len(pull.blocks)) == (128, 224, 3)
    assert pool.scheduler.borrows("r", tokens, 0), "it waits"
    pool.end(b"k")
    assert not pool.scheduler.borrows("r", tokens, 0)
    assert pool.scheduler.offer("r", tokens, 0) == 224
    runs, _ = pool.scheduler.take_changes()
    assert [len(run.keys) for run in runs] == [7], "in order, each the successor of the one before"
    pool.scheduler.promote("r", list(range(8)), with_pull=False, again=False)
    pool.scheduler.received("r")
    report = pool.scheduler.report()
    assert report is not None
    assert [(each.tokens, each.borrowed) for each in report.ended] == [(224, BORROWED)]


def test_a_loan_that_fails_leaves_what_was_here() -> None:
    pool = Lending()
    tokens = [*pool.tokens, *[2] * 100]
    pool.scheduler.admit("r", "digest", loan=loan(224))
    assert pool.scheduler.borrows("r", tokens, 0)
    pool.end(b"k", failed=True)
    assert not pool.scheduler.borrows("r", tokens, 0)
    assert pool.scheduler.offer("r", tokens, 0) == 128
    assert pool.directory.filling == 0


@pytest.mark.parametrize("failed", [False, True])
def test_a_request_waits_for_another_ones_loan(failed: bool) -> None:
    pool = Lending()
    tokens = [*pool.tokens, *[2] * 100]
    pool.scheduler.admit("r", "digest", loan=loan(224))
    pool.scheduler.admit("behind", "digest")
    pool.scheduler.admit("other", "digest")
    assert not pool.scheduler.borrows("behind", tokens, 0), "nothing is coming"
    assert pool.scheduler.borrows("r", tokens, 0)
    assert pool.scheduler.borrows("behind", tokens, 0)
    assert not pool.scheduler.borrows("other", [3] * 200, 0)
    pool.end(b"k", failed=failed)
    assert not pool.scheduler.borrows("behind", tokens, 0)
    assert pool.scheduler.offer("behind", tokens, 0) == (128 if failed else 224)
    assert not pool.scheduler.may_borrow("behind")


def test_a_request_waits_for_one_loan_of_others() -> None:
    pool = Lending()
    tokens = [*pool.tokens, *[2] * 100]
    pool.scheduler.admit("behind", "digest")
    for name, waits in (("first", True), ("second", False)):
        pool.scheduler.admit(name, "digest", loan=loan(224, name.encode()))
        assert pool.scheduler.borrows(name, tokens, 0)
        assert pool.scheduler.borrows("behind", tokens, 0) is waits
        # As after a preemption.
        assert pool.scheduler.borrows("first", tokens, 0), "its own loan, then the second's"
        pool.end(name.encode(), failed=True)
        assert not pool.scheduler.borrows(name, tokens, 0)


def test_a_loan_of_nothing_new_is_not_pulled() -> None:
    pool = Lending()
    pool.scheduler.admit("r", "digest", loan=loan(96))
    assert not pool.scheduler.borrows("r", [*pool.tokens, 2], 0)
    assert pool.scheduler.plan().lending.pulls == ()


def test_a_request_that_ends_while_it_borrows_cancels_the_pull() -> None:
    pool = Lending()
    pool.scheduler.admit("r", "digest", loan=loan(224))
    assert pool.scheduler.borrows("r", [*pool.tokens, *[2] * 100], 0)
    pool.scheduler.plan()
    pool.scheduler.finished("r")
    assert pool.scheduler.plan().lending.cancel == (b"k",)
    pool.end(b"k", failed=True)
    assert (pool.directory.filling, pool.scheduler.is_busy) == (0, False)
