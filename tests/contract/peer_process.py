"""A transfer agent in another process, driven from a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.contract.transfer_rig import KEY, SOURCE_BLOCKS, TOKENS, Fabric, wait_until

SCRIPT = Path(__file__).with_name("transfer_peer.py")


class Peer:
    """`transfer_peer.py` as a child process."""

    def __init__(self, fabric: Fabric, backends: str, lease_ttl_s: float = 5.0, file_bytes_max: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), backends, str(lease_ttl_s), str(file_bytes_max), json.dumps(fabric)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self.endpoint = self._stdout.readline().strip()
        assert self.endpoint, "the peer did not start"

    def tell(self, *words: object) -> None:
        self._stdin.write(" ".join(map(str, words)) + "\n")
        self._stdin.flush()
        assert self._stdout.readline() == "ok\n"

    def lease(self, seed: int = 0) -> None:
        self.tell("lease", KEY.hex(), ",".join(map(str, SOURCE_BLOCKS)), seed)

    def ready(self, layer: int) -> None:
        self.tell("ready", KEY.hex(), layer, TOKENS)

    def leases(self) -> int:
        self._stdin.write("leases\n")
        self._stdin.flush()
        return int(self._stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            wait_until(self._is_stopped)  # A running thread continues until it next enters the kernel.

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def close(self) -> None:
        self.kill()
        self._stdin.close()
        self._stdout.close()
