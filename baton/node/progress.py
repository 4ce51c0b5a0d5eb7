"""Progress of workers: one whose heartbeats go on, but whose engine does nothing with the work it has. Pure.

Heartbeats carry the number of tokens computed and generated so far. While a worker has work and this number stands
still, time is counted from heartbeat to heartbeat, and little of a long gap: a pause of the worker, of the bus or of
the listening process is no sign of a stuck engine.
"""

from __future__ import annotations

from typing import Final

from baton.messages.workers import Heartbeat

GAP_S_MAX: Final = 0.5
"""Longest time that counts between two heartbeats."""
PREDICTION_FACTOR: Final = 4.0
PREDICTION_S_MAX: Final = 15.0
UNMEASURED_S: Final = 25.0
"""Added while a worker has measured no rates: the first steps of an engine may be slow."""


class Progress:
    """Progress of one generation of a worker, which counts as stuck `floor_s` after its predicted times at least."""

    def __init__(self, beat: Heartbeat, now_s: float, *, floor_s: float) -> None:
        self.generation = beat.address.generation
        self.is_stuck = False
        """Until the next token."""
        self._floor_s = floor_s
        self._tokens = beat.progress_tokens
        self._heard_s = now_s
        self._idle_s = 0.0
        """Time with work and without a token."""

    def hear(self, beat: Heartbeat, now_s: float) -> bool:
        """Take a heartbeat of this generation; return whether tokens came since the last one."""
        gap_s, self._heard_s = min(now_s - self._heard_s, GAP_S_MAX), now_s
        came, self._tokens = beat.progress_tokens != self._tokens, beat.progress_tokens
        if came:
            self.is_stuck = False
        if came or not beat.computing:
            self._idle_s = 0.0
            return came
        self._idle_s += max(0.0, gap_s)
        self.is_stuck |= self._idle_s > self._floor_s + allowance_s(beat)
        return False


def allowance_s(beat: Heartbeat) -> float:
    """Return how long a healthy worker may take for its next tokens, by its own rates."""
    steps = beat.steps
    prompt_steps = -(-beat.prefill_tokens_queued // beat.step_tokens_max)
    predicted_s = (
        steps.prompt_step_s * prompt_steps
        + steps.prompt_token_s * beat.prefill_tokens_queued
        + steps.prompt_pair_s * beat.prefill_pairs_queued
        + beat.token_interval_s()
    )
    unmeasured_s = 0.0 if steps.samples else UNMEASURED_S
    return unmeasured_s + PREDICTION_FACTOR * min(predicted_s, PREDICTION_S_MAX)
