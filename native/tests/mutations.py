"""Faults that the C++ tests must find: each is planted in a copy of the sources, built, and looked for.

`python native/tests/mutations.py [--jobs N] [NAME…]` prints what found each, and fails where one is not found, or where
its text no longer occurs exactly once in the file it names, so the list cannot rot. `--texts` looks for the texts only.
"""

# This is a program that prints.
# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planted import Mutation, agents, conversions, leases, paths, pulls, streams

NATIVE = Path(__file__).resolve().parent.parent
OPERATIONS = 500_000
LIMIT_S = 300
"""Time limit of one run: a fault that makes a test hang counts as found."""

ROTTEN = "its text does not occur exactly once"

MUTATIONS = [
    *leases.MUTATIONS,
    *pulls.MUTATIONS,
    *conversions.MUTATIONS,
    *agents.MUTATIONS,
    *streams.MUTATIONS,
    *paths.MUTATIONS,
]


def occurs_once(mutation: Mutation, tree: Path) -> bool:
    return (tree / mutation.file).read_text().count(mutation.text) == 1


def plant(mutation: Mutation, tree: Path) -> None:
    path = tree / mutation.file
    path.write_text(path.read_text().replace(mutation.text, mutation.replacement))


def build(tree: Path, target: str) -> str:
    """Build one target; returns what the compiler said if it fails."""
    made = subprocess.run(
        ["cmake", "--build", str(tree / "build"), "--target", target], capture_output=True, text=True, check=False
    )
    return made.stdout[-2000:] if made.returncode else ""


def prepare(tree: Path) -> None:
    """Make a copy of the sources, built once, so that a mutation costs one file and a link."""
    shutil.copytree(NATIVE, tree, ignore=shutil.ignore_patterns("build", "*.so", "__pycache__"))
    # Without sanitizers: what only they would notice is not enough of a test, and this is a third of the time.
    flags = ["-DBATON_TESTS=ON", "-DBATON_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1"]
    subprocess.run(
        ["cmake", "-S", str(tree), "-B", str(tree / "build"), "-G", "Ninja", *flags], check=True, capture_output=True
    )
    for target in ("baton_model", "baton_tests"):
        if said := build(tree, target):
            sys.exit(said)


def look_for(mutation: Mutation, tree: Path) -> str:
    """Return what is wrong: the mutation was not found, or could not be looked for."""
    if not occurs_once(mutation, tree):
        return ROTTEN
    before = (tree / mutation.file).read_text()
    plant(mutation, tree)
    program = "baton_model" if mutation.test == "model" else "baton_tests"
    arguments = ["--operations", str(OPERATIONS)] if mutation.test == "model" else [mutation.test]
    try:
        if said := build(tree, program):
            return f"does not compile: {said}"
        run = subprocess.run(
            [str(tree / "build" / program), *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if run.returncode == 0:
            return "NOT FOUND"
        lines = [line for line in run.stdout.splitlines() if line.startswith(("seed", "FAILED", "never"))]
        print(f"found      {mutation.name}: {(lines or run.stderr.splitlines() or ['it fell'])[0][:140]}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"found      {mutation.name}: it hung", flush=True)
    finally:
        (tree / mutation.file).write_text(before)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--texts", action="store_true", help="only look whether each text occurs once")
    parser.add_argument("names", nargs="*", help="only mutations whose names contain one of these")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.names or any(name in m.name for name in options.names)]
    if options.texts:
        rotten = [mutation for mutation in chosen if not occurs_once(mutation, NATIVE)]
        for mutation in rotten:
            print(f"PROBLEM    {mutation.name}: {ROTTEN} in {mutation.file}")
        return 1 if rotten else 0
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-mutations-") as scratch:
        trees = [Path(scratch) / str(number) for number in range(options.jobs)]
        lots = [chosen[number :: options.jobs] for number in range(options.jobs)]

        def work(tree: Path, lot: list[Mutation]) -> list[str]:
            prepare(tree)
            return [f"{mutation.name}: {wrong}" for mutation in lot if (wrong := look_for(mutation, tree))]

        with ThreadPoolExecutor(options.jobs) as pool:
            problems = [problem for lot in pool.map(work, trees, lots) for problem in lot]
    for problem in problems:
        print(f"PROBLEM    {problem}")
    print(f"{len(chosen) - len(problems)} of {len(chosen)} found in {time.monotonic() - began_s:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
