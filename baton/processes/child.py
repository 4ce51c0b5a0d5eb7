"""Child processes of a parent that keeps them: none outlives the parent, however that ends.

Each child leads a session of its own, so a Ctrl-C at the terminal reaches the parent alone, which
then ends the children in order; and the kernel kills a child whose parent is gone (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.processes.probes import Probe

PR_SET_PDEATHSIG: Final = 1
_prctl = ctypes.CDLL(None).prctl

TAIL_LINES: Final = 15
KILLED_S: Final = 30.0
"""Longest wait for the end of a killed process: the kernel frees its memory first, and a driver may hold it up."""
POLL_S: Final = 0.5
"""Interval at which a process is looked at where the kernel cannot tell its end: no descriptor is free."""


def die_with_parent(parent_pid: int, with_signal: signal.Signals) -> None:
    """Have the kernel send `with_signal` to this process when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    if os.getppid() != parent_pid:
        # The parent ended before the call above, so the kernel will never say so.
        os.kill(os.getpid(), with_signal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process to start: its command, environment and probes."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    """The whole environment. Secrets travel here: every user of a machine can read a command line."""
    log_path: Path | None
    """File for its output; None: the parent's own output."""
    ready: Probe
    """Probe of whether it serves: its start has succeeded."""
    alive: Probe
    """Probe of whether it still reacts at all."""
    start_timeout_s: float
    stop_timeout_s: float = 10.0
    """Time to end by itself after SIGTERM."""
    sockets: Sequence[int] = ()
    """Descriptors that it inherits, under the same numbers."""


class Child:
    """One process of a `Program`, running or ended; can be started again."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False
        """Whether `terminate` has asked this process to end."""

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process. Call it on the main thread: PR_SET_PDEATHSIG watches the calling thread."""
        parent_pid, log_path = os.getpid(), self.program.log_path
        with nullcontext() if log_path is None else log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.program.command,
                env=self.program.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=self.program.sockets,
                # Safe here: the parent has one Python thread, so no lock can be held by another one at the fork.
                preexec_fn=lambda: die_with_parent(parent_pid, signal.SIGKILL),  # noqa: PLW1509
            )
        self._asked = False

    async def wait(self) -> int:
        """Wait for the end of the process and return its exit status; negative: the signal that ended it."""
        process = self._process
        assert process is not None, "wait before start"
        if process.poll() is None:
            loop = asyncio.get_running_loop()
            ended = asyncio.Event()
            try:
                descriptor = os.pidfd_open(process.pid)
            except OSError:
                while process.poll() is None:  # noqa: ASYNC110 - another process.
                    await asyncio.sleep(POLL_S)
                return process.wait()
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        return process.wait()

    def terminate(self) -> None:
        """Ask the process to end: SIGTERM, once. A second one would end a service that drains at once."""
        if self._process is not None and not self._asked:
            self._asked = True
            self._process.terminate()  # Nothing happens to one that has ended.

    async def stop(self) -> None:
        """End it: a last SIGTERM, then SIGKILL, also for what it left behind in its session's process group."""
        if self._process is None:
            return
        try:
            self._process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.program.stop_timeout_s):
                    await self.wait()
        finally:
            self.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(KILLED_S):
                    await self.wait()

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group. `wait` returns once it has ended."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of the log, indented."""
        if self.program.log_path is None:
            return ""
        with suppress(OSError):
            text = self.program.log_path.read_text(errors="replace")
            return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
        return ""


def describe_exit(status: int) -> str:
    """Say how a process ended: `was killed (SIGKILL)` or `ended with status 2`."""
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was killed ({signal.Signals(-status).name})"
    return f"was killed (signal {-status})"
