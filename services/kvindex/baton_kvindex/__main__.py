"""`python -m baton_kvindex`: answers which worker holds which prefix."""

from __future__ import annotations

import logging

from baton import config
from baton.bus import NatsBus
from baton.node.ports import system_ports
from baton.stop import Stop
from baton.telemetry import Metrics, Tracing, serve_status
from baton_kvindex.config import IndexSettings
from baton_kvindex.service import IndexService
from baton_kvindex.store import RedisStore


async def main(settings: IndexSettings, stop: Stop) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    tracing = Tracing("kvindex", settings)
    metrics = Metrics("kvindex")
    async with serve_status(settings, metrics, stop) as status:
        bus = await NatsBus.connect(settings.nats_url, name="kvindex")
        await tracing.answer(bus)
        metrics.read_bus(bus)
        ports = system_ports(bus)
        store = None
        if settings.redis_url:
            store = RedisStore(
                settings.redis_url,
                clock=ports.clock,
                prefix=settings.redis_prefix,
                timeout_s=settings.redis_timeout_s,
            )
        service = IndexService(ports=ports, store=store, tracing=tracing, metrics=metrics, settings=settings)
        status.check_ready = service.check_ready
        try:
            await service.run(stop)
        finally:
            await bus.close()
            tracing.close()


if __name__ == "__main__":
    config.run(main, IndexSettings, service="kvindex")
