"""What vLLM runs first thing in each of its processes. Its connector, built in every one of them, binds them too."""

from __future__ import annotations

import os

from baton.engines.processes import ENGINE_MARK, bind_to_parent


def plugin() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    if os.environ.get(ENGINE_MARK):
        bind_to_parent()
