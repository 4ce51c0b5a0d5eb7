"""What contract suites share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from bus_world import World, memory_world, nats_world
from servers import Server, start_nats

_names = (f"t{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Server]:
    """One NATS server for all tests that leave it running; take fresh subjects and streams."""
    with start_nats() as server:
        yield server


@pytest.fixture
def name() -> str:
    """Return a part of a subject that no other test uses."""
    return next(_names)


@pytest.fixture(params=["memory", "nats"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Open buses of each kind; afterwards they are closed and no task of theirs is left."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            yield memory_world(stack)
        else:
            yield await nats_world(stack, request.getfixturevalue("nats_server"))
    leftover = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leftover, f"tasks are left after close: {leftover}"
