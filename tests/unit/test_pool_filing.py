"""The KV pool's file around the toy engine of `test_pool_scheduler`: reads and writes end late and in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from baton.connectors.pool_filing import FileProgress, PoolFiling
from baton.connectors.pool_plan import PoolProgress
from baton.connectors.pool_rank import PoolRank
from baton.pool.chain import BlockChain
from baton.pool.directory import PoolDirectory, SlotState
from baton.pool.file import KvFile, PlacedBlock
from baton.pool.file_format import FileBlock, Geometry
from baton.pool.file_io import FileEnd, FileJob
from baton.pool.memory import KvPool
from baton.pool.policy import PolicyName, make_policy
from tests.unit.test_pool_scheduler import BLOCK_TOKENS, ROOT, ToyEngine

CONTENT = "a toy"


class HeldTier:
    """A file whose jobs are carried out when `end_some` says so, in random order."""

    def __init__(self, file: KvFile, random: Random) -> None:
        self.slots = file.slots
        self.file = file
        self.jobs: list[FileJob] = []
        self._random = random
        self._ended: list[FileEnd] = []
        self._found = [placed for placed in file.scan() if placed is not None]

    def submit(self, job: FileJob) -> None:
        self.jobs.append(job)

    def end_some(self) -> None:
        for _ in range(self._random.randint(0, len(self.jobs))):
            job = self.jobs.pop(self._random.randrange(len(self.jobs)))
            done = 0
            for block, slot, pool_slot in zip(job.blocks, job.slots, job.pool_slots, strict=True):
                if job.writes:
                    self.file.write(slot, block, pool_slot)
                elif not self.file.read(slot, block.key, pool_slot):
                    break
                done += 1
            self._ended.append(FileEnd(job=job, done=done, moving_s=0.001))

    def fileno(self) -> int:
        raise NotImplementedError

    def poll(self) -> list[FileEnd]:
        ended, self._ended = self._ended, []
        return ended

    def take_found(self, count_max: int) -> tuple[list[PlacedBlock], bool]:
        found, self._found = self._found[:count_max], self._found[count_max:]
        return found, not self._found

    def close(self) -> None:
        self.file.close()


class TrustingFile(KvFile):
    """Planted fault: what is read is not checked."""

    def read(self, slot: int, key: bytes, pool_slot: int) -> bool:
        super().read(slot, key, pool_slot)
        return True


@dataclass
class FilingEngine(ToyEngine):
    path: Path = Path()
    file_slots: int = 64
    file_class: type[KvFile] = KvFile
    events_heard: bool = True
    loading: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def make_rank(self, pool: KvPool) -> PoolRank:
        size = Geometry(pool.stride_bytes).file_bytes(self.file_slots)
        self.tier = HeldTier(self.file_class(self.path, pool, size, content=CONTENT), self.random)
        return PoolRank(pool.slots, self.copier, None, self.tier, events_heard=self.events_heard)

    def admit(self, tokens: list[int]) -> None:
        self.names += 1
        name = f"r{self.names}"
        self.scheduler.admit(name, "digest")
        self.loading[name] = tokens

    def step(self, advance: tuple[str, ...] | list[str]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for name, tokens in list(self.loading.items()):
            if not self.scheduler.loads(name, tokens, 0):
                del self.loading[name]
                self.begin(name, tokens)
        super().step(advance)
        self.tier.end_some()

    @property
    def filing(self) -> PoolFiling:
        assert self.scheduler.filing is not None
        return self.scheduler.filing

    def rest(self) -> None:
        """Finish every request, and wait for all that runs."""
        while self.loading or self.running or self.scheduler.is_busy:
            for name in [name for name, request in self.running.items() if not request.waits]:
                self.finish(name)
            self.step(())

    def restarted(self, **changes: object) -> FilingEngine:
        """Return another engine with the same file and an empty pool."""
        self.tier.close()
        settings = {"slots": self.slots, "path": self.path, "file_slots": self.file_slots} | changes
        return FilingEngine(self.random, **settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", range(4))
def test_blocks_from_the_file_have_the_bytes_that_were_computed(tmp_path: Path, seed: int) -> None:
    """A pool of 6 slots beside a file of 12 keeps both evicting; the toy engine checks each promoted block."""
    engine = FilingEngine(Random(seed), slots=6, path=tmp_path / "kv", file_slots=12)
    for restarts in range(3):
        engine.run(300)
        engine.rest()
        filing, directory = engine.filing, engine.scheduler.directory
        assert filing.directory is not None
        assert directory is not None
        assert filing.loaded_tokens > 10 * BLOCK_TOKENS
        assert filing.directory.counts.evicted > 0 or restarts
        assert not any(engine.users)
        for each in (directory, filing.directory):
            assert (each.pinned, each.filling) == (0, 0)
        held = filing.directory.ready
        engine = engine.restarted()
        engine.rest()
        assert engine.filing.directory is not None
        assert 0 < engine.filing.directory.ready <= held
    engine.tier.close()


def test_bit_flips_between_restarts_cost_hits_and_no_correctness(tmp_path: Path) -> None:
    random = Random(7)
    engine, failed = FilingEngine(random, slots=6, path=tmp_path / "kv"), 0
    for _ in range(4):
        engine.run(150)
        engine.rest()
        failed += engine.filing.failed_blocks
        with (tmp_path / "kv").open("r+b") as disk:
            size = disk.seek(0, 2)
            for _ in range(20):
                at = random.randrange(4096, size)
                disk.seek(at)
                byte = disk.read(1)[0]
                disk.seek(at)
                disk.write(bytes([byte ^ 1 << random.randrange(8)]))
        engine = engine.restarted()
    engine.tier.close()
    assert failed > 0


def test_a_file_that_is_not_checked_is_found(tmp_path: Path) -> None:
    random = Random(3)
    engine = FilingEngine(random, slots=6, path=tmp_path / "kv")
    engine.run(200)
    engine.rest()
    geometry = Geometry(engine.tier.file._pool.stride_bytes)  # pyright: ignore[reportPrivateUsage]
    with (tmp_path / "kv").open("r+b") as disk:
        for slot in range(engine.file_slots):
            disk.seek(geometry.offset(slot) + 4096 + 100)
            disk.write(b"damage")
    engine = engine.restarted(file_class=TrustingFile)
    with pytest.raises(AssertionError, match="other KV than was computed"):
        engine.run(400)
    engine.tier.close()


def name_of(chain: BlockChain, index: int) -> FileBlock:
    parent = chain.keys[index - 1] if index else b""
    return FileBlock(key=chain.keys[index], parent=parent, index=index, units=chain.units(index))


class Filing:
    """A pool of 16 slots, and on two ranks a file of 16 that holds the first blocks of a prompt of eight."""

    def __init__(self, *, found: int = 8, torn_on_one: int | None = None) -> None:
        self.pool = PoolDirectory(16, make_policy(PolicyName.LRU, 16))
        self.filing = PoolFiling(self.pool, block_tokens=BLOCK_TOKENS, ranks=2)
        self.chain = BlockChain(ROOT, BLOCK_TOKENS)
        self.chain.extend(list(range(8 * BLOCK_TOKENS)))
        placed = [PlacedBlock(index, name_of(self.chain, index)) for index in range(found)]
        for rank in range(2):
            torn = [each for each in placed if not (rank and each.slot == torn_on_one)]
            self.filing.progress(FileProgress(slots=(16,), found=tuple(torn), scanned=1))

    @property
    def held(self) -> int:
        assert self.filing.directory is not None
        return self.filing.directory.match(self.chain.keys)

    def end(self, job: int, *done: int, moving_s: float = 0.01) -> None:
        for each in done:
            self.filing.progress(FileProgress(jobs=Counter({job: 1}), done={job: each}, moving_s={job: moving_s}))


def test_what_all_ranks_hold_comes_back_and_is_told() -> None:
    files = Filing()
    assert files.held == 8
    (run,), removed = files.filing.take_changes()
    assert (run.parent, list(run.ids), removed) == (b"", files.chain.keys, ())
    assert not files.filing.is_busy


def test_a_block_that_one_rank_lost_ends_the_prefix() -> None:
    files = Filing(torn_on_one=5)
    assert files.held == 5
    assert files.filing.directory is not None
    assert files.filing.directory.ready == 5


def test_a_rank_without_a_file_turns_it_off() -> None:
    pool = PoolDirectory(4, make_policy(PolicyName.LRU, 4))
    filing = PoolFiling(pool, block_tokens=BLOCK_TOKENS, ranks=2)
    filing.progress(FileProgress(slots=(4,), scanned=1).joined(FileProgress(slots=(0,))))
    assert (filing.directory, filing.is_busy, filing.report()) == (None, False, None)


def test_a_prefix_is_read_when_all_ranks_have_it_whole() -> None:
    files = Filing()
    job, added = files.filing.load(files.chain, 0, 0.0)
    assert added == range(8)
    (step,) = files.filing.plan().loads
    assert (step.job.job, len(step.job.slots), len(step.job.pool_slots)) == (job, 8, 8)
    files.end(job, 8)
    assert files.filing.loads(job), "the other rank still reads"
    files.end(job, 6)
    assert not files.filing.loads(job)
    assert files.pool.match(files.chain.keys) == 6
    assert (files.held, files.filing.failed_blocks) == (6, 1)
    assert files.pool.filling == 0


def test_a_second_request_waits_for_the_same_read() -> None:
    files = Filing()
    job, _ = files.filing.load(files.chain, 0, 0.0)
    assert files.filing.load(files.chain, 0, 0.0) == (job, range(0))
    files.end(job, 8, 8)
    assert files.filing.load(files.chain, 8, 0.0) == (0, range(0))


def test_a_read_that_is_late_ends_by_itself() -> None:
    files = Filing()
    job, _ = files.filing.load(files.chain, 0, 0.001)
    (step,) = files.filing.plan().loads
    assert step.budget_s == pytest.approx(8 * BLOCK_TOKENS * 0.001)
    files.filing.progress(FileProgress(late=frozenset({job})))
    assert (files.filing.loads(job), files.filing.is_late(job), files.filing.loads_late) == (False, True, 1)
    assert files.pool.match(files.chain.keys) == 0
    files.end(job, 8, 8)
    assert files.pool.match(files.chain.keys) == 8


def test_a_slow_file_is_not_read_until_its_measurement_is_old() -> None:
    files = Filing()
    job, _ = files.filing.load(files.chain, 0, 0.0)
    files.end(job, 8, 8, moving_s=8.0)
    for key in reversed(files.chain.keys):
        files.pool.drop(key)
    # Computing a block takes 0.85 s.
    tries = [files.filing.load(files.chain, 0, 0.85 / BLOCK_TOKENS)[0] for _ in range(3)]
    assert tries == [0, 0, job + 1], "each prefix that is computed instead makes the measurement older"
    assert files.filing.loads_declined == 2


def saved(files: Filing, end: int) -> None:
    keys = files.chain.keys[:end]
    files.pool.filled([keys[index] for index, _ in files.pool.reserve(keys, 0)])


def test_writes_hold_a_quarter_of_the_pool_and_catch_up() -> None:
    files = Filing(found=0)
    saved(files, 8)
    files.filing.write(files.chain, 0, 8)
    (first,) = files.filing.plan().writes
    assert (len(first.slots), files.pool.pinned, files.filing.deferred_blocks) == (4, 4, 4)
    files.filing.write(files.chain, 7, 8)
    assert files.filing.plan().writes == (), "the disk is slow"
    files.end(first.job, 4, 4)
    files.filing.write(files.chain, 7, 8)
    (second,) = files.filing.plan().writes
    assert [block.index for block in second.blocks] == [4, 5, 6, 7]
    files.end(second.job, 4, 3)
    assert (files.held, files.pool.pinned, files.filing.is_busy) == (7, 0, False)
    assert (files.filing.written_blocks, files.filing.failed_blocks) == (7, 1)


def test_a_load_that_is_late_is_told_once() -> None:
    """The rank's clock decides; the decisions have none."""
    now_s = [0.0]
    files = Filing()
    rank = PoolRank(16, None, None, _Silent(), lambda: now_s[0])
    files.filing.load(files.chain, 0, 0.01)
    rank._begin_filing(files.filing.plan())  # pyright: ignore[reportPrivateUsage]
    told: list[int] = []
    for now_s[0] in (1.0, 2.5, 2.6, 3.0):
        rank._take_filed(_Silent())  # pyright: ignore[reportPrivateUsage]
        progress = rank.take_progress() or PoolProgress()
        told.append(len(progress.filing.late))
    assert told == [0, 0, 1, 0]


class _Silent(HeldTier):
    """A disk that never answers."""

    def __init__(self) -> None:
        self.slots = 16

    def submit(self, job: FileJob) -> None: ...

    def poll(self) -> list[FileEnd]:
        return []

    def take_found(self, count_max: int) -> tuple[list[PlacedBlock], bool]:
        return [], True


def test_an_old_file_is_told_once_events_are_heard(tmp_path: Path) -> None:
    engine = FilingEngine(Random(1), slots=16, path=tmp_path / "kv")
    engine.run(50)
    engine.rest()
    engine.tier.close()
    again = FilingEngine(Random(2), slots=16, path=tmp_path / "kv", events_heard=False)
    again.step(())
    assert again.filing.directory is None
    assert again.scheduler.is_busy, "the engine goes on stepping until it may tell"
    again.rank.events_heard = True
    again.step(())
    assert again.filing.directory is not None
    assert again.filing.directory.ready > 0
    again.tier.close()


def test_the_toy_engine_leaves_no_slot_behind_in_a_full_file(tmp_path: Path) -> None:
    engine = FilingEngine(Random(1), slots=4, path=tmp_path / "kv", file_slots=3)
    engine.run(200)
    engine.rest()
    assert engine.filing.directory is not None
    states = [engine.filing.directory.state(key) for key in engine.told]
    assert engine.filing.directory.ready <= 3
    assert SlotState.FILLING not in states
    engine.tier.close()
