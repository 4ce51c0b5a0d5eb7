"""The steps of `make test-gpu`, as make would run them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.harness.limits import HANG_S

ROOT = Path(__file__).parents[2]
STEPS = (
    "Needs one NVIDIA GPU",
    "command -v nvcc >/dev/null || make environment-nvcc",
    "libbaton_gpu.so",
    ".venv-vllm-cuda vllm-cuda core test",
    ".venv-sglang-cuda sglang-cuda",
    "timeout 600 make gpu-steps",
    ".venv/bin/baton doctor",
    "baton_native.bench_cuda --goals",
    "--not-run .cache/not-run-gpu -m gpu -n 2 tests/contract",
    ".venv-vllm-cuda/bin/python -m pytest -q --not-run .cache/not-run-gpu -m 'not nightly' tests/engines/test_vllm_gpu",
    "benchmarks.staging --device cuda",
    "! grep -s skipped .cache/not-run-gpu",
    "test ! -e .cache/goals-missed",
)


def dry_run(driver: str) -> str:
    command = ["make", "-n", "test-gpu", f"NVIDIA_DRIVER={driver}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_S).stdout


def test_with_a_driver_every_step_runs_in_order_within_the_time() -> None:
    said, at = dry_run("/dev/null"), 0
    for step in STEPS:
        assert step in said[at:], step
        at = said.index(step, at)


def test_without_a_driver_nothing_is_measured_and_it_says_so() -> None:
    said = dry_run("")
    assert "no NVIDIA driver: nothing ran on a GPU" in said
    assert not any(step in said for step in STEPS[1:6] + STEPS[7:])
