"""Messages of the index: events of KV blocks, matches, shadow maps and reports."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from baton.messages.base import Context, Message, Part
from baton.messages.workers import Fingerprint


class Tier(IntEnum):
    """Where a worker keeps a block, the nearest first."""

    DEVICE = 0
    """The engine's own KV memory."""
    POOL = 1
    """The KV pool in host memory: blocks are promoted into the engine before they serve."""
    FILE = 2
    """The pool's file: blocks are read into the pool, then promoted."""


class Match(Message, tag="match", frozen=True, kw_only=True):
    """Scheduler to any kvindex: which workers hold how much of this prompt? Answered by `Matched`."""

    context: Context
    model_digest: str
    blocks: bytes


class Matched(Message, tag="matched", frozen=True, kw_only=True):
    held: dict[str, int]
    """Worker → number of leading blocks it holds on its device. Workers that hold none are left out."""
    pooled: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Worker → number of leading blocks it holds on its device or in its pool. Workers whose pool adds none are left
    out."""
    filed: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Worker → number of leading blocks it holds on its device, in its pool or in the pool's file. Workers whose file
    adds none are left out."""
    speculative: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Worker → number of leading blocks it will hold once recently placed prompts are computed: held and speculative
    blocks. Workers without speculative blocks are left out."""


class BlocksStored(Part, tag="stored", tag_field="t", frozen=True, kw_only=True):
    """A run of canonical blocks, each the child of the one before."""

    parent: bytes
    """Id of the block before the first; empty at the root of the tree."""
    blocks: bytes
    """16 bytes each."""
    tier: Tier = Tier.DEVICE


class BlocksRemoved(Part, tag="removed", tag_field="t", frozen=True, kw_only=True):
    blocks: bytes
    tier: Tier = Tier.DEVICE


class BlocksCleared(Part, tag="cleared", tag_field="t", frozen=True, kw_only=True):
    """The worker dropped all its blocks of a tier."""

    tier: Tier | None = None
    """None: of every tier."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEvents(Message, tag="kv_events", frozen=True, kw_only=True):
    """Changes of a worker's cache, in order. JetStream message id: `worker/generation/sequence`."""

    worker: str
    generation: int
    model_digest: str
    sequence: int
    """Number of the message, from 1 within a generation; a gap makes the index resync this worker."""
    events: tuple[BlockEvent, ...]


class ShadowQuery(Message, tag="shadow_query", frozen=True, kw_only=True):
    """Index to worker: send one page of your shadow map. Answered by `ShadowPage`."""

    cursor: int = 0
    """0 for the first page, then `next_cursor` of the page before."""


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
    """Any client to every kvindex, on `subjects.INDEX_QUERIES`: report your state. Answered by an `IndexReport`."""

    asker: str
    """Answers go to `subjects.index_answers(asker)`."""
    prefixes_max: int = 10
    model_digest: str = ""
    blocks: bytes = b""
    """Block ids of a prompt of that model to match; empty: none."""


class IndexedPrefix(Part, frozen=True, kw_only=True):
    """The longest prefix that the same workers all hold."""

    last: bytes
    """Id of the prefix's last block."""
    blocks: int
    workers: int


class IndexedModel(Part, frozen=True, kw_only=True):
    model_digest: str
    blocks: int
    """Blocks in memory."""
    cold_blocks: int = 0
    """Blocks in Redis only."""
    holdings: int
    bytes: int
    nodes: int
    depth: int
    """Length of the longest prefix, in blocks."""
    prefixes: tuple[IndexedPrefix, ...] = ()
    """Prefixes held by most workers, longest first among equals."""


class WorkerReport(Part, frozen=True, kw_only=True):
    worker: str
    generation: int
    model_digest: str
    sequence: int
    """Sequence of the newest event that was applied."""
    held: Fingerprint
    """Blocks on its device."""
    pooled: Fingerprint = Fingerprint()
    """Blocks in its pool."""
    filed: Fingerprint = Fingerprint()
    """Blocks in the pool's file."""
    agreed_sequence: int
    """Sequence of the newest event after which worker and index agreed; -1: none yet, or none since they differed."""
    state: str
    """`synced`, or the state of a resync: `needed` or `running`."""
    resync_reason: str = ""
    drifts: int = 0
    """Differences found since worker and index last agreed."""
    predicted_tokens: int = 0
    cached_tokens: int = 0


class IndexReport(Message, tag="index_report", frozen=True, kw_only=True):
    """State of one kvindex."""

    instance: str
    writes: bool
    stream_sequence: int
    speculative_blocks: int = 0
    counters: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    models: tuple[IndexedModel, ...] = ()
    workers: tuple[WorkerReport, ...] = ()
    left_out: int = 0
    """Number of workers for which the message had no room."""
    held: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    pooled: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    filed: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    speculative: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """`held`, `pooled`, `filed` and `speculative` are those of `Matched`, for the prompt in the query."""
