"""Decides when a worker changes its role. Pure: time is passed in.

The demand for a role is counted in workers: prefill workers that compute and what is queued there, if it is to be
worked off within 10 s; the shares of slots and KV that sequences take on decode workers, without those that still wait
for a prompt to be computed. What is held for lack of room adds to both in proportion, since whichever role is short
holds up the other. The pressure of a role is its demand over its workers. A worker changes to the role with the higher
pressure if, for `dwell_s` on end,

    that pressure is at least `pressure_min`, and
    the other role's pressure without that worker would be at most `ratio_max` of it.

So at an unchanged demand no change is ever undone: it would need both ratios the other way round. As one change shifts
the load that the other role sees, changes of a model are `rest_s` apart, and one that undoes the last one four times
that. One change is under way at a time, and the last worker of a role stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf
from typing import Final

from baton.messages.workers import Role
from baton_scheduler.worker_load import WorkerLoad

HORIZON_S: Final = 10.0
"""Time in which what is queued is to be worked off."""
GROWTH_MAX: Final = 2.0
"""Bound on what held requests add to the demand."""
REVERSAL_RESTS: Final = 4.0
"""Rests before a change that undoes the last one."""
OTHER: Final = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    pressure_min: float = 0.95
    """Share of a role's capacity in demand from which on it may get another worker."""
    ratio_max: float = 0.5
    pressure_target: float = 0.7
    """Pressure for which replicas are recommended."""
    dwell_s: float = 10.0
    rest_s: float = 30.0
    smoothing_s: float = 10.0
    """Time constant of the average over demands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A change of role that is to be made."""

    worker: str
    generation: int
    role_epoch: int
    role: Role
    reason: str


@dataclass(slots=True)
class _Change:
    """A change of role that was seen."""

    at_s: float = -inf
    to: Role | None = None


@dataclass(slots=True)
class _Model:
    """Demand and history of one model."""

    demand: dict[Role, float] = field(default_factory=dict[Role, float])
    workers: dict[Role, int] = field(default_factory=dict[Role, int])
    seen_s: float = -inf
    wants: Role | None = None
    """Role that lacks a worker, since `wants_since_s`."""
    wants_since_s: float = inf
    last: _Change = field(default_factory=_Change)

    def pressure(self, role: Role) -> float:
        return self.demand.get(role, 0.0) / self.workers[role] if self.workers.get(role) else 0.0


class Supervisor:
    def __init__(self, options: SupervisorOptions | None = None) -> None:
        self._options = options or SupervisorOptions()
        self._models: dict[str, _Model] = {}
        self._epochs: dict[str, tuple[int, int]] = {}
        """Worker → generation and role epoch, as last seen."""
        self._unable: set[tuple[str, int]] = set()
        """(worker, generation) whose engine cannot have another role."""

    # ------------------------------------------------------------ reading

    def pressures(self) -> dict[tuple[Role, str], float]:
        """Return the pressure by role and model."""
        return {(role, name): model.pressure(role) for name, model in self._models.items() for role in model.workers}

    def replicas(self) -> dict[tuple[Role, str], int]:
        """Return the recommended number of workers by role and model: at least one where there is one."""
        target = self._options.pressure_target
        return {
            (role, name): max(1, ceil(model.demand[role] / target))
            for name, model in self._models.items()
            for role in model.workers
        }

    # ------------------------------------------------------------ deciding

    def refused(self, order: Order) -> None:
        """Leave a worker alone whose engine cannot have the role."""
        self._unable.add((order.worker, order.generation))

    def observe(self, loads: Iterable[WorkerLoad], held: Mapping[str, int], now_s: float) -> Order | None:
        """Take all live workers and the number of held requests by model; return the change that is due."""
        by_model: dict[str, list[WorkerLoad]] = {}
        for load in loads:
            by_model.setdefault(load.heartbeat.model, []).append(load)
        self._models = {name: self._models.get(name, _Model()) for name in by_model}
        self._note_changes(by_model, now_s)
        for name, workers in by_model.items():
            self._measure(self._models[name], workers, held.get(name, 0), now_s)
        if any(load.heartbeat.next_role for workers in by_model.values() for load in workers):
            return None
        orders = (self._judge(self._models[name], workers, now_s) for name, workers in sorted(by_model.items()))
        return next(filter(None, orders), None)

    def _note_changes(self, by_model: Mapping[str, Sequence[WorkerLoad]], now_s: float) -> None:
        epochs: dict[str, tuple[int, int]] = {}
        for name, workers in by_model.items():
            for load in workers:
                address = load.heartbeat.address
                epochs[load.worker] = now = (address.generation, address.role_epoch)
                before = self._epochs.get(load.worker, now)
                if load.heartbeat.next_role or (before[0] == now[0] and before[1] < now[1]):
                    self._models[name].last = _Change(now_s, load.heartbeat.next_role or load.role)
        self._epochs = epochs
        self._unable &= {(worker, generation) for worker, (generation, _) in epochs.items()}

    def _measure(self, model: _Model, workers: Sequence[WorkerLoad], held: int, now_s: float) -> None:
        serving = [load for load in workers if load.ready]
        share = 1 - exp(-(now_s - model.seen_s) / self._options.smoothing_s)
        model.seen_s = now_s
        beats = [load.heartbeat for load in serving if load.role is Role.DECODE]
        served = sum(beat.running + beat.waiting + beat.overbooked for beat in beats)
        growth = min(GROWTH_MAX, 1 + held / max(1, served))
        for role in Role:
            team = [load for load in serving if load.role is role]
            if not team:
                model.demand.pop(role, None)
                model.workers.pop(role, None)
                continue
            demand = growth * sum(_demand(load, now_s) for load in team)
            average = model.demand.get(role, demand)
            model.demand[role] = average + share * (demand - average)
            model.workers[role] = len(team)

    def _judge(self, model: _Model, workers: Sequence[WorkerLoad], now_s: float) -> Order | None:
        wants = next((role for role in Role if self._lacks(model, role)), None)
        if wants is not model.wants:
            model.wants, model.wants_since_s = wants, now_s
        if wants is None or now_s - model.wants_since_s < self._options.dwell_s:
            return None
        rest_s = self._options.rest_s * (REVERSAL_RESTS if model.last.to is OTHER[wants] else 1.0)
        donor = OTHER[wants]
        candidates = [load for load in workers if load.role is donor and self._may_change(load, workers)]
        if now_s - model.last.at_s < rest_s or not candidates:
            return None
        chosen = min(candidates, key=lambda load: (_demand(load, now_s), load.worker))
        address = chosen.heartbeat.address
        return Order(
            worker=chosen.worker,
            generation=address.generation,
            role_epoch=address.role_epoch,
            role=wants,
            reason=f"{wants} is at {model.pressure(wants):.0%} of its capacity, {donor} at {model.pressure(donor):.0%}",
        )

    def _lacks(self, model: _Model, role: Role) -> bool:
        """Return whether this role should get a worker of the other one."""
        others = model.workers.get(OTHER[role], 0)
        if others < 2 or role not in model.workers or model.pressure(role) < self._options.pressure_min:
            return False
        return model.demand[OTHER[role]] / (others - 1) <= self._options.ratio_max * model.pressure(role)

    def _may_change(self, load: WorkerLoad, workers: Sequence[WorkerLoad]) -> bool:
        """Return whether a worker can have the other role, and leaves one of its role and KV identity behind."""
        if not load.ready or not load.identity or (load.worker, load.heartbeat.address.generation) in self._unable:
            return False
        alike = (each for each in workers if each.role is load.role and each.identity == load.identity)
        return any(each.ready and each is not load for each in alike)


def _demand(load: WorkerLoad, now_s: float) -> float:
    """Return what a worker does for its role now, as a share of its capacity; above 1: prompts queue up."""
    if load.role is Role.PREFILL:
        # Prompts may also wait there for room on a decode worker, while nothing is computed.
        is_computing = load.heartbeat.prefill_elapsed_s > 0
        return 1 + max(0.0, load.computes_until_s - now_s) / HORIZON_S if is_computing else 0.0
    beat = load.heartbeat
    slots = (beat.running - beat.pulling + beat.waiting) / load.running_max
    return max(slots, (beat.kv_blocks_used - beat.pulling_kv_blocks) / max(1, beat.kv_blocks_total))
