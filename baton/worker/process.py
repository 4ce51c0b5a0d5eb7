"""A worker's process: load the engine, serve, leave. Both services' `__main__` call `run_worker`."""

from __future__ import annotations

import asyncio
import logging
import time
from hashlib import blake2b

import msgspec

from baton.bus import NatsBus
from baton.clock import SystemClock
from baton.engines.engine import Engine, EngineFacts
from baton.errors import ConfigurationError
from baton.messages import Role, WorkerAddress
from baton.stop import Stop
from baton.telemetry import Metrics, Tracing, serve_status
from baton.telemetry.status import Status
from baton.worker.admission import Identity
from baton.worker.ledger import Limits
from baton.worker.service import Timers, WorkerService
from baton.worker.settings import WorkerSettings, create_engine

_log = logging.getLogger("baton.worker")

CLOSE_TIMEOUT_S = 20.0


async def run_worker(role: Role, settings: WorkerSettings, stop: Stop) -> None:
    """Run one life of a worker. Raises ConfigurationError when it cannot start, EngineFailed when its engine dies."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    metrics = Metrics(role)
    async with serve_status(settings, metrics, stop) as status:
        await _serve(role, settings, stop, metrics, status)


async def _serve(role: Role, settings: WorkerSettings, stop: Stop, metrics: Metrics, status: Status) -> None:
    if not settings.model:
        raise ConfigurationError("there is no model: give the folder of one with --model", param="model")
    began_s = time.monotonic()
    worker = settings.worker_id(role)
    # The wall clock's milliseconds: higher at each start of a worker of this name, unless the machine's
    # clock was set back by more than the worker was away.
    generation = time.time_ns() // 1_000_000
    clock = SystemClock()
    tracing = Tracing(role, settings, instance=worker)
    # The bus first: a wrong address shows at once, not after a minute of loading.
    bus = await NatsBus.connect(settings.nats_url, name=worker)
    metrics.read_bus(bus)
    await tracing.answer(bus)
    engine = create_engine(role, settings)
    try:
        _log.info("loading model %s into %s …", settings.model, settings.engine)
        facts = await engine.start()
        _log.info("model loaded, %.1f s; proving the block mapping …", time.monotonic() - began_s)
        service = WorkerService(
            identity=Identity(
                address=WorkerAddress(worker=worker, generation=generation, agents=facts.agents),
                role=role,
                model_name=settings.public_model_name(),
                model_path=settings.model,
                block_tokens=settings.block_tokens,
                engine_kind=_engine_kind(settings, facts),
            ),
            facts=facts,
            engine=engine,
            bus=bus,
            clock=clock,
            tracing=tracing,
            metrics=metrics,
            limits=_limits(settings, facts),
            timers=Timers(
                heartbeat_s=settings.heartbeat_s,
                digest_s=settings.digest_s,
                canary_timeout_s=settings.canary_timeout_s,
                drain_s=settings.drain_s,
            ),
        )

        def announce() -> None:
            stop.serving = True
            status.check_ready = service.check_ready
            _log.info("ready in %.1f s: %s on %s", time.monotonic() - began_s, worker, facts.engine)

        await service.run(stop.asked, announce)
    finally:
        await _close(engine)
        await bus.close()
        tracing.close()


def _engine_kind(settings: WorkerSettings, facts: EngineFacts) -> str:
    options = msgspec.json.encode([facts.engine, settings.engine_options], order="deterministic")
    return blake2b(options, digest_size=16).hexdigest()


def _limits(settings: WorkerSettings, facts: EngineFacts) -> Limits:
    if settings.slots > facts.running_max:
        raise ConfigurationError(
            f"slots is {settings.slots}, but the engine runs {facts.running_max} at the same time", param="slots"
        )
    return Limits(
        slots=settings.slots or facts.running_max,
        kv_blocks=facts.kv_blocks,
        engine_block_tokens=facts.block_tokens,
        output_headroom_tokens_max=settings.output_headroom_tokens,
        leased_share_max=settings.leased_share,
        enter_timeout_s=settings.enter_timeout_s,
        progress_s=settings.progress_s,
        retain_s=settings.retain_s,
        gateway_silence_s=settings.gateway_silence_s,
    )


async def _close(engine: Engine) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await engine.close()
    except TimeoutError:
        _log.error("the engine did not close within %g s; its processes end with this one", CLOSE_TIMEOUT_S)
