"""Processor time and memory of the processes that make up a server, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

Threads = Mapping[tuple[int, int], int]
"""Nanoseconds of processor time by (process, thread)."""


def family(roots: Iterable[int]) -> list[int]:
    """Return the processes and all their descendants."""
    found = [psutil.Process(root) for root in roots]
    return [one.pid for each in found for one in (each, *each.children(recursive=True))]


def threads(pids: Iterable[int]) -> Threads:
    """Return the processor time of each thread: in nanoseconds, unlike that of a process, which is in ticks."""
    times: dict[tuple[int, int], int] = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # A thread may end at any time.
                times[pid, int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return times


def used_s(before: Threads, after: Threads) -> float:
    """Return the processor time between two readings; that of threads which ended meanwhile is lost."""
    return sum(used_ns - before.get(thread, 0) for thread, used_ns in after.items()) / 1e9


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes; what several share counts once."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)


def pin(pids: Iterable[int], cores: Sequence[int]) -> None:
    """Keep all threads of the processes on these cores, and those that they start from now on."""
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cores)
