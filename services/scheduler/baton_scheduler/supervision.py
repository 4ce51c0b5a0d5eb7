"""Carries out what the supervisor decides: one scheduler, the holder of a lease, orders changes of role."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from baton import subjects
from baton.errors import BatonError, InvalidRequest, MalformedMessage
from baton.messages.base import Refused
from baton.messages.workers import ChangeRole, RoleChange
from baton.node.lease import KeptLease
from baton.node.service import Node
from baton.telemetry import Reading, catalogue
from baton_scheduler.config import RoleChanges, SchedulerSettings
from baton_scheduler.loads import Loads
from baton_scheduler.supervisor import Order, Supervisor, SupervisorOptions

logger = logging.getLogger(__name__)

OBSERVE_S: Final = 1.0
ANSWER_TIMEOUT_S: Final = 2.0
LEASE_KEY: Final = "supervisor"
LEASE_TTL_S: Final = 2.0


class Supervision:
    """Every scheduler observes, for its metrics and to take over; only the holder of the lease orders."""

    def __init__(
        self, settings: SchedulerSettings, node: Node, loads: Loads, held: Callable[[], Mapping[str, int]]
    ) -> None:
        """`held` returns the number of requests that this scheduler holds, by model."""
        self._bus = node.ports.bus
        self._clock = node.ports.clock
        self._loads = loads
        self._held = held
        self._orders = settings.roles is RoleChanges.AUTO
        self._supervisor = Supervisor(SupervisorOptions(dwell_s=settings.role_dwell_s, rest_s=settings.role_rest_s))
        self._lease = KeptLease(node.ports, bucket=subjects.SCHEDULER_BUCKET, key=LEASE_KEY, ttl_s=LEASE_TTL_S)
        self._results = Counter[str]()
        node.metrics.read(self._readings)

    async def keep_lease(self) -> None:
        """Try to become the scheduler that orders, and stay it, until cancelled."""
        if not self._orders:
            return
        try:
            await self._lease.keep()
        finally:
            await self._lease.release()

    async def observe(self) -> None:
        """Follow the demand for each role, and order the changes that are due, for ever."""
        while True:
            now_s = self._clock.now_s()
            order = self._supervisor.observe(self._loads.live(now_s), self._held(), now_s)
            if order is not None and self._lease.fence():
                await self._send(order)
            await self._clock.sleep(OBSERVE_S)

    async def _send(self, order: Order) -> None:
        """Order a change. If it is refused or unanswered, the next observation shows what to do."""
        change = ChangeRole(generation=order.generation, role_epoch=order.role_epoch, role=order.role)
        try:
            answer = await self._bus.request(subjects.role(order.worker), change, timeout_s=ANSWER_TIMEOUT_S)
            if isinstance(answer, Refused):
                raise answer.error.to_error()
            if not isinstance(answer, RoleChange):
                raise MalformedMessage(f"the worker answered with {type(answer).__name__}")
        except BatonError as error:
            logger.warning("%s does not become a %s worker: %s", order.worker, order.role, error)
            self._results[error.code] += 1
            if isinstance(error, InvalidRequest):
                self._supervisor.refused(order)
        else:
            logger.info("%s becomes a %s worker: %s", order.worker, order.role, order.reason)
            self._results[order.role] += 1

    def _readings(self) -> Iterator[Reading]:
        for labels, pressure in self._supervisor.pressures().items():
            yield Reading(catalogue.ROLE_PRESSURE, pressure, labels)
        for labels, count in self._supervisor.replicas().items():
            yield Reading(catalogue.REPLICAS, count, labels)
        for result, count in self._results.items():
            yield Reading(catalogue.ROLE_ORDERS, count, (result,))
        yield Reading(catalogue.SUPERVISOR, int(self._lease.fence() > 0))
