"""Leases and pulls under way in a `StagedAgent`, with their slots, and copies in steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.errors import TransferFailed
from baton.pool.block_copies import BlockCopies
from baton.pool.slot_queue import SlotQueue
from baton.transfer import Pool, TransferEvent
from baton.transfer.device import Copy, CopyEnded

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Step:
    """What is done once these copies have ended, and all steps before this one are done."""

    then: Callable[[], None]
    tickets: set[int] = field(default_factory=set[int])


@dataclass(slots=True, eq=False)
class Flow:
    """One generation of a lease, or one pull; with all ranks of the peer."""

    key: bytes
    blocks: list[int]
    """The cache's blocks; block i is staged in slot i."""
    granted: Callable[[], None]
    """Called when the slots asked for are in `slots`."""
    failed: Callable[[], None]
    """Called when a copy has failed, with the reason in `failure`."""
    slots: list[int] = field(default_factory=list[int])
    """Cells of host memory."""
    after: int | None = None
    """Stream that last wrote or used the blocks."""
    steps: deque[Step] = field(default_factory=deque[Step])
    tickets: set[int] = field(default_factory=set[int])
    """Batches of copies under way."""
    over: bool = False
    last: Sequence[TransferEvent] = ()
    """Events of the end, told once no batch is under way."""
    held: bool = False
    """Whether its slots stay after its end, until `let_go`."""
    closed: bool = False
    """Whether that is done, and the slots are free, unless they are held."""
    failure: str = ""


class Staging:
    """Slots and copies of one agent's flows. Not thread-safe: the agent's lock is held in every call."""

    def __init__(
        self,
        cache: Pool,
        layers: int,
        queue: SlotQueue[Flow],
        copies: BlockCopies,
        tell: Callable[[TransferEvent], None],
    ) -> None:
        self.layers = layers
        self.block_tokens = cache.block_tokens
        self.tell = tell
        self._blocks = cache.blocks
        self._tensors_per_layer = len(cache.layer_addresses) // layers
        self._queue = queue
        self._copies = copies

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def check_blocks(self, blocks: Sequence[int]) -> None:
        if any(not 0 <= block < self._blocks for block in blocks):
            raise ValueError(f"a block lies outside the pool of {self._blocks} blocks")

    def ask(self, flow: Flow, slots: int) -> None:
        """Let a flow wait for more slots. Raises ValueError if there are not as many at all."""
        self._queue.ask(flow, slots)
        self._grant()

    def _grant(self) -> None:
        while granted := self._queue.grant():
            flow, slots = granted
            flow.slots += slots
            flow.granted()

    def copies(self, flow: Flow, blocks: slice, first_layer: int, end_layer: int, *, to_device: bool) -> list[Copy]:
        """Return the copies of some layers of a flow's blocks, to or from its slots."""
        tensors = range(first_layer * self._tensors_per_layer, end_layer * self._tensors_per_layer)
        return list(self._copies.between(flow.blocks[blocks], flow.slots[blocks], tensors, to_device=to_device))

    def submit(self, flow: Flow, copies: Sequence[Copy], then: Callable[[], None]) -> None:
        """Start copies; call `then` once they and all before them have ended, unless the flow fails or is over."""
        step = Step(then)
        flow.steps.append(step)
        try:
            for ticket in self._copies.submit(copies, after=flow.after, ended=partial(self._copied, flow, step)):
                step.tickets.add(ticket)
                flow.tickets.add(ticket)
        except (TransferFailed, ValueError) as error:
            self._fail(flow, str(error))
        self._advance(flow)

    def end(self, flow: Flow, *last: TransferEvent) -> None:
        """Let nothing new begin; tell `last` and free the slots once no copy is under way."""
        flow.over, flow.last = True, last
        flow.steps.clear()
        if self._queue.leave(flow):
            self._grant()
        self._advance(flow)

    def let_go(self, flow: Flow) -> None:
        """Free the slots of a flow that was held, once it is closed."""
        flow.held = False
        if flow.closed:
            self._give_back(flow)

    def _advance(self, flow: Flow) -> None:
        while flow.steps and not flow.steps[0].tickets:
            flow.steps.popleft().then()
        if flow.over and not flow.tickets and not flow.closed:
            flow.closed = True
            for event in flow.last:
                self.tell(event)
            if not flow.held:
                self._give_back(flow)

    def _give_back(self, flow: Flow) -> None:
        self._queue.give_back(flow.slots)
        self._grant()

    def _copied(self, flow: Flow, step: Step, ended: CopyEnded) -> None:
        flow.tickets.discard(ended.ticket)
        step.tickets.discard(ended.ticket)
        if ended.failure:
            self._fail(flow, ended.failure)
        self._advance(flow)

    def _fail(self, flow: Flow, reason: str) -> None:
        if flow.failure:
            return
        _log.error("a hand-off's copy failed: %s", reason)
        flow.failure = reason
        if not flow.over:
            flow.steps.clear()
            flow.failed()
