"""Rates of workers of one kind, pooled: what a worker measures is drawn towards the median of its kind. Pure.

Workers of one kind run the same engine, options and model, so most of the difference between their measurements is
noise. A worker that has measured nothing takes the median; one that has measured much keeps what it measured, even
where that is half the speed of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Final

from baton.messages.workers import StepFit

KIND_SPREAD: Final = 0.15
"""Standard deviation of the true speeds of workers of one kind, relative to their median."""
SAMPLES_MIN: Final = 8
"""Fits of fewer samples count in the median only where all have fewer."""
MEMORY_SAMPLES: Final = 64
"""More samples than this make a worker's own fit no better: it forgets older ones."""

RATES: Final = ("prompt_step_s", "prompt_token_s", "prompt_pair_s", "decode_step_s", "sequence_s", "kv_s")


def typical(fits: Iterable[StepFit]) -> StepFit | None:
    """Return the median of each rate over the fits; None where no worker has measured anything."""
    measured = [fit for fit in fits if fit.samples > 0]
    settled = [fit for fit in measured if fit.samples >= SAMPLES_MIN] or measured
    if not settled:
        return None
    rates = {name: median(getattr(fit, name) for fit in settled) for name in RATES}
    return StepFit(**rates, samples=len(settled))


def pooled(own: StepFit, kind: StepFit | None) -> StepFit:
    """Return a worker's rates: between its own and its kind's, the nearer to its own the surer these are."""
    if kind is None:
        return own
    share = own_share(own)
    rest = 1 - share
    # Written out: with names in a loop, this would be a sixth of all that a heartbeat costs.
    return StepFit(
        prompt_step_s=own.prompt_step_s**share * kind.prompt_step_s**rest,
        prompt_token_s=own.prompt_token_s**share * kind.prompt_token_s**rest,
        prompt_pair_s=own.prompt_pair_s**share * kind.prompt_pair_s**rest,
        decode_step_s=own.decode_step_s**share * kind.decode_step_s**rest,
        sequence_s=own.sequence_s**share * kind.sequence_s**rest,
        kv_s=own.kv_s**share * kind.kv_s**rest,
        spread=own.spread,
        samples=own.samples,
    )


def own_share(own: StepFit) -> float:
    """Return the weight of a worker's own fit: the part of the differences that is not its noise."""
    if own.samples <= 0:
        return 0.0
    noise = own.spread**2 * len(RATES) / min(own.samples, MEMORY_SAMPLES)
    return KIND_SPREAD**2 / (KIND_SPREAD**2 + noise)
