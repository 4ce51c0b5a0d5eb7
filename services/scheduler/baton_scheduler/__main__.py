"""`python -m baton_scheduler`: answers where an attempt runs."""

from __future__ import annotations

import asyncio
import logging
import signal
from random import Random

from baton import config
from baton.bus import NatsBus
from baton.clock import SystemClock
from baton.telemetry import Tracing
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.service import SchedulerService


async def main(settings: SchedulerSettings) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    clock = SystemClock()
    tracing = Tracing("scheduler")
    bus = await NatsBus.connect(settings.nats_url, name="scheduler")
    service = SchedulerService(bus=bus, clock=clock, tracing=tracing, settings=settings, random=Random(settings.seed))
    running = asyncio.ensure_future(service.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        if not running.cancelled():
            raise
    finally:
        await bus.close()
        tracing.close()


if __name__ == "__main__":
    config.run(main, SchedulerSettings, service="scheduler")
