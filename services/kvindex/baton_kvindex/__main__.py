"""`python -m baton_kvindex`: answers which worker holds which prefix."""

from __future__ import annotations

import asyncio
import logging
import signal

from baton import config
from baton.bus import NatsBus
from baton.clock import SystemClock
from baton.telemetry import Tracing
from baton_kvindex.config import IndexSettings
from baton_kvindex.service import IndexService
from baton_kvindex.store import RedisStore


async def main(settings: IndexSettings) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    clock = SystemClock()
    tracing = Tracing("kvindex")
    store = None
    if settings.redis_url:
        store = RedisStore(settings.redis_url, prefix=settings.redis_prefix, timeout_s=settings.redis_timeout_s)
    bus = await NatsBus.connect(settings.nats_url, name="kvindex")
    running = asyncio.ensure_future(
        IndexService(bus=bus, store=store, clock=clock, tracing=tracing, settings=settings).run()
    )
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
    config.run(main, IndexSettings, service="kvindex")
