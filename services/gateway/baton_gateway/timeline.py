"""Timeline of one answer: what each step of its machine changed, and when its phases began."""

from __future__ import annotations

import msgspec

from baton.clock import Clock
from baton_gateway.attempt import AttemptMachine, Phase


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one step."""

    new_attempt: bool
    queued_s: float | None
    """Time that the request waited for a worker, if that wait ended."""
    ttft_s: float | None
    """Time from the attempt's placement to its first token, if that token came."""


class Timeline:
    """Phases and times of one answer. They are read by its trace and its metrics."""

    def __init__(self, machine: AttemptMachine, clock: Clock) -> None:
        self._machine = machine
        self._clock = clock
        self._phase: Phase | None = None
        self._attempt = -1
        self._queued_at_s: float | None = None
        self._dispatched_at_s = 0.0
        self.first_token_at_s = 0.0
        """Time of the first token since the answer last started over."""
        self.changed_at_s = 0.0
        """Time of the last change."""

    def observe(self) -> Change | None:
        """Note the machine's state after a step. Costs nothing between phases; returns None then."""
        machine, before = self._machine, self._phase
        new_attempt = machine.attempt != self._attempt
        if machine.phase is before and not new_attempt:
            return None
        self._phase, self._attempt = machine.phase, machine.attempt
        now_s = self.changed_at_s = self._clock.now_s()
        queued_s = ttft_s = None
        if machine.phase is Phase.QUEUED:
            self._queued_at_s = now_s if self._queued_at_s is None else self._queued_at_s
        elif machine.phase is Phase.DISPATCHED:
            self._dispatched_at_s = now_s
        elif machine.phase is not Phase.PLACING:
            queued_s = None if self._queued_at_s is None else now_s - self._queued_at_s
            self._queued_at_s = None
        # A step may pass through several phases, down to an answer that comes in one frame.
        if machine.phase is Phase.STREAMING or (machine.phase is Phase.DONE and before is not Phase.STREAMING):
            ttft_s = now_s - self._dispatched_at_s
            if machine.output.starts_at == 0:
                self.first_token_at_s = now_s
        return Change(new_attempt=new_attempt, queued_s=queued_s, ttft_s=ttft_s)
