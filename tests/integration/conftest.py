"""Servers for the whole session. A test that kills one starts its own from `tests/harness/servers.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from xdist.remote import Producer  # pyright: ignore[reportMissingTypeStubs]

from baton.cli.tiny_model import make_tiny_model
from tests.harness.cluster import Cluster, below, running_plane
from tests.harness.scheduling import GroupScheduling
from tests.harness.servers import start_nats, start_redis

TOGETHER: Final = ("/test_metrics.py", "/test_up.py")
"""Modules with a system that takes long to start: one worker runs all tests of a module, and they start first."""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """Send every other test to the next free worker."""

    def group(test: str) -> str:
        module = test.partition("::")[0]
        return module if module.endswith(TOGETHER) else test

    return GroupScheduling(config, log, group)


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    with start_nats() as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with start_redis() as server:
        yield server.url


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plane(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Cluster]:
    async with running_plane(tmp_path_factory.mktemp("plane"), model=model) as plane:
        yield plane


@pytest.fixture
async def cluster(tmp_path: Path, plane: Cluster) -> AsyncIterator[Cluster]:
    """The control plane of the session, without workers; the test's own workers end with it."""
    async with below(plane, tmp_path) as cluster:
        yield cluster
