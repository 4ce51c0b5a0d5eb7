"""A real gateway in front of scripted actors, with one in-memory bus between them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from baton_gateway.api import make_app
from baton_gateway.config import Settings
from baton_gateway.idempotency_store import AnswerStore, MemoryAnswers
from baton_gateway.intake_pool import IntakePool, LocalPool
from baton_gateway.models import Models
from baton_gateway.responses.store import ResponseStore
from baton_gateway.server import listen, make_server
from baton_gateway.service import Gateway
from baton_gateway.tokenise import ModelTokenizer
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.service import SchedulerService
from msgspec import structs

from baton.bus import MemoryBus, MemoryNetwork
from baton.clock import SystemClock
from baton.messages.placement import Disaggregation
from baton.messages.traces import SpanRecord
from baton.node.ports import system_ports
from baton.node.service import Node
from baton.redis import RedisConnection
from baton.telemetry import Metrics, Tracing
from tests.harness.gateway.actors import Actors
from tests.harness.nodes import living, make_node


class Stage(Actors):
    """The gateway and the actors of one test. `base_url` is set while the gateway serves."""

    def __init__(
        self,
        settings: Settings,
        intake: IntakePool | None = None,
        model: tuple[Path, ModelTokenizer] | None = None,
        redis: RedisConnection | None = None,
        store: ResponseStore | None = None,
    ) -> None:
        # The gateway need not learn the workers before its first request: tests wait until it knows them.
        settings = structs.replace(settings, learn_s=0.0)
        clock = SystemClock()

        def load(_path: str) -> ModelTokenizer:
            return self.tokenizer

        self.spans: list[SpanRecord] = []
        self.network = MemoryNetwork(clock=clock)
        super().__init__(MemoryBus(self.network, name="actors"), clock, model)
        self.gateway_bus = MemoryBus(self.network, name="gateway")
        ports = system_ports(self.gateway_bus, seed=1)
        self.models = Models(ports=ports, intake=intake or LocalPool(load), load=load)
        self.gateway = Gateway(
            settings,
            gateway="gw-test",
            node=Node(
                ports=ports,
                tracing=Tracing("gateway", settings, export=self.spans.append),
                metrics=Metrics("gateway"),
            ),
            models=self.models,
            redis=redis,
        )
        self.store = store
        self.answers: AnswerStore = MemoryAnswers(clock, ttl_s=60.0)
        self.base_url = ""

    @asynccontextmanager
    async def standing(self) -> AsyncGenerator[None]:
        try:
            async with self.acting():
                await self.gateway.tracing.answer(self.gateway_bus)
                yield
        finally:
            await self.models.aclose()
            await self.gateway_bus.close()
            await self.bus.close()
            await self.network.close()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Serve the gateway over HTTP on a free port."""
        with listen(self.gateway.settings) as listener:
            server = make_server(make_app(self.gateway, self.store, self.answers), self.gateway, listener)
            self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with living(server):
                await self.wait_for(lambda: server.started)
                yield


@asynccontextmanager
async def open_stage(
    settings: Settings | None = None,
    intake: IntakePool | None = None,
    model: tuple[Path, ModelTokenizer] | None = None,
    redis: RedisConnection | None = None,
    store: ResponseStore | None = None,
) -> AsyncGenerator[Stage]:
    """Serve a stage over HTTP with one decode worker, d1, that the gateway knows."""
    stage = Stage(settings or Settings(port=0), intake, model, redis, store)
    async with stage.standing(), stage.serving():
        await stage.add("d1")
        await forward(stage, "d1")
        yield stage


@asynccontextmanager
async def open_scheduled_stage(
    settings: Settings, scheduling: SchedulerSettings | None = None
) -> AsyncGenerator[Stage]:
    """Serve a stage as `open_stage` does, with a real scheduler."""
    stage = Stage(settings)
    stage.scripted_scheduler = False
    async with stage.standing(), stage.serving():
        await stage.add("d1")
        await forward(stage, "d1")
        bus = MemoryBus(stage.network, name="scheduler")
        defaults = SchedulerSettings(disaggregation=Disaggregation.NEVER)
        async with living(SchedulerService(scheduling or defaults, make_node("scheduler", bus))):
            yield stage
        await bus.close()


async def forward(stage: Stage, *workers: str) -> None:
    """Wait until the gateway knows these workers."""
    await stage.wait_for(lambda: all(worker in stage.gateway.workers.members for worker in workers))
