"""Ends engine processes with the process that started them, however that one ends.

Engines run their scheduler and workers as children. These notice a parent that ends in order, but not always
one that is killed while they load a model or compute, and would then keep their memory. Linux can do it for
them: a process may ask to be killed when its parent dies. `bind_to_parent` runs in each of these processes as
early as possible, from the engine's own plug-in hook.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from typing import Final

ENGINE_MARK: Final = "BATON_ENGINE"
"""Variable that only children of our engines have, so that plug-ins leave other programs alone."""

_PR_SET_PDEATHSIG: Final = 1


def bind_to_parent() -> None:
    """Have the kernel kill this process when its parent dies. Does nothing in a process that was not spawned.

    The kernel means the parent's *thread*: the thread that spawns an engine must stay alive.
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


def end_at_once() -> None:
    """Have this process leave its memory to the kernel when it ends. Does nothing in one that was not spawned.

    Python would visit all objects that an engine's import has made, which takes seconds, and their libraries would
    each log a page of complaints about objects that are still alive.
    """
    if multiprocessing.parent_process() is not None:
        atexit.register(_abandon_objects)


def _abandon_objects() -> None:
    gc.freeze()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
