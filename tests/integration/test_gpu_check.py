"""The benchmark of `make test-gpu` over fake GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.contract.fake_library import FakeGpu


def test_the_gpu_check_finds_all_right(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    """The benchmark of `make test-gpu`, whose figures are meaningful only on a GPU."""
    out = tmp_path / "gpu.json"
    arguments = ["--library", fake_gpu.library, "--tokens", "256", "--layers", "1", "--out", str(out)]
    run = [sys.executable, "-m", "baton_native.bench_cuda", *arguments]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    assert "copies, conversions and pulls are right" in done.stdout
    assert {"cuda-ipc, checksum", "cuda-put, checksum", "whole blocks", "host to GPU, 64 KiB pieces"} <= {
        figure["what"] for figure in json.loads(out.read_text())["figures"]
    }
    # In the stand-in every batch then takes 10 ms, and cudaMemcpy no time.
    fake_gpu.set(delay_ms=10)
    slow = subprocess.run([*run, "--goals"], check=False, capture_output=True, text=True)
    missed = [f"{way}, {size} KiB pieces" for way in ("GPU to host", "host to GPU") for size in (64, 256, 1024)]
    assert (slow.returncode, slow.stderr) == (1, f"goals missed: {', '.join(missed)}\n")
    fake_gpu.set(delay_ms=0, corrupt=4)
    broken = subprocess.run(run, check=False, capture_output=True, text=True)
    assert broken.returncode == 1 and "otherwise than the host" in broken.stderr
    fake_gpu.set(no_driver=1)
    for goals, status in (([], 0), (["--goals"], 1)):
        idle = subprocess.run([*run, *goals], check=False, capture_output=True, text=True)
        assert (idle.returncode, idle.stdout) == (status, "nothing was measured: there is no NVIDIA driver here\n")
