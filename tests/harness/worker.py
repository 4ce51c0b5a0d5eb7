"""A worker's shell with a scripted engine, an in-memory bus and a clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from baton import subjects
from baton.bus import Delivery, MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.engines.engine import EngineDelta
from baton.engines.scripted import FACTS, ScriptedEngine
from baton.messages.attempts import AttemptState, DecodeTask, Digest, Frame, Frames, PrefillTask, Sampling
from baton.messages.base import Context, WorkerAddress, pack_tokens
from baton.messages.codec import AnyMessage
from baton.messages.workers import GatewayBeat, Heartbeat, Role
from baton.node.ports import deterministic_ports
from baton.node.service import Node, serve
from baton.stop import Stop
from baton.telemetry import Metrics, Tracing
from baton.worker.admission import Identity
from baton.worker.attempt import Limits
from baton.worker.role import WorkerRole
from baton.worker.service import Timers, WorkerService

GENERATION = 7
PROMPT = list(range(1, 101))
PREFILL_ADDRESS = WorkerAddress(worker="p0", generation=3, agents=("scripted",))


class World:
    """One worker, and the messages that one gateway receives."""

    def __init__(self, role: Role, engine: ScriptedEngine | None = None) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(clock=self.clock)
        self.bus = MemoryBus(self.network)
        self.gateway_bus = MemoryBus(self.network)
        self.engine = engine or ScriptedEngine()
        self.received: list[AnyMessage] = []
        self.stop = Stop()
        self.metrics = Metrics(role)
        ports = deterministic_ports(self.bus, self.clock, seed=0)
        self.node = Node(ports=ports, tracing=Tracing(role), metrics=self.metrics)
        self.service = WorkerService(
            identity=Identity(
                address=WorkerAddress(worker="w0", generation=GENERATION, agents=FACTS.agents),
                model_name="tiny",
                model_path="models/tiny",
                block_tokens=32,
                engine_kind="kind",
            ),
            role=WorkerRole(role),
            facts=self.engine.facts,
            engine=self.engine,
            node=self.node,
            limits=Limits(slots=2, kv_blocks=FACTS.kv_blocks, engine_block_tokens=FACTS.block_tokens),
            timers=Timers(),
        )
        self.running: asyncio.Task[None]

    async def start(self) -> None:
        async def hear(delivery: Delivery) -> None:
            self.received.append(delivery.message)

        for subject in (subjects.gateway("g"), subjects.HEARTBEAT):
            await self.gateway_bus.subscribe(subject, hear)
        self.running = asyncio.create_task(serve(self.service, self.stop))
        for _ in range(50):
            await self.clock.advance(0.02)
            if self.stop.serving:
                return
        raise AssertionError("the worker did not get ready")

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.bus.close()
        await self.gateway_bus.close()
        await self.network.close()

    async def ask(self, message: AnyMessage) -> AnyMessage:
        answer = asyncio.create_task(self.gateway_bus.request(subjects.task("w0"), message, timeout_s=1.0))
        await self.clock.settle()
        return await answer

    async def tell(self, message: AnyMessage) -> None:
        await self.gateway_bus.publish(subjects.task("w0"), message)
        await self.clock.settle()

    async def step(self, result: EngineDelta, key: tuple[str, int] = ("r", 0)) -> None:
        self.engine.step(key, result)
        await self.clock.settle()

    def frames(self) -> list[Frame]:
        return [frame for message in self.received if isinstance(message, Frames) for frame in message.frames]

    async def state(self, key: tuple[str, int] = ("r", 0)) -> AttemptState | None:
        """Return an attempt's state in the next digest."""
        self.received.clear()
        await self.gateway_bus.publish(subjects.GATEWAY_BEAT, GatewayBeat(gateway="g"))
        await self.clock.advance(1.0)
        [digest] = [message for message in self.received if isinstance(message, Digest)]
        return next((e.state for e in digest.entries if (e.request, e.attempt) == key), None)

    def shown(self, series: str) -> float:
        """Return a figure as a scrape shows it."""
        lines = self.metrics.render("")[1].decode().splitlines()
        (line,) = (line for line in lines if line.startswith(series + " "))
        return float(line.rpartition(" ")[2])

    def heartbeat(self) -> Heartbeat:
        return [message for message in self.received if isinstance(message, Heartbeat)][-1]


@asynccontextmanager
async def open_world(role: Role) -> AsyncGenerator[World]:
    """A worker that is ready."""
    world = World(role)
    await world.start()
    yield world
    await world.close()


def context(request: str = "r", attempt: int = 0, budget_s: float = 60.0) -> Context:
    return Context(request=request, attempt=attempt, budget_s=budget_s)


def decode_task(request: str = "r", attempt: int = 0, *, pulls: bool = True, budget_s: float = 60.0) -> DecodeTask:
    return DecodeTask(
        context=context(request, attempt, budget_s),
        gateway="g",
        generation=GENERATION,
        tokens=pack_tokens(PROMPT),
        prompt_tokens=len(PROMPT),
        sampling=Sampling(max_tokens=10),
        source=PREFILL_ADDRESS if pulls else None,
    )


def prefill_task(request: str = "r", attempt: int = 0) -> PrefillTask:
    return PrefillTask(
        context=context(request, attempt),
        gateway="g",
        generation=GENERATION,
        tokens=pack_tokens(PROMPT),
        prompt_tokens=len(PROMPT),
        sampling=Sampling(max_tokens=10),
    )
