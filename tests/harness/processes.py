"""Looks at other processes, which may end at any moment."""

from __future__ import annotations

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether the process has not ended; one that has may still have to be reaped by its parent or init."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> list[str]:
    """Return the words of the command line; none once the process has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
