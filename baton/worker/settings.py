"""Settings of a worker, common to both roles; each service's `config.py` sets what differs."""

from __future__ import annotations

import socket
from os import getpid
from pathlib import Path
from re import sub
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from baton.blocks import BLOCK_TOKENS_DEFAULT, BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN
from baton.engines.engine import Engine
from baton.errors import ConfigurationError
from baton.messages.workers import RANKS_MAX, Role
from baton.node.settings import NodeSettings, Seconds
from baton.telemetry.settings import traces_url
from baton.transfer import AgentOptions, Corruption, TransferFaults

_AGENT: Final = AgentOptions()
"""Defaults of the transfer agent."""


class InjectedFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setting for `baton.transfer.TransferFaults`."""

    delay_s: Annotated[float, Meta(ge=0)] = 0.0
    corrupt_every: Annotated[int, Meta(ge=0)] = 0
    corruption: Corruption = Corruption.FLIP
    before_checksum: bool = False


class WorkerSettings(NodeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_-]{0,64}$", description="Name of this worker; empty: role, host and process number."
        ),
    ] = ""
    model: Annotated[str, Meta(description="Folder of the model, or its id on a hub.")] = ""
    model_name: Annotated[str, Meta(description="Name that clients use; empty: the last part of the model's path.")] = (
        ""
    )
    engine: Annotated[Literal["vllm", "sglang", "simulated"], Meta(description="vllm, sglang or simulated.")] = "vllm"
    engine_options: Annotated[
        dict[str, object], Meta(description="Flags of the engine, passed through as they are, as JSON.")
    ] = msgspec.field(default_factory=dict[str, object])
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="Where the engine runs: auto, cpu or cuda.")] = (
        "auto"
    )
    kv_folder: Annotated[
        str,
        Meta(description="Folder for the file under the KV pool, named after worker or role; empty: no file."),
    ] = ""
    kv_file_bytes: Annotated[int, Meta(ge=0, description="Size of that file; 0: no file.")] = 0
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=RANKS_MAX, description="Ranks over which the engine divides the model's heads.")
    ] = 1

    block_tokens: Annotated[
        int,
        Meta(
            ge=BLOCK_TOKENS_MIN, le=BLOCK_TOKENS_MAX, description="Canonical block; the same in the whole deployment."
        ),
    ] = BLOCK_TOKENS_DEFAULT
    slots: Annotated[int, Meta(ge=0, description="Attempts that run at the same time; 0: the engine's limit.")] = 0
    output_headroom_tokens: Annotated[
        int, Meta(ge=1, description="Most output tokens for which an attempt reserves KV blocks beside its prompt.")
    ] = 512
    leased_share: Annotated[
        float, Meta(gt=0, le=1, description="Share of the KV blocks that may be held for decode workers.")
    ] = 0.4
    price_per_hour: Annotated[
        float, Meta(ge=0, description="Price of this worker for an hour, in any currency, for metrics; 0: not given.")
    ] = 0.0

    heartbeat_s: Annotated[Seconds, Meta(description="Time between two heartbeats.")] = 0.25
    digest_s: Annotated[Seconds, Meta(description="Time between two digests to each gateway.")] = 1.0
    lost_after_s: Annotated[
        Seconds, Meta(description="A gateway without a beat for this long is lost, and its attempts are aborted.")
    ] = 5.0
    enter_timeout_s: Annotated[Seconds, Meta(description="Time for an accepted attempt to enter the engine.")] = 2.0
    progress_s: Annotated[
        Seconds, Meta(description="Time without a token after which an attempt that has begun is given up.")
    ] = 30.0
    retain_s: Annotated[
        Seconds, Meta(description="How long an answer is kept for a gateway that does not confirm it.")
    ] = 30.0
    drain_s: Annotated[Seconds, Meta(description="Time for running attempts to finish while draining.")] = 30.0
    role_change_s: Annotated[
        Seconds,
        Meta(description="Longest wait for running attempts before a change of role; then they go on."),
    ] = 5.0
    canary_timeout_s: Annotated[Seconds, Meta(description="Time for the prompt that proves the block mapping.")] = 60.0

    agent_host: Annotated[
        str, Meta(description="Address on which the transfer agent listens; auto: the address of this host's name.")
    ] = "127.0.0.1"
    agent_port: Annotated[int, Meta(ge=0, le=65535, description="Port of the transfer agent; 0: any free one.")] = 0
    agent_rails: Annotated[
        tuple[str, ...],
        Meta(
            description="Addresses to listen on instead of agent_host and agent_port, host:port[@label][~distance]; "
            "KV is pulled over all of the nearest ones."
        ),
    ] = ()
    agent_streams: Annotated[
        int, Meta(ge=1, le=16, description="Connections to each address of a source that large pulls use.")
    ] = _AGENT.streams
    agent_secret: Annotated[
        str, Meta(description="Secret shared by all agents; better given by environment or file.")
    ] = ""
    agent_backends: Annotated[tuple[str, ...], Meta(description="Ways to move KV, in order of preference.")] = (
        _AGENT.backends
    )
    agent_verbs_devices: Annotated[
        str, Meta(description="RDMA devices: name, name:port or name:port:gid, with commas; empty: all that are up.")
    ] = _AGENT.verbs_devices
    lease_ttl_s: Annotated[Seconds, Meta(description="A lease ends this long after its sink's last keep-alive.")] = (
        _AGENT.lease_ttl_s
    )
    unclaimed_ttl_s: Annotated[Seconds, Meta(description="A lease that no sink asked for ends after this.")] = (
        _AGENT.unclaimed_ttl_s
    )
    wanted_timeout_s: Annotated[
        Seconds, Meta(description="A pull fails when its source neither opens nor refuses the lease for this long.")
    ] = _AGENT.wanted_timeout_s
    stall_timeout_s: Annotated[Seconds, Meta(description="A pull fails when it makes no progress for this long.")] = (
        _AGENT.stall_timeout_s
    )
    faults: Annotated[
        InjectedFaults, Meta(description="TransferFaults injected into the transfer agent, as JSON; for tests.")
    ] = InjectedFaults()

    def worker_id(self, role: Role) -> str:
        host = sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40]
        return self.worker or f"{role}-{host}-{getpid()}"

    def file_options(self, role: Role) -> dict[str, object]:
        """Return the engine's options for the KV pool's file: a restarted worker finds its own again."""
        if not self.kv_folder or not self.kv_file_bytes:
            return {}
        path = Path(self.kv_folder).absolute() / f"{self.worker or role}.kv"
        return {"kv_file": str(path), "kv_file_bytes": self.kv_file_bytes}

    def public_model_name(self) -> str:
        return self.model_name or Path(self.model).name or self.model

    def agent_options(self) -> AgentOptions:
        return AgentOptions(
            host=socket.gethostname() if self.agent_host == "auto" else self.agent_host,
            port=self.agent_port,
            rails=self.agent_rails,
            streams=self.agent_streams,
            secret=self.agent_secret,
            backends=self.agent_backends,
            verbs_devices=self.agent_verbs_devices,
            lease_ttl_s=self.lease_ttl_s,
            unclaimed_ttl_s=self.unclaimed_ttl_s,
            wanted_timeout_s=self.wanted_timeout_s,
            stall_timeout_s=self.stall_timeout_s,
            faults=TransferFaults(**msgspec.structs.asdict(self.faults)),
        )


def create_engine(role: Role, settings: WorkerSettings) -> Engine:
    """Return the engine that the settings name. The one place that imports engines: each needs its own packages."""
    agent = settings.agent_options()
    try:
        if settings.engine == "simulated":
            from baton.engines.simulated.engine import SimulatedEngine

            if settings.tensor_parallel > 1:
                raise ConfigurationError("the simulated engine has one rank", param="tensor_parallel")
            options = {**settings.file_options(role), **settings.engine_options}
            return SimulatedEngine(settings.model, options=options, agent=agent)
        if settings.engine == "sglang":
            from baton.engines.sglang.engine import SglangEngine

            ranks = {"tp_size": settings.tensor_parallel} if settings.tensor_parallel > 1 else {}
            options = {"device": settings.device, **ranks, **settings.file_options(role), **settings.engine_options}
            return SglangEngine(settings.model, role=role, options=options, agent=agent)
        from baton.engines.vllm.engine import VllmEngine

        traces = {"otlp_traces_endpoint": traces_url(settings.otlp_endpoint)} if settings.otlp_endpoint else {}
        ranks = {"tensor_parallel_size": settings.tensor_parallel} if settings.tensor_parallel > 1 else {}
        options = {"device": settings.device, **ranks, **traces, **settings.file_options(role)}
        options |= settings.engine_options
        return VllmEngine(settings.model, role=role, options=options, agent=agent)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the engine {settings.engine} is not installed in this Python environment, which lacks {error.name}: "
            f"Baton's extra `{settings.engine}` installs it"
        ) from error
