"""Real servers for the whole test session. A test that kills a server starts its own from `tests/servers.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import start_nats, start_redis


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    with start_nats() as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with start_redis() as server:
        yield server.url
