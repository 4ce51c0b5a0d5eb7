"""Workers join and leave under load: each takes its share of the requests while it is there, and none fails.

Conversations stay where their prefix is, though the load is spread.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from baton.bus import Delivery
from baton.messages.attempts import DecodeTask, PrefillTask
from baton.messages.workers import Role
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import HANG_S

pytestmark = pytest.mark.timeout(200)  # On a busy machine; alone it takes 30 s.

AT_ONCE = 9
COUNTED = 300
"""Requests over which the workers' shares are compared."""
OUTPUT_TOKENS = 8
ENGINE = {"speed": 1.0, "step_fixed_s": 0.03, "prefill_token_s": 0.0006, "blocks": 1024, "eos_probability": 0.0}
PATIENT = ("--accept-s", "20", "--place-resend-s", "5", "--lost-after-s", "20")
"""No worker counts as lost on a busy machine, so each request is sent once."""
SENT, RUN = "baton_attempts_total", "baton_worker_attempts_ended_total"
"""Metrics of a gateway and of a worker that count attempts by their end."""
SURE = ("--index-timeout-s", "20")
"""No placement goes without the index on a busy machine."""


class Load:
    """Clients with different prompts, and the tasks that workers were sent for them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asking = True
        self._changed = asyncio.Event()
        self.answered = 0
        self.tasks = Counter[str]()
        """Tasks by worker."""

    async def see(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, DecodeTask | PrefillTask):
            self.tasks[delivery.subject.split(".")[2]] += 1

    async def ask(self, client: httpx.AsyncClient) -> None:
        while self._asking:
            # No prefix of one is a prefix of another, so caches decide nothing.
            prompt = f"{self.answered} {id(client)} " + "the quick brown fox " * 20
            body = {"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            assert answer.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS
            self.answered += 1
            self._changed.set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Ask continuously; raises what any client met."""
        async with (
            asyncio.TaskGroup() as group,
            httpx.AsyncClient(base_url=self._cluster.url, timeout=HANG_S) as client,
        ):
            clients = [group.create_task(self.ask(client)) for _ in range(AT_ONCE)]
            yield
            self._asking = False
            await asyncio.wait(clients)

    async def next_tasks(self, count: int) -> Counter[str]:
        """Return the tasks by worker of the next `count` requests."""
        before, until = self.tasks.copy(), self.answered + count
        while self.answered < until:
            self._changed.clear()
            await self._changed.wait()
        return self.tasks - before


def is_even(tasks: Counter[str]) -> bool:
    """Return whether each of three workers of a role has the mean number of its role's tasks, within a fifth."""

    def shares(role: Role) -> list[float]:
        counts = [tasks[f"{role}-{number}"] for number in range(3)]
        return [count * 3 / sum(counts) for count in counts]

    return all(0.8 <= share <= 1.2 for role in Role for share in shares(role))


async def ended_attempts(cluster: Cluster, service: str, metric: str) -> Counter[str]:
    """Return the attempts that a service's own metric counts, by their end."""
    series = re.compile(rf'{metric}\{{end="(\w+)"\}}')
    shown = await cluster.metrics(service)
    return Counter({found[1]: int(value) for name, value in shown.items() if (found := series.fullmatch(name))})


async def start(cluster: Cluster, *workers: str) -> None:
    for worker in workers:
        await cluster.start_worker(Role(worker.split("-")[0]), worker, "--drain-s", "30", options=ENGINE)
    await asyncio.gather(*(cluster.wait_worker(worker) for worker in workers))


async def test_workers_that_join_and_leave_take_and_lose_their_share(tmp_path: Path, model: Path) -> None:
    async with running_cluster(tmp_path, model=model) as cluster:
        await cluster.start_control_plane(gateway_flags=PATIENT, scheduler_flags=SURE)
        await start(cluster, "prefill-0", "decode-0", "decode-1")
        await cluster.wait_ready()
        load = Load(cluster)
        assert cluster.bus is not None
        await cluster.bus.subscribe("baton.worker.*.task", load.see)
        async with load.running():
            await load.next_tasks(30)
            joining = ("prefill-1", "prefill-2", "decode-2")
            await start(cluster, *joining)
            await load.next_tasks(AT_ONCE)
            spread = await load.next_tasks(COUNTED)
            assert is_even(spread), spread
            assert (+await ended_attempts(cluster, "gateway", SENT)).keys() == {"done"}
            counted = {worker: load.tasks[worker] for worker in joining}
            for worker in joining:
                leaving = cluster.services.pop(worker)
                assert await leaving.end(grace_s=HANG_S) == 0, leaving.tail()
            left = await load.next_tasks(30)
        print(dict(spread), counted)
        assert set(left) == {"prefill-0", "decode-0", "decode-1"}
        for worker in ("prefill-0", "decode-0", "decode-1"):
            ended = await ended_attempts(cluster, worker, RUN)
            assert ended.total() == load.tasks[worker], "each worker counts what it did"
        ended = +await ended_attempts(cluster, "gateway", SENT)
        assert ended.keys() <= {"done", "busy"}, "a worker that leaves declines what is on its way to it"
        assert ended["done"] == load.answered, "each ran once"
        assert ended.total() == sum(load.tasks[f"decode-{number}"] for number in range(3))


@pytest.mark.nightly
async def test_conversations_stay_on_their_prefill_worker(tmp_path: Path, model: Path) -> None:
    conversations, turns = 12, 6
    at_once = asyncio.Semaphore(3)
    """No worker is overloaded: with as many requests as workers, none has to wait."""
    workers: dict[str, str] = {}
    """Answer → its prefill worker."""
    requests = [[""] * turns for _ in range(conversations)]

    async def see(delivery: Delivery) -> None:
        if isinstance(delivery.message, PrefillTask):
            workers[delivery.message.context.request] = delivery.subject.split(".")[2]

    async with running_cluster(tmp_path, model=model) as cluster:
        await cluster.start_control_plane(gateway_flags=PATIENT, scheduler_flags=SURE)
        await start(cluster, "prefill-0", "prefill-1", "prefill-2", "decode-0")
        await cluster.wait_ready()
        assert cluster.bus is not None
        await cluster.bus.subscribe("baton.worker.*.task", see)

        async def talk(client: httpx.AsyncClient, conversation: int) -> None:
            text = f"{conversation}: " + "the quick brown fox jumps over the lazy dog " * 40
            for turn in range(turns):
                body = {"model": "tiny", "prompt": text, "max_tokens": 16, "temperature": 0}
                async with at_once:
                    answer = await client.post("/v1/completions", json=body)
                answer.raise_for_status()
                requests[conversation][turn] = answer.json()["id"].removeprefix("cmpl-")
                text += answer.json()["choices"][0]["text"] + " and then seven wizards box again " * 5

        async with httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S) as client:
            await asyncio.gather(*(talk(client, conversation) for conversation in range(conversations)))
    # Each choice of a request is an answer of its own.
    places = [[workers[f"{request}-0"] for request in row] for row in requests]
    first = Counter(row[0] for row in places)
    stayed = [before == after for row in places for before, after in pairwise(row)]
    print(dict(first), f"{sum(stayed)} of {len(stayed)} turns stayed")
    assert max(first.values()) <= 2 * conversations / 3, "conversations begin on all workers"
    assert sum(stayed) >= 0.95 * len(stayed)
