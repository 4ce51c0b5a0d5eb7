"""NATS, Redis and Prometheus for tests, on free loopback ports and in temporary folders that are removed."""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.cli.servers import free_port, server_binary
from tests.harness.limits import HANG_S

PR_SET_PDEATHSIG = 1
SETTINGS_FILE = "settings.conf"
_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Run in the child: have the kernel kill the server when the test process ends for any reason."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Server:
    """One server process that can be killed and started again on the same port with the same data."""

    scheme: str
    command: list[str]
    port: int
    folder: Path
    ready_request: bytes
    ready_answer: bytes
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server does not run"
        return self.process.pid

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            # Tests start servers from their main thread, before others exist, so running Python between fork and
            # exec is safe here.
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509
            )
        give_up_at_s = time.monotonic() + HANG_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > give_up_at_s:
                self.kill()
                raise RuntimeError(f"{self.command[0]} did not start:\n{(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(self.ready_request)
                return self.ready_answer in connection.recv(4096)
        except OSError:
            return False

    def kill(self) -> None:
        """End the process as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def wipe(self) -> None:
        """Lose the data of a server that was killed."""
        shutil.rmtree(self.folder / "store", ignore_errors=True)

    def reload(self, settings: str) -> None:
        """Write `settings` into nats-server's configuration file and make nats-server reload it."""
        (self.folder / SETTINGS_FILE).write_text(settings)
        if self.process is not None:
            self.process.send_signal(signal.SIGHUP)

    def pause(self) -> None:
        """Stop the process, and return once all of its threads have stopped."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def running(server: Server) -> Generator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def start_nats(*, settings: str = "", payload_bytes_max: int = 8 << 20) -> Generator[Server]:
    """Run nats-server with JetStream; `settings` are lines for its configuration file."""
    with tempfile.TemporaryDirectory(prefix="baton-nats-") as temporary:
        folder, port = Path(temporary), free_port()
        configuration = folder / "nats.conf"
        configuration.write_text(
            f'listen: "127.0.0.1:{port}"\nmax_payload: {payload_bytes_max}\n'
            f'jetstream {{ store_dir: "{folder / "store"}", max_memory_store: 64MB, max_file_store: 64GB }}\n'
            f'include "{SETTINGS_FILE}"\n'
        )
        (folder / SETTINGS_FILE).write_text(settings)
        command = [server_binary("nats-server"), "-c", str(configuration)]
        # JetStream comes up after the port is open, but before the server writes its first INFO line.
        with running(Server("nats", command, port, folder, b"", b"INFO")) as server:
            yield server


@contextmanager
def start_redis() -> Generator[Server]:
    with tempfile.TemporaryDirectory(prefix="baton-redis-") as temporary:
        folder, port = Path(temporary), free_port()
        command = [
            *(server_binary("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--dir", temporary),
            # Killed, it has lost nothing: what it wrote is the kernel's. With `everysec` a busy disk postpones writes.
            *("--save", "", "--appendonly", "yes", "--appendfsync", "no"),
        ]
        with running(Server("redis", command, port, folder, b"PING\r\n", b"PONG")) as server:
            yield server


DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian, Ubuntu: apt install prometheus)",
)


def promtool(*arguments: str) -> str:
    """Run promtool and return its output; raises AssertionError when it fails."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, f"promtool {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done.stdout


class Prometheus:
    def __init__(self, url: str, targets: Path) -> None:
        self._api = httpx.AsyncClient(base_url=f"{url}/api/v1/", timeout=HANG_S)
        self._targets = targets

    def scrape(self, addresses: Mapping[str, list[str]]) -> None:
        """Scrape these addresses from now on: job → host and port of each of its processes."""
        groups = [{"targets": targets, "labels": {"job": job}} for job, targets in addresses.items()]
        fresh = self._targets.with_suffix(".new")
        fresh.write_text(json.dumps(groups))
        fresh.replace(self._targets)

    async def until(self, condition: str) -> None:
        """Wait until the expression has a value."""
        async with asyncio.timeout(HANG_S):
            while not (await self.ask("query", query=condition))["result"]:  # noqa: ASYNC110 - another process.
                await asyncio.sleep(0.1)

    async def ask(self, path: str, **parameters: str | float) -> Any:
        answer = (await self._api.post(path, data={name: str(value) for name, value in parameters.items()})).json()
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]

    async def values(self, expression: str, *, since_s: float) -> list[float]:
        """Return every value that all series of the expression have had since an instant."""
        data = await self.ask("query_range", query=expression, start=since_s, end=time.time(), step=1)
        figures = [float(value) for series in data["result"] for _, value in series["values"]]
        return [figure for figure in figures if not math.isnan(figure)]

    async def close(self) -> None:
        await self._api.aclose()


@contextmanager
def start_prometheus(folder: Path) -> Generator[Prometheus]:
    """Run Prometheus with a scrape interval of one second."""
    port, targets = free_port(), folder / "targets.json"
    targets.write_text("[]")
    scraping = {"job_name": "baton", "file_sd_configs": [{"files": [str(targets)]}]}
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [scraping],
    }
    # JSON is valid YAML.
    (folder / "prometheus.yml").write_text(json.dumps(configuration))
    command = [
        *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=warn"),
    ]
    server = Server("http", command, port, folder, b"GET /-/ready HTTP/1.0\r\n\r\n", b"200 OK")
    with running(server):
        yield Prometheus(server.url, targets)
