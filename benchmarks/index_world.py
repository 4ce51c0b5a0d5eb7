"""The setting of the index benchmarks: NATS, Redis and services as processes, and a worker with a growing cache."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from baton_kvindex.index import link

from baton import subjects
from baton.bus import Bus, Delivery
from baton.cli.servers import LOOPBACK, free_port, nats_server, redis_server
from baton.errors import BusUnavailable
from baton.messages.base import WorkerAddress
from baton.messages.index import BlocksStored, KvEvents, ShadowPage, ShadowQuery
from baton.messages.workers import Fingerprint, Heartbeat, Role
from baton.processes.child import Child, Program
from baton.processes.probes import http_probe
from baton.worker.rates import STEP_GUESS

MODEL: Final = "bench"
BLOCK_TOKENS: Final = 32
HEARTBEAT_S: Final = 0.1
PAGE_BLOCKS: Final = 4096
START_TIMEOUT_S: Final = 30.0


def chain(path: str) -> bytes:
    """Return block ids, one for each prefix of `path`."""
    return b"".join(hashlib.blake2b(path[:end].encode(), digest_size=16).digest() for end in range(1, len(path) + 1))


def events(worker: str, sequence: int, blocks: bytes) -> KvEvents:
    """Return the message that a worker has stored a run of blocks."""
    stored = BlocksStored(parent=b"", blocks=blocks)
    return KvEvents(worker=worker, generation=1, model_digest=MODEL, sequence=sequence, events=(stored,))


class CachingWorker:
    """A decode worker as the index and the scheduler see it: heartbeats, events, a shadow map. It is never full."""

    def __init__(self, name: str, bus: Bus) -> None:
        self.name = name
        self._bus = bus
        self._sequence = 0
        self._parents: dict[bytes, bytes] = {}

    @property
    def sequence(self) -> int:
        return self._sequence

    async def store(self, blocks: bytes) -> None:
        self._sequence += 1
        self._parents |= dict(link(b"", blocks))
        event = events(self.name, self._sequence, blocks)
        message_id = f"{self.name}/1/{self._sequence}"
        await self._bus.append(subjects.KV_STREAM, subjects.kv_events(self.name), event, message_id=message_id)

    @asynccontextmanager
    async def living(self) -> AsyncGenerator[None]:
        """Send heartbeats and answer for the shadow map until the block ends."""
        subscription = await self._bus.subscribe(subjects.shadow(self.name), self._answer)
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            await subscription.unsubscribe()

    async def _beat(self) -> None:
        while True:
            with suppress(BusUnavailable):
                await self._bus.publish(subjects.HEARTBEAT, self._heartbeat())
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self) -> Heartbeat:
        total = sum(int.from_bytes(block, "little") for block in self._parents)
        return Heartbeat(
            address=WorkerAddress(worker=self.name, generation=1, agents=(f"agent-{self.name}",)),
            role=Role.DECODE,
            model="tiny",
            model_path="tiny",
            model_digest=MODEL,
            engine="simulated",
            block_tokens=BLOCK_TOKENS,
            context_tokens_max=4096,
            running_max=10_000,
            kv_blocks_total=10_000_000,
            engine_block_tokens=BLOCK_TOKENS,
            step_tokens_max=2048,
            steps=STEP_GUESS,
            kv_bytes_per_token=1024,
            events_sequence=self._sequence,
            held=Fingerprint.of(total, len(self._parents)),
            held_sequence=self._sequence,
        )

    async def _answer(self, delivery: Delivery) -> None:
        query = delivery.message
        assert isinstance(query, ShadowQuery)
        runs = [BlocksStored(parent=parent, blocks=block) for block, parent in self._parents.items()]
        first = query.cursor * PAGE_BLOCKS
        page = ShadowPage(
            worker=self.name,
            generation=1,
            model_digest=MODEL,
            sequence=self._sequence,
            runs=tuple(runs[first : first + PAGE_BLOCKS]),
            next_cursor=query.cursor + 1 if len(runs) > first + PAGE_BLOCKS else 0,
        )
        await delivery.respond(page)


async def until(condition: Callable[[], bool], *, within_s: float = START_TIMEOUT_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - other processes.
            await asyncio.sleep(0.02)


@asynccontextmanager
async def servers(folder: Path) -> AsyncGenerator[tuple[str, str]]:
    """Run NATS and Redis, and yield their addresses."""
    started = [describe(folder, os.environ) for describe in (nats_server, redis_server)]
    (folder / "logs").mkdir(exist_ok=True)
    children = [Child(server.program) for server in started]
    try:
        for child in children:
            child.start()
            async with asyncio.timeout(START_TIMEOUT_S):
                await _ready(child)
        nats, redis = started
        yield nats.url, redis.url
    finally:
        for child in children:
            await child.stop()


def service(name: str, module: str, folder: Path, **settings: str) -> Child:
    """Return a service to start, with its settings as environment variables."""
    variables = {f"{module.upper()}_{key.upper()}": value for key, value in settings.items()}
    status_port = free_port()
    return Child(
        Program(
            name=name,
            command=(sys.executable, "-m", module, "--status-port", str(status_port)),
            environ={**os.environ, **variables},
            log_path=folder / f"{name}.log",
            ready=http_probe(LOOPBACK, status_port, "/ready"),
            alive=http_probe(LOOPBACK, status_port, "/health"),
            start_timeout_s=START_TIMEOUT_S,
        )
    )


async def started(child: Child) -> None:
    """Start a service with an empty log, and wait until it is ready."""
    assert child.program.log_path is not None
    child.program.log_path.write_text("")
    child.start()
    async with asyncio.timeout(START_TIMEOUT_S):
        await _ready(child)


async def _ready(child: Child) -> None:
    while not await child.program.ready():  # noqa: ASYNC110 - another process.
        await asyncio.sleep(0.02)
