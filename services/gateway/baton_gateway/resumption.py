"""Rules for continuing an answer on another worker: exactly, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

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
    numbers. So parameters that read the output so far, and seeds that must repeat a draw, are obstacles.
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
    )


def is_ended(sampling: Sampling, delivered: Sequence[int], eos_tokens: frozenset[int]) -> bool:
    """Return whether the last delivered token ended the output, although the final frame was lost."""
    if not delivered or len(delivered) <= sampling.min_tokens:
        return False
    last = delivered[-1]
    return last in sampling.stop_token_ids or (last in eos_tokens and not sampling.ignore_eos)


def rest_of(
    sampling: Sampling, delivered: Sequence[int], eos_tokens: frozenset[int], cause: BatonError
) -> FinishReason | NotResumable | None:
    """Return how an output ends after its attempt failed: complete, not resumable, or None if it continues."""
    if not delivered:
        return None
    if len(delivered) >= sampling.max_tokens:
        return FinishReason.LENGTH
    if is_ended(sampling, delivered, eos_tokens):
        return FinishReason.STOP
    if reason := obstacle(sampling):
        sent = f"{len(delivered)} tokens were sent when the attempt failed ({cause})"
        return NotResumable(f"{sent}; with {reason} the rest cannot be continued exactly")
    return None
