"""The command that `make up` runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.limits import HANG_S

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("value", "taken"), [("1", True), ("true", True), ("", False), ("0", False), ("false", False), ("no", False)]
)
def test_stored_keys_can_be_switched_off_in_words(value: str, taken: bool) -> None:
    command = ["make", "-n", "up", "ENGINE=simulated", f"STORED_KEYS={value}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    assert "-m baton.cli up" in said
    assert ("--stored-keys" in said) is taken
