"""What vLLM runs first thing in each of its processes. Its connector, built in every one of them, binds them too."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from baton.engines.processes import ENGINE_MARK, bind_to_parent, end_at_once


def unname_shared_memory(folder: Path = Path("/dev/shm")) -> None:
    """Take the names off the memory in which a CPU's tensor-parallel ranks add up, once all of them have mapped it.

    vLLM does it only where its ranks end by themselves; each other end would leave megabytes until the machine's.
    """
    if identity := os.environ.get("VLLM_DIST_IDENT"):
        for file in folder.glob(f"{glob.escape(identity)}-*-cpushm_*"):
            file.unlink(missing_ok=True)


def plugin() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    if os.environ.get(ENGINE_MARK):
        bind_to_parent()
        end_at_once()
