"""Records of decisions and of what became of them, kept in a stream for `baton explain`. They may be lost."""

from __future__ import annotations

import sys
from array import array
from enum import StrEnum
from typing import Final

from baton.errors import MalformedMessage
from baton.messages.base import ErrorReport, Message, Part
from baton.messages.placement import Candidate

VALUE_BYTES: Final = 4


class Verdict(StrEnum):
    PLACED = "placed"
    HELD = "held"
    REFUSED = "refused"


class Considered(Part, frozen=True, kw_only=True):
    """Workers that were considered for one leg of a placement, in any order, with the terms of each one's cost."""

    leg: str
    """`aggregated`: the whole attempt; `prefill`, `decode`: one side of a pair."""
    workers: tuple[str, ...]
    terms: tuple[str, ...]
    """Names, with units: `cost_s`, `waiting_s`, `cached_tokens` …"""
    values: bytes
    """One column per term, packed as little-endian float32: a decision among many workers takes few bytes."""
    left_out: int = 0
    """Further workers, each dearer than those listed, unless one of these was chosen."""

    def rows(self) -> list[dict[str, float]]:
        """Return the terms of each worker by name. Raises MalformedMessage where the values are not one per term."""
        count = len(self.workers)
        if len(self.values) != VALUE_BYTES * len(self.terms) * count:
            raise MalformedMessage(f"{len(self.values)} bytes are not {len(self.terms)} terms of {count} workers")
        values = array("f", self.values)
        if sys.byteorder == "big":
            values.byteswap()
        return [dict(zip(self.terms, values[row::count], strict=True)) for row in range(count)]


class Decision(Message, tag="decision", frozen=True, kw_only=True):
    """Scheduler, to the stream: what it decided about one attempt, and by what."""

    request: str
    attempt: int
    scheduler: str
    at_s: float
    """Wall-clock time of the scheduler's host."""
    verdict: Verdict
    policy: str
    model: str
    prompt_tokens: int
    output_tokens_max: int
    held_s: float = 0.0
    """Time for which this scheduler had held the request."""
    avoided: tuple[str, ...] = ()
    """Workers that the gateway asked to leave out: they failed, refused or were full."""
    avoided_left_out: int = 0
    without_index: bool = False
    """The index did not answer, so cached prefixes were unknown."""
    reason: str = ""
    candidates: tuple[Candidate, ...] = ()
    """The chosen placement, or that which would have to wait for too long; then the next best."""
    considered: tuple[Considered, ...] = ()
    error: ErrorReport | None = None


class AttemptReport(Message, tag="attempt_report", frozen=True, kw_only=True):
    """Gateway, to the stream: what became of one attempt."""

    request: str
    attempt: int
    gateway: str
    at_s: float
    """Wall-clock time of the gateway's host, when the attempt ended."""
    end: str
    """Reason of the finish, or the code of the error."""
    detail: str = ""
    prefill: str = ""
    decode: str = ""
    """Worker; empty: the attempt was not placed."""
    scheduler: str = ""
    """Scheduler whose placement was used: of several that placed the attempt, the first that the gateway heard."""
    predicted: Candidate | None = None
    ttft_s: float | None = None
    """Time from the placement to the first token; None: there was none."""
    token_interval_s: float | None = None
    cached_tokens: int = 0
    promoted_tokens: int = 0
    """Part of `cached_tokens` that was promoted from a worker's pool."""
    output_tokens: int = 0
    spent: tuple[tuple[str, float], ...] = ()
    """(phase, seconds), in the order in which the phases began."""
    positions: tuple[tuple[float, int], ...] = ()
    """(seconds since the attempt began, number of requests before it in the queue), at each change."""


class NamedRequest(Message, tag="named_request", frozen=True, kw_only=True):
    """Gateway, to the stream: the request that a client has named."""

    request: str
