"""The protocol that every inference engine implements. Implementations stand beside this file, one each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from baton.connectors.pool_lending import Loan
from baton.connectors.pool_report import PoolReport
from baton.messages.attempts import FinishReason, Sampling, TokenLogprob
from baton.messages.base import WorkerAddress
from baton.messages.index import Tier
from baton.messages.traces import AttributeValue
from baton.transfer import AgentStats, PullTally


class Leg(StrEnum):
    """The part of a request that this engine runs."""

    WHOLE = "whole"
    """Prompt and generation, without a hand-off."""
    PREFILL = "prefill"
    """Compute the prompt and hold its KV under lease for a decode worker; the sampled token is discarded."""
    DECODE = "decode"
    """Pull the prompt's KV from `source`, then generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One attempt as an engine sees it. `(request, attempt)` is unique for as long as an engine runs."""

    request: str
    attempt: int
    leg: Leg
    tokens: Sequence[int]
    sampling: Sampling
    cache_salt: str = ""
    source: WorkerAddress | None = None
    """Source of the prompt's KV, set exactly when `leg` is DECODE."""
    sink_ranks: int = 0
    """Agents that will pull (PREFILL only), one per rank of the decode engine; 0: as many as this engine has."""
    budget_s: float
    """Time to the first delta, a DECODE leg's pull included; after it, the reader of the deltas limits the time."""
    trace: str = ""
    """W3C `traceparent` for engines that make spans of their own."""
    loan: Loan | None = None
    """A prefix that another worker's pool lends; engines without a pool ignore it."""
    computing_token_s: float = 0.0
    """Predicted time to compute one token of the prompt, the longest that one may be waited for. 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A named part of an attempt's time. Instants are on this machine's monotonic clock."""

    name: str
    began_s: float
    ended_s: float
    facts: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    parts: tuple[Stage, ...] = ()


class EngineDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one engine step. The last delta of a request has a `finish`."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens this engine held before the request, on its device or in its pool; set from the first delta on."""
    promoted_tokens: int = 0
    """Part of `cached_tokens` that was promoted from the pool."""
    loaded_tokens: int = 0
    """Part of `promoted_tokens` that was read from the pool's file first."""
    promoted_bytes: int = 0
    promotion_s: float = 0.0
    """Time in which these bytes were copied; 0: the engine cannot tell."""
    transferred_tokens: int = 0
    """Prompt tokens whose KV was pulled."""
    transferred_bytes: int = 0
    transfer_s: float = 0.0
    """Time in which the pull's bytes were moving, without waiting for prefill; 0: the engine cannot tell."""
    stages: tuple[Stage, ...] = ()
    """Stages up to the first token, in a request's first delta; empty: the engine cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts that are fixed once an engine has started."""

    engine: str
    """Name and version, such as `vllm 0.32.0`."""
    model_digest: str
    """See `baton.blocks.model_digest`."""
    block_tokens: int
    kv_blocks: int
    kv_bytes_per_token: int
    running_max: int
    step_tokens_max: int
    """Prompt tokens that one step computes at most, over all requests in it."""
    context_tokens_max: int
    kv_identity: str = ""
    """See `baton.identity`; the fingerprint of the agents' pools."""
    agents: tuple[str, ...] = ()
    """Endpoints of the transfer agents, one per tensor-parallel rank; empty: cannot hand off."""
    pool_agents: tuple[str, ...] = ()
    """Endpoints of the KV pools' transfer agents, one per rank; empty: there is no pool to lend from."""
    parameters: tuple[str, ...] = ()
    """`Sampling.parameters` that this engine takes, in order."""
    pool_blocks: int = 0
    """Slots of the KV pool, of `block_tokens` each; 0: there is no pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A snapshot of the engine's scheduler."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV blocks in use by requests or held under lease, 0 to 1; cached free blocks are not in use."""
    leased_blocks: int = 0
    leased: frozenset[tuple[str, int]] = frozenset()
    """(request, attempt) of every lease, from the end of its PREFILL iterator at the latest until the lease is gone."""
    prompt_tokens_computed: int = 0
    """Prompt tokens computed here since the start: not cached, not pulled."""
    prompt_tokens_cached: int = 0
    """Found on the device."""
    prompt_tokens_promoted: int = 0
    """Found in the pool."""
    prompt_tokens_pulled: int = 0
    bytes_pulled: int = 0
    preemptions: int = 0
    pulls_failed: int = 0
    pool: PoolReport = field(default_factory=PoolReport)
    """Figures of the KV pool; without slots there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFigures:
    """Figures of an engine's transfer agents since the start, over all ranks."""

    pulls: PullTally = field(default_factory=PullTally)
    agents: AgentStats | None = None
    """None: there are no agents, or none has reported yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBlocksStored:
    """The engine filled a run of its blocks. Hashes are opaque and valid until the engine ends."""

    parent: bytes | None
    hashes: tuple[bytes, ...]
    tokens: tuple[int, ...]
    """Tokens of all blocks of the run, `block_tokens` each; none where `tier` is FILE."""
    block_tokens: int
    cache_salt: str = ""
    tier: Tier = Tier.DEVICE
    """The hashes of blocks in the pool are its keys, see `baton/pool/chain.py`; in its file, canonical ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBlocksRemoved:
    """The engine dropped these blocks. The same hash may be stored and removed more than once: count."""

    hashes: tuple[bytes, ...]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBlocksCleared:
    """The engine dropped all blocks of a tier."""

    tier: Tier | None = None
    """None: of every tier."""


EngineBlockEvent = EngineBlocksStored | EngineBlocksRemoved | EngineBlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEventBatch:
    sequence: int
    """Counts from 1 without gaps; a gap means events were lost and the worker must clear its shadow map."""
    events: tuple[EngineBlockEvent, ...] = field(default_factory=tuple)


class Engine(Protocol):
    """An inference engine in this process, or in a child that dies with it.

    Safe for one event loop. After `close`, or once the engine died, every method raises EngineFailed.
    """

    async def start(self) -> EngineFacts:
        """Load the model. Raises ConfigurationError with a sentence for the user when it cannot."""
        ...

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise InvalidRequest that names what this engine does not support.

        Quick and without side effects, so that a worker can refuse a task before it holds anything. `generate`
        raises what shows only inside the engine.
        """
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """Run one attempt; the last delta carries `finish`. Closing the iterator aborts the attempt.

        Raises InvalidRequest (the engine refuses what the request asks, and serves on), TransferFailed (KV
        did not arrive whole and verified; nothing was generated), EngineFailed for whatever fails inside the
        engine, AttemptFailed, DeadlineExceeded. For Leg.PREFILL the iterator ends when the prompt is computed;
        its KV stays under lease after that, until decode releases it, `abort` is called or the lease's time is up.
        """
        ...

    async def abort(self, request: str, attempt: int) -> None:
        """End an attempt in any state, a held lease included; its iterator ends with CANCELLED.

        Returns once the engine has been told; unknown attempts are ignored.
        """
        ...

    async def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        """Lease what the KV pool holds of a prefix to a peer, under `key`; return its tokens, 0: nothing is lent.

        `blocks`: the prefix's ids (`baton.blocks`), of 32 tokens each. Repeated calls lend once.
        """
        ...

    def load(self) -> EngineLoad: ...

    def transfers(self) -> TransferFigures:
        """Return figures for metrics; called a few times a minute."""
        ...

    def events(self) -> AsyncIterator[EngineEventBatch]:
        """Return changes of the prefix cache, in order, from the engine's start on; one consumer."""
        ...

    async def check_health(self) -> None:
        """Raise EngineFailed when the engine cannot serve any more."""
        ...

    async def close(self) -> None:
        """End everything, the engine's processes included."""
        ...
