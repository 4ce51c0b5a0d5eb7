"""An attempt in the worker's ledger, the request for it, and the worker's limits. Pure values."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from baton.engines.engine import Leg
from baton.errors import BatonError
from baton.messages.attempts import AttemptState, Finish, Frame, TokenLogprob, Usage
from baton.messages.base import pack_tokens
from baton.worker.kv_book import Holding

Key = tuple[str, int]

IN_ENGINE: Final = frozenset({AttemptState.QUEUED, AttemptState.PULLING, AttemptState.RUNNING, AttemptState.COMPUTING})
WITH_SLOT: Final = IN_ENGINE | {AttemptState.RESERVED}
WITH_BLOCKS: Final = WITH_SLOT | {AttemptState.HELD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a worker. `kv_blocks` are the engine's blocks, of `engine_block_tokens` each."""

    slots: int
    kv_blocks: int
    engine_block_tokens: int
    output_headroom_tokens_max: int = 512
    """An attempt reserves blocks for its prompt and for at most this much output."""
    leased_share_max: float = 0.4
    enter_timeout_s: float = 2.0
    waiting_max: int = 64
    """Attempts that may wait for room at the same time."""
    wait_s_max: float = 5.0
    progress_s: float = 30.0
    """An attempt that has begun to generate is given up after this long without a further token."""
    retain_s: float = 30.0
    retained_tokens_max: int = 4_000_000
    lost_after_s: float = 5.0
    """A gateway that is silent for this long is lost, and its attempts are aborted."""
    abort_timeout_s: float = 10.0
    """An aborted attempt that the engine has not released after this long is ended without it."""
    budget_s_max: float = 3600.0
    tombstones_max: int = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A task's request to the ledger."""

    key: Key
    gateway: str
    leg: Leg
    prompt_tokens: int
    output_tokens_max: int
    budget_s: float
    cached_tokens: int = 0
    """Prompt tokens expected in this worker's cache."""
    wait_s: float = 0.0
    """Time for which it may wait for room; 0: it is refused without room."""
    partner: str = ""
    """Worker of the other leg, of an attempt that may wait."""
    prefix: Sequence[Hashable] = ()
    """Ids of the prompt's leading parts, see `prefix_ids`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of an ask: `reason` of `messages.Busy`, and a sentence."""

    reason: str
    detail: str


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One attempt in the ledger; changed by the ledger alone."""

    key: Key
    gateway: str
    leg: Leg
    prompt_tokens: int
    uncached_tokens: int
    """Prompt tokens that must be computed, as estimated at admission."""
    kv: Holding
    lease: Holding
    """The same in the book of leases, of a prefill leg."""
    deadline_s: float
    """Instant by which its first token must arrive."""
    give_up_s: float
    """Instant at which it is given up: the deadline, and once tokens come, the progress limit after the last one."""
    state: AttemptState = AttemptState.RESERVED
    state_until_s: float = inf
    """Instant at which a state with its own time limit ends: RESERVED, RETAINED, stopping."""
    partner: str = ""
    wait_until_s: float = inf
    """Instant until which it may wait for room."""
    offer_at_s: float = -inf
    """Instant until which a waiting attempt lets others go first."""
    joining: bool = False
    """Whether it is reserved while the worker of the other leg is asked."""
    stopping: bool = False
    stop_error: BatonError | None = None
    """Error to report for a stopped attempt; None: no report is wanted."""
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    cached_tokens: int = 0
    promoted_tokens: int = 0
    loaded_tokens: int = 0
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    finish: Finish | None = None

    def usage(self) -> Usage:
        here_before = self.cached_tokens + self.transferred_tokens
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.tokens),
            cached_tokens=self.cached_tokens,
            promoted_tokens=self.promoted_tokens,
            loaded_tokens=self.loaded_tokens,
            transferred_tokens=self.transferred_tokens,
            transferred_bytes=self.transferred_bytes,
            computed_tokens=max(0, self.prompt_tokens - here_before),
        )

    def frame(self, index: int, finish: Finish | None = None) -> Frame:
        """Return all output from token `index` on, with the end where it is given."""
        index = max(0, min(index, len(self.tokens)))
        request, attempt = self.key
        return Frame(
            request=request,
            attempt=attempt,
            index=index,
            tokens=pack_tokens(self.tokens[index:]),
            logprobs=tuple(self.logprobs[index:]) if self.logprobs else (),
            finish=finish,
            usage=self.usage() if index == 0 and self.tokens else None,
        )


@dataclass(frozen=True, slots=True)
class Stopped:
    """An attempt that `sweep` stopped, and what the caller must do about it."""

    attempt: Attempt
    tell_engine: bool
    overdue: bool = False
    """The engine never released the attempt; its task must be cancelled."""
