"""The deployment that `baton up` starts: the user's choices, checked, and one `Program` per process."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import msgspec

from baton.cli.engine_defaults import context_limit, engine_defaults, worker_threads
from baton.cli.gpu_shares import GpuShare, ranks_of, share_gpus
from baton.cli.servers import LOOPBACK, free_ports
from baton.cli.tiny_model import make_tiny_model
from baton.config import is_loopback
from baton.engines.options import KV_POOL_AUTO, STAGES, WHOLE_ON_CUDA, KvPath, local_model
from baton.errors import ConfigurationError
from baton.messages.placement import Disaggregation
from baton.messages.workers import Role
from baton.processes.child import Program
from baton.processes.probes import Probe, http_probe

EngineName = Literal["vllm", "sglang", "simulated"]
ENGINES: Final[tuple[EngineName, ...]] = ("vllm", "sglang", "simulated")
DeviceName = Literal["auto", "cpu", "cuda"]

TINY_NAME: Final = "tiny"
SERVICE_START_TIMEOUT_S: Final = 120.0
SIMULATED_START_TIMEOUT_S: Final = 120.0
ENGINE_START_TIMEOUT_S: Final = 600.0
"""Time for an engine to start: real models load for minutes from slow disks."""
WORKERS_MAX: Final = 128
GATEWAY_PROCESSES_MAX: Final = 64
DRAIN_S: Final = 2
DRAIN_S_MAX: Final = 3600
STOP_S: Final = 8.0
"""Time that a gateway gets beyond that to end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The deployment that the user asks for."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    gateway_processes: int = 1
    drain_s: int = DRAIN_S
    """Time that running streams get to end after Ctrl-C."""
    prefill: int = 1
    decode: int | None = None
    """None: one for each GPU, or for as many as the engine's ranks need; on a CPU, one."""
    model: str = ""
    """A folder or a hub id; empty: the tiny model."""
    engine: EngineName = "vllm"
    prefill_engine: EngineName | None = None
    """None: `engine`."""
    decode_engine: EngineName | None = None
    device: DeviceName = "auto"
    gpus: tuple[int, ...] = ()
    """GPUs for the workers, by PCI address; empty: on a CPU, or if they are not known."""
    adapters: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """RDMA ports for the worker of each GPU, as `agent_verbs_devices` names them."""
    disaggregation: Disaggregation | None = None
    """None: `auto` if the device can hand off, else `never`."""
    engine_options: Mapping[str, object]
    """Options for every engine; those under an engine's name are for that engine only."""
    kv_pool_bytes: int | None = None
    """Host memory for each worker's KV pool; None: `auto`, the worker takes its share of what is free."""
    kv_path: KvPath = KvPath.AUTO
    kv_file_bytes: int = 0
    """Size of the file under each worker's KV pool; 0: no file."""
    kv_folder: Path | None = None
    """Folder for these files; None: `.cache/kv` in `folder`."""
    answer_format: str = ""
    """Format of reasoning and tool calls, one of the gateway's; empty: found by the model's chat template."""
    stored_keys: bool = False
    """Whether the gateway takes the keys that `baton keys create` has stored."""
    nats_url: str = ""
    redis_url: str = ""
    pythons: Mapping[EngineName, Path]
    """Python of each engine's environment: vLLM and SGLang pin their own torch, so each has its own."""
    folder: Path
    """Folder for logs, the servers' data and the tiny model."""

    @property
    def engines(self) -> Mapping[Role, EngineName]:
        return {Role.PREFILL: self.prefill_engine or self.engine, Role.DECODE: self.decode_engine or self.engine}

    @property
    def counts(self) -> Mapping[Role, int]:
        return {Role.PREFILL: self.prefill, Role.DECODE: 1 if self.decode is None else self.decode}

    def adapters_of(self, share: GpuShare) -> str:
        """Return the setting `agent_verbs_devices` of a worker with these GPUs; empty: all adapters that are up."""
        return ",".join(dict.fromkeys(port for gpu in share.gpus for port in self.adapters.get(gpu, ())))

    @property
    def workers(self) -> int:
        return sum(self.counts.values())

    @property
    def started_engines(self) -> tuple[EngineName, ...]:
        """Engines that have a worker, each once."""
        return tuple(dict.fromkeys(engine for role, engine in self.engines.items() if self.counts[role]))

    @property
    def tiny(self) -> bool:
        return not self.model

    @property
    def model_name(self) -> str:
        """Name of the model for clients: a hub id as it is, a folder's last part."""
        if self.tiny:
            return TINY_NAME
        path = Path(self.model).expanduser()
        return path.resolve().name if path.is_dir() else self.model

    @property
    def run_folder(self) -> Path:
        return self.folder / ".run" / str(self.port)

    @property
    def logs_folder(self) -> Path:
        return self.run_folder / "logs"

    @property
    def tiny_model_folder(self) -> Path:
        return self.folder / ".cache" / "models" / "tiny-qwen3"

    @property
    def local_host(self) -> str:
        """Address at which this machine reaches the gateway."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def address(self) -> str:
        host = f"[{self.local_host}]" if ":" in self.local_host else self.local_host
        return f"http://{host}:{self.port}"


def resolve(
    deployment: Deployment, *, gpu: bool, find_gpus: Callable[[], Sequence[int]] = tuple[int, ...]
) -> Deployment:
    """Return the deployment with device, disaggregation and number of workers decided.

    `gpu`: this machine has an NVIDIA driver; `find_gpus`: returns the GPUs for workers, none if they are not known.

    Raises ConfigurationError if the device does not support them.
    """
    device, engines = deployment.device, set(deployment.engines.values())
    if device == "auto":
        # As the Makefile chooses environments: only vLLM's comes with a build for GPUs.
        device = "cuda" if gpu and engines == {"vllm"} else "cpu"
    if device == "cpu" or engines == {"simulated"}:
        return replace(deployment, device="cpu", disaggregation=deployment.disaggregation or Disaggregation.AUTO)
    staged = deployment.kv_path in STAGES
    if deployment.disaggregation is Disaggregation.ALWAYS and not staged:
        raise ConfigurationError(
            f"DISAGGREGATION=always is not for GPUs: {WHOLE_ON_CUDA}; choose DISAGGREGATION=never, or DEVICE=cpu"
        )
    gpus = tuple(find_gpus())
    prefill = deployment.prefill if staged else 0
    free = (len(gpus) - prefill * _ranks(deployment, Role.PREFILL)) // _ranks(deployment, Role.DECODE)
    return replace(
        deployment,
        device=device,
        gpus=gpus,
        disaggregation=(deployment.disaggregation or Disaggregation.AUTO) if staged else Disaggregation.NEVER,
        prefill=prefill,
        decode=max(1, free) if deployment.decode is None else deployment.decode,
    )


def check_deployment(deployment: Deployment) -> None:
    """Raise ConfigurationError with a sentence that says what to do, before anything is started."""
    if deployment.prefill < 0 or deployment.counts[Role.DECODE] < 1:
        raise ConfigurationError("at least one decode worker is needed: DECODE=1 or more, PREFILL=0 or more")
    if deployment.kv_file_bytes < 0:
        raise ConfigurationError(f"KV_FILE_BYTES={deployment.kv_file_bytes} is no number of bytes")
    if deployment.kv_file_bytes and deployment.kv_pool_bytes == 0:
        raise ConfigurationError("KV_FILE_BYTES is the size of a file under the KV pool: it needs KV_POOL_BYTES, too")
    if deployment.workers > WORKERS_MAX:
        raise ConfigurationError(
            f"{deployment.workers} workers are too many for one machine: PREFILL and DECODE are "
            f"{WORKERS_MAX} together at most"
        )
    if not 1 <= deployment.gateway_processes <= GATEWAY_PROCESSES_MAX:
        raise ConfigurationError(
            f"GATEWAY_PROCESSES={deployment.gateway_processes} is not possible: choose 1 to {GATEWAY_PROCESSES_MAX}"
        )
    if not 0 <= deployment.drain_s <= DRAIN_S_MAX:
        raise ConfigurationError(f"DRAIN_S={deployment.drain_s} is not possible: choose 0 to {DRAIN_S_MAX}")
    if deployment.prefill == 0 and deployment.disaggregation is Disaggregation.ALWAYS:
        raise ConfigurationError(
            "disaggregation=always needs a prefill worker: PREFILL=1 or more, or DISAGGREGATION=auto"
        )
    for engine in deployment.started_engines:
        if engine in deployment.pythons and not deployment.pythons[engine].is_file():
            raise ConfigurationError(
                f"the environment with {engine} is missing ({deployment.pythons[engine]}): make it with "
                f"`make environment-{engine}`, or try ENGINE=simulated, which needs none"
            )
    if "simulated" in deployment.started_engines and len(deployment.started_engines) > 1:
        raise ConfigurationError("the simulated engine's KV means nothing to another engine: give both roles the same")
    if not (is_loopback(deployment.host) or deployment.api_key or deployment.stored_keys):
        raise ConfigurationError(
            f"HOST={deployment.host} lets other machines in: choose the key that they must send, with API_KEY=…, "
            "or take those of `baton keys create`, with STORED_KEYS=1"
        )
    _check_port(deployment.host, deployment.port)


def _check_port(host: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise ConfigurationError(f"PORT={port} is no port: choose one from 1 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            # As the gateway will: a port whose last connections are still closing is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} is in use on {host}: end what listens there, or choose another, such as PORT={port + 1}"
            ) from error
        raise ConfigurationError(
            f"the gateway cannot listen on {host}, port {port}: {error.strerror or error}"
        ) from error


def model_folder(deployment: Deployment) -> Path:
    """Return the folder of the model, which is made or downloaded if missing. Raises ConfigurationError."""
    if not deployment.tiny:
        return find_model(deployment.model)
    make_tiny_model(deployment.tiny_model_folder)
    return deployment.tiny_model_folder


def find_model(model: str) -> Path:
    """Return the folder of the user's model, downloaded if it is a hub id. Raises ConfigurationError."""
    folder = local_model(model)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigurationError(f"the folder {folder} holds no weights (*.safetensors): is the model complete?")
    return folder


def service_programs(
    deployment: Deployment, *, nats_url: str, redis_url: str, environ: Mapping[str, str]
) -> tuple[Program, Program, Program]:
    """Return index, scheduler and gateway, in the order in which they start."""

    status_ports = iter(free_ports(3, but=deployment.port))

    def program(
        service: str, *flags: str, ready: Probe | None = None, stop_timeout_s: float = 10.0, **settings: str
    ) -> Program:
        status_port = next(status_ports)
        return Program(
            name=service,
            command=(sys.executable, "-m", f"baton_{service}", "--status-port", str(status_port), *flags),
            environ={**environ, **_variables(service, nats_url=nats_url, **settings)},
            log_path=deployment.logs_folder / f"{service}.log",
            ready=ready or http_probe(LOOPBACK, status_port, "/ready"),
            alive=http_probe(LOOPBACK, status_port, "/health"),
            start_timeout_s=SERVICE_START_TIMEOUT_S,
            stop_timeout_s=stop_timeout_s,
        )

    return (
        program("kvindex", redis_url=redis_url),
        program("scheduler", "--disaggregation", deployment.disaggregation or Disaggregation.AUTO),
        program(
            "gateway",
            *("--host", deployment.host, "--port", str(deployment.port), "--drain-s", str(deployment.drain_s)),
            *("--processes", str(deployment.gateway_processes)),
            # Its /ready asks for workers, which start after it.
            ready=http_probe(deployment.local_host, deployment.port, "/health"),
            stop_timeout_s=deployment.drain_s + STOP_S,
            redis_url=redis_url,
            api_keys=deployment.api_key,
            answer_format=deployment.answer_format,
            stored_keys="true" if deployment.stored_keys else "",
        ),
    )


def _variables(service: str, **settings: str) -> dict[str, str]:
    """Return settings as a service's environment: unlike a command line, other users cannot read it."""
    return {f"BATON_{service.upper()}_{name.upper()}": value for name, value in settings.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings that all workers with one engine share, named as `baton.worker.settings` names them."""

    model: str
    model_name: str
    engine: EngineName
    engine_options: Mapping[str, object]
    device: DeviceName


def engine_settings(
    deployment: Deployment, model_path: Path, engine: EngineName, *, workers_per_gpu: int = 1
) -> EngineSettings:
    """Return settings that suit the model and the machine; the user's own win."""
    options = engine_defaults(engine, device=deployment.device, tiny=deployment.tiny, workers_per_gpu=workers_per_gpu)
    if engine != "simulated" and not deployment.tiny:
        options |= context_limit(engine, _model_config(model_path), device=deployment.device)
    if deployment.kv_pool_bytes is None:
        options |= {"kv_pool_bytes": KV_POOL_AUTO, "kv_pool_workers": max(deployment.workers, 1)}
    elif deployment.kv_pool_bytes:
        options |= {"kv_pool_bytes": deployment.kv_pool_bytes}
    if deployment.kv_path is not KvPath.AUTO and engine != "simulated":
        options |= {"kv_path": deployment.kv_path.value}
    return EngineSettings(
        model=str(model_path),
        model_name=deployment.model_name,
        engine=engine,
        engine_options={**options, **_options_for(engine, deployment.engine_options)},
        device=deployment.device,
    )


def _options_for(engine: EngineName, options: Mapping[str, object]) -> Mapping[str, object]:
    try:
        own = msgspec.convert(options.get(engine, {}), dict[str, object])
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the engine options under {engine} are no JSON object of its flags") from error
    return {**{name: value for name, value in options.items() if name not in ENGINES}, **own}


def gpu_shares(deployment: Deployment) -> Mapping[str, GpuShare]:
    """Return each worker's share of the GPUs, by the worker's name; none on a CPU. Raises ConfigurationError."""
    if deployment.device != "cuda":
        return {}
    ranks = [_ranks(deployment, role) for role, count in deployment.counts.items() for _ in range(count)]
    return dict(zip(_worker_names(deployment), share_gpus(ranks, deployment.gpus), strict=True))


def _ranks(deployment: Deployment, role: Role) -> int:
    engine = deployment.engines[role]
    return ranks_of(engine, _options_for(engine, deployment.engine_options))


def _worker_names(deployment: Deployment) -> Iterator[str]:
    for role, count in deployment.counts.items():
        yield from (f"{role}-{number}" for number in range(count))


def worker_programs(
    deployment: Deployment, *, model_path: Path, nats_url: str, environ: Mapping[str, str]
) -> list[Program]:
    """Return the workers, prefill first."""
    threads = worker_threads(deployment.device, cores=os.cpu_count() or 1, workers=deployment.workers)
    status_ports = iter(free_ports(deployment.workers, but=deployment.port))
    shares = gpu_shares(deployment)

    # Only this deployment's transfer agents know it: no other process can read or write their KV.
    agent_secret = secrets.token_urlsafe(24)

    def program(name: str) -> Program:
        role = role_of(name)
        engine, share = deployment.engines[role], shares.get(name, GpuShare())
        settings = engine_settings(deployment, model_path, engine, workers_per_gpu=share.workers)
        status_port = next(status_ports)
        flags = [
            *("--status-port", str(status_port)),
            *("--worker", name, "--drain-s", str(DRAIN_S), "--engine-options", json.dumps(settings.engine_options)),
            *("--model", settings.model, "--model-name", settings.model_name),
            *("--engine", settings.engine, "--device", settings.device),
        ]
        if deployment.kv_file_bytes:
            folder = deployment.kv_folder or deployment.folder / ".cache" / "kv"
            flags += ["--kv-folder", str(folder), "--kv-file-bytes", str(deployment.kv_file_bytes)]
        adapters = deployment.adapters_of(share)
        near = _variables(role, agent_verbs_devices=adapters) if adapters else {}
        return Program(
            name=name,
            command=(str(deployment.pythons.get(engine, sys.executable)), "-m", f"baton_{role}", *flags),
            environ={
                **threads,
                **near,
                **environ,
                **share.environment(),
                **_variables(role, nats_url=nats_url, agent_secret=agent_secret),
            },
            log_path=deployment.logs_folder / f"{name}.log",
            ready=http_probe(LOOPBACK, status_port, "/ready"),
            alive=http_probe(LOOPBACK, status_port, "/health"),
            start_timeout_s=SIMULATED_START_TIMEOUT_S if engine == "simulated" else ENGINE_START_TIMEOUT_S,
        )

    return [program(name) for name in _worker_names(deployment)]


def metrics_targets(programs: Iterable[Program]) -> str:
    """Return the addresses at which these processes serve metrics, as Prometheus reads them (`file_sd_configs`)."""

    def target(command: Sequence[str]) -> dict[str, object]:
        port, module = command[command.index("--status-port") + 1], command[command.index("-m") + 1]
        return {"targets": [f"{LOOPBACK}:{port}"], "labels": {"job": module.removeprefix("baton_")}}

    return json.dumps([target(program.command) for program in programs], indent=2) + "\n"


def role_of(worker: str) -> Role:
    """Return the role that a worker's name begins with."""
    return Role(worker.partition("-")[0])


def _model_config(model_path: Path) -> Mapping[str, object]:
    try:
        return msgspec.json.decode((model_path / "config.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"the model's config.json in {model_path} cannot be read: {error}") from error
