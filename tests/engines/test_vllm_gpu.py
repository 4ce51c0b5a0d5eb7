"""Two vLLM engines on one GPU, prefill to decode, staged through host memory: `make test-gpu` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from baton_native import DeviceMemory, GpuUnavailable
from engine_pair import Pair, check_several_at_once, prompt, started_pair


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def pair(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    try:
        DeviceMemory(1)
    except GpuUnavailable as error:
        pytest.skip(f"{error}: `make test-gpu`, on a machine with an NVIDIA GPU")
    options: dict[str, Any] = {
        "device": "cuda",
        "connector": "baton.connectors.vllm:BatonConnector",
        "kv_path": "staged",
        "kv_pool_bytes": 256 << 20,
        "enforce_eager": request.param,
        "gpu_memory_utilization": 0.2,
    }
    with started_pair(tiny_model, tmp_path_factory, **options) as pair:
        yield pair


@pytest.mark.parametrize("tokens", [33, 200, 1500])
def test_output_equals_one_engines(pair: Pair, tokens: int) -> None:
    ids = prompt(tokens, seed=tokens)
    output, last = pair.disaggregated(ids, 24)
    assert output == pair.aggregated(ids, 24)
    assert last["transferred_tokens"] == tokens - 1
    pair.settled()


def test_several_at_once(pair: Pair) -> None:
    check_several_at_once(pair)
    pair.settled()
