"""The baseline for the radix tree: a flat hash table built of the tree's parts, with a record for each block.

It is not part of the product: `native/tests/baseline` is compiled when a benchmark or a test first uses it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

from baton_kvindex.radix import NativeIndex

NATIVE: Final = Path(__file__).parent.parent / "native"
BUILD: Final = NATIVE / "build" / f"baseline-{sys.implementation.cache_tag}"


class CannotBuild(Exception):
    """The extension cannot be compiled here; the text says why."""


class FlatIndex(NativeIndex):
    """The flat hash table behind the index interface. Raises CannotBuild."""

    def __init__(self, *, counts_copies: bool = False) -> None:
        super().__init__(flat_table().FlatTable(counts_copies))


@cache
def flat_table() -> ModuleType:
    """Return the extension, compiled if it is not up to date. Raises CannotBuild."""
    scripts = Path(sys.executable).parent
    environ = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        commands = [["cmake", "--build", BUILD, "--target", "flat_table"]]
        if not (BUILD / "build.ninja").exists():
            python = f"-DPython_EXECUTABLE={sys.executable}"
            commands.insert(0, ["cmake", "-S", NATIVE, "-B", BUILD, "-G", "Ninja", python])
        for command in commands:
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
            except FileNotFoundError as error:
                raise CannotBuild(f"there is no {error.filename} beside {sys.executable}") from error
            except subprocess.CalledProcessError as error:
                said = [line for line in (error.stdout + error.stderr).splitlines() if "rror" in line]
                raise CannotBuild(f"the baseline of the index cannot be compiled: {said[:1]}") from error
    (file,) = BUILD.glob("flat_table*.so")
    spec = importlib.util.spec_from_file_location("flat_table", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    try:
        flat_table()
    except CannotBuild as why:
        sys.exit(f"baton: {why}")
