"""The router protocol: where each request of a replay runs. Baton's placement and the peers' policies implement it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from baton.errors import BatonError

Role = Literal["prefill", "decode", "aggregated"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as routers see it."""

    id: str
    session: str
    """Conversation; empty where the trace has none."""
    block_tokens: int
    blocks: tuple[int, ...]
    """One id for each whole block of the prompt. Equal ids mean equal prompts up to and including that block."""
    prompt_tokens: int
    output_tokens_max: int
    """The client's `max_tokens`, not the length of the answer."""
    tenant: str = ""
    weight: float = 1.0
    """Share of its tenant, relative to others."""


@dataclass(frozen=True, slots=True)
class Route:
    """Workers of one request."""

    decode: str
    prefill: str | None = None
    """None: the decode worker computes the prompt itself."""
    predicted_ttft_s: float | None = None
    """The router's own prediction; None where it makes none."""
    predicted_at_s: float = 0.0
    """Instant of the prediction, from which it counts."""
    lender: str = ""
    """Worker whose KV pool lends a prefix to the one that computes the prompt."""
    loan_s: float = 0.0
    """Time that computing what it lends is predicted to take, the longest that the loan may take."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker's constant properties."""

    name: str
    role: Role
    kv_blocks_total: int
    """Most blocks that running requests may hold."""
    block_tokens: int
    kv_bytes_per_token: int = 131_072
    step_tokens_max: int = 2048
    """Most prompt tokens that a step computes."""
    pool_blocks: int = 0
    """Blocks in the worker's KV pool."""
    lends: bool = False
    """Whether the pool lends to other workers."""


class Event(NamedTuple):
    """Something that a worker can measure."""

    at_s: float
    kind: Literal["entered", "computed", "pulled", "promoted", "borrowed", "first_token", "decoded", "ended"]
    """A prompt to compute entered the engine, was computed, or its KV pulled, promoted or borrowed; a sequence has its
    first token, tokens after it, or its last one."""
    request: str = ""
    """Empty where it is of several."""
    tokens: int = 0
    """Computed or decoded tokens."""
    prompt_tokens: int = 0
    """All tokens of the prompt that was computed."""
    peer: str = ""
    """Worker from which KV was pulled or borrowed."""
    size_bytes: int = 0
    elapsed_s: float = 0.0
    """Time in which the bytes of a pull, promotion or loan moved; of a computed prompt, for which it waited for loan
    and promotion."""
    promoted_tokens: int = 0
    """Tokens of the prompt that were promoted from the pool."""


class Measured(msgspec.Struct, frozen=True):
    """What a worker measured since its last heartbeat."""

    events: Sequence[Event] = ()
    decoded_tokens: int = 0
    """Tokens after the first of all sequences."""


class WorkerState(msgspec.Struct, frozen=True):
    """One worker's load at its heartbeat."""

    name: str
    role: Role
    running: int
    """Requests in the engine's batch, prompts under computation included."""
    waiting: int
    """Requests in the engine's queue, and on decode workers those whose KV is not there yet."""
    prefill_tokens_queued: int
    """Prompt tokens accepted and not yet computed, without those that the cache holds."""
    kv_blocks_used: int
    """Blocks that running requests hold, shared ones counted once."""
    kv_blocks_total: int
    active_decode_blocks: int
    """Part of `kv_blocks_used` that belongs to sequences in decode."""
    pool_blocks_free: int = 0
    """Blocks that the KV pool can take before it evicts."""
    measured: Measured = Measured()


class Router(Protocol):
    """Where each request goes. One instance sees one replay.

    The constructor takes `(workers: Sequence[WorkerSpec], options, random: random.Random)`. Calls come in order of
    virtual time; heartbeats may be up to one interval late, and always come before the next `route`.
    """

    def route(self, arrival: Arrival, now_s: float) -> Route | None:
        """Return the request's workers, or None if it is held. Only a `HoldingRouter` holds.

        Raises BatonError to refuse the request.
        """
        ...

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        """The request's first token exists."""
        ...

    def ended(self, arrival: Arrival, now_s: float) -> None:
        """The request's last token exists, or its worker refused it."""
        ...

    def cached(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        """The worker's prefix cache changed: its KV events, exact."""
        ...

    def beat(self, state: WorkerState, now_s: float) -> None:
        """A heartbeat: each worker sends one every 0.25 s, at a random phase.

        Those that no `route` sees are left out, with their measurements in the next one, and so are those of workers
        that have been idle for 10 s.
        """
        ...


@runtime_checkable
class HoldingRouter(Router, Protocol):
    """A router with a queue of its own."""

    @property
    def wake_at_s(self) -> float:
        """Time at which `wake` is to be called; infinite while nothing is held."""
        ...

    def wake(self, now_s: float) -> Sequence[tuple[Arrival, Route | BatonError]]:
        """Return the held requests that can run now, in order, and those that are refused after all."""
        ...


@runtime_checkable
class TieredRouter(Router, Protocol):
    """A router that knows of pools."""

    def pooled(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        """The worker's KV pool changed."""
        ...
