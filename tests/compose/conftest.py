"""Tests that need a Docker engine: `make test-compose`."""

from __future__ import annotations

import pytest

from tests.compose.project import why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if missing := why_not():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=missing))
