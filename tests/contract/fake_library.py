"""A shared library of our own in place of one for hardware; see native/tests/fabric."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
_WORD = struct.Struct("@i")


def compiler() -> list[str]:
    """Return the command of the C++ compiler; skip the test where there is none."""
    command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if command is None:
        pytest.skip("there is no C++ compiler")
    return command.split()


class FakeLibrary:
    """Compiles it and sets its faults; subclasses name the words that it has in its files."""

    source: str
    """Under native/tests/fabric."""
    file: str
    folder_variable: str
    """Read when the library is first used, and by child processes."""
    controls: tuple[str, ...]
    open: tuple[str, ...]
    """Counts of what a process has open; they come first."""
    done: tuple[str, ...]
    """Counts of what was done for it."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.library = self._compiled(folders.getbasetemp())
        self.tables = folders.mktemp("tables")
        (self.tables / "control").write_bytes(bytes(_WORD.size * len(self.controls)))
        os.environ[self.folder_variable] = str(self.tables)

    def _compiled(self, folder: Path) -> str:
        """Return the library, which the first process of a test run has made for all."""
        if "PYTEST_XDIST_WORKER" in os.environ:
            folder = folder.parent
        library = folder / self.file
        with (folder / f"{self.file}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                unfinished = library.with_suffix(".unfinished")
                source = NATIVE / "tests" / "fabric" / self.source
                options = ["-std=c++20", "-shared", "-fPIC", f"-I{NATIVE}", str(source), "-lpthread"]
                subprocess.run([*compiler(), *options, "-o", str(unfinished)], check=True)
                unfinished.rename(library)
        return str(library)

    def set(self, **words: int) -> None:
        """Set words of the fake's `Control`, for every process; those not named keep their values."""
        with (self.tables / "control").open("r+b") as file, mmap.mmap(file.fileno(), 0) as control:
            for name, value in words.items():
                _WORD.pack_into(control, self.controls.index(name) * _WORD.size, value)

    def reset(self) -> None:
        """Forget all faults and counts, but not what is open."""
        self.set(**dict.fromkeys(self.controls, 0))
        if (path := self.tables / str(os.getpid())).exists():
            with path.open("r+b") as file:
                file.seek(_WORD.size * len(self.open))
                file.write(bytes(_WORD.size * len(self.done)))

    def counts(self) -> dict[str, int]:
        """Return what this process has open, and how much the fake has done for it."""
        names = self.open + self.done
        path = self.tables / str(os.getpid())
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
    )
    open = ("contexts", "pds", "mrs", "channels", "cqs", "qps")
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
    )
    open = ("devices", "allocations", "mappings", "queues")
    done = ("launches", "chunks", "not_ready", "stale")
