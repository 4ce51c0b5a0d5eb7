"""Placement: gateways ask a scheduler, which places or holds; schedulers tell the indexes and each other what they
placed."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from baton.messages.base import PARAMETERS_MAX, Context, ErrorReport, Message, ParameterName, Part, WorkerAddress

REFUSALS_MAX: Final = 8
SESSION_CHARACTERS_MAX: Final = 64
PRIORITIES: Final = 8
WEIGHT_MIN: Final = 0.001
WEIGHT_MAX: Final = 1000.0
PRIORITY_BEGUN: Final = 0
"""Class of answers that have begun: their clients wait in the middle of an answer."""
PRIORITY_NEW: Final = 1
POSITIONS_MAX: Final = 2048
"""Entries in one message of positions."""


class Disaggregation(StrEnum):
    """Whether prefill runs on another worker than decode."""

    ALWAYS = "always"
    AUTO = "auto"
    NEVER = "never"


class Place(Message, tag="place", frozen=True, kw_only=True):
    """Gateway to any scheduler: choose workers for this attempt. Answered by `Placement`, `Held` or `Refused`."""

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
    """`Sampling.parameters` of the request. The decode worker must support all of them."""
    session: Annotated[str, Meta(max_length=SESSION_CHARACTERS_MAX)] = ""
    """Name of the conversation, the same for all of its requests; empty: unknown."""
    refused: Annotated[tuple[str, ...], Meta(max_length=REFUSALS_MAX)] = ()
    """Workers that refused the request's parameters. Unlike `exclude`, a strict rule; it covers all workers of the
    same `engine_kind`."""
    unavailable: tuple[str, ...] = ()
    """Workers that have just answered `Busy`, or did not listen: their newest heartbeat is out of date."""
    probe: bool = False
    """Whether only the answer counts: no task follows, and nobody is told of a placement."""
    gateway: str = ""
    """Gateway whose own subject gets what becomes of a held request."""
    hold_s: float = 0.0
    """Time for which the scheduler may hold the request until a worker has room; 0: it is refused as overloaded."""
    due_in_s: float = 0.0
    """Time left for the first token by the request's objective; less than 0: it is late already."""
    ttft_s: float = 0.0
    """TTFT objective by which the request is admitted; 0: it waits for as long as `hold_s` says."""
    tpot_s: float = 0.0
    """TPOT objective by which the request is admitted; 0: none."""
    tenant: str = ""
    """Owner of the request, by its API key; empty: a deployment without keys."""
    weight: float = 1.0
    """Share of the tenant, relative to those of others."""
    priority: int = PRIORITY_NEW
    """Class of the request in the queue, from 0 to below `PRIORITIES`; lower ones come first."""


class Candidate(Part, frozen=True, kw_only=True):
    """One possible placement and the scheduler's prediction for it."""

    decode: str
    prefill: str = ""
    cached_tokens: int = 0
    """Cached prompt tokens on the worker that would prefill."""
    decode_cached_tokens: int = 0
    promoted_tokens: int = 0
    """Part of `cached_tokens` that is promoted from the worker's pool."""
    decode_promoted_tokens: int = 0
    borrowed_tokens: int = 0
    """Further tokens whose KV the worker that would prefill borrows from `lender`."""
    lender: str = ""
    """Worker whose KV pool lends them; empty: none."""
    speculative_tokens: int = 0
    """Part of `cached_tokens` that is still being prefilled."""
    predicted_ttft_s: float
    ttft_bound_s: float = 0.0
    """Upper bound of `predicted_ttft_s`, which few requests exceed; 0: unknown."""
    predicted_token_interval_s: float = 0.0
    waiting_s: float = 0.0
    """Part of `predicted_ttft_s` until the workers have room for the attempt."""
    queue_s: float = 0.0
    """Part of `predicted_ttft_s` for the prompts that are computed before this one."""
    tail_s: float = 0.0
    """Part of `predicted_ttft_s`: what is left of the pull when the prompt is computed."""
    cost_s: float = 0.0
    """Cost by which the candidate was ranked: the prediction and what the placement does to other requests."""


class Placement(Message, tag="placement", frozen=True, kw_only=True):
    decode: WorkerAddress
    prefill: WorkerAddress | None = None
    reason: str
    predicted: Candidate
    candidates: tuple[Candidate, ...] = ()
    wait_s: float = 0.0
    """Time for which the attempt may wait at its workers for room; 0: they have room now."""
    lender: str = ""
    """Worker whose KV pool lends a prefix of the prompt to the worker that computes it; empty: none."""
    scheduler: str = ""

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """Decode worker, then prefill worker if there is one."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


class Held(Message, tag="held", frozen=True, kw_only=True):
    """Scheduler to gateway, in answer to `Place`: the request is held, and `Released` follows.

    Until then it is listed in `QueuePositions`. A gateway that hears neither asks again.
    """

    scheduler: str


class QueuePositions(Message, tag="positions", frozen=True, kw_only=True):
    """Scheduler to gateway, four times a second: all attempts that it holds for this gateway, in several messages if
    there are many."""

    scheduler: str
    positions: tuple[tuple[str, int, int, float], ...]
    """(request, attempt, number of requests before it, predicted seconds until its turn)."""


class Released(Message, tag="released", frozen=True, kw_only=True):
    """Scheduler to gateway: a held request is no longer held. It is placed, or refused with `error`, or, with neither,
    handed back: the scheduler leaves, and another one must be asked."""

    request: str
    attempt: int
    placement: Placement | None = None
    error: ErrorReport | None = None


class Withdraw(Message, tag="withdraw", frozen=True, kw_only=True):
    """Gateway to every scheduler: this attempt needs no placement any more."""

    request: str
    attempt: int


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
    tenant: str = ""
    weight: float = 1.0


class Audited(Message, tag="audited", frozen=True, kw_only=True):
    """Gateway to every kvindex: predicted and actual cached tokens of one placement. It may be lost."""

    context: Context
    address: WorkerAddress
    predicted_tokens: int
    """Predicted cached tokens, without speculative ones."""
    cached_tokens: int
