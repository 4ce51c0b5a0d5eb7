"""The lifecycle that all services share, and the process around it."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from baton.errors import EngineFailed
from baton.node.service import Process, serve
from baton.node.settings import NodeSettings
from baton.stop import Stop
from baton.telemetry import Metrics
from baton.telemetry.status import Status


class Recorded:
    """A service that notes what happens to it. `fails` ends it once it serves."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.notes: list[str] = []
        self.fails = asyncio.Event()

    def note(self, what: str) -> None:
        self.notes.append(f"{what}, serving" if self.stop.serving else what)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        self.note("start")
        try:
            async with asyncio.TaskGroup() as tasks:
                failing = tasks.create_task(self.fail())
                yield
                failing.cancel()
        except* EngineFailed as group:
            raise group.exceptions[0] from None
        finally:
            self.note("stop")

    async def fail(self) -> None:
        await self.fails.wait()
        raise EngineFailed("it is broken")

    async def check_ready(self) -> None: ...

    async def drain(self) -> None:
        self.note("drain")


async def until_serving(stop: Stop) -> None:
    while not stop.serving:  # noqa: ASYNC110 - it serves once a flag says so.
        await asyncio.sleep(0)


async def test_a_service_starts_serves_drains_and_stops() -> None:
    stop = Stop()
    service = Recorded(stop)
    life = asyncio.create_task(serve(service, stop))
    await until_serving(stop)
    assert service.notes == ["start"]
    stop.asked.set()
    await life
    assert service.notes == ["start", "drain, serving", "stop, serving"]


async def test_a_service_that_fails_stops_without_a_drain() -> None:
    stop = Stop()
    service = Recorded(stop)
    life = asyncio.create_task(serve(service, stop))
    await until_serving(stop)
    service.fails.set()
    with pytest.raises(BaseException) as raised:
        await life
    assert "it is broken" in repr(raised.value)
    assert service.notes == ["start", "stop, serving"]


async def test_collections_skip_what_a_process_has_loaded_while_it_serves() -> None:
    stop, metrics = Stop(), Metrics("test")
    stop.asked.set()
    frozen: list[int] = []

    class Counts(Recorded):
        def note(self, what: str) -> None:
            frozen.append(gc.get_freeze_count())

    await Process("test", NodeSettings(), stop, metrics, Status(metrics, stop)).serve(Counts(stop))
    assert min(frozen) > 0
    assert gc.get_freeze_count() == 0, "at the end, cycles that hold native objects must go"


PROGRAM = """
from baton.errors import BusUnavailable, ConfigurationError
from baton.node.service import run
from baton.node.settings import NodeSettings
class Settings(NodeSettings, frozen=True, kw_only=True):
    worker: str
async def main(settings, process):
    if settings.worker == "fails":
        raise BusUnavailable("the bus is gone")
    if settings.worker == "odd":
        raise ConfigurationError("odd is no name")
run("prefill", Settings, main)
"""


@pytest.mark.parametrize(
    ("argv", "status", "error"),
    [
        (["--worker", "w0"], 0, ""),
        (["--wrker", "w0"], 2, "baton-prefill: the setting --wrker is unknown; did you mean --worker?\n"),
        (["--worker", "odd"], 2, "baton-prefill: odd is no name\n"),
        (["--worker", "fails"], 1, "baton-prefill: the bus is gone\n"),
    ],
)
def test_a_process_ends_with_a_status_and_one_sentence(argv: list[str], status: int, error: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *argv], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (status, error)
