"""Schedulers that supervise roles, on the bus in memory and a clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from baton_scheduler.config import RoleChanges, SchedulerSettings
from baton_scheduler.loads import Loads, LoadsOptions
from baton_scheduler.supervision import LEASE_TTL_S, Supervision

from baton import subjects
from baton.bus import Delivery, MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.errors import BatonError, InvalidRequest
from baton.messages.base import ErrorReport, Refused
from baton.messages.codec import AnyMessage
from baton.messages.workers import ChangeRole, Heartbeat, Role, RoleChange
from baton.node.ports import deterministic_ports
from baton.node.service import Node
from baton.telemetry import Metrics, Tracing
from tests.harness.heartbeats import heartbeat

SETTINGS = SchedulerSettings(roles=RoleChanges.AUTO, role_dwell_s=5.0, role_rest_s=20.0)
BEATS = (
    heartbeat("p0", Role.PREFILL, prefill_tokens_queued=20_000, prefill_elapsed_s=0.1),
    heartbeat("d0", Role.DECODE),
    heartbeat("d1", Role.DECODE, running=1),
)


class Scheduler:
    def __init__(self, network: MemoryNetwork, settings: SchedulerSettings, number: int) -> None:
        self.bus = MemoryBus(network)
        self.loads = Loads(LoadsOptions())
        self.metrics = Metrics("scheduler")
        ports = deterministic_ports(self.bus, network.clock, seed=number)
        node = Node(ports=ports, tracing=Tracing("scheduler"), metrics=self.metrics)
        supervision = Supervision(settings, node, self.loads, dict[str, int])
        self._tasks = [asyncio.create_task(task) for task in (supervision.keep_lease(), supervision.observe())]

    def shown(self, series: str) -> float:
        lines = self.metrics.render("")[1].decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(series + " ")), 0.0)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.bus.close()


class World:
    """Schedulers, and workers that are heartbeats and record their orders."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(clock=self.clock)
        self.bus = MemoryBus(self.network)
        self.schedulers: list[Scheduler] = []
        self.orders: list[tuple[float, str, ChangeRole]] = []
        self.refusal: BatonError | None = None

    async def start(self, *settings: SchedulerSettings) -> None:
        self.schedulers = [Scheduler(self.network, each, number) for number, each in enumerate(settings)]
        for beat in BEATS:
            await self.bus.subscribe(subjects.role(beat.address.worker), self._on_role)

    async def _on_role(self, delivery: Delivery) -> None:
        order = delivery.message
        assert isinstance(order, ChangeRole)
        self.orders.append((self.clock.now_s(), delivery.subject.split(".")[2], order))
        answer: AnyMessage = RoleChange(role=order.role, role_epoch=order.role_epoch + 1)
        await delivery.respond(Refused(error=ErrorReport.of(self.refusal)) if self.refusal else answer)

    async def pass_time(self, seconds: int, *beats: Heartbeat) -> None:
        for _ in range(seconds):
            for scheduler in self.schedulers:
                for beat in beats or BEATS:
                    scheduler.loads.take(beat, self.clock.now_s())
            await self.clock.advance(1.0)


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    made = World()
    yield made
    for scheduler in made.schedulers:
        await scheduler.end()
    await made.bus.close()
    await made.network.close()


async def test_one_of_two_schedulers_orders_a_change(world: World) -> None:
    await world.start(SETTINGS, SETTINGS)
    await world.pass_time(9)
    [(at_s, worker, order)] = world.orders[:1]
    assert at_s >= SETTINGS.role_dwell_s
    assert (worker, order) == ("d0", ChangeRole(generation=1, role_epoch=0, role=Role.PREFILL))
    assert sum(each.shown("baton_supervisor") for each in world.schedulers) == 1
    instants = [at for at, _, _ in world.orders]
    assert len(instants) == len(set(instants)), "one of them orders, until heartbeats show the change"


async def test_another_scheduler_takes_over(world: World) -> None:
    await world.start(SETTINGS, SETTINGS)
    await world.pass_time(3)
    holder = next(each for each in world.schedulers if each.shown("baton_supervisor"))
    world.schedulers.remove(holder)
    await holder.end()
    await world.pass_time(int(LEASE_TTL_S) + 6)
    assert world.schedulers[0].shown("baton_supervisor") == 1
    assert world.orders


async def test_without_leave_nothing_is_ordered_and_figures_are_shown(world: World) -> None:
    await world.start(SchedulerSettings(role_dwell_s=5.0))
    await world.pass_time(30)
    assert not world.orders
    (scheduler,) = world.schedulers
    assert scheduler.shown("baton_supervisor") == 0
    assert scheduler.shown('baton_role_pressure{model="tiny",role="prefill"}') > 1
    assert scheduler.shown('baton_replicas_recommended{model="tiny",role="prefill"}') > 1
    assert scheduler.shown('baton_replicas_recommended{model="tiny",role="decode"}') == 1


async def test_a_worker_that_cannot_have_the_role_is_left_alone(world: World) -> None:
    world.refusal = InvalidRequest("no transfer agent")
    await world.start(SETTINGS)
    await world.pass_time(20)
    assert [worker for _, worker, _ in world.orders] == ["d0", "d1"], "each is asked once"
    (scheduler,) = world.schedulers
    assert scheduler.shown('baton_role_orders_total{result="invalid_request"}') == 2


async def test_a_worker_that_does_not_answer_is_ordered_again(world: World) -> None:
    world.schedulers = [Scheduler(world.network, SETTINGS, 0)]
    await world.pass_time(12)
    assert world.schedulers[0].shown('baton_role_orders_total{result="no_responders"}') > 1
