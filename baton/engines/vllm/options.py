"""From Baton's engine options to vLLM's arguments: device profiles, and the environment they need.

Options are vLLM's engine flags (the fields of `AsyncEngineArgs`), passed through as they are, and a few
of our own (`OWN_OPTIONS`). A flag that Baton sets itself, and one that vLLM does not know, stops the start.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from baton.engines.vllm.process import ENGINE_MARK
from baton.errors import ConfigurationError

CONNECTOR: Final = "baton.connectors.vllm:BatonConnector"

_SET_BY_BATON: Final = frozenset(
    {"model", "kv_transfer_config", "kv_events_config", "worker_extension_cls", "disable_log_stats", "headless"}
)


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions:
    """Engine options that are Baton's, not vLLM's."""

    device: Device = Device.AUTO
    handoff: bool = True
    """False: no transfer agent; the engine serves whole requests only."""
    connector: str = CONNECTOR
    """`module:Class` of the KV connector; tests derive their own."""


OWN_OPTIONS: Final = ("device", "handoff", "connector")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What a kind of machine needs. An option or variable that the user sets wins."""

    environment: Mapping[str, str]
    options: Mapping[str, object]
    block_tokens_multiple: int = 1


ENVIRONMENT: Final[Mapping[str, str]] = {
    # Children are started afresh: a fork would copy our event loop, threads and sockets.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    # A worker does not wake for the end of its queue; after this long vLLM sends it a signal, which it heeds.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    # Of vLLM's own spans, where its flag otlp_traces_endpoint is given: a collector that is down holds nobody up.
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1",
    ENGINE_MARK: "1",
}
"""Of every engine, before vLLM is imported."""

PROFILES: Final[Mapping[Device, DeviceProfile]] = {
    Device.CPU: DeviceProfile(
        # By default every engine pins its worker to core 0, so that two engines on a machine stall each other.
        environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        options={"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 30},
        # The attention kernels of vLLM on CPU stop the engine at any other size.
        block_tokens_multiple=32,
    ),
    # Written after vLLM's documentation and not run yet: no accelerator has been at hand.
    Device.CUDA: DeviceProfile(environment={}, options={"block_size": 32}, block_tokens_multiple=16),
}


def split_options(options: Mapping[str, object]) -> tuple[OwnOptions, dict[str, object]]:
    """Return our own options and vLLM's. Raises ConfigurationError naming a malformed one of ours."""
    engine_options = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    device = options.get("device", Device.AUTO)
    if device not in list(Device):
        raise ConfigurationError(f"engine option device is one of {', '.join(Device)}, not {device!r}", param="device")
    handoff = options.get("handoff", True)
    if not isinstance(handoff, bool):
        raise ConfigurationError(f"engine option handoff is true or false, not {handoff!r}", param="handoff")
    connector = options.get("connector", CONNECTOR)
    if not isinstance(connector, str) or connector.count(":") != 1:
        raise ConfigurationError(f"engine option connector is 'module:Class', not {connector!r}", param="connector")
    return OwnOptions(device=Device(str(device)), handoff=handoff, connector=connector), engine_options


def engine_arguments(options: Mapping[str, object], known: Iterable[str], profile: DeviceProfile) -> dict[str, object]:
    """Return the arguments for vLLM: the profile's, overridden by `options`. `known` are vLLM's names."""
    names = set(known)
    for name in options:
        if name in _SET_BY_BATON:
            raise ConfigurationError(f"engine option {name} is set by Baton itself", param=name)
        if name not in names:
            close = difflib.get_close_matches(name, [*names, *OWN_OPTIONS], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigurationError(f"vLLM has no engine option {name}{hint}", param=name)
    arguments = {**profile.options, **options}
    block_tokens = arguments.get("block_size")
    if block_tokens is not None and (
        not isinstance(block_tokens, int) or block_tokens <= 0 or block_tokens % profile.block_tokens_multiple
    ):
        multiple = profile.block_tokens_multiple
        raise ConfigurationError(
            f"engine option block_size is a multiple of {multiple} tokens on this device, not {block_tokens!r}",
            param="block_size",
        )
    if arguments.get("data_parallel_size", 1) != 1:
        raise ConfigurationError(
            "engine option data_parallel_size is 1 in Baton: start as many workers instead", param="data_parallel_size"
        )
    return arguments


def check_handoff(arguments: Mapping[str, object]) -> None:
    """Raise ConfigurationError where ranks divide something else than heads, which no layout describes."""
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if arguments.get(name, 1) != 1:
            raise ConfigurationError(
                f"engine option {name} is 1 where KV is handed over (handoff=false serves requests whole)", param=name
            )


@contextmanager
def engine_environment(profile: DeviceProfile | None = None) -> Generator[None]:
    """Set what the engine's processes inherit, and undo it, with whatever vLLM itself sets meanwhile."""
    before = dict(os.environ)
    wanted = {**ENVIRONMENT, **(profile.environment if profile else {})}
    os.environ.update({name: value for name, value in wanted.items() if name not in before})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def local_model(model: str) -> Path:
    """Return the folder of a model: itself, or a hub id's snapshot, loaded when it is not here yet."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(f"the folder {model} holds no model: it has no config.json", param="model")
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigurationError(f"there is no model folder {model}", param="model")
    # Imported here: a model in a folder needs no hub client.
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"the model {model} is neither a folder here nor to be had from the hub: {reason}", param="model"
        ) from error
