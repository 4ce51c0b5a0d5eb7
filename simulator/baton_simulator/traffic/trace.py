"""A trace: requests with arrival times, lengths and the identity of their prompts' blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One recorded request."""

    at_s: float
    """Arrival since the start of the trace."""
    blocks: tuple[int, ...]
    """One id for each whole block of the prompt; equal ids mean equal prompts up to there."""
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    after: int | None = None
    """Index of the session's request before: this one comes only `gap_s` after that one's answer."""
    gap_s: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    """Share of its tenant, relative to others."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_tokens: int
    requests: Sequence[Request]
