"""Every message that crosses the bus, defined once.

Messages are frozen tagged structs in MessagePack maps. Fields may be added with defaults; the meaning
of a field never changes. Every message of a request carries its `Context`: which attempt it belongs
to, how long its first or next token may take (a remaining time, since wall clocks differ) and
the W3C trace context. Token ids travel packed, as little-endian uint32 (`pack_tokens`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from baton.errors import BatonError, MalformedMessage, error_from_code

TOKEN_BYTES: Final = 4
RANKS_MAX: Final = 256
"""Tensor-parallel ranks of an engine."""
PARAMETERS_MAX: Final = 64
PARAMETER_CHARACTERS_MAX: Final = 64
REFUSALS_MAX: Final = 8

ParameterName = Annotated[str, Meta(min_length=1, max_length=PARAMETER_CHARACTERS_MAX)]
"""Key of `Sampling.extensions`."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", omit_defaults=True):
    """Base of everything that crosses the bus."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what stands inside a message."""


class Context(Part, frozen=True, kw_only=True):
    """Which attempt a message belongs to, the time left for it to make progress, and its trace."""

    request: str
    attempt: int = 0
    budget_s: float
    """Until the answer's first token: the rest of the request's deadline; after it: of the progress limit."""
    trace: str = ""
    """W3C `traceparent` of the span that sent this message; empty when the request is not traced."""


class ErrorReport(Part, frozen=True, kw_only=True):
    """A failure on its way across the bus: `code` of the class in `baton.errors`, and its sentence."""

    code: str
    detail: str
    retry_after_s: float | None = None
    param: str | None = None

    @classmethod
    def of(cls, error: BatonError) -> ErrorReport:
        return cls(code=error.code, detail=error.detail, retry_after_s=error.retry_after_s, param=error.param)

    def to_error(self) -> BatonError:
        return error_from_code(self.code, self.detail, retry_after_s=self.retry_after_s, param=self.param)


# ---------------------------------------------------------------- workers


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Disaggregation(StrEnum):
    """Whether prefill runs on another worker than decode."""

    ALWAYS = "always"
    AUTO = "auto"
    NEVER = "never"


class WorkerAddress(Part, frozen=True, kw_only=True):
    """One life of one worker. A message for an older `generation` is refused."""

    worker: str
    generation: int
    agents: tuple[str, ...] = ()
    """Endpoint of the transfer agent of each tensor-parallel rank, opaque outside `baton.transfer`."""


class Fingerprint(Part, frozen=True, kw_only=True):
    """What a set of block ids comes to, in whatever order: equal ones mean equal sets, but by a freak of chance."""

    blocks: int = 0
    ids: bytes = bytes(16)
    """The sum of the ids as numbers, modulo 2 to the 128, all little-endian."""

    @classmethod
    def of(cls, ids_sum: int, blocks: int) -> Fingerprint:
        return cls(blocks=blocks, ids=(ids_sum % (1 << 128)).to_bytes(16, "little"))


class Heartbeat(Message, tag="heartbeat", frozen=True, kw_only=True):
    """What a worker says of itself, on `subjects.HEARTBEAT`, several times a second."""

    address: WorkerAddress
    role: Role
    model: str
    """The name that clients use."""
    model_path: str
    """Where the gateway finds the tokenizer: a folder or a hub id."""
    model_digest: str
    """Hex digest over configuration and weights: the root of block identity."""
    kv_identity: str = ""
    """See `baton.identity`: KV is handed over between workers of which it is equal; empty: the digest stands for it."""
    engine: str
    engine_kind: Annotated[str, Meta(max_length=64)] = ""
    """Digest over the engine's version and options: what one worker of a kind refuses, all do. Empty: unlike any."""
    parameters: Annotated[tuple[ParameterName, ...], Meta(max_length=PARAMETERS_MAX)] = ()
    """Keys of `Sampling.extensions` that the engine takes."""
    block_tokens: int
    """Size of a canonical block (the index's unit), in tokens."""
    context_tokens_max: int
    running: int = 0
    waiting: int = 0
    running_max: int
    kv_blocks_used: int = 0
    kv_blocks_total: int
    engine_block_tokens: int
    """Size of the engine's own block, in tokens: the unit of `kv_blocks_*`."""
    prefill_tokens_queued: int = 0
    """Prompt tokens accepted and still to be computed, without those that are taken to be cached."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Of one sequence at the present batch size: the inverse of the token interval."""
    transfer_bytes_per_s: float
    kv_bytes_per_token: int
    attempts: tuple[tuple[str, int], ...] = ()
    """(request, attempt) of everything this worker holds."""
    events_sequence: int = 0
    """Sequence of the newest `KvEvents` sent, so that the index sees a lost tail."""
    held: Fingerprint | None = None
    """Of all blocks that the worker holds after event `held_sequence`, which may not have been sent yet."""
    held_sequence: int = 0
    draining: bool = False
    leaves_in_s: float = 0.0
    """While draining: after this what still runs here is ended."""


class Goodbye(Message, tag="goodbye", frozen=True, kw_only=True):
    """A worker leaves on purpose; what it held is gone."""

    address: WorkerAddress


# ---------------------------------------------------------------- placement


class Place(Message, tag="place", frozen=True, kw_only=True):
    """Gateway to any scheduler: where shall this attempt run? Answered by `Placement` or `Refused`."""

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
    """Keys of the request's `Sampling.extensions`: decode goes to a worker that takes all of them."""
    refused: Annotated[tuple[str, ...], Meta(max_length=REFUSALS_MAX)] = ()
    """Workers that refused what the request asks. Unlike `exclude` this holds, and for all workers of their kinds."""


class Candidate(Part, frozen=True, kw_only=True):
    """One possible placement and what the scheduler predicted of it."""

    decode: str
    prefill: str = ""
    cached_tokens: int = 0
    """On the worker that would prefill."""
    decode_cached_tokens: int = 0
    coming_tokens: int = 0
    """Of `cached_tokens`: those that an attempt placed there before has still to compute."""
    predicted_ttft_s: float
    predicted_token_interval_s: float = 0.0


class Placement(Message, tag="placement", frozen=True, kw_only=True):
    decode: WorkerAddress
    prefill: WorkerAddress | None = None
    reason: str
    predicted: Candidate
    candidates: tuple[Candidate, ...] = ()


class Refused(Message, tag="refused", frozen=True, kw_only=True):
    """The one negative answer to any request on the bus."""

    error: ErrorReport


class Match(Message, tag="match", frozen=True, kw_only=True):
    """Scheduler to any kvindex: who holds how much of this prompt? Answered by `Matched`."""

    context: Context
    model_digest: str
    blocks: bytes


class Matched(Message, tag="matched", frozen=True, kw_only=True):
    held: dict[str, int]
    """Worker → number of leading blocks it holds; workers that hold none are left out."""
    speculative: dict[str, int] = {}
    """The same once what was placed there lately is computed; only where that is more than it holds."""


class Placed(Message, tag="placed", frozen=True, kw_only=True):
    """Scheduler to every kvindex and scheduler: these workers will soon run this attempt, and hold its prompt.

    May be lost: it is a hint.
    """

    context: Context
    scheduler: str = ""
    """Who placed it."""
    model_digest: str
    blocks: bytes
    workers: tuple[WorkerAddress, ...]
    prompt_tokens: int = 0
    output_tokens_max: int = 0
    predicted: Candidate | None = None


class Audited(Message, tag="audited", frozen=True, kw_only=True):
    """Gateway to every kvindex: what a placement took a worker to hold of a prompt, and what it held. May be lost."""

    context: Context
    address: WorkerAddress
    predicted_tokens: int
    """What was still to come is not in it."""
    cached_tokens: int


# ---------------------------------------------------------------- the attempt


class Sampling(Part, frozen=True, kw_only=True):
    """How to choose tokens. `extensions` holds engine parameters that Baton passes through unread."""

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
    extensions: dict[str, object] = {}


class KvSource(Part, frozen=True, kw_only=True):
    """Where a decode worker pulls the prompt's KV from. The lease's key is `lease_key(request, attempt, tokens)`."""

    address: WorkerAddress


class TokenChunk(Message, tag="chunk", frozen=True, kw_only=True):
    """A leading part of a prompt that is too long for one message; sent before its task, in order."""

    context: Context
    offset: int
    tokens: bytes


class PrefillTask(Message, tag="prefill", frozen=True, kw_only=True):
    """Compute the prompt's KV and hold it under lease. Answered by `Accepted`, `Busy` or `Refused`."""

    context: Context
    gateway: str
    generation: int
    """Of the worker this is meant for; another life answers `Busy`."""
    tokens: bytes
    """The prompt's tail: what no `TokenChunk` carried."""
    prompt_tokens: int
    sampling: Sampling
    cache_salt: str = ""
    sink_ranks: int = 0
    """Tensor-parallel ranks of the decode worker, each of which pulls; 0: as many as this worker has."""
    cached_tokens: int = 0
    """Of the prompt, what the placement takes this worker to hold: the rest is what its queue grows by."""


class DecodeTask(Message, tag="decode", frozen=True, kw_only=True):
    """Generate. With a `source`, pull the prompt's KV from there; without one, compute it here.

    Answered as a `PrefillTask` is; `Refused` with InvalidRequest: the engine takes no such parameters.
    """

    context: Context
    gateway: str
    generation: int
    tokens: bytes
    prompt_tokens: int
    sampling: Sampling
    cache_salt: str = ""
    source: KvSource | None = None
    cached_tokens: int = 0
    """As in `PrefillTask`; without a source."""


class Accepted(Message, tag="accepted", frozen=True, kw_only=True):
    """The worker's ledger holds a reservation for this attempt."""

    worker: str
    generation: int


class Busy(Message, tag="busy", frozen=True, kw_only=True):
    """The worker will not run this attempt, and holds nothing of it."""

    worker: str
    reason: str
    """One of: `full`, `leases`, `draining`, `generation`, `role`, `tombstone`, `expired`, `incomplete`, `malformed`."""
    detail: str = ""


class Cancel(Message, tag="cancel", frozen=True, kw_only=True):
    """Gateway to worker: end this attempt and keep a tombstone, the task may still come."""

    context: Context
    reason: str = ""


class Acknowledge(Message, tag="acknowledge", frozen=True, kw_only=True):
    """Gateway to worker: the final frame arrived, forget the attempt."""

    context: Context


class Resend(Message, tag="resend", frozen=True, kw_only=True):
    """Gateway to decode: frames are missing, send all tokens from `index` on."""

    context: Context
    index: int


class Usage(Part, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV the worker that computed the prompt held before."""
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
    """What one engine step added to one attempt. `index` counts output tokens before `tokens`."""

    request: str
    attempt: int
    index: int
    tokens: bytes = b""
    logprobs: tuple[TokenLogprob, ...] = ()
    """As many as tokens, or none."""
    finish: Finish | None = None
    usage: Usage | None = None
    """In an attempt's first frame with tokens: what is known of the prompt by then, since an answer that the
    gateway ends at a stop string never gets a `finish`."""


class Frames(Message, tag="frames", frozen=True, kw_only=True):
    """What one engine step added to the attempts of one gateway."""

    worker: str
    generation: int
    frames: tuple[Frame, ...]


class Hint(Message, tag="hint", frozen=True, kw_only=True):
    """Prefill to gateway: my part of this attempt failed. Only decode's word or a timer ends an attempt."""

    context: Context
    worker: str
    error: ErrorReport


class Prefilled(Message, tag="prefilled", frozen=True, kw_only=True):
    """Prefill to gateway: the prompt is computed and held. `usage` is prefill's; decode's word ends the attempt."""

    context: Context
    worker: str
    usage: Usage


class AttemptState(StrEnum):
    """Where an attempt stands on a worker, see the protocol in `docs/handoff.md`."""

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
    """Each second, worker to gateway: all that this worker holds for it. Absent twice means lost."""

    worker: str
    generation: int
    entries: tuple[DigestEntry, ...] = ()


class GatewayBeat(Message, tag="gateway_beat", frozen=True, kw_only=True):
    """Each second, on `subjects.GATEWAY_BEAT`. Workers abort what belongs to a gateway silent for 5 s."""

    gateway: str


# ---------------------------------------------------------------- KV events


class BlocksStored(Part, tag="stored", tag_field="t", frozen=True, kw_only=True):
    """A run of canonical blocks, each the child of the one before."""

    parent: bytes
    """Id of the block before the first; empty at the root of the tree."""
    blocks: bytes
    """16 bytes each."""


class BlocksRemoved(Part, tag="removed", tag_field="t", frozen=True, kw_only=True):
    blocks: bytes


class BlocksCleared(Part, tag="cleared", tag_field="t", frozen=True, kw_only=True):
    """The worker dropped everything."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEvents(Message, tag="kv_events", frozen=True, kw_only=True):
    """Changes of a worker's cache, in order. JetStream message id: `worker/generation/sequence`."""

    worker: str
    generation: int
    model_digest: str
    sequence: int
    """Counts messages from 1 within a generation; a gap makes the index resync this worker."""
    events: tuple[BlockEvent, ...]


class ShadowQuery(Message, tag="shadow_query", frozen=True, kw_only=True):
    """Index to worker: page through everything you hold. Answered by `ShadowPage`."""

    cursor: int = 0
    """0, or `next_cursor` of the page before."""


class ShadowPage(Message, tag="shadow_page", frozen=True, kw_only=True):
    """Runs of the worker's shadow map; `sequence` is the newest event it contains."""

    worker: str
    generation: int
    model_digest: str
    sequence: int
    runs: tuple[BlocksStored, ...] = ()
    next_cursor: int = 0
    """0: this was the last page."""


class IndexQuery(Message, tag="index_query", frozen=True, kw_only=True):
    """Anyone to every kvindex, on `subjects.INDEX_QUERIES`: what do you know? Answered by an `IndexReport`."""

    asker: str
    """Answers go to `subjects.index_answers(asker)`."""
    prefixes_max: int = 10
    model_digest: str = ""
    blocks: bytes = b""
    """Of a prompt of that model, to be looked for; empty: none."""


class IndexedPrefix(Part, frozen=True, kw_only=True):
    """A prefix, as long as all these workers hold it."""

    last: bytes
    """Id of its last block."""
    blocks: int
    workers: int


class IndexedModel(Part, frozen=True, kw_only=True):
    model_digest: str
    blocks: int
    """In memory."""
    cold_blocks: int = 0
    """In Redis only."""
    holdings: int
    bytes: int
    nodes: int
    depth: int
    """Blocks of the longest prefix."""
    prefixes: tuple[IndexedPrefix, ...] = ()
    """The ones that most workers hold; of these the longest."""


class WorkerReport(Part, frozen=True, kw_only=True):
    worker: str
    generation: int
    model_digest: str
    sequence: int
    """The newest event that was applied."""
    held: Fingerprint
    agreed_sequence: int
    """The newest event after which the worker held the same; -1: none yet, or not since they differed."""
    state: str
    """`synced`, or of its resync: `needed` or `running`."""
    resync_reason: str = ""
    drifts: int = 0
    """Since both last held the same."""
    predicted_tokens: int = 0
    cached_tokens: int = 0


class IndexReport(Message, tag="index_report", frozen=True, kw_only=True):
    """What one kvindex knows."""

    instance: str
    writes: bool
    stream_sequence: int
    speculative_blocks: int = 0
    counters: dict[str, int] = {}
    models: tuple[IndexedModel, ...] = ()
    workers: tuple[WorkerReport, ...] = ()
    left_out: int = 0
    """Workers for which the message had no room."""
    held: dict[str, int] = {}
    speculative: dict[str, int] = {}
    """As in `Matched`, of the prompt that was asked for."""


class WriterLease(Message, tag="writer_lease", frozen=True, kw_only=True):
    """In a bucket: which of the indexes writes. It is held for as long as it is put anew."""

    holder: str


# ---------------------------------------------------------------- traces


AttributeValue = str | bool | int | float | tuple[str, ...]


class SpanRecord(Part, frozen=True, kw_only=True):
    """A piece of work in a trace, as the service that did it remembers it. Ids are hexadecimal."""

    trace: str
    span: str
    parent: str = ""
    name: str
    kind: int = 0
    """Number of OpenTelemetry's `SpanKind`."""
    start_ns: int
    """By the wall clock of the service's host."""
    end_ns: int = 0
    """0: it has not ended."""
    error: str = ""
    attributes: dict[str, AttributeValue] = {}
    links: tuple[str, ...] = ()
    """Spans of the same trace: the attempts that this one makes up for."""


class TraceQuery(Message, tag="trace_query", frozen=True, kw_only=True):
    """Anyone to every service, on `subjects.TRACES`: what do you remember of this? Answered by `TracePage`s."""

    id: str
    """Of a trace, or of the request that began one."""
    asker: str
    """Answers go to `subjects.trace_answers(asker)`."""


class TracePage(Message, tag="trace_page", frozen=True, kw_only=True):
    """Part of one service's answer to a `TraceQuery`; one without spans says that the service knows nothing."""

    service: str
    instance: str
    host: str
    spans: tuple[SpanRecord, ...] = ()
    left_out: int = 0
    """Spans of these traces that were not remembered, for want of room."""


class TraceWanted(Message, tag="trace_wanted", frozen=True, kw_only=True):
    """Gateway to every service, on `subjects.TRACES`: a request met a failure, so export all of its trace."""

    trace: str


AnyMessage = (
    Heartbeat
    | Goodbye
    | Place
    | Placement
    | Refused
    | Match
    | Matched
    | Placed
    | Audited
    | TokenChunk
    | PrefillTask
    | DecodeTask
    | Accepted
    | Busy
    | Cancel
    | Acknowledge
    | Resend
    | Frames
    | Hint
    | Prefilled
    | Digest
    | GatewayBeat
    | KvEvents
    | ShadowQuery
    | ShadowPage
    | IndexQuery
    | IndexReport
    | WriterLease
    | TraceQuery
    | TracePage
    | TraceWanted
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Return the message in `payload`. Raises MalformedMessage, naming what is wrong."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"{len(payload)} bytes from the bus are no message of ours: {error}") from error


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32. Raises MalformedMessage for an id outside uint32."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise MalformedMessage(f"a token id does not fit 32 bits: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the token ids in `packed`. Raises MalformedMessage where its length is no multiple of 4."""
    if len(packed) % TOKEN_BYTES:
        raise MalformedMessage(f"{len(packed)} bytes are no whole number of packed token ids")
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()
