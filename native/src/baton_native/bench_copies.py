"""Measures copies between host memory and a CUDA device: a part of `python -m baton_native.bench_cuda`."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from baton_native import CopyEngine, DeviceMemory

REPEATS = 7
IN_A_ROW = 4
"""Copies of everything per measurement, each begun before the one before has ended."""
PIECES_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
RANDOM_BYTES = 64 << 20
WAIT_S = 60.0
UNALIGNED_BYTES = 8
"""Bytes left out of each piece, so that it is no multiple of 16: then the driver's own batches move it."""
GOAL = 0.9
"""Share of cudaMemcpy's speed that batches are to reach, from pieces of `GOAL_BYTES` on."""
GOAL_BYTES = 64 << 10


@dataclass
class Figure:
    what: str
    gb_per_s: float
    of_limit: float = 0.0
    goal: float = 0.0
    """Share of the limit that is to be reached; 0: there is no goal."""

    @property
    def is_missed(self) -> bool:
        return self.of_limit < self.goal


def random_bytes(seed: int, size: int) -> bytes:
    """Return random bytes, of which `random` makes 256 MiB at most at a time."""
    source = random.Random(seed)
    return b"".join(source.randbytes(min(RANDOM_BYTES, size - at)) for at in range(0, size, RANDOM_BYTES))


def median_gb_per_s(size: int, run: Callable[[], float]) -> float:
    """Return the median speed of `run`, which returns how many seconds it took."""
    run()
    return size / statistics.median(run() for _ in range(REPEATS)) / 1e9


class _Host:
    """Pinned host memory beside as much memory of the device."""

    def __init__(self, library: str, size: int) -> None:
        self.size = size
        self.device = DeviceMemory(size, 0, library)
        self.pages = mmap.mmap(-1, size)
        self.address = ctypes.addressof((ctypes.c_uint8 * size).from_buffer(self.pages))
        self.engine = CopyEngine(0, library)
        self.engine.register(self.address, size)

    def timed(self, run: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        run()
        return time.perf_counter() - began_s

    def batch(self, piece_bytes: int, *, to_host: bool, left_out: int = 0) -> bytes:
        """Return a batch that moves all but the last bytes of each piece, each to another place than its own."""
        pieces = self.size // piece_bytes
        order = random.Random(piece_bytes).sample(range(pieces), pieces)
        words = array("Q")
        for to, source in enumerate(order):
            host, device = self.address + to * piece_bytes, self.device.address + source * piece_bytes
            to_address, from_address = (host, device) if to_host else (device, host)
            words.extend((to_address, from_address, piece_bytes - left_out))
        return words.tobytes()

    def run(self, batch: bytes, times: int = 1) -> None:
        tickets = [self.engine.submit(batch, None) for _ in range(times)]
        if not self.engine.wait(tickets[-1], WAIT_S):
            raise RuntimeError("a batch of copies did not end in time")
        if failures := [failure for _, failure in self.engine.poll() if failure]:
            raise RuntimeError(f"a batch of copies failed: {failures[0]}")


def measure_copies(library: str, size: int) -> list[Figure]:
    """Return GB/s of batches in both directions, by the host's clock; raise if a byte is wrong."""
    host = _Host(library, size - size % max(PIECES_BYTES))
    try:
        return _measure(host)
    finally:
        host.engine.close()


def _measure(host: _Host) -> list[Figure]:
    data = random_bytes(5, host.size)
    figures: list[Figure] = []
    for to_host, name in ((True, "GPU to host"), (False, "host to GPU")):
        plain = host.device.copy_to_host if to_host else host.device.copy_from_host
        limit = median_gb_per_s(host.size, lambda plain=plain: host.timed(lambda: plain(0, host.address, host.size)))
        figures.append(Figure(f"limit: cudaMemcpy, {name}", limit, 1.0))
        for piece_bytes, left_out in itertools.product(PIECES_BYTES, (0, UNALIGNED_BYTES)):
            batch = host.batch(piece_bytes, to_host=to_host, left_out=left_out)
            _verify(host, batch, data, to_host=to_host)
            speed = median_gb_per_s(
                host.size * IN_A_ROW, lambda batch=batch: host.timed(lambda: host.run(batch, IN_A_ROW))
            )
            what = f"{name}, {piece_bytes >> 10} KiB pieces" + (", by the driver" if left_out else "")
            goal = GOAL if piece_bytes >= GOAL_BYTES and not left_out else 0.0
            figures.append(Figure(what, speed, speed / limit, goal))
    return figures


def _verify(host: _Host, batch: bytes, data: bytes, *, to_host: bool) -> None:
    if to_host:
        host.device.write(0, data)
        host.pages[:] = bytes(host.size)
    else:
        host.pages[:] = data
        host.device.fill(0, host.size, 0)
    host.run(batch)
    got = host.pages[:] if to_host else host.device.read(0, host.size)
    words = array("Q", batch)
    begin, source = (host.address, host.device.address) if to_host else (host.device.address, host.address)
    for at in range(0, len(words), 3):
        to, of, size = words[at] - begin, words[at + 1] - source, words[at + 2]
        if got[to : to + size] != data[of : of + size]:
            raise RuntimeError("a batch of copies succeeded with wrong bytes")
