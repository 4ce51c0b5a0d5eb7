"""Servers for the whole session. A test that kills one starts its own from `tests/harness/servers.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from xdist.remote import Producer  # pyright: ignore[reportMissingTypeStubs]

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
