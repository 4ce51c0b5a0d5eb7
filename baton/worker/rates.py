"""Measured speeds of this worker: prefill, decode, transfer. Pure: instants are passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

_NEWEST_SHARE_MIN: Final = 0.2
_HICCUP: Final = 4.0
"""Samples are clamped to within this factor of the average. Schedulers avoid a worker that seems slow, so after one
hiccup it would get no work to correct its average. A lasting change is still followed."""
_WINDOW_S: Final = 5.0
_RELAXED_SHARE: Final = 0.05
_PREFILL_SAMPLE_TOKENS_MIN: Final = 64
"""Fewer computed tokens measure a step's fixed cost more than the rate."""
_TRANSFER_SAMPLE_BYTES_MIN: Final = 64 << 10


@dataclass(slots=True)
class Average:
    """An exponential average; the first samples replace the initial guess."""

    value: float
    samples: int = 0
    lowest: float = math.inf
    """Lowest average since the first sample."""

    def add(self, sample: float) -> None:
        if self.samples:
            sample = min(max(sample, self.value / _HICCUP), self.value * _HICCUP)
        self.samples += 1
        share = max(_NEWEST_SHARE_MIN, 1 / self.samples)
        self.value += share * (sample - self.value)
        self.lowest = min(self.lowest, self.value)

    def relax(self) -> None:
        """Move towards the lowest average: nothing runs, so nothing is measured."""
        if self.samples:
            self.value += _RELAXED_SHARE * (self.lowest - self.value)


@dataclass(slots=True)
class Throughput:
    """Amounts over the time that they took, in about the last `_WINDOW_S` of such time; a guess until measured.

    An average of rates would be wrong: work that runs together ends almost together, so the parts show any rate.
    """

    guess: float
    _amount: float = 0.0
    _elapsed_s: float = 0.0

    @property
    def value(self) -> float:
        return self._amount / self._elapsed_s if self._elapsed_s else self.guess

    def add(self, amount: float, elapsed_s: float) -> None:
        if self._elapsed_s:
            elapsed_s = min(elapsed_s, max(_WINDOW_S, _HICCUP * amount / self.value))
        kept = math.exp(-elapsed_s / _WINDOW_S)
        self._amount = kept * self._amount + amount
        self._elapsed_s = kept * self._elapsed_s + elapsed_s


@dataclass(slots=True)
class BusyTime:
    """Time in which at least one of several activities was going on."""

    _running: int = 0
    _since_s: float = 0.0
    _past_s: float = 0.0

    @property
    def is_on(self) -> bool:
        return self._running > 0

    def began(self, now_s: float) -> None:
        if self._running == 0:
            self._since_s = now_s
        self._running += 1

    def ended(self, now_s: float) -> None:
        self._running -= 1
        if self._running == 0:
            self._past_s += now_s - self._since_s

    def total_s(self, now_s: float) -> float:
        return self._past_s + (now_s - self._since_s if self._running else 0.0)


@dataclass(slots=True, kw_only=True)
class Rates:
    """Rates of one worker. Initial guesses fit a mid-sized model on one GPU; they matter until the first requests."""

    prefill_tokens_per_s: Throughput = field(default_factory=lambda: Throughput(5_000.0))
    token_interval_s: Average = field(default_factory=lambda: Average(0.02))
    transfer_bytes_per_s: Average = field(default_factory=lambda: Average(1e9))
    busy: BusyTime = field(default_factory=BusyTime)
    """Time in which the engine has work: an attempt that waits for its pull gives it nothing to compute."""
    _prefilling: int = 0
    _prefill_since_s: float = 0.0
    _prefilled_tokens: int = 0
    _intervals_s: float = 0.0
    _interval_tokens: int = 0

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode rate of one sequence."""
        return 1 / self.token_interval_s.value

    def prefill_began(self, now_s: float) -> None:
        """Record that a prompt is being computed. Prompts run together: time in which any runs is counted once."""
        if self._prefilling == 0:
            self._prefill_since_s, self._prefilled_tokens = now_s, 0
        self._prefilling += 1

    def prefill_ended(self, computed_tokens: int, now_s: float) -> None:
        """Record that one of the prompts is done, with 0 tokens if it was stopped."""
        self._prefilling -= 1
        self._prefilled_tokens += computed_tokens
        if self._prefilled_tokens >= _PREFILL_SAMPLE_TOKENS_MIN:
            self.prefill_tokens_per_s.add(self._prefilled_tokens, now_s - self._prefill_since_s)
            self._prefill_since_s, self._prefilled_tokens = now_s, 0

    def tokens_came(self, tokens: int, since_s: float) -> None:
        """Record how long a sequence took for its latest tokens."""
        self._interval_tokens += tokens
        self._intervals_s += since_s

    def transfer_ended(self, size_bytes: int, moving_s: float) -> None:
        if size_bytes >= _TRANSFER_SAMPLE_BYTES_MIN and moving_s > 0:
            self.transfer_bytes_per_s.add(size_bytes / moving_s)

    def tick(self) -> None:
        """Take the token intervals since the last tick as one sample, so that long batches do not outweigh time."""
        if self._interval_tokens and self._intervals_s > 0:
            self.token_interval_s.add(self._intervals_s / self._interval_tokens)
        elif not self.busy.is_on:
            # Otherwise a worker that was crowded once and is empty now would be avoided for ever.
            self.token_interval_s.relax()
        self._interval_tokens, self._intervals_s = 0, 0.0
