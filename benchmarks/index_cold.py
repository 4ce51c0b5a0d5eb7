"""The cost of an index larger than its memory. Part of `make bench-index-restart`.

Prompts of 256 blocks behind 16 shared ones, half of them matched again, with memory for a quarter of them. Then some
prompts that are in memory and some that are cold are matched one at a time, as the service does it.
"""

from __future__ import annotations

import os
import statistics
import time

import redis.asyncio as redis
from baton_kvindex.cold import BLOCK_BYTES, ColdIndex
from baton_kvindex.config import IndexSettings
from baton_kvindex.durable import Journal
from baton_kvindex.index import ID_BYTES
from baton_kvindex.reconciler import Reconciler
from baton_kvindex.spill import Spill
from baton_kvindex.store import RedisStore

from baton.bus import MemoryBus, MemoryNetwork
from baton.clock import SystemClock
from baton.node.ports import system_ports
from benchmarks.index_world import MODEL, events
from benchmarks.report import Row

PROMPTS, PROMPT_BLOCKS, SHARED_BLOCKS = 2000, 256, 16
ASKED = 200
WORKER = "w"


async def cold_rows(redis_url: str) -> list[Row]:
    store = RedisStore(redis_url, clock=SystemClock(), prefix="cold", timeout_s=10.0)
    settings = IndexSettings(memory_bytes_max=PROMPTS * PROMPT_BLOCKS * BLOCK_BYTES // 4, cold_timeout_s=10.0)
    reconciler = Reconciler(ColdIndex, IndexSettings(), Journal(1))
    ports = system_ports(MemoryBus(MemoryNetwork()))
    spill = Spill(ports=ports, store=store.cold("bench"), reconciler=reconciler, settings=settings)
    before_bytes = await memory_bytes(redis_url)
    shared = os.urandom(ID_BYTES * SHARED_BLOCKS)
    prompts = [shared + os.urandom(ID_BYTES * PROMPT_BLOCKS) for _ in range(PROMPTS)]
    for number, prompt in enumerate(prompts):
        reconciler.on_events(events(WORKER, number + 1, prompt), number, 0.0)
        if number % 2:
            reconciler.match(MODEL, prompt)
        if number % 8 == 0:
            await spill.make_room()
    await spill.make_room()
    (index,) = reconciler.models().values()
    assert isinstance(index, ColdIndex)
    tree_bytes = index.footprint().bytes
    each_bytes = (await memory_bytes(redis_url) - before_bytes) / index.cold_blocks
    cold = [prompt for prompt in prompts if reconciler.match(MODEL, prompt).held[WORKER] == SHARED_BLOCKS]
    hot = [prompt for prompt in prompts if prompt not in set(cold)]
    times_s = {
        name: [await _match_s(reconciler, spill, prompt) for prompt in some[:ASKED]]
        for name, some in (("hot", hot), ("cold", cold))
    }
    await spill.close()
    await store.close()
    rows = [
        Row(name="Redis memory for each cold block", unit="bytes", ours=each_bytes),
        Row(name="memory of the tree, of its bound", unit="share", ours=tree_bytes / settings.memory_bytes_max),
    ]
    for name, times in times_s.items():
        for percent in (50, 99):
            figure = statistics.quantiles(times, n=100)[percent - 1] * 1e6
            rows.append(Row(name=f"a {name} prompt of {PROMPT_BLOCKS} blocks, p{percent}", unit="µs", ours=figure))
    return rows


async def _match_s(reconciler: Reconciler, spill: Spill, prompt: bytes) -> float:
    began_s = time.perf_counter()
    match = await spill.complete(reconciler.match(MODEL, prompt), MODEL, prompt)
    assert set(match.held.values()) == {SHARED_BLOCKS + PROMPT_BLOCKS}
    return time.perf_counter() - began_s


async def memory_bytes(redis_url: str) -> int:
    async with redis.Redis.from_url(redis_url) as client:  # pyright: ignore[reportUnknownMemberType]
        info = await client.info("memory")  # pyright: ignore[reportUnknownMemberType]
    return int(info["used_memory"])
