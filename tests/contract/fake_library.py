"""A fake shared library in place of a hardware library; see native/tests/fabric."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
FABRIC = NATIVE / "tests" / "fabric"
BUILT = NATIVE.parent / ".cache" / "fabric"
_WORD = struct.Struct("@i")


def compiler() -> list[str]:
    """Return the command of the C++ compiler; skip the test if there is none."""
    command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if command is None:
        pytest.skip("there is no C++ compiler: install one, or name it in CXX")
    return command.split()


@cache
def _sources() -> bytes:
    """Return the digest of all sources that may be compiled into a fake."""
    headers = (path for path in NATIVE.rglob("*.h") if not path.is_relative_to(NATIVE / "build"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted((*headers, *FABRIC.glob("*.cpp"))))).digest()


def _digest(command: list[str]) -> str:
    return hashlib.sha256(_sources() + repr(command).encode()).hexdigest()[:16]


class FakeLibrary:
    """Compiles a fake library and sets its faults; subclasses name the words in its files."""

    source: str
    """Source file, under native/tests/fabric."""
    file: str
    folder_variable: str
    """Environment variable, read on the first use of the library and by child processes."""
    controls: tuple[str, ...]
    open: tuple[str, ...]
    """Counts of a process's open objects; they come first."""
    done: tuple[str, ...]
    """Counts of completed operations."""

    def __init__(self, tables: Path, *, here: bool = True) -> None:
        """`tables`: folder of its control and counts. `here`: this process and those it starts use it."""
        self.library = self.compiled()
        self.tables = tables
        # A process that uses it already must not find it empty.
        with (tables / "control").open("ab") as control:
            control.truncate(_WORD.size * len(self.controls))
        if here:
            os.environ[self.folder_variable] = str(tables)

    @classmethod
    def compiled(cls) -> str:
        """Return the library. The first process that needs it compiles it for all, until a source changes."""
        command = [*compiler(), "-std=c++20", "-shared", "-fPIC", f"-I{NATIVE}", str(FABRIC / cls.source), "-lpthread"]
        folder = BUILT / _digest(command)
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / cls.file
        with (folder / f"{cls.file}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                unfinished = library.with_suffix(".unfinished")
                subprocess.run([*command, "-o", str(unfinished)], check=True)
                unfinished.rename(library)
        return str(library)

    def set(self, **words: int) -> None:
        """Set words of the fake's `Control`, for every process; those not named keep their values."""
        with (self.tables / "control").open("r+b") as file, mmap.mmap(file.fileno(), 0) as control:
            for name, value in words.items():
                _WORD.pack_into(control, self.controls.index(name) * _WORD.size, value)

    def reset(self) -> None:
        """Reset all faults and counts, except those of open objects."""
        self.set(**dict.fromkeys(self.controls, 0))
        if (path := self.tables / str(os.getpid())).exists():
            with path.open("r+b") as file:
                file.seek(_WORD.size * len(self.open))
                file.write(bytes(_WORD.size * len(self.done)))

    def counts(self, pid: int | None = None) -> dict[str, int]:
        """Return counts of a process's open objects, and of the operations the fake has done for it; of this one's."""
        names = self.open + self.done
        path = self.tables / str(pid or os.getpid())
        words = path.read_bytes()[: _WORD.size * len(names)] if path.exists() else bytes(_WORD.size * len(names))
        return dict(zip(names, (value for (value,) in _WORD.iter_unpack(words)), strict=True))

    def left_open(self) -> dict[str, int]:
        return {name: count for name, count in self.counts().items() if name in self.open and count}


class FakeVerbs(FakeLibrary):
    """RDMA without adapters."""

    source = "fake_verbs.cpp"
    file = "libibverbs.so.1"
    folder_variable = "FAKE_VERBS_DIR"
    controls = (
        "devices_missing",
        "ports_down",
        "infiniband",
        "delay_ms",
        "hold",
        "fail_post",
        "fail_nth",
        "fail_status",
        "shrink",
        "peer_memory",
    )
    open = ("contexts", "pds", "mrs", "channels", "cqs", "qps", "unflushed")
    done = ("operations", "reads_0", "reads_1", "sink_gid")


class FakeGpu(FakeLibrary):
    """CUDA without a GPU."""

    source = "fake_gpu.cpp"
    file = "libbaton_gpu.so"
    folder_variable = "FAKE_GPU_DIR"
    controls = (
        "no_driver",
        "no_device",
        "no_share",
        "no_map",
        "delay_ms",
        "hold",
        "hold_streams",
        "fail_launch",
        "fail_run",
        "stale",
        "corrupt",
        "hold_copies",
        "reorder_copies",
        "no_pin",
        "fail_start",
        "fail_copies",
        "no_dma_buf",
        "no_flush",
        "lose_flush",
    )
    open = ("devices", "allocations", "mappings", "queues", "engines", "pinned")
    done = ("launches", "chunks", "not_ready", "stale", "batches", "copies")

    def write(self, stream: int, to: int, data: bytes) -> None:
        """Have a stream of the engine write device memory: at once, unless `hold_streams` is set."""
        source = ctypes.create_string_buffer(data, len(data))
        self._call("fake_gpu_write", stream, to, ctypes.addressof(source), len(data))

    def wrote(self, stream: int, to: int, size: int) -> None:
        """Say that a stream of the engine writes this memory, which is memory of an engine on the CPU."""
        self._call("fake_gpu_write", stream, to, 0, size)

    def adopt(self, address: int, size: int) -> None:
        """Let memory of this process, whole pages, stand for the device's, which other processes can map."""
        self._call("fake_gpu_adopt", address, size)

    def synchronise(self) -> None:
        """Say that all streams of the engine have been waited for."""
        self._call("fake_gpu_synchronise")

    def _call(self, name: str, *words: int) -> None:
        call = getattr(ctypes.CDLL(self.library), name)
        call.argtypes, call.restype = [ctypes.c_uint64] * len(words), None
        call(*words)


class FakeNvml(FakeLibrary):
    """NVIDIA's management library without a driver; a text file says what it finds, see fake_nvml.cpp."""

    source = "fake_nvml.cpp"
    file = "libnvidia-ml.so.1"


if __name__ == "__main__":
    # Compiles ahead of the tests, as `make test-fast` does: on a busy machine it takes longer than a test may.
    for library in (FakeVerbs, FakeGpu, FakeNvml):
        library.compiled()
