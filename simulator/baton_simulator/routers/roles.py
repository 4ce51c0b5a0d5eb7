"""Baton's router on a fleet whose workers change their roles, as the scheduler's supervisor decides."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from baton_scheduler.supervisor import Supervisor, SupervisorOptions
from msgspec.structs import replace

from baton.messages.workers import ChangeRole, Role
from baton.worker.role import WorkerRole
from baton_simulator.routers.baton import BatonOptions, BatonRouter
from baton_simulator.routers.ledgers import MODEL
from baton_simulator.routers.protocol import Arrival, Measured, Route, WorkerSpec, WorkerState

OBSERVE_S: Final = 1.0


Change = tuple[float, str, Role]
"""Instant, worker and new role."""


class RolesRouter(BatonRouter):
    """Answers are not moved: those that outlast a change go on beside the new role."""

    def __init__(
        self, workers: Sequence[WorkerSpec], options: BatonOptions, random: Random, supervisor: SupervisorOptions
    ) -> None:
        self.changes: list[Change] = []
        self._roles = {
            spec.name: WorkerRole(Role.PREFILL if spec.role == "prefill" else Role.DECODE) for spec in workers
        }
        self._states: dict[str, WorkerState] = {}
        self._supervisor = Supervisor(supervisor)
        self._observe_at_s = 0.0
        super().__init__(workers, options, random)

    def route(self, arrival: Arrival, now_s: float) -> Route | None:
        if now_s >= self._observe_at_s:
            self._observe_at_s = now_s + OBSERVE_S
            self._observe(now_s)
        return super().route(arrival, now_s)

    def beat(self, state: WorkerState, now_s: float) -> None:
        self._states[state.name] = replace(state, measured=Measured())
        role = self._roles[state.name]
        if role.step(now_s, is_idle=state.running + state.waiting == 0):
            self.changes.append((now_s, state.name, role.role))
        beat = self._ledgers.beat(state, now_s)
        beat = replace(
            beat,
            address=replace(beat.address, role_epoch=role.epoch),
            role=role.role,
            next_role=role.next_role,
            draining=role.next_role is not None,
        )
        self._loads.take(beat, now_s)

    def _observe(self, now_s: float) -> None:
        for name, role in self._roles.items():
            if role.next_role is not None:
                # Workers that have been idle for long send no heartbeats.
                self.beat(self._states[name], now_s)
        order = self._supervisor.observe(self._loads.live(now_s), {MODEL: len(self._held)}, now_s)
        if order is not None:
            change = ChangeRole(generation=order.generation, role_epoch=order.role_epoch, role=order.role)
            self._roles[order.worker].take(change, now_s)
            self.beat(self._states[order.worker], now_s)
