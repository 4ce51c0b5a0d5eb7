"""The worker's role, and its change at run time. Pure: the clock's values are passed in.

    serves ──`take`──▶ changes: accepts no attempt ──`step`: no attempt runs, or `change_s` is over──▶ serves, epoch + 1

Process, engine, cache and generation stay. A role says which legs the worker accepts; engines run both, and the ledger
books by leg. So attempts that outlast `change_s` go on beside those of the new role, and none is ended by a change. The
epoch fences tasks and orders that were meant for an earlier role.
"""

from __future__ import annotations

from math import inf

from baton.errors import Conflict, InvalidRequest
from baton.messages.workers import ChangeRole, Role, RoleChange


class WorkerRole:
    def __init__(self, role: Role, *, hands_off: bool = True, change_s: float = 5.0) -> None:
        """`hands_off`: whether the engine has a transfer agent, without which it cannot prefill for other workers."""
        self.role = role
        self.epoch = 0
        self.next_role: Role | None = None
        """Role that the worker is changing to."""
        self.changes_at_s = inf
        """Latest instant of the change that is under way."""
        self._hands_off = hands_off
        self._change_s = change_s

    def take(self, order: ChangeRole, now_s: float) -> RoleChange:
        """Begin a change, or confirm the role; a repeated order changes nothing.

        Raises Conflict if the order is out of date or another change is under way, InvalidRequest if the engine cannot
        have the role.
        """
        if order.role_epoch != self.epoch:
            raise Conflict(f"the order is for role epoch {order.role_epoch}, the worker is at {self.epoch}")
        if order.role is self.role:
            if self.next_role is not None:
                raise Conflict(f"the worker is changing its role to {self.next_role}")
            return RoleChange(role=self.role, role_epoch=self.epoch)
        if order.role is Role.PREFILL and not self._hands_off:
            raise InvalidRequest("the worker's engine has no transfer agent: it cannot prefill for other workers")
        if self.next_role is None:
            self.next_role, self.changes_at_s = order.role, now_s + self._change_s
        return RoleChange(role=order.role, role_epoch=self.epoch + 1)

    def step(self, now_s: float, *, is_idle: bool) -> bool:
        """Take the next role if it is time; return whether it was."""
        if self.next_role is None or not (is_idle or now_s >= self.changes_at_s):
            return False
        self.role, self.epoch = self.next_role, self.epoch + 1
        self.stay()
        return True

    def stay(self) -> None:
        """Give up a change that is under way: the worker leaves."""
        self.next_role, self.changes_at_s = None, inf
