"""SGLang's dialect of options, and its device profiles."""

from __future__ import annotations

from typing import Final

from baton.engines.options import Device, DeviceProfile, Dialect
from baton.engines.sglang.plugins import PLATFORM

_ONE_PROCESS: Final = "its scheduler hands off for one rank; start as many workers instead"

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
    one_only={"tp_size": _ONE_PROCESS, "dp_size": _ONE_PROCESS, "pp_size": _ONE_PROCESS, "nnodes": _ONE_PROCESS},
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
        # Written from SGLang's documentation and not run yet: no accelerator has been at hand.
        Device.CUDA: DeviceProfile(environment={}, options={"device": "cuda", "page_size": 32}),
    },
)
