"""Fixtures that the contract suites share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from bus_world import World, memory_world, nats_world
from transfer_rig import BLOCK_BYTES, BLOCKS, OPTIONS, Fabric, MakeAgent, MakeNode, Node, make_gpu_agent

from baton.clock import SystemClock
from baton.pool.staging import StagedAgent
from baton.redis import RedisConnection
from baton.transfer import NativeAgent, TransferAgent
from baton.transfer.device import cuda_copies, host_copies
from baton.transfer.memory import MemoryFabric
from tests.contract.spilled_index import spilled_indexes
from tests.harness.servers import Server, start_nats, start_redis

STAGING_SLOTS = 64

_names = (f"t{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Server]:
    """One NATS server for all tests that leave it running; take fresh subjects and streams."""
    with start_nats() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    with start_redis() as server:
        yield server


Connect = Callable[[], RedisConnection]


@pytest.fixture
async def redis(redis_server: Server) -> AsyncIterator[Connect]:
    """Return what makes connections to a Redis that all tests share; use keys that no other test has."""
    async with AsyncExitStack() as stack:

        def connect() -> RedisConnection:
            connection = RedisConnection(redis_server.url, clock=SystemClock(), timeout_s=5.0)
            stack.push_async_callback(connection.close)
            return connection

        yield connect


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


@pytest.fixture(
    params=[
        "cuda-ipc",
        "cuda-put",
        "gpudirect",
        pytest.param("gpudirect lanes", marks=pytest.mark.nightly),
        pytest.param("cuda-ipc on a GPU", marks=pytest.mark.gpu),
        pytest.param("cuda-put on a GPU", marks=pytest.mark.gpu),
        pytest.param("cuda-ipc or staged", marks=pytest.mark.nightly),
        pytest.param("direct+staged for cuda-ipc, with a device", marks=pytest.mark.nightly),
        "direct",
        "direct+staged",
        pytest.param("direct+staged with a device", marks=pytest.mark.nightly),
        pytest.param("tcp+staged", marks=pytest.mark.nightly),
        "cma",
        "shm",
        "verbs",
        pytest.param("verbs lanes", marks=pytest.mark.nightly),
        pytest.param("ucx over tcp", marks=pytest.mark.nightly),
        "ucx over posix,cma",
        "tcp",
        pytest.param("tcp lanes", marks=pytest.mark.nightly),
        "memory",
    ]
)
def way(request: pytest.FixtureRequest) -> str:
    """Name a backend, for UCX with the transports it may use, or the real library."""
    return request.param


def staged(agent: TransferAgent, gpu_library: str | None) -> StagedAgent:
    """Return an agent whose pool is reached by copies: host memory, or that of a device."""
    copies = host_copies() if gpu_library is None else cuda_copies(0, library=gpu_library)
    return StagedAgent(agent, copies, STAGING_SLOTS)


@pytest.fixture
def make_agent(way: str, backend: str, fabric: Fabric) -> Iterator[MakeAgent]:
    """Make agents that talk over one backend; close them afterwards."""
    agents: list[TransferAgent] = []
    memory_fabric = MemoryFabric()

    def make(**changes: object) -> TransferAgent:
        options = replace(OPTIONS, **{"backends": (backend,), **fabric, **changes})  # pyright: ignore[reportArgumentType]
        if "staged" in way and "cuda-ipc" in way:
            agents.append(make_gpu_agent(options, STAGING_SLOTS))
            return agents[-1]
        agent = memory_fabric.agent(options) if backend == "memory" else NativeAgent(options)
        agents.append(staged(agent, fabric.get("gpu_library")) if "staged" in way else agent)
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def make_node(make_agent: MakeAgent, backend: str, fabric: Fabric) -> Iterator[MakeNode]:
    """Make nodes whose transfer agents talk over one backend; close them afterwards."""
    nodes: list[Node] = []

    def make(
        *,
        fingerprint: str = "model",
        block_bytes: int = BLOCK_BYTES,
        blocks: int = BLOCKS,
        layout: str = "",
        host: bool = False,
        **changes: object,
    ) -> Node:
        nodes.append(
            Node(
                make_agent(**changes),
                fingerprint=fingerprint,
                block_bytes=block_bytes,
                blocks=blocks,
                layout=layout,
                shared=backend == "direct",
                gpu_library=None if host else fabric.get("gpu_library"),
            )
        )
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def source(make_node: MakeNode) -> Node:
    return make_node()


@pytest.fixture
def sink(make_node: MakeNode) -> Node:
    return make_node()


@pytest.fixture(scope="session")
def spilling() -> Iterator[None]:
    """Provide a Redis for indexes that spill everything."""
    with spilled_indexes():
        yield
