"""The restart time of an index, and the gain from batches: `make bench-index-restart`. Real NATS and Redis.

Restart: a tree of 100,000 blocks, held by 8 workers in prompts of 64 blocks with a quarter shared, is read from Redis
and built. Inserts: events of one worker, with one block each and with 256, from JetStream through the index into Redis,
all in this process, until the last one is written; the publisher waits for each to be stored, as a worker does.
Placements while indexes are restarted, killed and stopped: `index_blind.py`. An index larger than its memory:
`index_cold.py`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from itertools import chain
from pathlib import Path

from baton_kvindex.config import IndexSettings
from baton_kvindex.durable import Batch, Journal, SavedWorker, WorkerChange, WorkerState
from baton_kvindex.index import ID_BYTES, Run
from baton_kvindex.radix import RadixIndex
from baton_kvindex.reconciler import Reconciler
from baton_kvindex.service import IndexService
from baton_kvindex.store import RedisStore

from baton import subjects
from baton.bus import NatsBus
from baton.clock import SystemClock
from baton.node.ports import system_ports
from baton.node.service import Node, serve
from baton.stop import Stop
from baton.telemetry import Metrics, Tracing
from benchmarks.index_blind import Phase, blind_placements
from benchmarks.index_cold import cold_rows, memory_bytes
from benchmarks.index_world import MODEL, events, servers, until
from benchmarks.report import Row, report

WORKERS, PROMPT_BLOCKS, SHARED_BLOCKS = 8, 64, 16
TREE_BLOCKS = 100_000
BATCH_BLOCKS = 256
SINGLE_EVENTS, BATCH_EVENTS = 2000, 400
ROUNDS = 5


async def restart_s(redis_url: str) -> tuple[float, int, float]:
    """Return the time to load the tree, its blocks, and the bytes in Redis per holding; the best of several rounds."""
    store = RedisStore(redis_url, clock=SystemClock(), prefix="restart", timeout_s=10.0)
    await store.claim(1)
    before = await memory_bytes(redis_url)
    shared = os.urandom(ID_BYTES * SHARED_BLOCKS)
    prompts = (TREE_BLOCKS - SHARED_BLOCKS) // (PROMPT_BLOCKS - SHARED_BLOCKS) // WORKERS
    state = WorkerState(generation=1, model_digest=MODEL, sequence=1)
    for number in range(WORKERS):
        own = [os.urandom(ID_BYTES * (PROMPT_BLOCKS - SHARED_BLOCKS)) for _ in range(prompts)]
        runs = [Run(parent=b"", blocks=shared + blocks) for blocks in own]
        change = WorkerChange(state=state, runs=runs, stored={}, removed=())
        await store.write(Batch(1, {f"w{number}": change}), 1)
    times: list[float] = []
    reconciler = Reconciler(RadixIndex, IndexSettings(), Journal(8192))
    for _ in range(ROUNDS):
        reconciler = Reconciler(RadixIndex, IndexSettings(), Journal(8192))
        began_s = time.perf_counter()
        await load(store, reconciler)
        times.append(time.perf_counter() - began_s)
    size = reconciler.size()
    bytes_each = (await memory_bytes(redis_url) - before) / size.holdings
    await store.close()
    return min(times), size.blocks, bytes_each


async def load(store: RedisStore, reconciler: Reconciler) -> None:
    """Load the stored state as an index does at its start."""

    async def take(worker: str, saved: SavedWorker) -> None:
        reconciler.restore_worker(worker, saved, 0.0)

    reconciler.begin(await store.load(take), 0.0)


async def inserts_per_s(nats_url: str, redis_url: str, blocks: int, count: int) -> float:
    """Return blocks per second from the first event to the last write."""
    settings = IndexSettings(redis_prefix=f"insert-{blocks}", write_interval_s=0.02, lost_after_s=3600.0)
    worker = f"w-{blocks}"
    bus, own = [await NatsBus.connect(nats_url, name=name) for name in ("bench", "kvindex")]
    node = Node(ports=system_ports(own), tracing=Tracing("kvindex"), metrics=Metrics("kvindex"))
    store = RedisStore(
        redis_url, clock=node.ports.clock, prefix=settings.redis_prefix, timeout_s=settings.redis_timeout_s
    )
    index = IndexService(settings, node, store)
    stop = Stop()
    running = asyncio.create_task(serve(index, stop))
    began_s = time.perf_counter()
    for number in range(1, count + 1):
        event = events(worker, number, os.urandom(ID_BYTES * blocks))
        await bus.append(subjects.KV_STREAM, subjects.kv_events(worker), event, message_id=f"{worker}/{number}")
    await until(lambda: (state := index.reconciler.state_of(worker)) is not None and state.sequence == count)
    # The index writes everything before it ends.
    stop.asked.set()
    await running
    took_s = time.perf_counter() - began_s
    await own.close()
    await bus.close()
    return blocks * count / took_s


def _blind_rows(phase: Phase) -> list[Row]:
    p99_s = statistics.quantiles(phase.times_s, n=100)[98]
    return [
        Row(name=f"blind placements {phase.name}", unit="share", ours=phase.blind_share),
        Row(name=f"a placement {phase.name}, p99", unit="s", ours=p99_s),
    ]


async def main() -> None:
    # The indexes' logs go where they do not disturb the table.
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        phases = await blind_placements(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        async with servers(Path(folder)) as (nats_url, redis_url):
            load_s, blocks, bytes_each = await restart_s(redis_url)
            single = await inserts_per_s(nats_url, redis_url, 1, SINGLE_EVENTS)
            batch = await inserts_per_s(nats_url, redis_url, BATCH_BLOCKS, BATCH_EVENTS)
            cold = await cold_rows(redis_url)
    rows = [
        Row(name=f"restart with {blocks} blocks", unit="s", ours=load_s),
        Row(name="Redis memory for each block of a worker", unit="bytes", ours=bytes_each),
        Row.against(f"inserts, {BATCH_BLOCKS} blocks to a message", "blocks/s", batch, single=single),
        *chain.from_iterable(map(_blind_rows, phases)),
        *cold,
    ]
    notes = f"{'; '.join(map(str, phases))}; load of the machine {os.getloadavg()[1]:.1f}"
    report("index_restart", rows, notes=notes)


if __name__ == "__main__":
    asyncio.run(main())
