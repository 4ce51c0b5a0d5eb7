"""Options of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from tests.harness.outcome import RUNNING

pytest_plugins = ["tests.contract.transfer_fixtures"]

LEFT_OUT: Final = pytest.StashKey[int]()
"""Number of nightly tests that this run leaves out."""

# Packages are installed without bytecode. Where none were written, each process of a service or an engine that a test
# starts would compile all of its modules again, which is half of an engine's start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The threads of numpy's BLAS spin while they wait, in every process that imports it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell ignores SIGINT for what it runs in the background, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Thousands of tests are objects that live as long as the process: collections of garbage would look at all of them,
# which is half of what each worker needs to begin and to end.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# `make test-nightly` runs many examples. No deadline per example: a busy machine must not fail a property.
settings.register_profile("few", max_examples=50, deadline=None)
settings.register_profile("many", max_examples=1000, deadline=None)
settings.load_profile("few")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None]:
    """Make hypothesis' tables of Unicode while the workers start, once for all: each needs two seconds, and keeps them
    in a file, which a fresh checkout lacks."""
    yield
    if session.config.pluginmanager.hasplugin("dsession"):
        st.text().validate()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--not-run", metavar="FILE", help="append what was skipped or left out to FILE, by reason")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    config = items[0].config
    nightly = sum(item.get_closest_marker("nightly") is not None for item in items)
    config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + nightly


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    # pytest collects garbage five times at its end, to see errors of finalisers; one of all objects is enough.
    gc.collect()
    gc.freeze()
    # A worker of pytest-xdist tells the process that reports. Each of them has collected all tests.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)  # pyright: ignore


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A crashed worker has reported nothing.
    if output := getattr(node, "workeroutput", None):
        node.config.stash[LEFT_OUT] = output["left_out"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report the tests that were not run; the reason of each skip names the way to run it."""
    skipped = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    lines = [f"{count} skipped: {reason.removeprefix('Skipped: ')}" for reason, count in sorted(skipped.items())]
    if left_out := config.stash.get(LEFT_OUT, 0):
        lines.append(f"{left_out} left out: `make test-nightly` runs them")
    if not lines or hasattr(config, "workerinput"):
        return
    terminalreporter.section("not run")
    terminalreporter.write("".join(f"{line}\n" for line in lines))
    if path := config.getoption("--not-run"):
        with Path(path).open("a") as file:
            file.writelines(f"{' '.join(config.args)}: {line}\n" for line in lines)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when != "teardown":
        RUNNING.has_failed = report.failed
    return report


@pytest.fixture(autouse=True, scope="session")
def no_settings_from_outside() -> Generator[None]:
    """Hide the `BATON_` variables of the developer's shell from the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("BATON_")]:
            patch.delenv(variable)
        yield
