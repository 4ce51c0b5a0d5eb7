"""A load that shifts, under which the supervisor must change roles and no request may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from types import MappingProxyType

from baton.messages.workers import Role
from tests.harness.clients import Clients
from tests.harness.cluster import Cluster

FAST = ("--roles", "auto", "--role-dwell-s", "1", "--role-rest-s", "0.5")
"""Flags of a scheduler that changes roles soon."""
WRITERS, READERS = 24, 12
SHIFTED_S = 120.0


async def shift_load(
    cluster: Cluster, *, prompt_lines: int = 40, body: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Ask for long answers until they have a third decode worker, then read long prompts until these have a second.

    The cluster has two workers of each role, of four slots each. `body`: of each request, beside OpenAI's.
    """
    observer = cluster.observer
    generations = {name: beat.address.generation for name, beat in observer.heartbeats.items()}

    def workers(role: Role) -> int:
        return sum(beat.role is role and not beat.draining for beat in observer.heartbeats.values())

    stories = [f"story {number}" for number in range(WRITERS)]
    writers = Clients(cluster, stories, body=body)
    expected = {story: await writers.ask(story) for story in stories[:2]}
    async with writers.asking():
        await observer.until(lambda: workers(Role.DECODE) == 3, timeout_s=SHIFTED_S)
    assert all(writers.answers[story] for story in stories)
    assert all(answer == expected[story] for story in expected for answer in writers.answers[story])
    assert sum(beat.address.role_epoch for beat in observer.heartbeats.values()) == 1, "one prefill worker stays"

    readers, numbers = Clients(cluster, (), output_tokens=2, body=body), count()
    shifted = asyncio.Event()

    async def read() -> None:
        while not shifted.is_set():
            # No worker has any of these in its cache.
            lines = " ".join(f"line {line}, the quick brown fox" for line in range(prompt_lines))
            await readers.ask(f"{next(numbers)}: {lines}")

    async with asyncio.TaskGroup() as group:
        for _ in range(READERS):
            group.create_task(read())
        await observer.until(lambda: workers(Role.PREFILL) >= 2, timeout_s=SHIFTED_S)
        shifted.set()
    assert {name: beat.address.generation for name, beat in observer.heartbeats.items()} == generations
