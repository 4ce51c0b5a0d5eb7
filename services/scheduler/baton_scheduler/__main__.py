"""`python -m baton_scheduler`: answers where an attempt runs."""

from __future__ import annotations

import logging
from random import Random

from baton import config
from baton.bus import NatsBus
from baton.clock import SystemClock
from baton.stop import Stop
from baton.telemetry import Metrics, Tracing, serve_status
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.service import SchedulerService


async def main(settings: SchedulerSettings, stop: Stop) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    clock = SystemClock()
    tracing = Tracing("scheduler", settings)
    metrics = Metrics("scheduler")
    async with serve_status(settings, metrics, stop) as status:
        bus = await NatsBus.connect(settings.nats_url, name="scheduler")
        await tracing.answer(bus)
        metrics.read_bus(bus)
        service = SchedulerService(
            bus=bus, clock=clock, tracing=tracing, metrics=metrics, settings=settings, random=Random(settings.seed)
        )
        status.check_ready = service.check_ready
        try:
            await service.run(stop)
        finally:
            await bus.close()
            tracing.close()


if __name__ == "__main__":
    config.run(main, SchedulerSettings, service="scheduler")
