"""Starts Python processes as forks of one that has imported what they need: imports are most of what a start costs.

    environ = forked(os.environ, "services")
    subprocess.Popen([python, "-m", module, …], env=environ)          # or asyncio.create_subprocess_exec

The caller keeps its `Popen` or asyncio `Process`, because the new process becomes its own child: the fork server forks
twice, and when the process in between ends, the kernel gives the orphan to the next subreaper above it, which the
caller is for that moment.

    test process ── fork server         one for each interpreter, kind and environment (fork_server_process.py)
               └─── engine ── seed      a fork of the engine before it ran: the fork server of what it spawns
                         └─── scheduler

What differs from a process that was executed:
- modules of its kind are imported before it starts, and its log lacks what they say meanwhile;
- torch has the number of threads that Baton gives to what an engine spawns, also in the engine's own process;
- /proc has the fork server's command line; priority and processor affinity are the fork server's;
- the kernel kills it when the test process dies, and an engine has one child more, its seed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import resource
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

Kind = Literal["services", "vllm", "sglang"]

ROOT: Final = Path(__file__).resolve().parents[2]
MARK: Final = "BATON_TEST_FORK"
"""Variable with the kind of process to fork; the process itself does not get it."""
VOLATILE: Final = ("BATON_", "PYTEST_", "FAILING_WORKER_", "PYTHONPATH")
"""Beginnings of variables that no import reads. A process in which others differ has another fork server."""
PR_SET_CHILD_SUBREAPER: Final = 36

_prctl: Final = ctypes.CDLL(None).prctl
_execute: Final = cast("Callable[..., int]", subprocess._fork_exec)  # pyright: ignore
_fork_servers: Final[dict[object, ForkServer]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A Python process to fork."""

    arguments: tuple[str, ...]
    environ: dict[str, str]
    folder: str
    parent: int
    descriptors: tuple[int, ...]
    """Numbers of the descriptors that are sent along."""
    files_max: tuple[int, int]
    """Soft and hard limit of open files."""
    bound: bool
    """Whether the kernel is to kill it when its parent dies."""


def forked(environ: Mapping[str, str], kind: Kind = "services") -> dict[str, str]:
    """Return the environment for a Python process that is to be forked when it is started from here."""
    subprocess._fork_exec = _fork_or_execute  # pyright: ignore
    subprocess._USE_POSIX_SPAWN = False  # pyright: ignore  # Python 3.13 would seldom come here.
    return {**environ, MARK: kind}


def _fork_or_execute(command: Sequence[str | bytes], *rest: Any) -> int:
    """Stand in for the standard library's `fork_exec` (Python 3.11 to 3.13)."""
    _, _, _, folder, variables, stdin, _, _, stdout, _, stderr, *_ = rest
    environ = dict(os.fsdecode(each).split("=", 1) for each in variables or ())
    kind: Any = environ.pop(MARK, None)
    if kind is None:
        return _execute(command, *rest)
    python, *arguments = map(os.fsdecode, command)
    lasting = frozenset(variable for variable in environ.items() if not variable[0].startswith(VOLATILE))
    server = _fork_servers.get((python, kind, lasting))
    if server is None:
        server = _fork_servers[python, kind, lasting] = start_fork_server(python, kind, environ)
    descriptors = {number: number if own < 0 else own for number, own in enumerate((stdin, stdout, stderr))}
    return server.fork(arguments, environ, descriptors, folder=os.fsdecode(folder or Path.cwd()), bound=True)


def start_fork_server(python: str, kind: Kind, environ: Mapping[str, str]) -> ForkServer:
    """Start a fork server, which ends with this process."""
    ours, theirs = socket.socketpair()
    program = f"from tests.harness.fork_server_process import main; main({kind!r}, {theirs.fileno()})"
    # OpenBLAS would start threads when numpy is imported.
    own = {"OPENBLAS_NUM_THREADS": "1", **environ}
    with theirs:
        process = subprocess.Popen(
            [python, "-c", program], cwd=ROOT, env=own, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ForkServer(ours)


class ForkServer:
    """The side of a fork server that asks for processes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def fork(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        descriptors: Mapping[int, int],
        *,
        folder: str,
        bound: bool = False,
    ) -> int:
        """Return the id of a new child. `descriptors`: ours, by the number that each has there."""
        request = Request(
            arguments=tuple(arguments),
            environ=dict(environ),
            folder=folder,
            parent=os.getpid(),
            descriptors=tuple(descriptors),
            files_max=resource.getrlimit(resource.RLIMIT_NOFILE),
            bound=bound,
        )
        with self._lock:
            _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                process = self._ask(pickle.dumps(request), list(descriptors.values()))
            except BaseException:
                # The answer may still come, and the next request would take it for its own.
                self._connection.close()
                raise
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return process

    def _ask(self, request: bytes, descriptors: list[int]) -> int:
        answer = b""
        with suppress(ConnectionError):
            socket.send_fds(self._connection, [len(request).to_bytes(8, "big")], descriptors)
            self._connection.sendall(request)
            answer = self._connection.recv(8, socket.MSG_WAITALL)
        if not answer:
            raise ChildProcessError("the fork server has ended")
        return int.from_bytes(answer, "big")
