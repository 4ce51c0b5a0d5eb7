"""Real vLLM engines for this folder's tests: one prefill and one decode, started once per session."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from engine_pair import Pair, started_pair
from xdist.remote import Producer  # pyright: ignore[reportMissingTypeStubs]

from baton.cli.tiny_model import make_tiny_model
from tests.harness.scheduling import GroupScheduling

OF_THE_PAIR: Final = ("death", "failures", "handoff", "parallel", "whole")
"""Modules `test_vllm_*.py` that share one pair of engines, and therefore one worker."""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """Keep each module on one worker, and all that share the pair of engines on the same one."""
    together = {f"test_vllm_{name}.py" for name in OF_THE_PAIR}

    def group(test: str) -> str:
        module = test.partition("::")[0].rpartition("/")[2]
        return "the pair" if module in together else module

    return GroupScheduling(config, log, group)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ends_engines: kills the session's engines, and therefore runs last")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip vLLM's tests without vLLM; with it, give them time: the first one also waits for the engines' start."""
    items.sort(key=lambda item: item.get_closest_marker("ends_engines") is not None)
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name.startswith("test_vllm_"):
            item.add_marker(pytest.mark.timeout(700))
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: `make test-engines` installs it"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with started_pair(tiny_model, tmp_path_factory) as pair:
        yield pair


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    """The session's engines, checked after each test: nothing of it may be left on either side."""
    yield engines
    engines.let_go()
    engines.prefill.ask("faults", faults={})
    engines.settled()
