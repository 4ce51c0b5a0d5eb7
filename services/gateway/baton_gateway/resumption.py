"""Output of an answer over its attempts, and rules for continuing it on another worker: exactly, or not at all."""

from __future__ import annotations

import msgspec

from baton.errors import BatonError, NotResumable
from baton.messages.attempts import FinishReason, Sampling


class Moved(BatonError):
    """End of an attempt whose answer moves to another worker; no failure."""

    code = "moved"
    http_status = 409


def obstacle(sampling: Sampling) -> str:
    """Return what makes a continuation from prompt + delivered tokens inexact, or "" if it is exact.

    An engine that gets delivered tokens as prompt counts none of them as output, and restarts its random
    numbers. So parameters that read the output so far, and seeds that must repeat a draw, are obstacles. A constraint
    is none: engines that enforce one advance it by the delivered tokens.
    """
    if sampling.seed is not None and sampling.temperature > 0:
        return "a seed"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "a penalty on repeated output"
    if sampling.repetition_penalty != 1:
        return "a repetition penalty"
    return f"the parameter `{min(sampling.extensions)}`" if sampling.extensions else ""


def resumed(sampling: Sampling, delivered_tokens: int) -> Sampling:
    """Return `sampling` for the rest of an output after `delivered_tokens`, which is less than `max_tokens`."""
    if not delivered_tokens:
        return sampling
    return msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - delivered_tokens,
        min_tokens=max(0, sampling.min_tokens - delivered_tokens),
        delivered_tokens=delivered_tokens,
    )


class Output:
    """Output of one answer, over all attempts since it last started over."""

    def __init__(self, sampling: Sampling, eos_tokens: frozenset[int]) -> None:
        self._sampling = sampling
        self._eos_tokens = eos_tokens
        self.tokens: list[int] = []
        self.starts_at = 0
        """Tokens before the present attempt."""
        self.shown = False
        """Whether the client has received a part of it, so that it cannot start over."""

    @property
    def has_begun(self) -> bool:
        return bool(self.tokens)

    @property
    def emitted(self) -> int:
        """Tokens from the present attempt."""
        return len(self.tokens) - self.starts_at

    @property
    def tokens_left(self) -> int:
        """Most tokens that may still come."""
        return self._sampling.max_tokens - len(self.tokens)

    @property
    def is_ended(self) -> bool:
        """Whether the last token ended the output, although the final frame was lost."""
        if not self.tokens or len(self.tokens) <= self._sampling.min_tokens:
            return False
        last = self.tokens[-1]
        return last in self._sampling.stop_token_ids or (last in self._eos_tokens and not self._sampling.ignore_eos)

    @property
    def must_start_over(self) -> bool:
        """Whether another attempt cannot continue it exactly."""
        return self.has_begun and bool(obstacle(self._sampling))

    def begin_attempt(self) -> None:
        self.starts_at = len(self.tokens)

    def rest(self, cause: BatonError) -> FinishReason | NotResumable | None:
        """Return how it ends if its attempt ends here; None: the next attempt continues it or starts it over."""
        if not self.tokens:
            return None
        if self.tokens_left <= 0:
            return FinishReason.LENGTH
        if self.is_ended:
            return FinishReason.STOP
        if self.shown and (reason := obstacle(self._sampling)):
            sent = f"{len(self.tokens)} tokens were sent when the attempt failed ({cause})"
            return NotResumable(f"{sent}; with {reason} the rest cannot be continued exactly")
        return None
