"""Options of all tests; its place also makes `tests/servers.py` importable."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# A busy machine must not fail a property: how long one example takes is no property of the code.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see no `BATON_` variable of the developer's shell."""
    for variable in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(variable)
