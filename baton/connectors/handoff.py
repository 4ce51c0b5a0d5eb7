"""The scheduler's side of the hand-off, as plain decisions: what each step's workers have to do.

One `HandoffScheduler` runs beside an engine's scheduler. It is told what the scheduler decided and
answers two questions (how many tokens will come from elsewhere, may blocks be freed) and, once per step,
with the `StepPlan` for the workers' agents. It knows no engine; `baton.connectors.vllm` feeds it.

    prefill   new ──first scheduled──▶ leased ──prompt computed──▶ held ──lease ended or staged on all ranks──▶ gone
                                         └──preempted──▶ revoked ──scheduled again──▶ leased (generation + 1)
                                         └──aborted──▶ revoked for good ──▶ gone
    decode    new ──blocks allocated──▶ pulling ──done or failed──▶ consumed
                ├──no slots in time, where KV is staged──▶ computed here, lease released
                └──nothing lacks──▶ consumed, lease released      └──aborted──▶ pull cancelled, then freed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from baton.connectors.pool_report import PoolReport
from baton.transfer import AgentStats, Cause, LayerGroup

STAGING_WAIT_S: Final = 1.0
"""Time for which a request waits for slots, in seconds, before it is computed here."""


class HandoffLeg(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """A request's hand-off, inside the engine's `kv_transfer_params`."""

    leg: HandoffLeg
    key: bytes
    """See `baton.transfer.lease_key`."""
    sink_ranks: int = 0
    """Tensor-parallel ranks that will pull; 0: as many as there are here. Prefill only."""
    endpoints: tuple[str, ...] = ()
    """Addresses of the source's agents, by tensor-parallel rank. Decode only."""
    deadline_s: float = 0.0
    """Deadline of the pull, an instant on this machine's monotonic clock. Decode only."""


class PullOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a pull: from one source's rank, on one rank, or on all together."""

    key: bytes
    cause: Cause = Cause.NONE
    detail: str = ""
    tokens: int = 0
    moved_bytes: int = 0
    moving_s: float = 0.0
    failed: bool = False
    groups: tuple[LayerGroup, ...] = ()

    def joined(self, other: PullOutcome) -> PullOutcome:
        """Return both as one: the sum of bytes, the slower's time, and the first failure.

        A cancellation counts as the failure only where nothing else failed: it follows from another part's.
        """
        first = max(self, other, key=lambda outcome: (outcome.failed, outcome.cause is not Cause.CANCELLED))
        return msgspec.structs.replace(
            first,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            moving_s=max(self.moving_s, other.moving_s),
            groups=self.groups + other.groups,
        )


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of the workers' agents to the streaming process, once per step."""

    pulls: tuple[PullOutcome, ...] = ()
    leases_ended: tuple[bytes, ...] = ()
    leased_blocks: dict[int, int] = {}
    """Leased blocks by rank, when the number has changed."""
    agents: dict[int, AgentStats] = {}
    """Figures of the agents by rank, as of this report."""
    pool: PoolReport | None = None
    """Figures of the KV pool, when they have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStep:
    """A prompt of which this step computes a part."""

    request: str
    key: bytes
    opens: bool
    """Whether this step opens the lease, as a new generation: the first one, or the first since a preemption."""
    blocks: tuple[int, ...]
    """Blocks new since the last step."""
    ready_before: int
    """Tokens computed before the step; cached ones when it opens the lease."""
    ready_after: int
    tokens: int
    """Length of the whole prompt."""
    sink_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PullStep:
    """A pull to start: blocks allocated for KV that has to come from a peer."""

    request: str
    key: bytes
    endpoints: tuple[str, ...]
    first_token: int
    tokens: int
    blocks: tuple[int, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step's orders, applied in this order."""

    computes: bool = True
    """False: the engine steps only to learn what its agents have finished."""

    revoke: tuple[bytes, ...] = ()
    """Leases of preempted requests: their blocks are overwritten in this step."""
    end: tuple[bytes, ...] = ()
    """Leases of aborted or failed requests, to revoke for good; forgotten unless they are `held`."""
    held: tuple[bytes, ...] = ()
    """Leases that the engine is done with and whose end it waits for."""
    leases: tuple[LeaseStep, ...] = ()
    cancel: tuple[bytes, ...] = ()
    release: tuple[tuple[bytes, tuple[str, ...]], ...] = ()
    pulls: tuple[PullStep, ...] = ()


@dataclass(slots=True)
class _Prompt:
    """A request on the prefill leg."""

    handoff: Handoff
    tokens: int
    leased: bool = False
    open: bool = False
    """Whether the present generation is open, or the next step has to open one."""
    blocks_sent: int = 0


@dataclass(slots=True)
class _Sink:
    """A request on the decode leg."""

    handoff: Handoff
    tokens: int
    consumed: bool = False
    """Whether the source has been asked, or told that it is not needed; this happens once."""
    pulled_blocks: int = 0
    """Blocks that a pull fills; 0: none runs."""
    compute_at_s: float | None = None
    """Instant from which on it does not wait for slots any more."""


@dataclass(slots=True)
class _Orders:
    revoke: list[bytes] = field(default_factory=list[bytes])
    end: list[bytes] = field(default_factory=list[bytes])
    held: list[bytes] = field(default_factory=list[bytes])
    cancel: list[bytes] = field(default_factory=list[bytes])
    release: list[tuple[bytes, tuple[str, ...]]] = field(default_factory=list[tuple[bytes, tuple[str, ...]]])
    pulls: list[PullStep] = field(default_factory=list[PullStep])


class HandoffScheduler:
    """Decides the orders for each step. Requests go by the engine's ids; ids without a hand-off are ignored."""

    def __init__(
        self,
        block_tokens: int,
        *,
        staging_slots: int = 0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`staging_slots`: slots of each rank's host memory through which KV is staged; 0: peers use the cache."""
        self._block_tokens = block_tokens
        self._staging_slots = staging_slots
        self._now_s = now_s
        self.leases_open = 0
        """Leases of all ranks that peers read though the engine has freed their blocks; it has to go on stepping."""
        self._prompts: dict[str, _Prompt] = {}
        self._sinks: dict[str, _Sink] = {}
        self._orders = _Orders()

    @property
    def has_orders(self) -> bool:
        """Whether the workers must be told something even if nothing else is to be computed."""
        orders = self._orders
        return any((orders.revoke, orders.end, orders.held, orders.cancel, orders.release, orders.pulls))

    @property
    def is_idle(self) -> bool:
        return not self._prompts and not self._sinks and not self.leases_open

    def admit(self, request: str, handoff: Handoff, prompt_tokens: int) -> None:
        if handoff.leg is HandoffLeg.PREFILL:
            self._prompts[request] = _Prompt(handoff, prompt_tokens)
        else:
            self._sinks[request] = _Sink(handoff, prompt_tokens)

    def leases(self, request: str) -> bool:
        """Whether steps of this request belong in `plan`."""
        return request in self._prompts

    # Decode.

    def tokens_from_source(self, request: str, computed_tokens: int) -> int | None:
        """Return how many tokens beyond `computed_tokens` will be pulled. Asked any number of times.

        None: ask again, it waits for slots. The last token of the prompt is always computed here: its forward pass
        samples the first token.
        """
        sink = self._sinks.get(request)
        if sink is None or sink.consumed:
            return 0
        tokens = max(sink.tokens - 1 - computed_tokens, 0)
        if tokens == 0 or self._has_slots(-(-tokens // self._block_tokens)):
            return tokens
        now_s = self._now_s()
        if sink.compute_at_s is None:
            sink.compute_at_s = now_s + STAGING_WAIT_S
        if now_s < sink.compute_at_s:
            return None
        # Its source may wait for slots as well, which others of its leases hold until they are pulled here.
        sink.consumed = True
        self._orders.release.append((sink.handoff.key, sink.handoff.endpoints))
        return 0

    def _has_slots(self, blocks: int) -> bool:
        used = sum(sink.pulled_blocks for sink in self._sinks.values())
        return not self._staging_slots or used + blocks <= self._staging_slots

    def allocated(self, request: str, blocks: Sequence[int], external_tokens: int, promoted_tokens: int = 0) -> bool:
        """Note that the engine allocated `blocks`, the request's whole table, whose last tokens are to be pulled.

        The first `promoted_tokens` of them come from this engine's KV pool. Returns whether a pull begins.
        """
        sink = self._sinks.get(request)
        if sink is None or sink.consumed:
            return False
        sink.consumed = True
        external_tokens -= promoted_tokens
        if external_tokens == 0:
            self._orders.release.append((sink.handoff.key, sink.handoff.endpoints))
            return False
        tokens = sink.tokens - 1
        first_token = tokens - external_tokens
        first_block, end_block = first_token // self._block_tokens, -(-tokens // self._block_tokens)
        sink.pulled_blocks = end_block - first_block
        self._orders.pulls.append(
            PullStep(
                request=request,
                key=sink.handoff.key,
                endpoints=sink.handoff.endpoints,
                first_token=first_token,
                tokens=tokens,
                blocks=tuple(blocks[first_block:end_block]),
                deadline_s=sink.handoff.deadline_s,
            )
        )
        return True

    def pulled(self, request: str) -> None:
        """Note that all ranks have ended their pull, successful or not."""
        if sink := self._sinks.get(request):
            sink.pulled_blocks = 0

    # Prefill.

    def preempted(self, request: str) -> None:
        """Note that the engine took the request's blocks away and will overwrite them in this step."""
        prompt = self._prompts.get(request)
        if prompt is None or not prompt.open:
            return
        prompt.open = False
        prompt.blocks_sent = 0
        self._orders.revoke.append(prompt.handoff.key)

    def computes(self, request: str, blocks: Sequence[int], tokens_before: int, tokens_after: int) -> LeaseStep:
        """Return the lease's part in a step that computes tokens [before, after); `blocks` is the whole table."""
        prompt = self._prompts[request]
        opens = not prompt.open
        new_blocks = tuple(blocks[prompt.blocks_sent : -(-prompt.tokens // self._block_tokens)])
        prompt.leased = prompt.open = True
        prompt.blocks_sent += len(new_blocks)
        return LeaseStep(
            request=request,
            key=prompt.handoff.key,
            opens=opens,
            blocks=new_blocks,
            ready_before=tokens_before,
            ready_after=min(tokens_after, prompt.tokens),
            tokens=prompt.tokens,
            sink_ranks=prompt.handoff.sink_ranks,
        )

    # Both.

    def finished(self, request: str, *, computed: bool, loads: bool = False) -> bool:
        """Note that the engine is done with a request; return whether its blocks must stay until the lease ends.

        `computed`: the prompt was computed in full, as opposed to aborted or failed. `loads`: its blocks stay in any
        case, until what the KV pool promotes for it is there. A request with a lease is promoted for only once it was
        preempted, so no peer reads these blocks, and the end of its lease is not reported.
        """
        if sink := self._sinks.pop(request, None):
            if sink.pulled_blocks:
                self._orders.cancel.append(sink.handoff.key)
            elif not sink.consumed:
                self._orders.release.append((sink.handoff.key, sink.handoff.endpoints))
            return False
        prompt = self._prompts.get(request)
        if prompt is None:
            return False
        if not prompt.leased:
            del self._prompts[request]
            return False
        if not computed or not prompt.open:
            self._orders.end.append(prompt.handoff.key)
        if loads:
            assert not prompt.open, "blocks that peers read are written"
            del self._prompts[request]
            return False
        self._orders.held.append(prompt.handoff.key)
        return True

    def freed(self, request: str) -> None:
        """Note that the lease has ended on all ranks, or was staged, and that the engine frees the blocks."""
        self._prompts.pop(request, None)

    def plan(self, leases: Sequence[LeaseStep], *, computes: bool = True) -> StepPlan:
        """Return this step's orders and forget them. `leases` comes from `computes`, the method."""
        orders, self._orders = self._orders, _Orders()
        return StepPlan(
            computes=computes,
            revoke=tuple(orders.revoke),
            end=tuple(orders.end),
            held=tuple(orders.held),
            leases=tuple(leases),
            cancel=tuple(orders.cancel),
            release=tuple(orders.release),
            pulls=tuple(orders.pulls),
        )
