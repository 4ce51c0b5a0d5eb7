"""Placement: gateways ask a scheduler; schedulers tell the indexes and each other what they placed."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from baton.messages.base import PARAMETERS_MAX, Context, Message, ParameterName, Part, WorkerAddress

REFUSALS_MAX: Final = 8


class Disaggregation(StrEnum):
    """Whether prefill runs on another worker than decode."""

    ALWAYS = "always"
    AUTO = "auto"
    NEVER = "never"


class Place(Message, tag="place", frozen=True, kw_only=True):
    """Gateway to any scheduler: choose workers for this attempt. Answered by `Placement` or `Refused`."""

    context: Context
    model: str
    blocks: bytes
    """Block ids of the prompt, 16 bytes each, see `baton.blocks`."""
    prompt_tokens: int
    output_tokens_max: int
    disaggregation: Disaggregation | None = None
    """None: the deployment's default."""
    exclude: tuple[str, ...] = ()
    """Workers that failed an earlier attempt."""
    exclude_pairs: tuple[tuple[str, str], ...] = ()
    """(prefill, decode) pairs whose agents cannot reach each other."""
    parameters: Annotated[tuple[ParameterName, ...], Meta(max_length=PARAMETERS_MAX)] = ()
    """Keys of the request's `Sampling.extensions`. The decode worker must support all of them."""
    refused: Annotated[tuple[str, ...], Meta(max_length=REFUSALS_MAX)] = ()
    """Workers that refused the request's parameters. Unlike `exclude`, a strict rule; it covers all workers of the
    same `engine_kind`."""


class Candidate(Part, frozen=True, kw_only=True):
    """One possible placement and the scheduler's prediction for it."""

    decode: str
    prefill: str = ""
    cached_tokens: int = 0
    """Cached prompt tokens on the worker that would prefill."""
    decode_cached_tokens: int = 0
    speculative_tokens: int = 0
    """Part of `cached_tokens` that is still being prefilled."""
    predicted_ttft_s: float
    predicted_token_interval_s: float = 0.0


class Placement(Message, tag="placement", frozen=True, kw_only=True):
    decode: WorkerAddress
    prefill: WorkerAddress | None = None
    reason: str
    predicted: Candidate
    candidates: tuple[Candidate, ...] = ()

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """Decode worker, then prefill worker if there is one."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


class Placed(Message, tag="placed", frozen=True, kw_only=True):
    """Scheduler to every kvindex and scheduler: these workers will soon run this attempt and hold its prompt.

    It may be lost.
    """

    context: Context
    scheduler: str = ""
    """Scheduler that placed it."""
    model_digest: str
    blocks: bytes
    workers: tuple[WorkerAddress, ...]
    prompt_tokens: int = 0
    output_tokens_max: int = 0
    predicted: Candidate | None = None


class Audited(Message, tag="audited", frozen=True, kw_only=True):
    """Gateway to every kvindex: predicted and actual cached tokens of one placement. It may be lost."""

    context: Context
    address: WorkerAddress
    predicted_tokens: int
    """Predicted cached tokens, without speculative ones."""
    cached_tokens: int
