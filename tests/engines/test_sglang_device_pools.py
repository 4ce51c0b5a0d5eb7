"""What SGLang's connector says of a cache on a GPU, by SGLang's own classes of pools with tensors of a CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.remote_engine.settings import engine_environ, engine_python
from tests.harness.limits import START_S

PROGRAM = Path(__file__).with_name("sglang_device_pools.py")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(700)]


def test_pools_on_a_device_are_described_with_it_and_handed_off_staged_only() -> None:
    python = engine_python("sglang")
    if python is None:
        pytest.skip("there is no environment with sglang: make environment-sglang")
    command = [python, str(PROGRAM)]
    run = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=START_S, env=engine_environ("sglang")
    )
    said: dict[str, dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    row_bytes = {"heads": 4 * 64 * 2, "latent": 576 * 2}
    for kind, tensors in (("heads", 4), ("latent", 2)):
        pool = said[kind]
        block = {"block_bytes", "block_stride_bytes"}
        assert {pool[name] for name in block} == {32 * row_bytes[kind]}
        assert (pool["device"], pool["blocks"], pool["block_tokens"]) == (1, 3, 32)
        assert (pool["layer_addresses"], pool["in_order"]) == (tensors, True)
    assert said["heads"]["layout"] == (
        "layers=2 kv_heads=8 dim=64 dtype=bfloat16 order=NHD form=split packing=plain block_tokens=32 tp=1/2"
    )
    assert said["latent"]["layout"] == (
        "layers=2 kv_heads=1 dim=576 dtype=bfloat16 order=NHD form=latent packing=plain block_tokens=32 tp=1/2"
    )
    assert said["direct"] == {
        "refusal": "the KV cache lies on cuda, from where KV is handed off with engine option kv_path=staged or gpu "
        "only"
    }
