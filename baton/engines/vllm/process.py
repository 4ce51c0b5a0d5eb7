"""Plug-in that vLLM runs first in each of its processes. Its connector, built in each, binds them to us, too."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from baton.engines.processes import ENGINE_MARK, bind_to_parent, end_at_once
from baton.engines.vllm.grammar import advance_grammars
from baton.engines.vllm.lending import add_lending


def unname_shared_memory(folder: Path = Path("/dev/shm")) -> None:
    """Unlink the shared memory in which a CPU's tensor-parallel ranks add up, once all of them have mapped it.

    vLLM does it only if its ranks end by themselves; any other end would leave megabytes until the machine restarts.
    """
    if identity := os.environ.get("VLLM_DIST_IDENT"):
        for file in folder.glob(f"{glob.escape(identity)}-*-cpushm_*"):
            file.unlink(missing_ok=True)


def plugin() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    if os.environ.get(ENGINE_MARK):
        bind_to_parent()
        end_at_once()
        advance_grammars()
        add_lending()
