"""A model of durations, fitted online: recursive least squares on logarithms, with clipped errors. Pure.

    seconds ≈ Σ coefficient × feature, all positive

The logarithms of the coefficients are learned from the logarithm of the ratio of each sample to its prediction: half
and double are equally far, and a sample of a millisecond counts as much as one of a second. The first sample moves all
coefficients together, since a machine's speed is less known than how its times are composed.

An error of more than `_CLIP` standard deviations is clipped: one pause or one odd prompt moves little.
`_CHANGE_SAMPLES` such errors in a row on the same side are a change: the doubt of the start returns, and the change is
followed at once. Old samples are forgotten only in the directions in which new ones say something (Kulhavý, 1987), so
what has not been seen for long is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul, sub
from typing import Final

MEMORY_SAMPLES: Final = 64
"""Number of samples that the fit remembers."""
_SPEED_DOUBT: Final = 2.0
"""Standard deviation, as a logarithm, of what all coefficients have in common."""
_OWN_DOUBT: Final = 0.7
"""Standard deviation, as a logarithm, of each coefficient beside that."""
_CLIP: Final = 1.5
_CHANGE_SAMPLES: Final = 5
_FORGETTING: Final = 1 - 1 / MEMORY_SAMPLES
_SPREAD_GUESS: Final = 0.2
_SPREAD_MIN: Final = 0.02
_SPREAD_MAX: Final = 2.0
_SPREAD_SHARE: Final = 0.05
"""Weight of the newest error in the spread."""
_CLIPPED_VARIANCE: Final = 0.78
"""Variance of a standard normal variable that is clipped at `_CLIP`."""
_LOGARITHM_MAX: Final = 50.0


class LinearFit:
    """Positive coefficients, and the spread of samples around the model: a standard deviation, as a logarithm."""

    def __init__(self, guess: Sequence[float]) -> None:
        self._logarithms = [math.log(value) for value in guess]
        self._covariance = _doubt(len(guess))
        self._unusual_run = 0
        """Clipped errors in a row; negative below the prediction."""
        self.coefficients = tuple(guess)
        self.spread = _SPREAD_GUESS
        self.samples = 0

    def predict(self, features: Sequence[float]) -> float:
        return sum(map(mul, self.coefficients, features))

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one sample; one without duration or features says nothing."""
        shares_s = list(map(mul, self.coefficients, features))
        predicted = sum(shares_s)
        if not (predicted > 0 and 0 < seconds < math.inf):
            return
        self.samples += 1
        # In units of the spread: what each coefficient contributes, how much is still unknown of that, and the error.
        unit_s = predicted * self.spread
        direction = [share_s / unit_s for share_s in shares_s]
        pull = [sum(map(mul, row, direction)) for row in self._covariance]
        doubt = sum(map(mul, direction, pull))
        # The guess may be wrong by any factor.
        limit = _CLIP * math.sqrt(1 + doubt) if self.samples > 1 else math.inf
        error = (math.log(seconds) - math.log(predicted)) / self.spread
        clipped = min(max(error, -limit), limit)
        gain = 1 + doubt
        logarithms = [value + each * clipped / gain for value, each in zip(self._logarithms, pull, strict=True)]
        if not max(map(abs, logarithms)) <= _LOGARITHM_MAX:
            logarithms = [min(max(each, -_LOGARITHM_MAX), _LOGARITHM_MAX) for each in logarithms]
        self._logarithms = logarithms
        self.coefficients = tuple(map(math.exp, logarithms))
        self._forget(pull, doubt)
        seen = clipped * clipped / (1 + doubt) / _CLIPPED_VARIANCE
        self.spread *= math.sqrt(1 - _SPREAD_SHARE + _SPREAD_SHARE * seen)
        self.spread = min(max(self.spread, _SPREAD_MIN), _SPREAD_MAX)
        self._note_change(error, limit)

    def _forget(self, pull: Sequence[float], doubt: float) -> None:
        """Take into the covariance what a sample has told, and forget as much of earlier ones in its direction."""
        if not doubt > 0:
            return
        shrink = (_FORGETTING - (1 - _FORGETTING) / doubt) / (_FORGETTING * (1 + doubt))
        factors = [shrink * left for left in pull]
        self._covariance = [
            list(map(sub, row, [factor * right for right in pull]))
            for row, factor in zip(self._covariance, factors, strict=True)
        ]

    def _note_change(self, error: float, limit: float) -> None:
        if abs(error) <= limit:
            self._unusual_run = 0
            return
        side = 1 if error > 0 else -1
        self._unusual_run = side + (self._unusual_run if self._unusual_run * side > 0 else 0)
        if abs(self._unusual_run) >= _CHANGE_SAMPLES:
            self._unusual_run = 0
            self._covariance = _doubt(len(self._logarithms))


def _doubt(size: int) -> list[list[float]]:
    """Return the covariance before the first sample."""
    return [
        [_SPEED_DOUBT**2 + (_OWN_DOUBT**2 if column == row else 0.0) for column in range(size)] for row in range(size)
    ]
