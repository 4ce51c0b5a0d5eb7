"""A deployment as `baton up` starts it, for benchmarks that speak HTTP."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    gateway_status: int
    launcher_pid: int
    """Process that all others of the deployment are children of."""


@contextmanager
def deployment(folder: Path, flags: Sequence[str], settings: Mapping[str, str] | None = None) -> Generator[Ports]:
    """Run `baton up` with these flags until it is ready, and end it afterwards. Logs go to `folder`.

    `settings`: environment variables.
    """
    environ = {**os.environ, **(settings or {})}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "baton.cli", "up", "--port", str(port), "--folder", str(folder)]
    command += ["--kv-pool-bytes", "0"]
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen([*command, "--die-with-parent", *flags], stdout=log, stderr=log, env=environ)
    try:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise SystemExit(f"the deployment did not start:\n{(folder / 'up.log').read_text()}")
            time.sleep(0.2)
        log = next(folder.rglob("gateway.log")).read_text()
        yield Ports(port, int(re.findall(r"status is served on \S+ port (\d+)", log)[-1]), process.pid)
    finally:
        process.terminate()
        process.wait()


def is_ready(port: int, path: str = "/ready") -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200
    except httpx.TransportError:
        return False
