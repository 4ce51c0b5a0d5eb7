"""Two engines on one GPU, prefill to decode, staged through host memory or by CUDA IPC: `make test-gpu` runs it.

Nightly the same tests run with vLLM on a CPU, whose copies a thread makes.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from baton_native import DeviceMemory, GpuUnavailable
from cross_engines import nightly
from engine_pair import Pair, check_several_at_once, greedy, new_prompt, start_engine
from engine_process import EngineError, EngineProcess, until
from tiny_models import make_model

STAGED: dict[str, Any] = {"kv_path": "staged", "kv_pool_bytes": 512 << 20}
# A share of the GPU's memory that must be free when an engine starts; the caches themselves are of a fixed size.
VLLM = STAGED | {"connector": "baton.connectors.vllm:BatonConnector", "device": "cuda", "gpu_memory_utilization": 0.12}
BY_IPC = {"kv_path": "gpu"}
# Eager, since it starts faster: graphs are the others' matter.
HALF = VLLM | {"dtype": "bfloat16", "enforce_eager": True}


def graphs(mode: str) -> dict[str, Any]:
    """Return options with which all steps are replayed: prefill's have up to 512 tokens."""
    return {"compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 8, 64, 512]}}


ENGINES: dict[str, dict[str, Any]] = {
    "vllm full, ipc": VLLM | graphs("FULL") | BY_IPC,
    "vllm eager, ipc": VLLM | BY_IPC | {"enforce_eager": True},
    "vllm piecewise": VLLM | graphs("PIECEWISE"),
    # In float32, as needed for equal tokens; its default is for 16 bits. The share includes what others use.
    "sglang triton": STAGED | {"device": "cuda", "attention_backend": "triton", "mem_fraction_static": 0.8},
    "vllm 16 bits, ipc": HALF | BY_IPC,
    "vllm 16 bits too, ipc": HALF | BY_IPC,
    "vllm latent": HALF,
    "vllm latent too": HALF,
    "vllm 8 bits": HALF | {"kv_cache_dtype": "fp8"},
    "vllm 8 bits too": HALF | {"kv_cache_dtype": "fp8"},
    "vllm cpu": STAGED | {"connector": "baton.connectors.vllm:BatonConnector"},
    "vllm cpu too": STAGED | {"connector": "baton.connectors.vllm:BatonConnector"},
}
"""Options by name. Each engine serves either leg."""
ON_CPU = ("vllm cpu to vllm cpu too", "vllm cpu too to vllm cpu")
PAIRS = (
    "vllm full, ipc to vllm eager, ipc",
    "vllm eager, ipc to vllm piecewise",
    "vllm piecewise to vllm full, ipc",
    "sglang triton to vllm full, ipc",
    "vllm full, ipc to sglang triton",
)
"""By CUDA IPC where both sides have it, else staged. Few engines: each takes half a minute to start."""
ALIKE_PAIRS = (
    "vllm 16 bits, ipc to vllm 16 bits too, ipc",
    "vllm latent to vllm latent too",
    nightly("vllm 8 bits to vllm 8 bits too"),
)
"""Engines with the same options, so that they compute the same, with the attention that vLLM chooses for them."""


@pytest.fixture(scope="module")
def get(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], EngineProcess]]:
    """Provide a function that returns an engine by name, which it starts at first use."""
    running: dict[str, EngineProcess] = {}
    latent_model = tmp_path_factory.mktemp("models") / "latent"
    make_model(latent_model, "deepseek")

    def get(name: str) -> EngineProcess:
        if name not in running:
            kind = "sglang" if name.startswith("sglang") else "vllm"
            model = latent_model if "latent" in name else tiny_model
            running[name] = start_engine(model, tmp_path_factory, "decode", kind, **ENGINES[name])
        return running[name]

    yield get
    for engine in running.values():
        engine.close()


@pytest.fixture(scope="module", params=[*PAIRS, *map(nightly, ON_CPU)])
def names(request: pytest.FixtureRequest) -> list[str]:
    """Return the names of prefill and decode."""
    if request.param not in ON_CPU:
        try:
            DeviceMemory(1)
        except GpuUnavailable as error:
            pytest.skip(f"{error}: `make test-gpu`, on a machine with an NVIDIA GPU")
    pair: str = request.param
    return pair.split(" to ")


@pytest.fixture(scope="module")
def pair(names: list[str], get: Callable[[str], EngineProcess]) -> Pair:
    prefill, decode = names
    return Pair(get(prefill), get(decode))


def pulls(pair: Pair) -> Counter[str]:
    """Return decode's pulls so far, by backend."""
    return Counter({name: totals["pulls"] for name, totals in pair.decode.ask("transfers")["pulls"]["done"].items()})


@pytest.mark.parametrize("tokens", [33, 200, 1500])
def test_output_equals_one_engines(names: list[str], pair: Pair, tokens: int) -> None:
    ids, before = new_prompt(tokens), pulls(pair)
    output, last = pair.disaggregated(ids, 24)
    assert output == pair.aggregated(ids, 24)
    assert last["transferred_tokens"] == tokens - 1
    (backend,) = pulls(pair) - before
    if all(ENGINES[name]["kv_path"] == "gpu" for name in names):
        assert backend == "cuda-ipc"
    else:
        assert backend.endswith("+staged")
    pair.settled()


def test_several_at_once(pair: Pair) -> None:
    check_several_at_once(pair)
    pair.settled()


@pytest.mark.parametrize("names", [*ALIKE_PAIRS, *map(nightly, ON_CPU)], indirect=True, scope="module")
@pytest.mark.parametrize("tokens", [33, 193, 1505])
def test_handed_kv_answers_as_cached_kv(pair: Pair, tokens: int) -> None:
    """For 16 bits: there, answers are the same only where all steps are.

    The prompts fill their blocks, but for one token, so the prefill engine computes only that one, too.
    """
    ids = new_prompt(tokens)
    output, last = pair.disaggregated(ids, 24)
    assert last["transferred_tokens"] == tokens - 1
    whole = pair.prefill.send("generate", request=pair.name(), leg="whole", tokens=ids, sampling=greedy(24))
    assert output == whole.tokens()
    assert whole.last["cached_tokens"] == tokens - 1
    pair.settled()


@pytest.mark.ends_engines
@pytest.mark.parametrize(
    "names", ["vllm full, ipc to vllm piecewise", nightly(ON_CPU[0])], indirect=True, scope="module"
)
def test_prefill_that_is_killed_in_the_middle_of_a_transfer(pair: Pair) -> None:
    """Decode is rid of the pull and its slots, and serves on."""
    ids, name = new_prompt(1500), pair.name()
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
