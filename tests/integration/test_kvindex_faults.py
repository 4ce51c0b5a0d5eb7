"""Seeded fault runs: after any kill or loss, both indexes and Redis soon match the workers' caches again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from uuid import uuid4

import pytest
from msgspec.structs import replace

from baton import subjects
from baton.cli.asking import ask_all
from baton.errors import BatonError
from baton.messages.index import BlocksStored, IndexQuery, IndexReport, KvEvents, Tier
from tests.harness.index.services import PREFIX, WRITES, Pair, running_pair, said, until
from tests.harness.index.worker import Worker, chain, working, written
from tests.harness.limits import HANG_S

PAUSE_S = 0.02
PATHS = ["abcdefgh", "abcdxyz", "abq", "mnopq", "mnxy", "zyxwv"]


class Chaos:
    """A worker that restarts, and whose events are lost, doubled, delayed, reordered and wrong, driven by a seed."""

    def __init__(self, worker: Worker, seed: int) -> None:
        self.worker = worker
        self._random = Random(seed)
        self._late: list[KvEvents] = []

    async def run(self) -> None:
        while True:
            await self._step()
            await asyncio.sleep(self._random.uniform(0, 2 * PAUSE_S))

    async def _step(self) -> None:
        random, worker = self._random, self.worker
        tier = random.choice(list(Tier))
        path = random.choice(PATHS)
        path = path[: random.randint(1, len(path))]
        match random.choices(["store", "remove", "clear", "restart"], [60, 35, 2, 1])[0]:
            case "store":
                event = worker.stored(path, tier)
            case "remove":
                held = list(worker.on(tier))
                event = worker.removed(b"".join(random.sample(held, min(len(held), 2))), tier)
            case "clear":
                event = worker.cleared()
            case _:
                worker.restart()
                return
        await self.tell(event, random.choices(["sent", "lost", "twice", "late", "wrong"], [80, 4, 8, 4, 4])[0])

    async def tell(self, event: KvEvents, how: str) -> None:
        match how:
            case "sent":
                await self._send(event)
                while self._late:
                    await self._send(self._late.pop())
            case "twice":
                await self._send(event)
                await self._send(event, uuid4().hex)
            case "late":
                self._late.append(event)
            case "wrong":
                # No number is missing, so nothing but the fingerprint can tell.
                tier = self._random.choice(list(Tier))
                phantom = BlocksStored(parent=b"", blocks=chain("phantom"), tier=tier)
                await self._send(replace(event, events=(phantom,)))
            case _:
                pass

    async def _send(self, event: KvEvents, message_id: str = "") -> None:
        # What cannot be sent is lost.
        with suppress(BatonError, TimeoutError):
            async with asyncio.timeout(0.5):
                await self.worker.send(event, message_id)


class BusFaults:
    """Faults that kill a process and restart it."""

    def __init__(self, pair: Pair, random: Random) -> None:
        self.pair = pair
        self._random = random

    def all(self) -> list[Callable[[], Coroutine[None, None, None]]]:
        return [self.kill_writer, self.kill_reader, self.kill_redis, self.kill_nats, self.stop_an_index]

    async def kill_writer(self) -> None:
        await self._kill_index(writes=True)

    async def kill_reader(self) -> None:
        await self._kill_index(writes=False)

    async def kill_redis(self) -> None:
        self.pair.redis.kill()
        await self._while_away()
        self.pair.redis.start()

    async def kill_nats(self) -> None:
        self.pair.nats.kill()
        await self._while_away()
        self.pair.nats.start()

    async def stop_an_index(self) -> None:
        service = self._random.choice(self.pair.services)
        service.signal(signal.SIGSTOP)
        await self._while_away()
        service.signal(signal.SIGCONT)

    async def _kill_index(self, *, writes: bool) -> None:
        # The newest line of its log tells whether an index writes.
        service = max(self.pair.services, key=lambda each: (each.log.read_text().rfind(WRITES) >= 0) is writes)
        service.signal(signal.SIGKILL)
        await self._while_away()
        service.log.write_text("")
        await service.start()
        await until(lambda: said(service, "the index answers"))

    async def _while_away(self) -> None:
        await asyncio.sleep(self._random.uniform(0.1, 1.5))


async def differences(pair: Pair, workers: list[Worker]) -> list[str]:
    """Describe the differences between an index, or Redis, and the workers' caches."""
    asker = uuid4().hex
    query = IndexQuery(asker=asker)
    try:
        reports = await ask_all(pair.bus, subjects.INDEX_QUERIES, query, subjects.index_answers(asker), IndexReport)
    except BatonError as error:
        return [f"the bus: {error}"]
    found = [f"{len(reports)} indexes answered"] if len(reports) != len(pair.services) else []
    truth = {worker.name: (worker.generation, *map(worker.fingerprint, Tier)) for worker in workers}
    for report in reports:
        known = {each.worker: (each.generation, each.held, each.pooled, each.filed) for each in report.workers}
        found += [
            f"{report.instance}: {known.get(name)} of {name} is {its}"
            for name, its in truth.items()
            if known.get(name) != its
        ]
    for worker in workers:
        with suppress(KeyError):
            if await written(pair.redis.url, PREFIX, worker) == {tier: worker.on(tier) for tier in Tier}:
                continue
        found.append(f"Redis has not what {worker.name} holds")
    return found


async def until_equal(pair: Pair, workers: list[Worker], within_s: float) -> None:
    ended_s = time.monotonic()
    while found := await differences(pair, workers):
        assert time.monotonic() - ended_s < within_s, found
    print(f"equal {time.monotonic() - ended_s:.1f} s after the last fault")


@pytest.mark.parametrize(
    ("seed", "flags", "within_s"),
    [
        pytest.param(20260917, (), 5.0, id="in memory", marks=pytest.mark.nightly),
        pytest.param(20261121, ("--memory-bytes-max", "1", "--cold-patience-s", "1"), HANG_S, id="cold"),
    ],
)
async def test_the_index_equals_the_truth_soon_after_the_last_fault(
    tmp_path: Path, seed: int, flags: tuple[str, ...], within_s: float
) -> None:
    random = Random(seed)
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(running_pair(tmp_path))
        workers = [pair.worker, *[await stack.enter_async_context(working(pair.bus)) for _ in range(2)]]
        for _ in range(2):
            await pair.start(*flags)
        order = BusFaults(pair, random).all()
        random.shuffle(order)
        for worker in workers:
            worker.page_blocks = 1000
        chaos = [Chaos(worker, random.randrange(1 << 30)) for worker in workers]
        tasks = [asyncio.create_task(each.run()) for each in chaos]
        print(f"seed {seed}: {[fault.__name__ for fault in order]}")
        for fault in order:
            await asyncio.sleep(random.uniform(0.2, 1.0))
            await fault()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
        await until_equal(pair, workers, within_s)
        for each, how in zip(chaos, ("lost", "wrong", "twice"), strict=True):
            await each.tell(each.worker.stored("the end", Tier.POOL), how)
        await until_equal(pair, workers, within_s)
