"""SGLang's dialect of options, and its device profiles."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from baton.engines.options import Device, DeviceProfile, Dialect
from baton.engines.sglang.plugins import PLATFORM
from baton.errors import ConfigurationError

_HEADS_ONLY: Final = "it hands off between ranks that divide heads (tp_size); start as many workers instead"

DIALECT: Final = Dialect(
    engine="SGLang",
    connector="baton.connectors.sglang:BatonScheduler",
    block_option="page_size",
    set_by_baton=frozenset(
        {
            "model_path",
            "server_args",
            "radix_cache_backend",
            "kv_events_config",
            "disable_overlap_schedule",
            "disaggregation_mode",
            "incremental_streaming_output",
            "sleep_on_idle",
            "stream_interval",
        }
    ),
    one_only={
        "dp_size": _HEADS_ONLY,
        "pp_size": _HEADS_ONLY,
        "dcp_size": _HEADS_ONLY,
        "attn_cp_size": _HEADS_ONLY,
        "attn_dp_size": _HEADS_ONLY,
        "nnodes": "its ranks share a host; start a worker on each instead",
    },
    environment={
        "SGLANG_PLUGINS": "baton,baton_cpu",
        # Sampling by seed is compiled otherwise when it is first used, in the middle of a request.
        "TORCHDYNAMO_DISABLE": "1",
    },
    profiles={
        Device.CPU: DeviceProfile(
            environment={"SGLANG_PLATFORM": PLATFORM, "SGLANG_USE_CPU_ENGINE": "0", "OMP_NUM_THREADS": "1"},
            options={
                "device": "cpu",
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "grammar_backend": "xgrammar",
                "disable_cuda_graph": True,
                "page_size": 32,
                "max_total_tokens": 32768,
            },
        ),
        # Written from SGLang's documentation; it has not run on a GPU yet (`docs/gpu.md`).
        Device.CUDA: DeviceProfile(environment={}, options={"device": "cuda", "page_size": 32}),
    },
)

RANKS_OPTION: Final = "tp_size"
CORES_VARIABLE: Final = "SGLANG_CPU_OMP_THREADS_BIND"


def tensor_parallel_ranks(options: Mapping[str, object]) -> int:
    """Return the number of ranks. Raises ConfigurationError if it is none."""
    ranks = options.get(RANKS_OPTION, 1)
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigurationError(
            f"engine option {RANKS_OPTION} is a number of ranks, not {ranks!r}", param=RANKS_OPTION
        )
    return ranks


def shared_cores(ranks: int, cores: Collection[int]) -> str:
    """Return SGLang's setting under which all ranks use the same cores. Its own default is a NUMA node for each."""
    return "|".join([",".join(map(str, sorted(cores)))] * ranks)
