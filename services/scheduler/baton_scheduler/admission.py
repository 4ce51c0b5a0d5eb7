"""Admission: which requests may wait, for how long, and when the others may come again. Pure.

A request that states a TTFT objective is admitted by its predicted *waiting*: the time until a worker has room for it
and has computed the prompts before it. The time of its own prompt does not count, so a long prompt is as welcome as a
short one, even where its length alone exceeds the objective. What would wait for more than a share of the objective is
held for that long at most, and then refused.

A refusal says when the request's turn would come, at the speed at which held requests are being placed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Final

from baton.messages.placement import Candidate
from baton_scheduler.queue import Entry, Key

WAIT_SHARE: Final = 0.25
"""Longest wait, as a share of the TTFT objective: the rest is for the prompt itself, and for errors of predictions."""
BACKLOG_SHARE: Final = 0.05
"""The same at workers, for a tenant that leaves room to others: its work waits in the queue, where tenants have shares,
and leaves workers free for those that have nothing waiting."""
HOLD_S_MAX: Final = 600.0
DRAIN_MEMORY_S: Final = 10.0
"""Time over which the speed of placements is averaged."""
DRAIN_SAMPLES_MIN: Final = 8.0
"""Fewer placements in that time do not tell the speed of the next ones."""
RETRY_AFTER_S_MIN: Final = 1.0
RETRY_AFTER_S_MAX: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Objectives by which a request is admitted; 0: none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def begins_soon(
        self, predicted: Candidate, wait_s_max: float, *, room: float = 0.0, free: float = 1.0, idle: bool = False
    ) -> bool:
        """Return whether the request may be placed now and wait at its workers, for `wait_s_max` at most.

        `room`: share to leave to other tenants, of the workers, which must be free before, and of the token interval;
        `free`: share of the workers that is free. `idle`: whether the worker that would decode runs nothing, so that no
        shorter interval can be waited for.
        """
        if free < room:
            return False
        tpot_s = self.tpot_s if idle else self.tpot_s * (1 - room)
        if self.tpot_s and predicted.predicted_token_interval_s > tpot_s:
            return False
        if not self.ttft_s:
            return predicted.waiting_s <= wait_s_max
        share = BACKLOG_SHARE if room else WAIT_SHARE
        return predicted.waiting_s + predicted.queue_s <= min(wait_s_max, share * self.ttft_s)

    def hold_s_max(self, hold_s: float, due_in_s: float) -> float:
        """Return how long the request may be held from now on; 0 or less: not at all."""
        hold_s = min(hold_s, HOLD_S_MAX)
        waited_s = self.ttft_s - due_in_s
        return min(hold_s, WAIT_SHARE * self.ttft_s - waited_s) if self.ttft_s else hold_s


def retry_after_s(turn_s: float) -> float:
    """Return what a refused client is told, from the predicted time until its turn."""
    return min(max(turn_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)


class DrainRate:
    """Speed at which held requests of one model are placed, over the last seconds in which any were held."""

    def __init__(self) -> None:
        self._held_s = 0.0
        self._tokens = 0.0
        self._placements = 0.0
        self._stalled_s = 0.0
        """Time since the last placement in which requests were held."""

    @property
    def is_known(self) -> bool:
        return self._placements >= DRAIN_SAMPLES_MIN

    def note_placed(self, tokens: int) -> None:
        self._tokens += tokens
        self._placements += 1
        self._stalled_s = 0.0

    def note_held(self, duration_s: float) -> None:
        """Let time pass in which requests were held."""
        kept = exp(-duration_s / DRAIN_MEMORY_S)
        self._held_s = self._held_s * kept + duration_s
        self._tokens *= kept
        self._placements *= kept
        self._stalled_s += duration_s

    def wait_s(self, tokens: int) -> float:
        """Return the predicted time until held requests of so many tokens are placed.

        While the speed is unknown, a stall is taken to last as long again as it has lasted.
        """
        return tokens * self._held_s / self._tokens if self.is_known else self._stalled_s


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predicted times until the turns of held requests, in order."""

    turns_s: Mapping[Key, float]
    last_s: Mapping[str, float]
    """Model → turn of a request that comes after all others."""


def look_ahead(entries: Iterable[Entry], rates: Mapping[str, DrainRate]) -> Outlook:
    """Return the outlook of requests that come in order. Each model has a rate."""
    ahead = dict.fromkeys(rates, 0)
    turns_s: dict[Key, float] = {}
    for entry in entries:
        turns_s[entry.key] = rates[entry.model].wait_s(ahead[entry.model])
        ahead[entry.model] += entry.tokens
    return Outlook(turns_s, {model: rate.wait_s(ahead[model]) for model, rate in rates.items()})
