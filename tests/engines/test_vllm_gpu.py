"""Two vLLM engines on one GPU, prefill to decode, staged through host memory: `make test-gpu` runs it.

Nightly the same tests run on a CPU, whose copies a thread makes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from baton_native import DeviceMemory, GpuUnavailable
from engine_pair import Pair, check_several_at_once, prompt, started_pair
from engine_process import EngineError, until


@pytest.fixture(scope="module", params=["eager", "graphs", pytest.param("cpu", marks=pytest.mark.nightly)])
def pair(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    options: dict[str, Any] = {
        "connector": "baton.connectors.vllm:BatonConnector",
        "kv_path": "staged",
        "kv_pool_bytes": 256 << 20,
    }
    if request.param != "cpu":
        try:
            DeviceMemory(1)
        except GpuUnavailable as error:
            pytest.skip(f"{error}: `make test-gpu`, on a machine with an NVIDIA GPU")
        options |= {"device": "cuda", "enforce_eager": request.param == "eager", "gpu_memory_utilization": 0.2}
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


@pytest.mark.ends_engines
def test_prefill_that_is_killed_in_the_middle_of_a_transfer(pair: Pair) -> None:
    """Decode is rid of the pull and its slots, and serves on."""
    ids, name = prompt(1500, seed=9), pair.name()
    pair.prefill.ask("faults", faults={"delay_s": 30.0})
    prefill = pair.send_prefill(name, ids)
    decode = pair.send_decode(name, ids, 8)
    prefill.wait()
    until(lambda: pair.decode.ask("stats")["pulls"] == 1)
    for pid in (*pair.prefill.pids(), pair.prefill.pid):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="did not arrive"):
        decode.tokens()
    pair.decode.settled()
    assert len(pair.aggregated(ids, 8)) == 8
