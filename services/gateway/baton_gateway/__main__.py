"""Starts the gateway: `python -m baton_gateway --help`."""

from __future__ import annotations

import logging
from random import SystemRandom
from uuid import uuid4

import uvloop

from baton import config
from baton.bus import NatsBus
from baton.clock import SystemClock
from baton.telemetry import Tracing
from baton_gateway.api import make_app
from baton_gateway.config import Settings
from baton_gateway.server import listen, make_server
from baton_gateway.service import Gateway
from baton_gateway.tokenise import Tokenizers

log = logging.getLogger(__name__)


async def serve(settings: Settings) -> None:
    clock = SystemClock()
    # Before anything else, so that a port in use is found at once.
    with listen(settings) as listener:
        gateway_id = f"gw-{uuid4().hex[:12]}"
        bus = await NatsBus.connect(settings.nats_url, name=gateway_id)
        tokenizers = Tokenizers(clock=clock, threads=settings.tokenizer_threads)
        tracing = Tracing("gateway")
        try:
            gateway = Gateway(
                settings,
                gateway=gateway_id,
                bus=bus,
                clock=clock,
                tracing=tracing,
                tokenizers=tokenizers,
                random=SystemRandom(),
            )
            server = make_server(make_app(gateway), settings, gateway.end_requests)
            async with gateway.running():
                log.info("gateway %s listens on %s port %d", gateway_id, settings.host, listener.getsockname()[1])
                await server.serve(sockets=[listener])
        finally:
            tokenizers.close()
            tracing.close()
            await bus.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    uvloop.install()
    config.run(serve, Settings, service="gateway")
