"""When workers change their roles: decisions over loads on virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any

import pytest
from baton_scheduler.supervisor import Order, Supervisor, SupervisorOptions
from baton_scheduler.worker_load import WorkerLoad
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.messages.base import WorkerAddress
from baton.messages.workers import Role
from tests.harness.heartbeats import heartbeat

OPTIONS = SupervisorOptions()
PREFILL, DECODE = Role.PREFILL, Role.DECODE
CHANGE_S = 3.0


@dataclass
class Member:
    role: Role
    epoch: int = 0
    next_role: Role | None = None
    until_s: float = 0.0
    agents: tuple[str, ...] = ("agent",)
    identity: str = "same"


@dataclass
class Fleet:
    """Workers whose role's demand is spread evenly over them, and that carry out the supervisor's orders."""

    demand: dict[Role, float]
    """In workers."""
    members: dict[str, Member]
    supervisor: Supervisor = field(default_factory=Supervisor)
    now_s: float = 0.0
    orders: list[tuple[float, Order]] = field(default_factory=list[tuple[float, Order]])
    held: dict[str, int] = field(default_factory=dict[str, int])
    obeys: bool = True
    turn: int = 0

    def loads(self) -> list[WorkerLoad]:
        serving = {role: self.count(role) for role in Role}
        loads: list[WorkerLoad] = []
        for name, member in self.members.items():
            share = self.demand[member.role] / max(1, serving[member.role])
            beat = heartbeat(
                name,
                member.role,
                address=WorkerAddress(worker=name, generation=1, role_epoch=member.epoch, agents=member.agents),
                kv_identity=member.identity,
                **(self._prompts(share) if member.role is PREFILL else {}),
                kv_blocks_used=round(1000 * share) if member.role is DECODE else 0,
                next_role=member.next_role,
                draining=member.next_role is not None,
            )
            loads.append(WorkerLoad(beat, self.now_s, leased_share_max=1.0))
        return loads

    def _prompts(self, share: float) -> dict[str, Any]:
        """Return figures that show this demand: a queue beyond a busy worker, or work in this share of observations."""
        self.turn = (self.turn + 7) % 100
        is_computing = self.turn < 100 * share
        return {
            "prefill_elapsed_s": 1e-6 if is_computing else 0.0,
            "prefill_tokens_queued": max(0, round((share - 1) * 10_000)),
        }

    def count(self, role: Role) -> int:
        return sum(member.role is role and member.next_role is None for member in self.members.values())

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 1.0
            for member in self.members.values():
                if member.next_role is not None and member.until_s <= self.now_s:
                    member.role, member.epoch, member.next_role = member.next_role, member.epoch + 1, None
            order = self.supervisor.observe(self.loads(), self.held, self.now_s)
            if order is not None and self.obeys:
                self.orders.append((self.now_s, order))
                self.change(order.worker, order.role)

    def change(self, worker: str, role: Role) -> None:
        assert all(member.next_role is None for member in self.members.values()), "one change at a time"
        self.members[worker].next_role, self.members[worker].until_s = role, self.now_s + CHANGE_S

    @property
    def roles(self) -> list[Role]:
        return [order.role for _, order in self.orders]


def fleet(prefill: int, decode: int, *, prefill_demand: float, decode_demand: float) -> Fleet:
    members = {f"p{n}": Member(PREFILL) for n in range(prefill)} | {f"d{n}": Member(DECODE) for n in range(decode)}
    return Fleet({PREFILL: prefill_demand, DECODE: decode_demand}, members)


def test_a_role_without_capacity_gets_workers_until_it_has_enough() -> None:
    each = fleet(2, 6, prefill_demand=3.5, decode_demand=0.8)
    each.run(200)
    assert each.roles == [PREFILL, PREFILL]
    first, second = (at_s for at_s, _ in each.orders)
    assert first >= OPTIONS.dwell_s
    assert second - first >= OPTIONS.rest_s
    assert (each.count(PREFILL), each.count(DECODE)) == (4, 4)


def test_load_that_shifts_is_followed_and_nothing_flaps() -> None:
    each = fleet(4, 4, prefill_demand=5.5, decode_demand=0.8)
    each.run(600)
    assert each.count(PREFILL) == 6
    each.demand = {PREFILL: 0.8, DECODE: 5.5}
    each.run(600)
    assert each.count(DECODE) == 6
    assert each.roles == [PREFILL] * 2 + [DECODE] * 4


def test_balanced_load_changes_nothing() -> None:
    each = fleet(4, 4, prefill_demand=3.6, decode_demand=3.6)
    each.run(600)
    assert not each.orders
    each.demand = {PREFILL: 6.0, DECODE: 6.0}
    each.run(600)
    assert not each.orders, "both lack workers"


def test_peaks_shorter_than_the_dwell_time_change_nothing() -> None:
    each = fleet(4, 4, prefill_demand=1.0, decode_demand=1.0)
    for _ in range(20):
        each.demand[PREFILL] = 6.0
        each.run(OPTIONS.dwell_s / 2)
        each.demand[PREFILL] = 0.5
        each.run(3 * OPTIONS.dwell_s)
    assert not each.orders


def test_the_last_worker_of_a_role_stays() -> None:
    each = fleet(1, 3, prefill_demand=5.0, decode_demand=0.1)
    each.run(600)
    assert (each.count(PREFILL), each.count(DECODE)) == (3, 1)


def test_what_undoes_the_last_change_waits_longer() -> None:
    each = fleet(3, 3, prefill_demand=3.5, decode_demand=0.4)
    each.run(40)
    assert each.roles == [PREFILL]
    each.demand = {PREFILL: 0.4, DECODE: 4.0}
    each.run(150)
    (_, first), (second_s, second) = ((order.role, at_s) for at_s, order in each.orders[:2])
    assert second_s is DECODE
    assert second - first >= 4 * OPTIONS.rest_s


def test_a_change_by_an_operator_is_rested_after_like_any_other() -> None:
    each = fleet(2, 4, prefill_demand=1.0, decode_demand=0.5)
    each.run(20)
    each.change("d0", PREFILL)
    each.demand[PREFILL] = 6.0
    each.run(CHANGE_S + OPTIONS.rest_s - 2)
    assert not each.orders
    each.run(10)
    assert each.roles == [PREFILL]


def test_the_least_loaded_worker_changes() -> None:
    each = fleet(1, 3, prefill_demand=2.0, decode_demand=0.6)
    prefill, *decodes = (load.heartbeat for load in each.loads())
    used = [replace(beat, kv_blocks_used=blocks) for beat, blocks in zip(decodes, (900, 100, 200), strict=True)]
    supervisor = Supervisor(SupervisorOptions(dwell_s=0.0))
    order = supervisor.observe([WorkerLoad(beat) for beat in (prefill, *used)], {}, 1.0)
    assert order
    assert order.worker == "d1"


def test_workers_that_cannot_hand_off_are_left_alone() -> None:
    each = fleet(1, 3, prefill_demand=3.0, decode_demand=0.3)
    each.members["d0"].agents = each.members["d1"].agents = ()
    each.run(120)
    assert not each.orders, "d2 is the only decode worker that hands off"
    each.members["d1"].agents = ("agent",)
    each.run(60)
    assert [order.worker for _, order in each.orders] == ["d1"]


def test_one_of_each_kv_identity_stays() -> None:
    each = fleet(1, 3, prefill_demand=4.0, decode_demand=0.3)
    each.members["d0"].identity = "other"
    each.run(600)
    assert [order.worker for _, order in each.orders] == ["d1"]


def test_a_worker_that_refused_is_left_alone_until_it_restarts() -> None:
    each = fleet(1, 2, prefill_demand=3.0, decode_demand=0.1)
    each.obeys = False
    each.run(20)
    order = each.supervisor.observe(each.loads(), {}, each.now_s)
    assert order
    each.supervisor.refused(order)
    second = each.supervisor.observe(each.loads(), {}, each.now_s)
    assert second
    assert second.worker != order.worker
    each.supervisor.refused(second)
    assert each.supervisor.observe(each.loads(), {}, each.now_s) is None


def test_nothing_is_ordered_while_a_worker_of_any_model_changes() -> None:
    each = fleet(1, 4, prefill_demand=3.0, decode_demand=0.1)
    changing = heartbeat("other", DECODE, model="other", draining=True, next_role=PREFILL)
    supervisor = Supervisor()
    for now_s in range(30):
        assert supervisor.observe([*each.loads(), WorkerLoad(changing)], {}, float(now_s)) is None
    assert any(supervisor.observe(each.loads(), {}, float(now_s)) for now_s in range(30, 45))


def pressure(role: Role, *workers: WorkerLoad, held: int = 0) -> float:
    supervisor = Supervisor()
    supervisor.observe(workers, {"tiny": held}, 0.0)
    return supervisor.pressures()[role, "tiny"]


def test_what_is_queued_counts_and_what_is_held_counts_for_both_roles() -> None:
    prefill = WorkerLoad(heartbeat("p", PREFILL, prefill_tokens_queued=5_000, prefill_elapsed_s=0.1))
    decode = WorkerLoad(heartbeat("d", DECODE, running=4, kv_blocks_used=300))
    assert pressure(PREFILL, prefill, decode) == pytest.approx(1.5, rel=0.05), "busy, and 5 s queued"
    assert pressure(DECODE, prefill, decode) == 0.5, "half of the slots"
    assert pressure(PREFILL, prefill, decode, held=2) == pytest.approx(2.25, rel=0.05)
    assert pressure(DECODE, prefill, decode, held=2) == 0.75
    assert pressure(DECODE, prefill, decode, held=4_000) == 1.0
    waiting = WorkerLoad(heartbeat("p", PREFILL, prefill_tokens_queued=5_000))
    assert pressure(PREFILL, waiting, decode) == 0, "its prompts wait for room on a decode worker"


def test_answers_whose_prompts_are_still_computed_are_no_demand_for_decode() -> None:
    full = heartbeat("d", DECODE, running=8, kv_blocks_used=1000)
    assert pressure(DECODE, WorkerLoad(full)) == 1.0
    assert pressure(DECODE, WorkerLoad(replace(full, pulling=6, pulling_kv_blocks=800))) == 0.25


def test_recommended_replicas_keep_a_reserve() -> None:
    each = fleet(2, 2, prefill_demand=0.0, decode_demand=2.8)
    each.run(60)
    assert each.supervisor.replicas() == {(PREFILL, "tiny"): 1, (DECODE, "tiny"): ceil(2.8 / 0.7 - 1e-6)}


def test_models_are_judged_apart_and_one_change_is_made_at_a_time() -> None:
    each = fleet(1, 3, prefill_demand=3.0, decode_demand=0.3)
    other = [
        WorkerLoad(replace(load.heartbeat, model="other", address=replace(load.heartbeat.address, worker=f"o{number}")))
        for number, load in enumerate(each.loads())
    ]
    supervisor = Supervisor()
    orders = [supervisor.observe([*each.loads(), *other], {}, float(now_s)) for now_s in range(12)]
    assert [order.worker[0] for order in orders if order] == ["o", "o"], "not obeyed, so it is ordered again"


demands = st.floats(0.0, 6.0)
sizes = st.integers(1, 4)


@given(sizes, sizes, demands, demands)
def test_at_an_unchanged_demand_no_change_is_ever_undone(
    prefill: int, decode: int, prefill_demand: float, decode_demand: float
) -> None:
    each = fleet(prefill, decode, prefill_demand=prefill_demand, decode_demand=decode_demand)
    each.run(200)
    assert len(set(each.roles)) <= 1
    assert len(each.roles) < prefill + decode
    for role in Role:
        assert each.count(role) >= 1
    steps = [later - earlier for (earlier, _), (later, _) in zip(each.orders, each.orders[1:], strict=False)]
    assert all(step_s >= OPTIONS.rest_s for step_s in steps)
