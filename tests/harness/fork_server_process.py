"""The process of a fork server: imports what a kind of process needs, then forks the processes that are asked for."""

from __future__ import annotations

import _posixsubprocess
import atexit
import ctypes
import fcntl
import gc
import importlib
import logging
import os
import pickle
import resource
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tests.harness.fork_server import ForkServer, Kind, Request

MODULES: Final[Mapping[Kind, Sequence[str]]] = {
    "services": (
        *(f"baton_{name}.__main__" for name in ("gateway", "scheduler", "kvindex", "prefill", "decode")),
        *("baton.engines.simulated.engine", "transformers.tokenization_utils_tokenizers", "uvloop"),
    ),
    "vllm": (
        *("baton_prefill.__main__", "baton_decode.__main__", "baton.engines.vllm.engine", "baton.connectors.vllm"),
        *("baton.connectors.vllm_extension", "vllm.v1.engine.async_llm", "vllm.v1.engine.core"),
        "vllm.v1.worker.cpu_worker",
    ),
    "sglang": (
        *("baton_prefill.__main__", "baton_decode.__main__", "baton.engines.sglang.engine", "baton.connectors.sglang"),
        *("baton.connectors.sglang_cache", "sglang.srt.entrypoints.engine"),
    ),
}
DESCRIPTORS_MAX: Final = 64
PR_SET_PDEATHSIG: Final = 1

_execute: Final[Any] = _posixsubprocess.fork_exec


def main(kind: Kind, descriptor: int) -> None:
    """Run a fork server until its connection ends; then, in each process that it has forked, what that is for."""
    import_modules(kind)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"a fork would lose {threads - 1} threads that the imports for {kind} have started"
    gc.collect()
    gc.freeze()
    # A Ctrl-C is for the tests, which end all.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    while True:
        request, received = serve(connection)
        if kind == "services":
            break
        ours, theirs = socket.socketpair()
        if os.fork():
            theirs.close()
            # Out of the way of those that this process is to get.
            above = max(request.descriptors) + 1
            ours = socket.socket(fileno=fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, above))
            _posixsubprocess.fork_exec = partial(_fork_or_execute, ForkServer(ours))
            break
        # The seed holds nothing of what its parent is given.
        ours.close()
        for each in received:
            os.close(each)
        connection = theirs
    signal.signal(signal.SIGINT, on_interrupt)
    become(request, received)
    run(*request.arguments)


def import_modules(kind: Kind) -> None:
    with ExitStack() as stack:
        if kind != "services":
            # Its first call looks for the memory of titles beside that of the variables, which move when one is set.
            importlib.import_module("setproctitle").getproctitle()
            Path("/proc/self/comm").write_text(Path(sys.executable).name)
            # The environment of what an engine spawns.
            options = importlib.import_module("baton.engines.options")
            dialect = importlib.import_module(f"baton.engines.{kind}.options").DIALECT
            stack.enter_context(options.engine_environment(dialect, dialect.profiles[options.Device.CPU]))
        for name in MODULES[kind]:
            importlib.import_module(name)
            if name.endswith(".__main__"):
                # It will be run, not imported.
                del sys.modules[name]
    # SGLang warns while it is imported, which gives the root a handler, and a service would not set up its own then.
    logging.root.handlers.clear()


def serve(connection: socket.socket) -> tuple[Request, list[int]]:
    """Fork what is asked for. Returns in each process that was forked, with the request and its descriptors."""
    with connection:
        while True:
            head, received, _, _ = socket.recv_fds(connection, 8, DESCRIPTORS_MAX)
            if not head:
                os._exit(0)
            request: Request = pickle.loads(connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
            between = os.fork()
            if between == 0:
                between = os.getpid()
                if os.fork():
                    os._exit(0)
                while os.getppid() == between:
                    time.sleep(0.0002)
                if os.getppid() != request.parent:
                    os._exit(1)
                connection.sendall(os.getpid().to_bytes(8, "big"))
                return request, received
            os.waitpid(between, 0)
            for descriptor in received:
                os.close(descriptor)


def become(request: Request, received: Sequence[int]) -> None:
    """Give this process the descriptors, limits, environment and folder that it was asked for with."""
    # Out of the way first: one may have the number that another is to get.
    above = max(*request.descriptors, *received) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(moved, request.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, request.files_max)
    if request.bound:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != request.parent:
            os._exit(1)
    own_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request.environ)
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:] = [*paths, *(path for path in sys.path[1:] if path not in own_paths)]
    importlib.invalidate_caches()
    os.chdir(request.folder)
    # Python does the same for its own generator after a fork.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if "torch" in sys.modules:
        atexit.register(_fall_silent)


def run(first: str, *rest: str) -> None:
    """Run Python with these arguments: `-m module …`, `-c code …` or `script …`."""
    sys.orig_argv[1:] = (first, *rest)
    sys.modules["__main__"] = ModuleType("__main__")
    match first:
        case "-m":
            sys.argv, sys.path[0] = ["-m", *rest[1:]], str(Path.cwd())
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        case "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
            exec(rest[0], vars(sys.modules["__main__"]))
        case _:
            sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
            runpy.run_path(first, run_name="__main__")


def _fork_or_execute(seed: ForkServer, command: Sequence[str | bytes], *rest: Any) -> int:
    """Stand in for the standard library's `fork_exec`: what multiprocessing spawns comes from the seed."""
    words = [os.fsdecode(word) for word in command]
    if (words[1], words[-1]) != ("-c", "--multiprocessing-fork"):
        return _execute(command, *rest)
    descriptors = {number: number for number in (0, 1, 2, *rest[2])}
    return seed.fork(words[1:], os.environ, descriptors, folder=str(Path.cwd()))


def _fall_silent() -> None:
    """Drop what libraries say at the very end of objects that are still alive: those of the fork server always are."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
