"""Runs of `make test-faults`: no request fails, no byte is wrong, and the index soon agrees about all tiers again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--seconds", "30", "--every-s", "3", "--equal-s", "60"], id="random"),
        pytest.param(["--each"], id="each", marks=pytest.mark.nightly),
    ],
)
def test_answers_and_fingerprints_survive_faults(tmp_path: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "tests.faults", "--seed", "1", *flags]
    workers = ["--prefill", "2", "--decode", "2", "--prompts", "12", "--folder", str(tmp_path)]
    answer = subprocess.run([*command, *workers], capture_output=True, text=True, timeout=880, check=False)
    print(answer.stdout)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.endswith("good\n")
