"""Options of all tests."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings
from hypothesis import strategies as st

# `make test-nightly` takes many. A busy machine must not fail a property: how long an example takes is none.
settings.register_profile("few", max_examples=150, deadline=None)
settings.register_profile("many", max_examples=1000, deadline=None)
settings.load_profile("few")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None]:
    """Make hypothesis' tables of Unicode while the workers start, once for all: each needs two seconds, and keeps them
    in a file, which a fresh checkout lacks."""
    yield
    if session.config.pluginmanager.hasplugin("dsession"):
        st.text().validate()


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see no `BATON_` variable of the developer's shell."""
    for variable in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(variable)
