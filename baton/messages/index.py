"""The index: events of KV blocks, matches, shadow maps and reports."""

from __future__ import annotations

import msgspec

from baton.messages.base import Context, Message, Part
from baton.messages.workers import Fingerprint


class Match(Message, tag="match", frozen=True, kw_only=True):
    """Scheduler to any kvindex: who holds how much of this prompt? Answered by `Matched`."""

    context: Context
    model_digest: str
    blocks: bytes


class Matched(Message, tag="matched", frozen=True, kw_only=True):
    held: dict[str, int]
    """Worker → number of leading blocks it holds; workers that hold none are left out."""
    speculative: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """The same once what was placed there lately is computed; only where that is more than it holds."""


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
    counters: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    models: tuple[IndexedModel, ...] = ()
    workers: tuple[WorkerReport, ...] = ()
    left_out: int = 0
    """Workers for which the message had no room."""
    held: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    speculative: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """As in `Matched`, of the prompt that was asked for."""


class WriterLease(Message, tag="writer_lease", frozen=True, kw_only=True):
    """In a bucket: which of the indexes writes. It is held for as long as it is put anew."""

    holder: str
