"""The file under the KV pool: what it returns is what was written, whatever happened to the disk meanwhile."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigurationError
from baton.pool.file import KvFile, PlacedBlock, parents_first
from baton.pool.file_format import (
    PAGE_BYTES,
    UNITS_MAX,
    FileBlock,
    Geometry,
    SlotHeader,
    decode_slot_header,
    encode_slot_header,
    identity_digest,
)
from baton.pool.file_io import FileEnd, FileIo, FileJob
from baton.pool.memory import KvPool, slot_bytes
from baton.transfer import Pool, checksum_bytes, checksum_memory

SLOTS, LAYERS, BLOCK_TOKENS, BLOCK_BYTES = 4, 2, 32, 2048
"""A slot is one page."""
IDENTITY = identity_digest("a model")
DEADLINE_S = 10.0


def make_pool(slots: int = SLOTS) -> KvPool:
    cache = Pool(
        layer_addresses=(4096, 8192),
        blocks=1,
        block_bytes=BLOCK_BYTES,
        block_stride_bytes=BLOCK_BYTES,
        block_tokens=BLOCK_TOKENS,
        fingerprint="toy",
    )
    return KvPool(cache, slots * slot_bytes(LAYERS, BLOCK_BYTES))


def fill(pool: KvPool, slot: int, content: bytes) -> None:
    ctypes.memmove(pool.slot_address(slot), content.ljust(pool.stride_bytes, b"."), pool.stride_bytes)


def content(pool: KvPool, slot: int) -> bytes:
    return ctypes.string_at(pool.slot_address(slot), pool.stride_bytes).rstrip(b".")


def block(number: int, parent: int | None = None, index: int = 0) -> FileBlock:
    key = number.to_bytes(16, "little")
    return FileBlock(
        key=key, parent=b"" if parent is None else parent.to_bytes(16, "little"), index=index, units=(bytes(16), key)
    )


@contextmanager
def opened(path: Path, pool: KvPool, content: str = "a model", slots: int = SLOTS) -> Generator[KvFile]:
    budget_bytes = Geometry(pool.stride_bytes).file_bytes(slots)
    file = KvFile(path / "kv", pool, budget_bytes, content=content)
    try:
        yield file
    finally:
        file.close()


def found(file: KvFile) -> dict[int, FileBlock]:
    return {each.slot: each.block for each in file.scan() if each is not None}


headers = st.builds(
    SlotHeader,
    st.builds(
        FileBlock,
        key=st.binary(min_size=16, max_size=16),
        parent=st.binary(min_size=16, max_size=16),
        index=st.integers(1, 2**32 - 1),
        units=st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=UNITS_MAX).map(tuple),
    ),
    st.integers(0, 2**32 - 1),
)


@given(header=headers)
def test_a_header_is_read_as_it_was_written(header: SlotHeader) -> None:
    page = encode_slot_header(header, IDENTITY, checksum_bytes)
    assert len(page) == PAGE_BYTES
    assert decode_slot_header(page, IDENTITY, checksum_bytes) == header
    assert decode_slot_header(page, identity_digest("another model"), checksum_bytes) is None


@given(header=headers, bit=st.integers(0, 8 * PAGE_BYTES - 1))
def test_a_header_with_a_flipped_bit_is_refused_or_unchanged(header: SlotHeader, bit: int) -> None:
    page = bytearray(encode_slot_header(header, IDENTITY, checksum_bytes))
    page[bit // 8] ^= 1 << bit % 8
    assert decode_slot_header(bytes(page), IDENTITY, checksum_bytes) in (None, header)


@given(data=st.binary(max_size=5000), start=st.integers(0, 100))
def test_the_checksum_of_memory_is_that_of_its_bytes(data: bytes, start: int) -> None:
    memory = ctypes.create_string_buffer(data, len(data) + 1)
    start = min(start, len(data))
    assert checksum_memory(ctypes.addressof(memory) + start, len(data) - start) == checksum_bytes(data[start:])


def test_blocks_outlast_the_process_that_wrote_them(tmp_path: Path) -> None:
    pool = make_pool()
    names = {slot: block(slot + 1, parent=slot or None, index=slot) for slot in range(SLOTS)}
    with opened(tmp_path, pool) as file:
        assert found(file) == {}
        for slot, name in names.items():
            fill(pool, 0, b"KV of %d" % slot)
            file.write(slot, name, 0)
    other = make_pool()
    with opened(tmp_path, other) as file:
        assert found(file) == names
        for slot, name in names.items():
            assert file.read(slot, name.key, 2)
            assert content(other, 2) == b"KV of %d" % slot
        assert not file.read(1, names[2].key, 2), "the slot holds another block"
    assert (tmp_path / "kv").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_torn_or_damaged_slot_is_never_served(tmp_path: Path, seed: int) -> None:
    """Each round writes a slot anew, tears that write or flips bits, as a crash and a bad disk would, and restarts."""
    random, pool = Random(seed), make_pool()
    written: dict[int, set[tuple[bytes, bytes]]] = {slot: set() for slot in range(SLOTS)}
    served = damaged = 0
    for number in range(1, 120):
        slot, name, kv = random.randrange(SLOTS), block(number), random.randbytes(64) * 60
        with opened(tmp_path, pool) as file:
            path, size = file.path, Geometry(pool.stride_bytes).slot_bytes
            offset = Geometry(pool.stride_bytes).offset(slot)
            before = path.read_bytes()[offset : offset + size]
            fill(pool, 0, kv)
            file.write(slot, name, 0)
        written[slot].add((name.key, kv.ljust(pool.stride_bytes, b".")))
        after = path.read_bytes()[offset : offset + size]
        with path.open("r+b") as disk:
            match random.randrange(3):
                case 0:  # Any sectors of the write are on the disk, the others are as before.
                    sectors = range(0, size, 512)
                    kept = {at for at in sectors if random.random() < random.choice((0.1, 0.5, 0.95))}
                    torn = b"".join((after if at in kept else before)[at : at + 512] for at in sectors)
                    os.pwrite(disk.fileno(), torn, offset)
                    damaged += torn not in (before, after)
                case 1:
                    bits = bytearray(after)
                    for _ in range(random.randint(1, 3)):
                        bits[random.randrange(size)] ^= 1 << random.randrange(8)
                    os.pwrite(disk.fileno(), bits, offset)
                    damaged += 1
                case _:
                    pass
        with opened(tmp_path, pool) as file:
            for where, claimed in found(file).items():
                if file.read(where, claimed.key, 1):
                    served += 1
                    kv_read = ctypes.string_at(pool.slot_address(1), pool.stride_bytes)
                    assert (claimed.key, kv_read) in written[where]
    assert served > 100
    assert damaged > 30


def test_a_file_of_another_model_is_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool()
    with opened(tmp_path, pool) as file:
        file.write(0, block(1), 0)
        file.write(1, block(2), 0)
    with opened(tmp_path, pool, content="another model") as file:
        assert "holds other blocks and is overwritten: a model" in caplog.text
        assert found(file) == {}
        file.write(0, block(3), 0)
    with opened(tmp_path, pool) as file:
        assert found(file) == {1: block(2)}, "what was not overwritten is this model's"


def test_another_file_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("important")
    with pytest.raises(ConfigurationError, match="is no KV file"), opened(tmp_path, make_pool()):
        pass
    assert (tmp_path / "kv").read_text() == "important"


def test_two_engines_do_not_share_a_file(tmp_path: Path) -> None:
    pool = make_pool()
    with (
        opened(tmp_path, pool),
        pytest.raises(ConfigurationError, match="in use by another engine"),
        opened(tmp_path, pool),
    ):
        pass


def test_sizes_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    pool = make_pool()
    with pytest.raises(ConfigurationError, match="smaller than one block"):
        KvFile(tmp_path / "kv", pool, PAGE_BYTES, content="a model")
    with pytest.raises(ConfigurationError, match=r"cannot have \d+ bytes: "):
        KvFile(tmp_path / "kv", pool, 1 << 62, content="a model")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be opened: Is a directory"):
        KvFile(tmp_path / "folder", pool, 1 << 20, content="a model")


def test_a_smaller_file_keeps_its_first_slots(tmp_path: Path) -> None:
    pool = make_pool()
    with opened(tmp_path, pool) as file:
        for slot in range(SLOTS):
            file.write(slot, block(slot + 1), 0)
    with opened(tmp_path, pool, slots=2) as file:
        assert found(file) == {0: block(1), 1: block(2)}
        assert file.path.stat().st_size == Geometry(pool.stride_bytes).file_bytes(2)


@given(
    parents=st.lists(st.one_of(st.none(), st.integers(0, 15)), min_size=16, max_size=16),
    order=st.permutations(range(16)),
)
def test_only_blocks_with_their_whole_prefix_come_back(parents: list[int | None], order: list[int]) -> None:
    """A block may follow one with a lower number, which is on the disk or not."""

    def parent_of(number: int) -> int | None:
        parent = parents[number]
        return None if parent is None or number == 0 else parent % number

    def depth(number: int) -> int:
        parent = parent_of(number)
        return 0 if parent is None else depth(parent) + 1

    kept = [number for number in order if number % 5]
    placed = [PlacedBlock(number, block(number, parent_of(number), depth(number))) for number in kept]

    def reachable(number: int) -> bool:
        parent = parent_of(number)
        return number in kept and (parent is None or reachable(parent))

    restored = [each.slot for each in parents_first(placed)]
    assert sorted(restored) == sorted(number for number in range(16) if reachable(number))
    assert all(parent_of(number) is None or parent_of(number) in restored[:at] for at, number in enumerate(restored))


@contextmanager
def running(file: KvFile) -> Generator[FileIo]:
    io = FileIo(file)
    try:
        yield io
    finally:
        io.close()


def ends(io: FileIo, count: int = 1) -> list[FileEnd]:
    taken: list[FileEnd] = []
    while len(taken) < count:
        ready, _, _ = select.select([io.fileno()], [], [], DEADLINE_S)
        assert ready, "no job has ended in time"
        taken += io.poll()
    return taken


def job(number: int, *names: FileBlock, writes: bool) -> FileJob:
    slots = tuple(range(len(names)))
    return FileJob(job=number, writes=writes, blocks=names, slots=slots, pool_slots=slots)


def make_file(path: Path, pool: KvPool) -> KvFile:
    return KvFile(path / "kv", pool, Geometry(pool.stride_bytes).file_bytes(SLOTS), content="a model")


def test_jobs_move_blocks_and_stop_at_the_first_bad_one(tmp_path: Path) -> None:
    pool, names = make_pool(), [block(number + 1) for number in range(3)]
    with running(make_file(tmp_path, pool)) as io:
        for slot in range(3):
            fill(pool, slot, b"KV %d" % slot)
        io.submit(job(1, *names, writes=True))
        assert [(end.job.job, end.done) for end in ends(io)] == [(1, 3)]
        for slot in range(3):
            fill(pool, slot, b"")
        io.submit(job(2, names[0], block(9), names[2], writes=False))
        assert [(end.job.job, end.done) for end in ends(io)] == [(2, 1)]
        assert content(pool, 0) == b"KV 0"


class HeldFile(KvFile):
    """A disk that answers when it is told to, or never has room."""

    def __init__(self, path: Path, pool: KvPool) -> None:
        super().__init__(path, pool, Geometry(pool.stride_bytes).file_bytes(SLOTS), content="a model")
        self.answers = threading.Event()
        self.is_full = False

    def write(self, slot: int, block: FileBlock, pool_slot: int) -> None:
        assert self.answers.wait(DEADLINE_S)
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(slot, block, pool_slot)


def test_a_write_that_does_not_end_delays_no_read(tmp_path: Path) -> None:
    pool, file = make_pool(), HeldFile(tmp_path / "kv", make_pool())
    with running(file) as io:
        io.submit(job(1, block(1), writes=True))
        io.submit(job(2, block(2), writes=False))
        assert [end.job.job for end in ends(io)] == [2]
        file.answers.set()
        assert [end.job.job for end in ends(io)] == [1]
    assert pool.slots == SLOTS


def test_a_file_for_which_the_disk_has_no_room_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    with opened(tmp_path, pool) as file:
        fill(pool, 0, b"kept")
        file.write(0, block(1), 0)
    before_bytes = (tmp_path / "kv").stat().st_size
    reserve = os.posix_fallocate

    def reserve_half(fd: int, offset: int, size: int) -> None:
        # As ext4 does: what was free is the file's, though it is not enough.
        reserve(fd, offset, size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", reserve_half)
    with pytest.raises(ConfigurationError, match="No space left"), opened(tmp_path, pool, slots=8 * SLOTS):
        pass
    assert (tmp_path / "kv").stat().st_size == before_bytes
    monkeypatch.undo()
    with opened(tmp_path, pool) as file:
        assert found(file) == {0: block(1)}


def test_a_full_disk_is_said_once_and_writes_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = HeldFile(tmp_path / "kv", make_pool())
    file.answers.set()
    with running(file) as io:
        file.is_full = True
        for number in range(5):
            io.submit(job(number, block(1), writes=True))
        assert [end.done for end in ends(io, 5)] == [0] * 5
        file.is_full = False
        io.submit(job(5, block(1), writes=True))
        assert [end.done for end in ends(io)] == [1]
    assert caplog.text.count("No space left on device") == 1
