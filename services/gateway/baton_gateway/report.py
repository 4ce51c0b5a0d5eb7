"""Reports what became of each attempt of an answer, for `baton explain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from baton import subjects
from baton.clock import Clock
from baton.errors import BatonError, ClientGone
from baton.messages.decisions import AttemptReport
from baton.messages.placement import Placement
from baton_gateway.attempt import AttemptMachine
from baton_gateway.order import Order, Outcome
from baton_gateway.timeline import Change

POSITIONS_MAX: Final = 32
"""Positions in the queue that are reported of one attempt; of more, every second one is dropped."""


class AnswerReport:
    """Reports of one answer: one for each of its attempts, when the attempt has ended."""

    def __init__(
        self,
        post: Callable[[str, AttemptReport], None],
        machine: AttemptMachine,
        order: Order,
        clock: Clock,
        *,
        gateway: str,
    ) -> None:
        self._post = post
        self._machine = machine
        self._order = order
        self._clock = clock
        self._gateway = gateway
        self._phase = ""
        self._since_s = order.received_at_s
        self._begin(0, "read")

    def _begin(self, attempt: int, phase: str) -> None:
        self._attempt = attempt
        self._phase = phase
        self._began_at_s = self._since_s
        self._placement: Placement | None = None
        self._spent: dict[str, float] = {}
        self._positions: list[tuple[float, int]] = []
        self._ttft_s: float | None = None
        self._first = (0.0, 0)
        """Instant of the attempt's first tokens, and tokens of the answer by then."""
        self._starts_at = 0
        self._cached_tokens = self._promoted_tokens = 0

    def note_position(self, position: int) -> None:
        """Note the number of requests before this one in a scheduler's queue."""
        if self._positions and self._positions[-1][1] == position:
            return
        if len(self._positions) >= POSITIONS_MAX:
            # The first one stays.
            self._positions = self._positions[::2]
        self._positions.append((self._clock.now_s() - self._began_at_s, position))

    def note(self, change: Change) -> None:
        """Note the machine's state, which has just changed."""
        machine, now_s = self._machine, self._clock.now_s()
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now_s - self._since_s
        self._since_s, self._phase = now_s, machine.phase
        if change.new_attempt and machine.attempt != self._attempt:
            self._send(machine.setback, None)
            self._begin(machine.attempt, machine.phase)
        if machine.placement is not None:
            self._placement, self._starts_at = machine.placement, machine.output.starts_at
            self._note_cached()
        if change.ttft_s is not None:
            self._ttft_s, self._first = change.ttft_s, (now_s, len(machine.output.tokens))

    def end(self, outcome: Outcome | None, error: Exception | None) -> None:
        """Report the last attempt."""
        self._note_cached()
        self._send(error, outcome)

    def _note_cached(self) -> None:
        self._cached_tokens = max(self._cached_tokens, self._machine.cached_tokens)
        self._promoted_tokens = max(self._promoted_tokens, self._machine.promoted_tokens)

    def _send(self, error: Exception | None, outcome: Outcome | None) -> None:
        end, detail = outcome.reason if outcome else "", ""
        if outcome is None:
            error = error or ClientGone("the gateway gave up")
            end, detail = (error.code if isinstance(error, BatonError) else BatonError.code), str(error)
        placement = self._placement
        prefill = placement and placement.prefill
        first_at_s, first_tokens = self._first
        tokens = len(self._machine.output.tokens)
        has_interval = outcome is not None and self._ttft_s is not None and tokens > first_tokens
        report = AttemptReport(
            request=self._order.request,
            attempt=self._attempt,
            gateway=self._gateway,
            at_s=self._clock.wall_s(),
            end=end,
            detail=detail,
            prefill=prefill.worker if prefill else "",
            decode=placement.decode.worker if placement else "",
            scheduler=placement.scheduler if placement else "",
            predicted=placement and placement.predicted,
            ttft_s=self._ttft_s,
            token_interval_s=(self._since_s - first_at_s) / (tokens - first_tokens) if has_interval else None,
            cached_tokens=min(self._cached_tokens, self._order.prompt_tokens),
            promoted_tokens=self._promoted_tokens,
            # An answer that starts over has dropped what the attempt delivered.
            output_tokens=max(0, tokens - self._starts_at) if placement else 0,
            spent=tuple(self._spent.items()),
            positions=tuple(self._positions),
        )
        self._post(subjects.decisions(report.request), report)
