"""A short run of `make test-faults`: no request fails and no byte is wrong, whichever process is killed or stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_answers_survive_random_faults(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults", "--seconds", "30", "--seed", "1", "--every-s", "3"]
    workers = ["--prefill", "2", "--decode", "2", "--prompts", "12", "--folder", str(tmp_path)]
    answer = subprocess.run([*command, *workers], capture_output=True, text=True, timeout=380, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.endswith("good\n")
