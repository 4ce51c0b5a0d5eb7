"""What contract suites share."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from baton_native import DeviceMemory, GpuUnavailable
from bus_world import World, memory_world, nats_world
from fake_library import FakeGpu, FakeVerbs
from transfer_rig import BLOCK_BYTES, BLOCKS, OPTIONS, RAILS, Fabric, MakeAgent, MakeNode, Node
from ucx_library import ucx_library

from baton.transfer import NativeAgent, TransferAgent
from baton.transfer.memory import MemoryFabric
from tests.contract.frozen_index import frozen_indexes
from tests.harness.servers import Server, start_nats

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


@pytest.fixture(scope="session")
def fake_verbs_library(tmp_path_factory: pytest.TempPathFactory) -> FakeVerbs:
    return FakeVerbs(tmp_path_factory)


@pytest.fixture
def fake_verbs(fake_verbs_library: FakeVerbs) -> Iterator[FakeVerbs]:
    """Lend the fake RDMA adapters; afterwards nothing of them may be in use."""
    fake_verbs_library.reset()
    yield fake_verbs_library
    assert not fake_verbs_library.left_open()


@pytest.fixture(scope="session")
def fake_gpu_library(tmp_path_factory: pytest.TempPathFactory) -> FakeGpu:
    return FakeGpu(tmp_path_factory)


@pytest.fixture
def fake_gpu(fake_gpu_library: FakeGpu) -> Iterator[FakeGpu]:
    """Lend the fake GPUs; afterwards nothing of them may be in use."""
    fake_gpu_library.reset()
    yield fake_gpu_library
    if fake_gpu_library.left_open():
        gc.collect()  # Memory in a cycle that a test has let go. It takes longer than most tests do.
    assert not fake_gpu_library.left_open()


@pytest.fixture(
    params=[
        "cuda-ipc",
        "cuda-put",
        "cuda-ipc on a GPU",
        "cuda-put on a GPU",
        "direct",
        "cma",
        "shm",
        "verbs",
        "verbs lanes",
        "ucx over tcp",
        "ucx over posix,cma",
        "tcp",
        "tcp lanes",
        "memory",
    ]
)
def way(request: pytest.FixtureRequest) -> str:
    """Name a backend and, of UCX, which of its transports it may use; or that it is the real one."""
    return request.param


@pytest.fixture
def backend(way: str) -> str:
    return way.split()[0]


@pytest.fixture
def fabric(request: pytest.FixtureRequest, way: str, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """Return the options that the backend needs here."""
    lanes: Fabric = {"rails": RAILS, "streams": 2, "lane_bytes": 1} if way.endswith("lanes") else {}
    if way.startswith("verbs"):
        fake: FakeVerbs = request.getfixturevalue("fake_verbs")
        return {"verbs_library": fake.library, **lanes}
    if way.endswith("on a GPU"):
        try:
            DeviceMemory(1)
        except GpuUnavailable as error:
            pytest.skip(str(error))
        return {"gpu_library": ""}
    if way.startswith("cuda"):
        return {"gpu_library": request.getfixturevalue("fake_gpu").library}
    if way.startswith("ucx"):
        monkeypatch.setenv("UCX_TLS", way.split()[-1])
        return {"ucx_library": ucx_library()}
    return lanes


@pytest.fixture
def make_agent(backend: str, fabric: Fabric) -> Iterator[MakeAgent]:
    """Make agents that talk over one backend; close them afterwards."""
    agents: list[TransferAgent] = []
    memory_fabric = MemoryFabric()

    def make(**changes: object) -> TransferAgent:
        options = replace(OPTIONS, **{"backends": (backend,), **fabric, **changes})  # pyright: ignore[reportArgumentType]
        agents.append(memory_fabric.agent(options) if backend == "memory" else NativeAgent(options))
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
def freezing() -> Iterator[None]:
    """Give indexes that keep everything in Redis one."""
    with frozen_indexes():
        yield
