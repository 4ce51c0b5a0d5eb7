"""A running `baton up`, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.cli.servers import free_port

READY_TIMEOUT_S = 240.0
"""Time that all processes have to become ready, on a busy machine; alone they take 5 s."""


@dataclass
class Launcher:
    """A running `baton up`, or a shell that runs one."""

    process: subprocess.Popen[bytes]
    output_path: Path
    port: int

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, words: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        self.wait_until(lambda output: words in output, f"it said {words!r}", timeout_s)

    def wait_until(self, condition: Callable[[str], bool], what: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until `condition` is true of the output."""
        give_up_at_s = time.monotonic() + timeout_s
        while not condition(self.output):
            assert self.process.poll() is None, f"it ended before {what}:\n{self.output}"
            assert time.monotonic() < give_up_at_s, f"in vain: {what}:\n{self.output}"
            time.sleep(0.05)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def up_command(folder: Path, port: int, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "baton.cli", "up", "--engine", "simulated", "--port", str(port)]
    # Memory is reserved for each worker's pool, which takes time in every test.
    return [*command, "--folder", str(folder), "--kv-pool-bytes", "0", *flags]


@contextmanager
def launched(
    folder: Path, *flags: str, shell: str = "", ready_timeout_s: float = READY_TIMEOUT_S
) -> Generator[Launcher]:
    """Run `baton up`; `shell`: inside a shell, as `make` does, with this as its last command."""
    port = free_port()
    command = up_command(folder, port, *flags)
    if shell:
        command = ["sh", "-c", f'"$@" & {shell}', "sh", *command]
    output_path = folder / f"output-{port}"
    with output_path.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    launcher = Launcher(process, output_path, port)
    seen: list[psutil.Process] = []
    try:
        launcher.wait_for("Ctrl-C ends everything", ready_timeout_s)
        seen = launcher.descendants()
        yield launcher
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stray in seen:
            if stray.is_running():
                stray.kill()
