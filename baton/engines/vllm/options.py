"""vLLM's dialect of options, and its device profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from baton.engines.options import Device, DeviceProfile, Dialect
from baton.errors import ConfigurationError

DIALECT: Final = Dialect(
    engine="vLLM",
    connector="baton.connectors.vllm:BatonConnector",
    block_option="block_size",
    set_by_baton=frozenset(
        {"model", "kv_transfer_config", "kv_events_config", "worker_extension_cls", "disable_log_stats", "headless"}
    ),
    one_only={"data_parallel_size": "start as many workers instead"},
    environment={
        # Children are spawned: a fork would copy our event loop, threads and sockets.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # A worker does not wake for the end of its queue; after this long vLLM sends it a signal, which it heeds.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        # For vLLM's own spans, if its flag otlp_traces_endpoint is given: a collector that is down delays nothing.
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1",
    },
    profiles={
        Device.CPU: DeviceProfile(
            environment={
                # By default every engine pins its worker to core 0, so that two engines on a machine stall each other.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                # Ranks of log-probabilities are compiled otherwise when the first request asks, and all others wait.
                "TORCHDYNAMO_DISABLE": "1",
            },
            options={"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 30},
            # The attention kernels of vLLM on CPU stop the engine at any other size.
            block_tokens_multiple=32,
        ),
        # What has run with these on a GPU, and what has not, stands in `docs/gpu.md`.
        Device.CUDA: DeviceProfile(environment={}, options={"block_size": 32}, block_tokens_multiple=16),
    },
)

DEFAULT_STRUCTURED_OUTPUTS: Final[Mapping[str, Any]] = {"backend": "xgrammar"}
"""Settings of vLLM's structured output that the user's override, one by one.

vLLM can choose a back end for each request, but keeps the first request's for all: a schema that only another back end
enforces would then be enforced in part.
"""

_LAYER_AND_TOKEN_RANKS: Final = ("pipeline_parallel_size", "prefill_context_parallel_size")


def choose_executor(arguments: dict[str, object], environ: Mapping[str, str]) -> None:
    """Have a single rank compute in the process of vLLM's scheduler, as it does on a GPU, unless the user said how.

    On a CPU vLLM turns "uni" into "mp", since it binds a rank's threads to cores by the environment of a process of
    its own. Threads that are not bound need none, and a process less is 0.7 GB, a third of the start, and nothing
    that a step must cross.
    """
    alone = all(arguments.get(name, 1) == 1 for name in ("tensor_parallel_size", *_LAYER_AND_TOKEN_RANKS))
    if alone and environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        arguments.setdefault("distributed_executor_backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")


def check_handoff(arguments: Mapping[str, object]) -> None:
    """Raise ConfigurationError if ranks divide something else than heads, which no layout describes, or span hosts."""
    for name in (*_LAYER_AND_TOKEN_RANKS, "decode_context_parallel_size"):
        if arguments.get(name, 1) != 1:
            raise ConfigurationError(
                f"engine option {name} is 1 where KV is handed over (handoff=false serves requests whole)", param=name
            )
    executor = arguments.get("distributed_executor_backend")
    if executor == "ray" or arguments.get("nnodes", 1) != 1:
        name = "distributed_executor_backend" if executor == "ray" else "nnodes"
        raise ConfigurationError(
            f"engine option {name}={arguments[name]} spreads ranks over hosts, and where KV is handed over they share "
            "one (handoff=false serves requests whole)",
            param=name,
        )
