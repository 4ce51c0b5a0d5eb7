"""Engine processes die with the process that started them, however that one ends.

vLLM runs its scheduler (`EngineCore`) and its workers as children. They notice a parent that ends in
order, but not one that is killed while they load a model or compute, and would then keep their memory.
Linux can do it for them: a process may ask to be killed when its parent dies.

`bind_to_parent` runs in each of these processes: from vLLM's plug-in hook where Baton is installed (the
entry point `vllm.general_plugins`, the earliest moment), and from the connector's constructor, which
vLLM builds in every one of its processes.
"""

from __future__ import annotations

import ctypes
import glob
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Final

ENGINE_MARK: Final = "BATON_ENGINE"
"""Set for the children of our engines only, so that the plug-in leaves other vLLM programs alone."""

_PR_SET_PDEATHSIG: Final = 1


def bind_to_parent() -> None:
    """Have the kernel kill this process when its parent dies. Does nothing in a process that was not spawned.

    The kernel means the parent's *thread*: whoever spawns an engine must keep that thread alive.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the call: then no signal will come.
    if os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)


def unname_shared_memory(folder: Path = Path("/dev/shm")) -> None:
    """Take the names off the memory in which a CPU's tensor-parallel ranks add up, once all of them have mapped it.

    vLLM does it only where its ranks end by themselves; each other end would leave megabytes until the machine's.
    """
    if identity := os.environ.get("VLLM_DIST_IDENT"):
        for file in folder.glob(f"{glob.escape(identity)}-*-cpushm_*"):
            file.unlink(missing_ok=True)


def plugin() -> None:
    """Entry point of the group `vllm.general_plugins`; vLLM calls it first thing in each of its processes."""
    if os.environ.get(ENGINE_MARK):
        bind_to_parent()
