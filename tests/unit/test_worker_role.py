"""The change of a worker's role, as a state machine."""

from __future__ import annotations

from math import inf

import pytest

from baton.errors import Conflict, InvalidRequest
from baton.messages.workers import ChangeRole, Role, RoleChange
from baton.worker.role import WorkerRole


def order(role: Role, epoch: int = 0) -> ChangeRole:
    return ChangeRole(generation=1, role_epoch=epoch, role=role)


def test_a_change_waits_for_the_last_attempt() -> None:
    role = WorkerRole(Role.DECODE, change_s=5.0)
    assert role.take(order(Role.PREFILL), 10.0) == RoleChange(role=Role.PREFILL, role_epoch=1)
    assert (role.role, role.next_role, role.changes_at_s) == (Role.DECODE, Role.PREFILL, 15.0)
    assert not role.step(14.9, is_idle=False)
    assert role.step(14.9, is_idle=True)
    assert (role.role, role.epoch, role.next_role, role.changes_at_s) == (Role.PREFILL, 1, None, inf)
    assert not role.step(20.0, is_idle=True)


def test_a_change_does_not_wait_for_ever() -> None:
    role = WorkerRole(Role.DECODE, change_s=5.0)
    role.take(order(Role.PREFILL), 10.0)
    assert role.step(15.0, is_idle=False)
    assert role.role is Role.PREFILL


def test_a_repeated_order_changes_nothing() -> None:
    role = WorkerRole(Role.DECODE, change_s=5.0)
    assert role.take(order(Role.PREFILL), 10.0) == role.take(order(Role.PREFILL), 12.0)
    assert role.changes_at_s == 15.0
    assert role.take(order(Role.PREFILL), 12.0).role_epoch == 1


def test_the_present_role_is_confirmed() -> None:
    role = WorkerRole(Role.DECODE)
    assert role.take(order(Role.DECODE), 0.0) == RoleChange(role=Role.DECODE, role_epoch=0)
    assert role.next_role is None


def test_orders_for_an_earlier_epoch_are_refused() -> None:
    role = WorkerRole(Role.DECODE)
    role.take(order(Role.PREFILL), 0.0)
    role.step(0.0, is_idle=True)
    with pytest.raises(Conflict, match="epoch 0, the worker is at 1"):
        role.take(order(Role.DECODE), 1.0)
    assert role.take(order(Role.DECODE, epoch=1), 1.0).role_epoch == 2


def test_two_changes_at_once_are_refused() -> None:
    role = WorkerRole(Role.DECODE)
    role.take(order(Role.PREFILL), 0.0)
    with pytest.raises(Conflict, match="changing its role to prefill"):
        role.take(order(Role.DECODE), 0.1)


def test_an_engine_that_cannot_hand_off_stays_a_decode_worker() -> None:
    role = WorkerRole(Role.DECODE, hands_off=False)
    with pytest.raises(InvalidRequest, match="no transfer agent"):
        role.take(order(Role.PREFILL), 0.0)
    assert role.next_role is None


def test_a_worker_that_leaves_gives_up_its_change() -> None:
    role = WorkerRole(Role.DECODE)
    role.take(order(Role.PREFILL), 0.0)
    role.stay()
    assert not role.step(100.0, is_idle=True)
    assert role.role is Role.DECODE
