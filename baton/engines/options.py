"""Turns Baton's engine options into an engine's own arguments, with device profiles and their environment.

Options are the engine's own flags, passed through as they are, and a few of ours (`OwnOptions`). A flag that
Baton sets itself, and one that the engine does not know, stops the start. An engine's `Dialect` names its flags.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from baton.engines.processes import ENGINE_MARK
from baton.errors import ConfigurationError
from baton.messages.workers import Role
from baton.pool.memory import available_bytes

_log = logging.getLogger(__name__)


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class KvPath(StrEnum):
    """How KV of hand-offs gets from the engine's cache to a peer."""

    AUTO = "auto"
    """Direct from host memory; on a GPU no hand-off."""
    DIRECT = "direct"
    """Peers read the cache itself."""
    STAGED = "staged"
    """It is copied to host memory, which peers read (`docs/gpu.md`)."""
    GPU = "gpu"
    """Peers' GPUs read the cache itself, or their adapters do; for all other peers it is staged."""


STAGES: Final = (KvPath.STAGED, KvPath.GPU)
"""Ways that need slots of host memory."""
KV_POOL_AUTO: Final = "auto"
KV_POOL_SHARE: Final = 0.25
"""Share of a host's free memory for the KV pools of all its workers, where their size is `auto`."""
KV_POOL_BYTES_MAX: Final = 4 << 30
"""Most of that for one worker: the memory is reserved at the start, which takes about 0.3 s for each GiB."""
HANDOFF_FOR_POOL: Final = "an engine that hands off KV (on a GPU: kv_path=staged or gpu)"
WHOLE_ON_CUDA: Final = (
    "on CUDA decode workers serve requests whole, unless kv_path=staged or kv_path=gpu asks for hand-offs, "
    "whose cost beside decode has not been measured on a GPU"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions:
    """Engine options that Baton defines, not the engine."""

    device: Device = Device.AUTO
    handoff: bool | None = None
    """False: no transfer agent; the engine serves whole requests only. None: true if the device supports it."""
    connector: str
    """`module:Class` of the connector, which runs beside the engine's KV memory; tests derive their own."""
    kv_pool_bytes: int = 0
    """Host memory for the KV pool, over all ranks (`docs/kv-pool.md`). 0: no pool."""
    kv_pool_auto: bool = False
    """Whether that size is `auto`: an engine that cannot have a pool then serves without one."""
    kv_path: KvPath = KvPath.AUTO
    kv_staging_tokens: int = 0
    """Tokens of hand-offs that are staged at a time; 0: twice the longest context."""
    kv_file: str = ""
    """Path of the pool's file; further ranks append their number."""
    kv_file_bytes: int = 0
    """Size of that file, over all ranks. 0: no file."""


OWN_OPTIONS: Final = (
    "device",
    "handoff",
    "connector",
    "kv_pool_bytes",
    "kv_pool_workers",
    "kv_path",
    "kv_staging_tokens",
    "kv_file",
    "kv_file_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Defaults for a kind of machine. An option or variable that the user sets wins."""

    environment: Mapping[str, str]
    options: Mapping[str, object]
    block_tokens_multiple: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Names of one engine's options, and those that users cannot set."""

    engine: str
    connector: str
    """The default of `OwnOptions.connector`."""
    block_option: str
    """The flag that sets the tokens of a block of KV."""
    set_by_baton: frozenset[str]
    one_only: Mapping[str, str]
    """Flags that must stay 1, and what to do instead."""
    environment: Mapping[str, str]
    """Environment variables to set before the engine is imported."""
    profiles: Mapping[Device, DeviceProfile]


def split_options(options: Mapping[str, object], dialect: Dialect) -> tuple[OwnOptions, dict[str, object]]:
    """Return our own options and the engine's.

    Raises ConfigurationError that names a malformed option of ours, or a flag of the engine that has to be 1.
    """
    engine_options = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    for name, instead in dialect.one_only.items():
        if engine_options.get(name, 1) != 1:
            raise ConfigurationError(f"{dialect.engine}'s option {name} is 1 in Baton: {instead}", param=name)
    device = options.get("device", Device.AUTO)
    if device not in list(Device):
        raise ConfigurationError(f"engine option device is one of {', '.join(Device)}, not {device!r}", param="device")
    handoff = options.get("handoff")
    if not isinstance(handoff, bool | None):
        raise ConfigurationError(f"engine option handoff is true or false, not {handoff!r}", param="handoff")
    connector = options.get("connector", dialect.connector)
    if not isinstance(connector, str) or connector.count(":") != 1:
        raise ConfigurationError(f"engine option connector is 'module:Class', not {connector!r}", param="connector")
    path = options.get("kv_path", KvPath.AUTO)
    if path not in list(KvPath):
        raise ConfigurationError(f"engine option kv_path is one of {', '.join(KvPath)}, not {path!r}", param="kv_path")
    kv_file = options.get("kv_file", "")
    if not isinstance(kv_file, str):
        raise ConfigurationError(f"engine option kv_file is a path, not {kv_file!r}", param="kv_file")
    is_auto = options.get("kv_pool_bytes") == KV_POOL_AUTO
    workers = _number(options, "kv_pool_workers", "workers")
    pool_bytes = auto_pool_bytes(workers) if is_auto else _number(options, "kv_pool_bytes", "bytes")
    own = OwnOptions(
        device=Device(str(device)),
        handoff=handoff,
        connector=connector,
        kv_pool_bytes=pool_bytes,
        kv_pool_auto=is_auto,
        kv_path=KvPath(str(path)),
        kv_staging_tokens=_number(options, "kv_staging_tokens", "tokens"),
        kv_file=kv_file,
        kv_file_bytes=_number(options, "kv_file_bytes", "bytes"),
    )
    check_kv_file(own.kv_file, own.kv_file_bytes, is_auto or pool_bytes > 0)
    return own, engine_options


def auto_pool_bytes(workers: int) -> int:
    """Return the size of a worker's KV pool on a host that has so many workers, by the memory that is free now."""
    return min(int(available_bytes() * KV_POOL_SHARE) // max(workers, 1), KV_POOL_BYTES_MAX)


def choose_pool(own: OwnOptions, path: KvPath | None) -> OwnOptions:
    """Return the options of an engine that hands off by `path`; without one it has no KV pool.

    Raises ConfigurationError if it has to have one.
    """
    if path is not None or not own.kv_pool_bytes:
        return own
    if not own.kv_pool_auto:
        raise ConfigurationError(f"engine option kv_pool_bytes needs {HANDOFF_FOR_POOL}", param="kv_pool_bytes")
    _log.warning("this engine runs without a KV pool: that needs %s", HANDOFF_FOR_POOL)
    return replace(own, kv_pool_bytes=0, kv_file="", kv_file_bytes=0)


def check_kv_file(path: str, file_bytes: int, has_pool: bool) -> None:
    """Raise ConfigurationError unless the options of the KV pool's file fit together."""
    if bool(path) != bool(file_bytes):
        raise ConfigurationError("engine options kv_file and kv_file_bytes need each other", param="kv_file")
    if path and not has_pool:
        raise ConfigurationError("engine option kv_file needs a KV pool: kv_pool_bytes", param="kv_file")


def _number(options: Mapping[str, object], name: str, unit: str) -> int:
    number = options.get(name, 0)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ConfigurationError(f"engine option {name} is a number of {unit}, not {number!r}", param=name)
    return number


def choose_handoff(own: OwnOptions, role: Role, here: Device) -> KvPath | None:
    """Return the way by which an engine hands off KV on the device that it found; None: it serves requests whole.

    Raises ConfigurationError if it cannot hand off but must: by option, or as a prefill worker.
    """
    if here is not Device.CUDA:
        path = own.kv_path if own.kv_path in STAGES else KvPath.DIRECT
        return None if own.handoff is False else path
    if own.kv_path in STAGES and own.handoff is not False:
        return own.kv_path
    if own.handoff or role is Role.PREFILL:
        raise ConfigurationError(f"this worker cannot hand off: {WHOLE_ON_CUDA}", param="handoff")
    _log.warning(WHOLE_ON_CUDA)
    return None


def choose_profile(wanted: Device, here: Device, dialect: Dialect) -> DeviceProfile:
    """Return the profile of the device that the engine found. Raises ConfigurationError if it is not `wanted`."""
    if wanted not in (Device.AUTO, here):
        raise ConfigurationError(
            f"engine option device is {wanted}, but this {dialect.engine} is built for {here}", param="device"
        )
    return dialect.profiles[here]


def on_gpu(profile: DeviceProfile, options: Mapping[str, object]) -> DeviceProfile:
    """Return the profile with a GPU's options; those of the profile, which other parts rely on, win."""
    if options:
        _log.info("options for this GPU: %s", ", ".join(f"{name}={value}" for name, value in options.items()))
    return replace(profile, options={**options, **profile.options})


def engine_arguments(
    options: Mapping[str, object], known: Iterable[str], profile: DeviceProfile, dialect: Dialect
) -> dict[str, object]:
    """Return the engine's arguments: the profile's, overridden by `options`. `known` are the engine's names."""
    names = set(known)
    for name in options:
        if name in dialect.set_by_baton:
            raise ConfigurationError(f"engine option {name} is set by Baton itself", param=name)
        if name not in names:
            close = difflib.get_close_matches(name, [*names, *OWN_OPTIONS], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigurationError(f"{dialect.engine} has no engine option {name}{hint}", param=name)
    arguments = {**profile.options, **options}
    block_tokens = arguments.get(dialect.block_option)
    if block_tokens is not None and (
        not isinstance(block_tokens, int) or block_tokens <= 0 or block_tokens % profile.block_tokens_multiple
    ):
        multiple, option = profile.block_tokens_multiple, dialect.block_option
        raise ConfigurationError(
            f"engine option {option} is a multiple of {multiple} tokens on this device, not {block_tokens!r}",
            param=option,
        )
    return arguments


@contextmanager
def engine_environment(dialect: Dialect, profile: DeviceProfile | None = None) -> Generator[None]:
    """Set the environment that the engine's processes inherit, and restore it, the engine's own changes included."""
    before = dict(os.environ)
    wanted = {ENGINE_MARK: "1", **dialect.environment, **(profile.environment if profile else {})}
    os.environ.update({name: value for name, value in wanted.items() if name not in before})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def local_model(model: str) -> Path:
    """Return a model's folder: `model` itself, or a hub id's snapshot, downloaded unless it is on this machine."""
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
            f"the model {model} is no folder here and cannot be downloaded from the hub: {reason}", param="model"
        ) from error
