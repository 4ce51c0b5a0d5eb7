"""What contract suites share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from bus_world import World, memory_world, nats_world
from servers import Server, start_nats
from transfer_rig import BLOCK_BYTES, OPTIONS, RAILS, MakeNode, Node

from baton.transfer import NativeAgent
from baton.transfer.memory import MemoryFabric

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


@pytest.fixture(params=["direct", "cma", "shm", "tcp", "tcp lanes", "memory"])
def make_node(request: pytest.FixtureRequest) -> Iterator[MakeNode]:
    """Make nodes whose transfer agents talk over one backend; close them afterwards."""
    nodes: list[Node] = []
    fabric = MemoryFabric()

    def make(*, fingerprint: str = "model", block_bytes: int = BLOCK_BYTES, **changes: object) -> Node:
        options = replace(OPTIONS, **changes)  # pyright: ignore[reportArgumentType]
        if request.param == "memory":
            agent = fabric.agent(options)
        else:
            backend, *lanes = request.param.split()
            striped: dict[str, Any] = {"rails": RAILS, "streams": 2, "lane_bytes": 1} if lanes else {}
            agent = NativeAgent(replace(options, backends=(backend,), **striped))
        shared = request.param == "direct"
        nodes.append(Node(agent, fingerprint=fingerprint, block_bytes=block_bytes, shared=shared))
        return nodes[-1]

    yield make
    for node in nodes:
        node.agent.close()


@pytest.fixture
def source(make_node: MakeNode) -> Node:
    return make_node()


@pytest.fixture
def sink(make_node: MakeNode) -> Node:
    return make_node()
