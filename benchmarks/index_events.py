"""Conversion of a trace of prompts into index events: stores and removals of blocks, per worker, in batches.

    hash_ids of a request (512 tokens each) ──▶ 16 blocks of 32 tokens each
    worker: by the first id at which requests differ, so that requests with a shared prefix meet the same cache
    its cache: least recently used blocks go first, within a prompt from the end, as engines evict
    what the cache lacks is stored, what it evicts is removed, in runs of at most `BATCH_BLOCKS`

Standard library only, so that a peer's interpreter can read it too.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TRACE: Final = Path(__file__).parents[1] / "simulator/baton_simulator/traffic/packed/mooncake_conversation.jsonl.gz"
ID_BYTES: Final = 16
BLOCKS_PER_TRACE_ID: Final = 16
BATCH_BLOCKS: Final = 256
CACHED_BLOCKS: Final = 1 << 19
"""Blocks cached by all workers together: a third of the trace's different blocks."""
LARGE_COPIES: Final = 7
"""Number of copies of the trace, each with its own ids and nothing evicted: 10.8 million different blocks."""
TRUNKS, TRUNK_BLOCKS, OWN_BLOCKS = 24, 256, 16


@dataclass(frozen=True, slots=True)
class Event:
    worker: int
    parent: bytes | None
    """None for a removal."""
    blocks: bytes


@dataclass(frozen=True, slots=True)
class Workload:
    workers: int
    events: list[Event]
    prompts: list[bytes]
    """A sample of the prompts, matched after all events are applied."""
    holdings: int
    """Blocks held at the end, summed over workers."""


def make_workload(name: str) -> Workload:
    """Return the workload `trace-W`, `split-W` or `large-W`, for W workers."""
    kind, _, workers = name.partition("-")
    return {"trace": _trace, "split": _split, "large": _large}[kind](int(workers))


def _trace(workers: int) -> Workload:
    requests = list(_requests())
    return _through_caches(workers, requests, CACHED_BLOCKS // workers)


def _large(workers: int) -> Workload:
    events: list[Event] = []
    prompts: list[bytes] = []
    seen: set[tuple[int, bytes]] = set()
    holdings = 0
    step_bytes = ID_BYTES * BLOCKS_PER_TRACE_ID
    for copy in range(LARGE_COPIES):
        for number, (key, prompt) in enumerate(_requests(salt=copy)):
            worker = _worker_of(key, workers)
            at = 0
            while at < len(prompt) and (worker, prompt[at : at + ID_BYTES]) in seen:
                at += step_bytes
            seen.update((worker, prompt[new : new + ID_BYTES]) for new in range(at, len(prompt), step_bytes))
            events += _stores(worker, prompt, at)
            holdings += (len(prompt) - at) // ID_BYTES
            if number % 40 == 0:
                prompts.append(prompt)
    return Workload(workers, events, prompts, holdings)


def _split(workers: int) -> Workload:
    """Every edge cut at every block: prompts branch off a trunk at each of its blocks, by workers in turn.

    They are stored; the blocks that only they have are removed, then stored again.
    """
    events: list[Event] = []
    trunks: list[bytes] = []
    for number in range(TRUNKS):
        trunk = _ids(f"trunk {number}", TRUNK_BLOCKS)
        for length in range(1, TRUNK_BLOCKS + 1):
            own = _ids(f"own {number} {length}", OWN_BLOCKS)
            events.append(Event((number + length) % workers, b"", trunk[: ID_BYTES * length] + own))
        trunks.append(trunk)
    removals = [Event(event.worker, None, event.blocks[-ID_BYTES * OWN_BLOCKS :]) for event in events]
    held = {
        (event.worker, event.blocks[at : at + ID_BYTES])
        for event in events
        for at in range(0, len(event.blocks), ID_BYTES)
    }
    return Workload(workers, events + removals + events, trunks, len(held))


def _requests(salt: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield for each request the key that selects its worker, and the blocks of its prompt."""
    expanded: dict[int, bytes] = {}
    with gzip.open(TRACE, "rt") as lines:
        for line in lines:
            hash_ids: list[int] = json.loads(line)["hash_ids"]
            for each in hash_ids:
                if each not in expanded:
                    expanded[each] = _ids(f"{salt} {each}", BLOCKS_PER_TRACE_ID)
            yield (hash_ids[1] if len(hash_ids) > 1 else 0), b"".join(expanded[each] for each in hash_ids)


def _ids(seed: str, count: int) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(ID_BYTES * count)


def _worker_of(key: int, workers: int) -> int:
    return int.from_bytes(_ids(f"worker {key}", 1)[:8], "big") % workers


def _stores(worker: int, prompt: bytes, at: int) -> Iterator[Event]:
    """Yield the prompt from byte `at` on, in runs."""
    for start in range(at, len(prompt), ID_BYTES * BATCH_BLOCKS):
        parent = prompt[start - ID_BYTES : start] if start else b""
        yield Event(worker, parent, prompt[start : start + ID_BYTES * BATCH_BLOCKS])


def _through_caches(workers: int, requests: list[tuple[int, bytes]], cached_blocks: int) -> Workload:
    caches = [OrderedDict[bytes, None]() for _ in range(workers)]
    events: list[Event] = []
    for key, prompt in requests:
        worker = _worker_of(key, workers)
        cache = caches[worker]
        ids = [prompt[at : at + ID_BYTES] for at in range(0, len(prompt), ID_BYTES)]
        held = next((count for count, each in enumerate(ids) if each not in cache), len(ids))
        events += _stores(worker, prompt, held * ID_BYTES)
        for each in reversed(ids):
            cache[each] = None
            cache.move_to_end(each)
        gone = [cache.popitem(last=False)[0] for _ in range(len(cache) - cached_blocks)]
        for at in range(0, len(gone), BATCH_BLOCKS):
            events.append(Event(worker, None, b"".join(gone[at : at + BATCH_BLOCKS])))
    step = max(1, len(requests) // 1000)
    return Workload(workers, events, [prompt for _, prompt in requests[::step]], sum(map(len, caches)))
