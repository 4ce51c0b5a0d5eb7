"""RDMA without adapters: a libibverbs.so.1 of our own, see native/tests/fabric/fake_verbs.cpp."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
SOURCE = NATIVE / "tests" / "fabric" / "fake_verbs.cpp"
CONTROLS = (
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
OPEN = ("contexts", "pds", "mrs", "channels", "cqs", "qps")
COUNTS = (*OPEN, "operations", "reads_0", "reads_1", "sink_gid")
_WORD = struct.Struct("@i")


class FakeVerbs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library = str(folder / "libibverbs.so.1")
        self.tables = folder / "tables"
        self.tables.mkdir()
        (self.tables / "control").write_bytes(bytes(_WORD.size * len(CONTROLS)))

    def set(self, **words: int) -> None:
        """Set words of the fake's `Control`, for every process; those not named keep their values."""
        with (self.tables / "control").open("r+b") as file, mmap.mmap(file.fileno(), 0) as control:
            for name, value in words.items():
                _WORD.pack_into(control, CONTROLS.index(name) * _WORD.size, value)

    def reset(self) -> None:
        """Forget all faults and counts, but not what is open."""
        self.set(**dict.fromkeys(CONTROLS, 0))
        if (path := self.tables / str(os.getpid())).exists():
            with path.open("r+b") as file:
                file.seek(_WORD.size * len(OPEN))
                file.write(bytes(_WORD.size * (len(COUNTS) - len(OPEN))))

    def counts(self) -> dict[str, int]:
        """Return what this process has open, and how much the fake has done for it."""
        path = self.tables / str(os.getpid())
        words = path.read_bytes()[: _WORD.size * len(COUNTS)] if path.exists() else bytes(_WORD.size * len(COUNTS))
        return dict(zip(COUNTS, (value for (value,) in _WORD.iter_unpack(words)), strict=True))

    def left_open(self) -> dict[str, int]:
        return {name: count for name, count in self.counts().items() if name in OPEN and count}


def compiler() -> list[str]:
    """Return the command of the C++ compiler; skip the test where there is none."""
    command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if command is None:
        pytest.skip("there is no C++ compiler")
    return command.split()


def compile_fake_verbs(folder: Path) -> FakeVerbs:
    fake = FakeVerbs(folder)
    arguments = ["-std=c++20", "-shared", "-fPIC", f"-I{NATIVE}", str(SOURCE), "-o", fake.library, "-lpthread"]
    subprocess.run([*compiler(), *arguments], check=True)
    os.environ["FAKE_VERBS_DIR"] = str(fake.tables)  # Read when the library is first used, and by child processes.
    return fake
