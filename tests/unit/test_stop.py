"""The first signal starts a drain, the second one forces the end."""

from __future__ import annotations

import asyncio
import signal

import pytest

from baton.stop import Stop

pytestmark = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


class Service:
    """Serves until it is asked to stop, and then drains for as long as it takes."""

    def __init__(self, *, loads: bool = False, drains: bool = True) -> None:
        self.loads = loads
        self.drained = asyncio.Event()
        self.ended = ""
        if drains:
            self.drained.set()

    async def serve(self, stop: Stop) -> None:
        try:
            stop.serving = not self.loads
            await stop.asked.wait()
            await asyncio.sleep(0)
            await self.drained.wait()
            self.ended = "drained"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


async def watched(service: Service, *numbers: signal.Signals) -> None:
    watching = asyncio.create_task(Stop().watch(service.serve))
    await asyncio.sleep(0)
    for number in numbers:
        signal.raise_signal(number)
        await asyncio.sleep(0.01)
    await watching


async def test_a_signal_drains_a_service_that_serves(number: signal.Signals) -> None:
    service = Service()
    await watched(service, number)
    assert service.ended == "drained"


async def test_a_second_signal_ends_the_drain(number: signal.Signals) -> None:
    service = Service(drains=False)
    await watched(service, number, signal.SIGTERM)
    assert service.ended == "cancelled"


async def test_a_signal_ends_a_service_that_does_not_serve_yet(number: signal.Signals) -> None:
    service = Service(loads=True)
    await watched(service, number)
    assert service.ended == "cancelled"


async def test_a_cancellation_that_no_signal_caused_is_passed_on(number: signal.Signals) -> None:
    del number
    watching = asyncio.create_task(Stop().watch(Service().serve))
    await asyncio.sleep(0)
    watching.cancel()
    await asyncio.wait([watching])
    assert watching.cancelled()
