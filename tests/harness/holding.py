"""Schedulers that hold requests, on a clock that the test moves: workers that are only heartbeats, and a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import msgspec
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.service import SchedulerService

from baton import subjects
from baton.bus import Delivery, MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.messages.base import Context
from baton.messages.codec import AnyMessage
from baton.messages.index import Match, Matched
from baton.messages.placement import Candidate, Held, Place, Placed, QueuePositions, Released
from baton.messages.workers import GatewayBeat, Heartbeat
from baton.node.ports import Randomness, deterministic_ports
from baton.node.service import Node, serve
from baton.stop import Stop
from baton.telemetry import Metrics, Tracing
from tests.harness.heartbeats import heartbeat

BEAT_S = 0.25
FULL: dict[str, Any] = {"running": 8}


@dataclass
class World:
    """Schedulers, workers that are only heartbeats, an index, and what gateway `g` hears."""

    clock: ManualClock = field(default_factory=ManualClock)
    workers: dict[str, Heartbeat] = field(default_factory=dict[str, Heartbeat])
    heard: list[AnyMessage] = field(default_factory=list[AnyMessage])
    placed: list[Placed] = field(default_factory=list[Placed])
    matches: list[Match] = field(default_factory=list[Match])
    gateways: tuple[str, ...] = ("g",)
    seeds: Iterator[int] = field(default_factory=count)
    bus_of_scheduler: type[MemoryBus] = MemoryBus

    def __post_init__(self) -> None:
        self.network = MemoryNetwork(clock=self.clock)
        self.bus = MemoryBus(self.network)

    async def start(self) -> None:
        async def hear(delivery: Delivery) -> None:
            self.heard.append(delivery.message)

        async def note(delivery: Delivery) -> None:
            assert isinstance(delivery.message, Placed)
            self.placed.append(delivery.message)

        async def match(delivery: Delivery) -> None:
            assert isinstance(delivery.message, Match)
            self.matches.append(delivery.message)
            await delivery.respond(Matched(held={}))

        handlers = {subjects.gateway("g"): hear, subjects.gateway("h"): hear, subjects.PLACED: note}
        for subject, handler in (handlers | {subjects.MATCH: match}).items():
            await self.bus.subscribe(subject, handler)

    @asynccontextmanager
    async def scheduler(self, random: Randomness | None = None, **changes: Any) -> AsyncGenerator[Stop]:
        """Run a scheduler."""
        settings = msgspec.structs.replace(SchedulerSettings(learn_s=0.01), **changes)
        bus, stop = self.bus_of_scheduler(self.network), Stop()
        ports = deterministic_ports(bus, self.clock, seed=next(self.seeds))
        if random is not None:
            ports = replace(ports, random=random)
        node = Node(ports=ports, tracing=Tracing("scheduler"), metrics=Metrics("scheduler"))
        running = asyncio.create_task(serve(SchedulerService(settings, node), stop))
        await self.pass_time(0.02)
        assert stop.serving
        yield stop
        stop.asked.set()
        await self.pass_time(1.0)
        assert running.done()
        running.result()
        await bus.close()

    async def pass_time(self, duration_s: float) -> None:
        """Let time pass; workers and gateways beat at its start and each 0.25 s."""
        while duration_s > 0:
            for worker in self.workers.values():
                await self.bus.publish(subjects.HEARTBEAT, worker)
            for gateway in self.gateways:
                await self.bus.publish(subjects.GATEWAY_BEAT, GatewayBeat(gateway=gateway))
            await self.clock.advance(min(BEAT_S, duration_s))
            duration_s -= BEAT_S

    async def beat(self, worker: str, **load: Any) -> None:
        """Send a worker's heartbeat, and let schedulers act on it."""
        self.workers[worker] = heartbeat(worker, **load)
        await self.bus.publish(subjects.HEARTBEAT, self.workers[worker])
        await self.clock.advance(0.02)

    async def ask(self, request: str, **changes: Any) -> AnyMessage:
        place = Place(
            context=Context(request=request, budget_s=60.0),
            model="tiny",
            blocks=bytes(32),
            prompt_tokens=64,
            output_tokens_max=16,
            gateway="g",
            hold_s=10.0,
        )
        asked = asyncio.create_task(
            self.bus.request(subjects.PLACE, msgspec.structs.replace(place, **changes), timeout_s=2.0)
        )
        await self.clock.settle()
        return await asked

    async def hold(self, request: str, **changes: Any) -> None:
        assert isinstance(await self.ask(request, **changes), Held)

    def released(self) -> dict[str, str]:
        """Return what became of held requests, in order: their worker, the code of their error, or `handed back`."""
        return {
            each.request: each.placement.decode.worker
            if each.placement
            else each.error.code
            if each.error
            else "handed back"
            for each in self.heard
            if isinstance(each, Released)
        }

    def positions(self) -> list[str]:
        """Return the requests of the last message of positions, in order."""
        last = [each for each in self.heard if isinstance(each, QueuePositions)][-1]
        assert [number for _, _, number, _ in last.positions] == sorted(number for _, _, number, _ in last.positions)
        return [request for request, *_ in last.positions]


def placed_elsewhere(tenant: str, weight: float = 1.0) -> Placed:
    """Return what another scheduler tells of a placement."""
    return Placed(
        context=Context(request="other", budget_s=1.0),
        scheduler="another",
        model_digest="digest",
        blocks=b"",
        workers=(),
        prompt_tokens=100,
        predicted=Candidate(decode="unknown", predicted_ttft_s=0.1),
        tenant=tenant,
        weight=weight,
    )


@asynccontextmanager
async def open_world() -> AsyncGenerator[World]:
    world = World()
    await world.start()
    yield world
    await world.bus.close()
    await world.network.close()
