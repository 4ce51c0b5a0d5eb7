"""Attempts: the tasks of a request, and the workers' answers (`docs/handoff.md`)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from baton.messages.base import Context, ErrorReport, Message, Part, WorkerAddress


class ConstraintKind(StrEnum):
    """Form of a constraint, under vLLM's name for it."""

    JSON = "json"
    """JSON Schema."""
    REGEX = "regex"
    GRAMMAR = "grammar"
    """EBNF, with `root` as its first rule."""
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's structural tag, as JSON."""

    @property
    def parameter(self) -> str:
        """Name under which a worker declares that its engine enforces such constraints."""
        return f"structured_outputs.{self}"


class Constraint(Part, frozen=True, kw_only=True):
    """Constraint on the whole output: each token continues a text that it allows."""

    kind: ConstraintKind
    text: str


class Sampling(Part, frozen=True, kw_only=True):
    """Sampling parameters. `extensions` holds engine parameters that Baton passes through unread."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of alternatives reported beside each sampled token; None: no log-probabilities."""
    constraint: Constraint | None = None
    delivered_tokens: int = 0
    """Tail of the prompt that an earlier attempt generated: the constraint allows it, and continues after it."""
    extensions: dict[str, object] = msgspec.field(default_factory=dict[str, object])

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters beyond the common ones, which the decode worker must declare."""
        constraint = () if self.constraint is None else (self.constraint.kind.parameter,)
        return (*constraint, *self.extensions)


class TokenChunk(Message, tag="chunk", frozen=True, kw_only=True):
    """A leading part of a prompt that is too long for one message; sent before its task, in order."""

    context: Context
    offset: int
    tokens: bytes


class Task(Message, frozen=True, kw_only=True):
    """Gateway to worker: run one attempt. Answered by `Accepted`, `Busy` or `Refused`.

    `Refused` with InvalidRequest: the engine does not support these parameters.
    """

    context: Context
    gateway: str
    generation: int
    """Generation of the worker this is meant for; a worker of another generation answers `Busy`."""
    role_epoch: int = 0
    """`role_epoch` of the worker this is meant for; a worker that has changed its role since answers `Busy`."""
    tokens: bytes
    """Tail of the prompt, after the `TokenChunk`s."""
    prompt_tokens: int
    sampling: Sampling
    cache_salt: str = ""
    cached_tokens: int = 0
    """Prompt tokens that the placement expects in the cache of the worker that computes the prompt; the rest adds to
    its queue."""
    wait_s: float = 0.0
    """Time for which the attempt may wait for room, holding nothing; 0: a worker without room answers `Busy`."""
    lender: str = ""
    """Worker to ask for a loan of the prompt's prefix; empty: none. For the worker that computes the prompt."""


class PrefillTask(Task, tag="prefill", frozen=True, kw_only=True):
    """Compute the prompt's KV and hold it under lease."""

    sink_ranks: int = 0
    """Tensor-parallel ranks of the decode worker, each of which pulls; 0: as many as this worker has."""
    sink: str = ""
    """Decode worker, which this worker asks to join once a waiting attempt has room."""


class DecodeTask(Task, tag="decode", frozen=True, kw_only=True):
    """Generate. With a `source`, pull the prompt's KV from there; without one, compute it here."""

    source: WorkerAddress | None = None
    """Prefill worker. Its lease's key is `lease_key(request, attempt, tokens)`."""


class Accepted(Message, tag="accepted", frozen=True, kw_only=True):
    """The worker's ledger holds a reservation for this attempt, or it waits there for room."""

    worker: str
    generation: int


class Busy(Message, tag="busy", frozen=True, kw_only=True):
    """The worker will not run this attempt, and holds nothing of it."""

    worker: str
    reason: str
    """One of: `full`, `leases`, `draining`, `generation`, `role`, `tombstone`, `expired`, `incomplete`, `malformed`,
    `loan`."""
    detail: str = ""


class Join(Message, tag="join", frozen=True, kw_only=True):
    """Worker to the worker of the other leg: this waiting attempt is reserved here; reserve it as well and begin.

    Answered by `Accepted` or `Busy`. A pair is reserved on both workers or on neither.
    """

    context: Context


class Lend(Message, tag="lend", frozen=True, kw_only=True):
    """Worker to worker: open a lease on what your KV pool holds of this prefix. Answered by `Lent`, `Busy` or
    `Refused`, none of which ends an attempt. Repeated, it lends once."""

    context: Context
    key: bytes
    """Key of the lease; one for each reader."""
    blocks: bytes
    """Ids of the prefix's blocks of 32 tokens, see `baton.blocks`."""
    sink_ranks: int
    """Tensor-parallel ranks that will pull."""


class Lent(Message, tag="lent", frozen=True, kw_only=True):
    worker: str
    tokens: int
    """Leading tokens of the prefix that are lent."""
    agents: tuple[str, ...]
    """Endpoints of the agents of the lender's pools, by rank."""


class Cancel(Message, tag="cancel", frozen=True, kw_only=True):
    """Gateway to worker: end this attempt and keep a tombstone, since the task may still arrive."""

    context: Context
    reason: str = ""


class Acknowledge(Message, tag="acknowledge", frozen=True, kw_only=True):
    """Gateway to worker: the final frame arrived; forget the attempt."""

    context: Context


class Resend(Message, tag="resend", frozen=True, kw_only=True):
    """Gateway to decode: frames are missing; send all tokens from `index` on."""

    context: Context
    index: int


class Usage(Part, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were in the prefix cache of the worker that computed the prompt, or in its pool."""
    promoted_tokens: int = 0
    """Part of `cached_tokens` that was promoted from the pool."""
    loaded_tokens: int = 0
    """Part of `promoted_tokens` that was read from the pool's file first."""
    transferred_tokens: int = 0
    """Prompt tokens whose KV decode pulled."""
    transferred_bytes: int = 0
    computed_tokens: int = 0
    """Prompt tokens that the decode worker computed itself."""


class FinishReason(StrEnum):
    STOP = "stop"
    """End-of-sequence or a stop token: the last token of the output is that token."""
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Finish(Part, frozen=True, kw_only=True):
    reason: FinishReason
    usage: Usage
    error: ErrorReport | None = None


class TokenLogprob(Part, frozen=True, kw_only=True):
    """Log-probability of a sampled token, and of the most likely alternatives as (token, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Frame(Part, frozen=True, kw_only=True):
    """Output of one engine step for one attempt. `index` counts output tokens before `tokens`."""

    request: str
    attempt: int
    index: int
    tokens: bytes = b""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token, or none."""
    finish: Finish | None = None
    usage: Usage | None = None
    """Usage as known so far; set in an attempt's first frame with tokens, because an answer that the gateway
    ends at a stop string never gets a `finish`."""


class Frames(Message, tag="frames", frozen=True, kw_only=True):
    """Output of one engine step for all attempts of one gateway."""

    worker: str
    generation: int
    frames: tuple[Frame, ...]


class PrefillFailed(Message, tag="prefill_failed", frozen=True, kw_only=True):
    """Prefill to gateway: prefill of this attempt failed. Only decode's final frame or a timer ends an attempt."""

    context: Context
    worker: str
    error: ErrorReport


class Prefilled(Message, tag="prefilled", frozen=True, kw_only=True):
    """Prefill to gateway: the prompt is computed and held. `usage` is prefill's; decode's final frame ends the
    attempt."""

    context: Context
    worker: str
    usage: Usage


class AttemptState(StrEnum):
    """State of an attempt on a worker, see the protocol in `docs/handoff.md`."""

    WAITING = "waiting"
    RESERVED = "reserved"
    QUEUED = "queued"
    PULLING = "pulling"
    RUNNING = "running"
    RETAINED = "retained"
    COMPUTING = "computing"
    HELD = "held"


class DigestEntry(Part, frozen=True, kw_only=True):
    request: str
    attempt: int
    emitted: int
    state: AttemptState


class Digest(Message, tag="digest", frozen=True, kw_only=True):
    """Worker to gateway, each second: all attempts that the worker holds for it. An attempt absent twice is lost."""

    worker: str
    generation: int
    entries: tuple[DigestEntry, ...] = ()


class Fault(Message, tag="fault", frozen=True, kw_only=True):
    """Gateway to every scheduler: an attempt failed, and these workers or this pair are at fault. It may be lost."""

    request: str
    attempt: int
    workers: tuple[WorkerAddress, ...] = ()
    pair: tuple[str, str] | None = None
    """Prefill and decode worker that cannot hand over, though neither failed."""
    code: str = ""
    """Class of the error, see `ErrorReport`."""
