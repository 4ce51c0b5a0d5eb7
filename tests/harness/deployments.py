"""Deployments of `baton up` with plain settings, and the programs that they start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from baton.cli.deployment import Deployment, resolve, service_programs, worker_programs
from baton.processes.child import Program

NATS_URL = "nats://nats-token@127.0.0.1:4222"
REDIS_URL = "redis://:redis-password@127.0.0.1:6379/0"


def make_deployment(folder: Path, **changes: object) -> Deployment:
    values: dict[str, object] = {
        "engine_options": {},
        "pythons": {"vllm": folder / "python", "sglang": folder / "sglang-python"},
        "folder": folder,
    }
    values.update(changes)
    return Deployment(**values)  # pyright: ignore[reportArgumentType]


def all_programs(requested: Deployment, *, gpu: bool = False) -> list[Program]:
    deployment = resolve(requested, gpu=gpu)
    services = service_programs(deployment, nats_url=NATS_URL, redis_url=REDIS_URL, environ={"PATH": "/bin"})
    return [
        *services,
        *worker_programs(deployment, model_path=Path("/model"), nats_url=NATS_URL, environ={"PATH": "/bin"}),
    ]


def flags(program: Program) -> Mapping[str, str]:
    words = list(program.command)[3:]
    return dict(zip(words[::2], words[1::2], strict=True))
