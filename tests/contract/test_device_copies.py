"""The contract of `baton.transfer.device.CopyEngine`, over a thread of the host, the fake GPU, and a GPU."""

from __future__ import annotations

import ctypes
import mmap
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from baton_native import DeviceMemory, GpuUnavailable
from fake_library import FakeGpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import ConfigurationError, TransferFailed
from baton.transfer.device import COPIES_MAX, Copy, CopyEngine, cuda_copies, host_copies

PAGE = mmap.PAGESIZE
HOST_BYTES = 4 * PAGE
CACHE_BYTES = 8 * PAGE
STREAM, OTHER_STREAM = 11, 12
END_TIMEOUT_S = 10.0


class HostMemory:
    """Whole pages of this process."""

    def __init__(self, size: int) -> None:
        self._pages = mmap.mmap(-1, size)
        self._view = (ctypes.c_uint8 * size).from_buffer(self._pages)
        self.address = ctypes.addressof(self._view)

    def read(self, offset: int, size: int) -> bytes:
        return self._pages[offset : offset + size]

    def write(self, offset: int, data: bytes) -> None:
        self._pages[offset : offset + len(data)] = data


@dataclass
class Rig:
    """An engine with registered host memory, and a device's memory."""

    copies: CopyEngine
    host: HostMemory
    cache: HostMemory | DeviceMemory

    def close(self) -> None:
        """End, and free the device's memory, although the test's fixtures still hold this."""
        self.copies.close()
        del self.cache

    def to_host(self, host_offset: int, cache_offset: int, size: int) -> Copy:
        return Copy(self.host.address + host_offset, self.cache.address + cache_offset, size)

    def to_device(self, cache_offset: int, host_offset: int, size: int) -> Copy:
        return Copy(self.cache.address + cache_offset, self.host.address + host_offset, size)

    def wait(self, *tickets: int) -> dict[int, str]:
        """Wait for the descriptor until these batches have ended; return the reason of each one's failure."""
        failures: dict[int, str] = {}
        while not failures.keys() >= set(tickets):
            assert select.select([self.copies.fileno()], [], [], END_TIMEOUT_S)[0], "no batch ended in time"
            failures |= {ended.ticket: ended.failure for ended in self.copies.poll()}
        return failures

    def copy(self, *copies: Copy) -> None:
        ticket = self.copies.submit(copies, after=None)
        assert self.wait(ticket) == {ticket: ""}


MakeRig = Callable[[], Rig]


@pytest.fixture(params=["host", "cuda", pytest.param("cuda on a GPU", marks=pytest.mark.gpu)])
def make_rig(request: pytest.FixtureRequest) -> Iterator[MakeRig]:
    rigs: list[Rig] = []
    library = request.getfixturevalue("fake_gpu").library if request.param == "cuda" else ""

    def make() -> Rig:
        if request.param == "host":
            rig = Rig(host_copies(), HostMemory(HOST_BYTES), HostMemory(CACHE_BYTES))
        else:
            try:
                cache = DeviceMemory(CACHE_BYTES, 0, library)
            except GpuUnavailable as error:
                pytest.skip(f"{error}: `make test-gpu`, on a machine with an NVIDIA GPU")
            rig = Rig(cuda_copies(0, library=library), HostMemory(HOST_BYTES), cache)
        rig.copies.register(rig.host.address, HOST_BYTES)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()


@pytest.fixture
def gpu(fake_gpu: FakeGpu) -> Iterator[FakeGpu]:
    """Provide the fake GPU; whatever is held at the end of a test goes on before its engine closes."""
    yield fake_gpu
    fake_gpu.set(hold_copies=0, hold_streams=0)
    fake_gpu.synchronise()


@pytest.fixture
def cuda(gpu: FakeGpu) -> Iterator[Rig]:
    rig = Rig(cuda_copies(0, library=gpu.library), HostMemory(HOST_BYTES), DeviceMemory(CACHE_BYTES, 0, gpu.library))
    rig.copies.register(rig.host.address, HOST_BYTES)
    yield rig
    gpu.set(hold_copies=0, hold_streams=0)
    rig.close()


# ---------------------------------------------------------------- every engine


def test_a_batch_moves_its_bytes_and_no_others(rig: Rig) -> None:
    data = bytes(range(256)) * (CACHE_BYTES // 256)
    rig.cache.write(0, data)
    ticket = rig.copies.submit([rig.to_host(16, 1000, 300), rig.to_host(PAGE, 0, 64)], after=None)
    assert rig.wait(ticket) == {ticket: ""}
    expected = bytearray(HOST_BYTES)
    expected[16:316] = data[1000:1300]
    expected[PAGE : PAGE + 64] = data[:64]
    assert rig.host.read(0, HOST_BYTES) == bytes(expected)


Span = tuple[bool, int, int, int]
SPANS = st.tuples(
    st.booleans(), st.integers(0, HOST_BYTES - 1), st.integers(0, CACHE_BYTES - 1), st.integers(1, 2 * PAGE)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(batches=st.lists(SPANS, min_size=1, max_size=12))
def test_copies_equal_an_oracle(rig: Rig, batches: list[Span]) -> None:
    """Batches, one after another, in both directions, equal assignments to two byte arrays."""
    cache, host = bytearray(b"\xc5" * CACHE_BYTES), bytearray(b"\x3a" * HOST_BYTES)
    rig.cache.write(0, bytes(cache))
    rig.host.write(0, bytes(host))
    for to_device, host_at, cache_at, wanted in batches:
        size = min(wanted, HOST_BYTES - host_at, CACHE_BYTES - cache_at)
        if to_device:
            rig.copy(rig.to_device(cache_at, host_at, size))
            cache[cache_at : cache_at + size] = host[host_at : host_at + size]
        else:
            rig.copy(rig.to_host(host_at, cache_at, size))
            host[host_at : host_at + size] = cache[cache_at : cache_at + size]
    assert rig.cache.read(0, CACHE_BYTES) == bytes(cache)
    assert rig.host.read(0, HOST_BYTES) == bytes(host)


def test_wait_returns_at_the_end_of_its_batch_and_poll_still_tells(rig: Rig) -> None:
    ticket = rig.copies.submit([rig.to_host(0, 0, PAGE)], after=None)
    assert rig.copies.wait(ticket, timeout_s=END_TIMEOUT_S)
    assert rig.wait(ticket) == {ticket: ""}
    assert rig.copies.wait(ticket, timeout_s=0.0)


def test_closing_waits_for_every_batch(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.cache.write(0, b"\x77" * CACHE_BYTES)
    for number in range(4):
        rig.copies.submit([rig.to_host(number * PAGE, 0, PAGE)], after=None)
    rig.copies.close()
    assert rig.host.read(0, HOST_BYTES) == b"\x77" * HOST_BYTES
    with pytest.raises(TransferFailed, match="closed"):
        rig.copies.submit([rig.to_host(0, 0, 1)], after=None)


def test_mistakes_of_the_caller_are_named(rig: Rig) -> None:
    submit = rig.copies.submit
    for copies, words in (
        ([], "1 to 65536 copies, not 0"),
        ([rig.to_host(0, 0, 1)] * (COPIES_MAX + 1), "1 to 65536 copies, not 65537"),
        ([rig.to_host(0, 0, 0)], "empty"),
        ([rig.to_host(HOST_BYTES - 1, 0, 2)], "not exactly one end in registered memory"),
        ([Copy(rig.host.address, rig.host.address + PAGE, 8)], "not exactly one end in registered memory"),
        ([rig.to_host(0, 0, 8), rig.to_device(64, 64, 8)], "both directions"),
    ):
        with pytest.raises(ValueError, match=words):
            submit(copies, after=None)
    for address, size in ((rig.host.address + 1, PAGE), (rig.host.address, 0), (rig.host.address, PAGE + 1)):
        with pytest.raises(ValueError, match="whole pages"):
            rig.copies.register(address, size)
    with pytest.raises(ValueError, match="registered twice"):
        rig.copies.register(rig.host.address + PAGE, PAGE)
    with pytest.raises(ValueError, match="not registered"):
        rig.copies.unregister(rig.host.address + PAGE)
    rig.copies.unregister(rig.host.address)
    with pytest.raises(ValueError, match="registered memory"):
        submit([rig.to_host(0, 0, 8)], after=None)


def test_batches_that_are_not_polled_are_bounded(rig: Rig) -> None:
    for _ in range(1024):
        rig.copies.submit([rig.to_host(0, 0, 8)], after=None)
    with pytest.raises(TransferFailed, match="1024 batches"):
        rig.copies.submit([rig.to_host(0, 0, 8)], after=None)
    rig.copies.poll()


# ---------------------------------------------------------------- what a GPU adds


def test_bytes_are_read_when_the_batch_ends(cuda: Rig, gpu: FakeGpu) -> None:
    """A block that is freed and reused before its copy's end arrives as what it is then."""
    cuda.cache.write(0, b"A" * PAGE)
    gpu.set(hold_copies=1)
    ticket = cuda.copies.submit([cuda.to_host(0, 0, PAGE)], after=None)
    cuda.cache.write(0, b"B" * PAGE)
    assert not cuda.copies.wait(ticket, timeout_s=0.02)
    assert cuda.copies.poll() == [] and cuda.host.read(0, PAGE) == bytes(PAGE)
    gpu.set(hold_copies=0)
    cuda.wait(ticket)
    assert cuda.host.read(0, PAGE) == b"B" * PAGE


def test_a_batch_waits_for_the_stream_that_it_is_ordered_after(cuda: Rig, gpu: FakeGpu) -> None:
    gpu.set(hold_streams=1)
    gpu.write(STREAM, cuda.cache.address, b"K" * PAGE)
    ordered = cuda.copies.submit([cuda.to_host(0, 0, PAGE)], after=STREAM)
    free = cuda.copies.submit([cuda.to_host(PAGE, PAGE, PAGE)], after=STREAM)
    assert not cuda.copies.wait(ordered, timeout_s=0.05)
    gpu.set(hold_streams=0)
    assert cuda.wait(ordered, free) == {ordered: "", free: ""}
    assert cuda.host.read(0, PAGE) == b"K" * PAGE


@pytest.mark.parametrize("after", [None, OTHER_STREAM])
@pytest.mark.parametrize("to_device", [False, True])
def test_a_copy_that_is_not_ordered_after_the_last_write_is_refused(
    cuda: Rig, gpu: FakeGpu, after: int | None, to_device: bool
) -> None:
    """The stand-in refuses it even if the write happens to have ended: on a GPU that would be luck."""
    gpu.write(OTHER_STREAM, cuda.cache.address, b"Q" * PAGE)
    gpu.write(STREAM, cuda.cache.address, b"K" * PAGE)
    copy = cuda.to_device(100, 0, 8) if to_device else cuda.to_host(0, 100, 8)
    with pytest.raises(TransferFailed, match="not ordered after the last write"):
        cuda.copies.submit([copy], after=after)
    cuda.wait(cuda.copies.submit([copy], after=STREAM))
    gpu.synchronise()
    cuda.wait(cuda.copies.submit([copy], after=None))


def test_batches_may_end_in_any_order(cuda: Rig, gpu: FakeGpu) -> None:
    gpu.set(hold_copies=1, reorder_copies=1)
    tickets = [cuda.copies.submit([cuda.to_host(number, 0, 1)], after=None) for number in range(3)]
    gpu.set(hold_copies=0)
    ended: list[int] = []
    while len(ended) < 3:
        assert select.select([cuda.copies.fileno()], [], [], END_TIMEOUT_S)[0]
        ended += [one.ticket for one in cuda.copies.poll()]
    assert ended == tickets[::-1]


def test_memory_that_a_batch_uses_stays_registered(cuda: Rig, gpu: FakeGpu) -> None:
    gpu.set(hold_copies=1)
    ticket = cuda.copies.submit([cuda.to_device(0, 0, 8)], after=None)
    with pytest.raises(ValueError, match="have not ended"):
        cuda.copies.unregister(cuda.host.address)
    gpu.set(hold_copies=0)
    cuda.wait(ticket)
    cuda.copies.unregister(cuda.host.address)
    assert gpu.counts()["pinned"] == 0


@pytest.mark.usefixtures("cuda")
def test_the_stand_in_counts_what_is_open(gpu: FakeGpu) -> None:
    """The control of the fixture that looks for resources left open."""
    assert gpu.left_open() == {"devices": 2, "allocations": 1, "engines": 1, "pinned": 1}


def test_a_batch_that_is_refused_leaves_nothing_behind(cuda: Rig, gpu: FakeGpu) -> None:
    gpu.set(fail_start=1)
    with pytest.raises(TransferFailed, match="refused"):
        cuda.copies.submit([cuda.to_host(0, 0, 8)], after=None)
    cuda.wait(cuda.copies.submit([cuda.to_host(0, 0, 8)], after=None))
    cuda.copies.unregister(cuda.host.address)


def test_a_device_that_fails_fails_every_batch(cuda: Rig, gpu: FakeGpu) -> None:
    """It announces nothing, as a real one: `poll`, at a deadline, finds it."""
    gpu.set(hold_copies=1, fail_copies=2)
    first, *others = [cuda.copies.submit([cuda.to_host(number, 0, 1)], after=None) for number in range(3)]
    gpu.set(hold_copies=0)
    assert all(cuda.copies.wait(ticket, timeout_s=END_TIMEOUT_S) for ticket in (first, *others))
    failures = {ended.ticket: ended.failure for ended in cuda.copies.poll()}
    assert failures[first] == ""
    assert all("copies failed" in failures[ticket] for ticket in others)


def test_memory_that_cannot_be_pinned_is_not_registered(gpu: FakeGpu) -> None:
    copies, host = cuda_copies(0, library=gpu.library), HostMemory(PAGE)
    gpu.set(no_pin=1)
    with pytest.raises(TransferFailed, match="cannot be pinned"):
        copies.register(host.address, PAGE)
    gpu.set(no_pin=0)
    copies.register(host.address, PAGE)
    copies.close()


def test_a_host_without_a_gpu_says_so(gpu: FakeGpu) -> None:
    gpu.set(no_driver=1)
    with pytest.raises(ConfigurationError, match="there is no NVIDIA driver here"):
        cuda_copies(0, library=gpu.library)
