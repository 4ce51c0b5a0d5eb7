"""Starts the gateway: `python -m baton_gateway --help`."""

from __future__ import annotations

import gc
import logging
from contextlib import AsyncExitStack
from random import SystemRandom
from uuid import uuid4

import uvloop

from baton import config
from baton.bus import NatsBus
from baton.clock import SystemClock
from baton.stop import Stop
from baton.telemetry import Metrics, Tracing, serve_status
from baton_gateway.api import make_app
from baton_gateway.config import Settings
from baton_gateway.server import listen, make_server
from baton_gateway.service import Gateway
from baton_gateway.tokenise import ModelTokenizer, Tokenizers

log = logging.getLogger(__name__)


def load_to_stay(path: str) -> ModelTokenizer:
    """Load a tokenizer, and take it and all that came with it, 100,000 objects, out of the garbage collector's sight.

    A full collection that looked at them stopped every stream for 60 ms.
    """
    tokenizer = ModelTokenizer(path)
    gc.collect()
    gc.freeze()
    return tokenizer


async def serve(settings: Settings, stop: Stop) -> None:
    clock = SystemClock()
    # Before anything else, so that a port in use is found at once.
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(settings))
        metrics = Metrics("gateway")
        status = await stack.enter_async_context(serve_status(settings, metrics, stop))
        gateway_id = f"gw-{uuid4().hex[:12]}"
        bus = await NatsBus.connect(settings.nats_url, name=gateway_id)
        tokenizers = Tokenizers(clock=clock, threads=settings.tokenizer_threads, load=load_to_stay)
        tracing = Tracing("gateway", settings, instance=gateway_id)
        await tracing.answer(bus)
        metrics.read_bus(bus)
        try:
            gateway = Gateway(
                settings,
                gateway=gateway_id,
                bus=bus,
                clock=clock,
                tracing=tracing,
                metrics=metrics,
                tokenizers=tokenizers,
                random=SystemRandom(),
            )
            server = make_server(make_app(gateway), gateway)
            async with gateway.running():
                status.check_ready = gateway.check_ready
                log.info("gateway %s listens on %s port %d", gateway_id, settings.host, listener.getsockname()[1])
                # Connections wait meanwhile: whoever knows no worker yet would say that there is no such model.
                await clock.sleep(settings.learn_s)
                await server.serve_until(stop, listener)
        finally:
            tokenizers.close()
            tracing.close()
            await bus.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    uvloop.install()
    config.run(serve, Settings, service="gateway")
