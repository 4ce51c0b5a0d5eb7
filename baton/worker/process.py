"""A worker's process: load the engine, serve, leave. Both services' `__main__` call `run_worker`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b
from typing import NoReturn

import msgspec

from baton.engines.engine import Engine, EngineFacts
from baton.errors import ConfigurationError, Unavailable
from baton.messages.base import WorkerAddress
from baton.messages.workers import Role
from baton.node.service import Node, Process, run
from baton.telemetry import Reading, catalogue
from baton.worker.admission import Identity
from baton.worker.attempt import Limits
from baton.worker.role import WorkerRole
from baton.worker.service import Timers, WorkerService
from baton.worker.settings import WorkerSettings, create_engine

_log = logging.getLogger("baton.worker")

CLOSE_TIMEOUT_S = 20.0


def run_worker(role: Role, settings_type: type[WorkerSettings]) -> NoReturn:
    """Run the process of a worker."""
    run(role, settings_type, partial(_main, role))


async def _main(role: Role, settings: WorkerSettings, process: Process) -> None:
    if not settings.model:
        raise ConfigurationError("there is no model: give the folder of one with --model", param="model")
    # The bus comes before the engine: a wrong address shows at once, not after a minute of loading.
    async with process.join(settings.worker_id(role)) as node:
        await process.serve(LoadingWorker(role, settings, node))


class LoadingWorker:
    """Service that loads an engine, then delegates to a `WorkerService` around it.

    Raises ConfigurationError when it cannot start, EngineFailed when its engine dies.
    """

    def __init__(self, role: Role, settings: WorkerSettings, node: Node) -> None:
        self._role = role
        self._settings = settings
        self._node = node
        self._clock = node.ports.clock
        # Wall-clock time in milliseconds: higher at each start of a worker of this name, unless the clock was set
        # back by more than the worker's downtime.
        self._generation = int(self._clock.wall_s() * 1000)
        self._service: WorkerService | None = None
        node.metrics.read(lambda: [Reading(catalogue.PRICE, settings.price_per_hour)])

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        settings, began_s = self._settings, self._clock.now_s()
        engine = create_engine(self._role, settings)
        try:
            _log.info("loading model %s into %s …", settings.model, settings.engine)
            facts = await engine.start()
            _log.info("model loaded, %.1f s; proving the block mapping …", self._clock.now_s() - began_s)
            self._service = WorkerService(
                identity=self._identify(facts),
                role=WorkerRole(self._role, hands_off=bool(facts.agents), change_s=settings.role_change_s),
                facts=facts,
                engine=engine,
                node=self._node,
                limits=_limits(settings, facts),
                timers=Timers(
                    heartbeat_s=settings.heartbeat_s,
                    digest_s=settings.digest_s,
                    canary_timeout_s=settings.canary_timeout_s,
                    drain_s=settings.drain_s,
                ),
            )
            async with self._service.serving():
                _log.info("ready in %.1f s, on %s", self._clock.now_s() - began_s, facts.engine)
                yield
        finally:
            await self._close(engine)

    async def check_ready(self) -> None:
        if self._service is None:
            raise Unavailable("the service is starting")
        await self._service.check_ready()

    async def drain(self) -> None:
        assert self._service is not None, "what does not serve yet is not drained"
        await self._service.drain()

    def _identify(self, facts: EngineFacts) -> Identity:
        worker = self._settings.worker_id(self._role)
        return Identity(
            address=WorkerAddress(worker=worker, generation=self._generation, agents=facts.agents),
            model_name=self._settings.public_model_name(),
            model_path=self._settings.model,
            block_tokens=self._settings.block_tokens,
            engine_kind=_engine_kind(self._settings, facts),
        )

    async def _close(self, engine: Engine) -> None:
        try:
            async with self._clock.timeout(CLOSE_TIMEOUT_S):
                await engine.close()
        except TimeoutError:
            _log.error("the engine did not close within %g s; its processes end with this one", CLOSE_TIMEOUT_S)


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
        lost_after_s=settings.lost_after_s,
    )
