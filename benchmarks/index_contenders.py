"""One index under a workload, in a process of its own: reads a workload's name per line, writes its figures as JSON.

`python -m benchmarks.index_contenders tree|flat|dictionary|dynamo`. Dynamo runs under its own interpreter, so Baton's
modules are imported only where they are needed. Keys are encoded beforehand, so only each index's Python call is
timed: wall-clock time and processor time of all threads, which a busy machine distorts less. A reader and the writer
beside it are each pinned to a core.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.index_events import ID_BYTES, Event, Workload, make_workload

MATCHES = 3000
RESTED_S, BUSY_S = 0.5, 1.5
PAUSE_S = 100e-6
"""Pause between two matches beside a writer, which needs its turns of the interpreter's one lock. After a pause a
match finds its memory in slower caches; `rested` measures that cost alone, without a writer."""
WRITTEN_BLOCKS = 256


class Contender(Protocol):
    threads: bool
    """Whether the index may be read while it is written."""

    def encode(self, event: Event) -> Any: ...
    def apply(self, encoded: Any) -> None: ...
    def encode_prompt(self, prompt: bytes) -> Any: ...
    def match(self, prompt: Any) -> object: ...
    def settle(self) -> None:
        """Return once all applied events are visible."""
        ...

    def bytes(self) -> int:
        """Return the memory that the index itself reports, in bytes; 0 if it reports none."""
        ...


class Ours:
    """The radix tree, or the flat table built of its parts."""

    threads = True

    def __init__(self, kind: str) -> None:
        from baton_kvindex.radix import RadixIndex

        from benchmarks.flat_index import FlatIndex

        self._index = {"tree": RadixIndex, "flat": FlatIndex}[kind]()

    def encode(self, event: Event) -> tuple[str, bytes | None, bytes]:
        return f"worker-{event.worker}", event.parent, event.blocks

    def apply(self, encoded: tuple[str, bytes | None, bytes]) -> None:
        worker, parent, blocks = encoded
        if parent is None:
            self._index.remove(worker, blocks)
        else:
            self._index.store(worker, parent, blocks)

    def encode_prompt(self, prompt: bytes) -> bytes:
        return prompt

    def match(self, prompt: bytes) -> dict[str, int]:
        return self._index.match(prompt)

    def settle(self) -> None:
        pass

    def bytes(self) -> int:
        return self._index.footprint().bytes


class Dictionary:
    """The obvious implementation: a dictionary from block to the workers that hold it."""

    threads = False

    def __init__(self) -> None:
        self._holders: dict[bytes, set[int]] = {}

    def encode(self, event: Event) -> tuple[int, bool, bytes]:
        return event.worker, event.parent is None, event.blocks

    def apply(self, encoded: tuple[int, bool, bytes]) -> None:
        worker, is_removal, blocks = encoded
        for at in range(0, len(blocks), ID_BYTES):
            block = blocks[at : at + ID_BYTES]
            if not is_removal:
                self._holders.setdefault(block, set()).add(worker)
            elif (holders := self._holders.get(block)) is not None:
                holders.discard(worker)
                if not holders:
                    del self._holders[block]

    def encode_prompt(self, prompt: bytes) -> bytes:
        return prompt

    def match(self, prompt: bytes) -> dict[int, int]:
        leading: dict[int, int] = {}
        alive: set[int] | None = None
        for at in range(0, len(prompt), ID_BYTES):
            holders = self._holders.get(prompt[at : at + ID_BYTES], set())
            if alive is None:
                alive = set(holders)
            elif not alive <= holders:
                leading.update(dict.fromkeys(alive - holders, at // ID_BYTES))
                alive &= holders
            if not alive:
                return leading
        return leading | dict.fromkeys(alive or (), len(prompt) // ID_BYTES)

    def settle(self) -> None:
        pass

    def bytes(self) -> int:
        return 0


class Dynamo:
    """`dynamo.llm.RadixTree`: ids of 64 bits, events as JSON, applied on a thread of its own."""

    threads = True

    def __init__(self) -> None:
        from dynamo.llm import RadixTree  # pyright: ignore

        self._tree: Any = RadixTree()
        self._number = 0

    def encode(self, event: Event) -> tuple[int, bytes]:
        hashes = self.encode_prompt(event.blocks)
        self._number += 1
        if event.parent is None:
            data: dict[str, Any] = {"removed": {"block_hashes": hashes}}
        else:
            parent = self.encode_prompt(event.parent)[0] if event.parent else None
            blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes]
            data = {"stored": {"parent_hash": parent, "blocks": blocks}}
        return event.worker, json.dumps({"event_id": self._number, "data": data, "dp_rank": 0}).encode()

    def apply(self, encoded: tuple[int, bytes]) -> None:
        self._tree.apply_event(*encoded)

    def encode_prompt(self, prompt: bytes) -> list[int]:
        return [int.from_bytes(prompt[at : at + 8], "little") for at in range(0, len(prompt), ID_BYTES)]

    def match(self, prompt: list[int]) -> object:
        return self._tree.find_matches(prompt).scores

    def settle(self) -> None:
        self._tree.find_matches([0])

    def bytes(self) -> int:
        return 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentiles(prefix: str, times_ns: list[int]) -> dict[str, float]:
    times_ns.sort()
    return {
        f"{prefix}_p50_us": times_ns[len(times_ns) // 2] / 1e3,
        f"{prefix}_p99_us": times_ns[len(times_ns) * 99 // 100] / 1e3,
    }


def timed_match(contender: Contender, prompt: Any) -> int:
    began_ns = time.perf_counter_ns()
    contender.match(prompt)
    return time.perf_counter_ns() - began_ns


def replay(contender: Contender, events: Sequence[Event]) -> dict[str, float]:
    """Apply all events in order; return the speed of each kind. Each turn of one kind is timed as a whole."""
    encoded = [(event.parent is not None, len(event.blocks) // ID_BYTES, contender.encode(event)) for event in events]
    spent_s, spent_cpu_s, blocks = [0.0, 0.0], [0.0, 0.0], [0, 0]
    # Free memory left over from making the workload would hide what the index allocates from now on.
    ctypes.CDLL(None).malloc_trim(0)
    before_bytes = resident_bytes()
    at = 0
    while at < len(encoded):
        kind, began_s, began_cpu_s = encoded[at][0], time.perf_counter(), time.process_time()
        while at < len(encoded) and encoded[at][0] is kind:
            contender.apply(encoded[at][2])
            blocks[kind] += encoded[at][1]
            at += 1
        if at == len(encoded):
            contender.settle()
        spent_s[kind] += time.perf_counter() - began_s
        spent_cpu_s[kind] += time.process_time() - began_cpu_s
    return {
        "stored_per_s": blocks[True] / spent_s[True],
        "stored_per_cpu_s": blocks[True] / spent_cpu_s[True],
        "removed_per_s": blocks[False] / spent_s[False] if blocks[False] else 0.0,
        "removed_per_cpu_s": blocks[False] / spent_cpu_s[False] if blocks[False] else 0.0,
        "resident_bytes": float(resident_bytes() - before_bytes),
    }


def match_idle(contender: Contender, prompts: Sequence[Any]) -> dict[str, float]:
    times_ns = [timed_match(contender, prompts[number % len(prompts)]) for number in range(MATCHES)]
    return percentiles("idle", times_ns) | {"matched_per_s": MATCHES * 1e9 / sum(times_ns)}


def match_after_pauses(contender: Contender, prompts: Sequence[Any], lasting_s: float) -> list[int]:
    """Match on the first core; return the times."""
    times_ns: list[int] = []
    cores = os.sched_getaffinity(0)
    began_s = time.perf_counter()
    os.sched_setaffinity(0, {min(cores)})
    try:
        while time.perf_counter() - began_s < lasting_s or len(times_ns) < 300:
            times_ns.append(timed_match(contender, prompts[len(times_ns) % len(prompts)]))
            time.sleep(PAUSE_S)
    finally:
        os.sched_setaffinity(0, cores)
    return times_ns


def match_while_writing(contender: Contender, workload: Workload, prompts: Sequence[Any]) -> dict[str, float]:
    """Match beside a thread that stores runs of its own and removes them again, as fast as it can."""
    runs: list[tuple[Any, Any]] = []
    for number in range(200):
        run = os.urandom(ID_BYTES * WRITTEN_BLOCKS)
        worker = number % workload.workers
        runs.append((contender.encode(Event(worker, b"", run)), contender.encode(Event(worker, None, run))))
    stop = threading.Event()
    written = 0
    last_core = max(os.sched_getaffinity(0))

    def write() -> None:
        nonlocal written
        os.sched_setaffinity(0, {last_core})
        while not stop.is_set():
            for stored, _ in runs:
                contender.apply(stored)
            for _, removed in runs:
                contender.apply(removed)
            written += 2 * len(runs) * WRITTEN_BLOCKS

    writer = threading.Thread(target=write)
    began_s = time.perf_counter()
    writer.start()
    try:
        times_ns = match_after_pauses(contender, prompts, BUSY_S)
        spent_s = time.perf_counter() - began_s
    finally:
        stop.set()
        writer.join()
    return percentiles("busy", times_ns) | {"busy_written_per_s": written / spent_s}


def measure(make: Callable[[], Contender], workload: Workload) -> dict[str, float]:
    contender = make()
    gc.collect()
    gc.disable()
    figures = replay(contender, workload.events)
    figures |= {"counted_bytes": float(contender.bytes()), "holdings": float(workload.holdings)}
    prompts = [contender.encode_prompt(prompt) for prompt in workload.prompts]
    figures |= match_idle(contender, prompts)
    figures |= percentiles("rested", match_after_pauses(contender, prompts, RESTED_S))
    if contender.threads:
        figures |= match_while_writing(contender, workload, prompts)
    gc.enable()
    return figures


def main() -> None:
    kind = sys.argv[1]
    make: Callable[[], Contender] = {"dynamo": Dynamo, "dictionary": Dictionary}.get(kind, lambda: Ours(kind))
    name, workload = "", None
    for line in sys.stdin:
        if workload is None or line.strip() != name:
            name = line.strip()
            workload = make_workload(name)
        print(json.dumps(measure(make, workload)), flush=True)


if __name__ == "__main__":
    main()
