"""The simulated engine's side of a hand-off: leases for prefill, pulls for decode, over one transfer agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.engines.engine import TransferFigures
from baton.engines.simulated.scheduler import Pull
from baton.errors import BatonError, DeadlineExceeded, PeerUnreachable, TransferFailed
from baton.transfer import Cause, EventKind, PullTally, PullWatch, TransferAgent, TransferEvent, pull_failure


@dataclass(slots=True, eq=False)
class SimulatedLease:
    """One attempt's lease or pull at the agent."""

    key: bytes
    generation: int = 0
    """Generation of the lease while it is open, else 0."""
    leased_blocks: int = 0
    is_over: bool = False
    """True once the sink has released the lease or it has expired: it is not opened again."""
    pulled_bytes: int = 0
    moving_s: float = 0.0
    watch: PullWatch | None = None
    """Watch of the pull, from its start."""


class SimulatedHandoff:
    """Tells the agent what the scheduler decided, and the engine what the agent reports.

    `pull_over(key, error)` is called once per pull, when nothing writes its blocks any more; `lease_over(key)`
    when a lease was released or expired; `broke(error)` when the agent itself failed.
    """

    def __init__(
        self,
        agent: TransferAgent,
        pull_over: Callable[[bytes, BatonError | None], None],
        lease_over: Callable[[bytes], None],
        broke: Callable[[TransferFailed], None],
    ) -> None:
        self._agent = agent
        self._pull_over = pull_over
        self._lease_over = lease_over
        self._broke = broke
        self._pulls: dict[bytes, SimulatedLease] = {}
        self.bytes_pulled = 0
        self.pulls_failed = 0
        self.tally = PullTally()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self._agent.fileno(), self._take_events)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._agent.fileno())

    def figures(self) -> TransferFigures:
        return TransferFigures(pulls=self.tally, agents=self._agent.stats())

    def close(self) -> None:
        self._agent.close()

    # Source.

    def lease_blocks(self, lease: SimulatedLease, blocks: Sequence[int], *, ready: int) -> None:
        """Lease all of `blocks`. A new lease posts their first `ready` tokens, which are computed already."""
        if lease.is_over:
            return
        if not lease.generation:
            lease.generation = self._agent.open_lease(lease.key)
            lease.leased_blocks = 0
        opened = not lease.leased_blocks
        if len(blocks) > lease.leased_blocks:
            self._agent.extend_lease(lease.key, lease.generation, list(blocks[lease.leased_blocks :]))
            lease.leased_blocks = len(blocks)
        if opened and ready:
            self._agent.post_ready(lease.key, lease.generation, -1, ready)

    def post(self, lease: SimulatedLease, layer: int, tokens: int) -> None:
        if lease.generation and not lease.is_over:
            self._agent.post_ready(lease.key, lease.generation, layer, tokens)

    def give_up(self, lease: SimulatedLease) -> None:
        """Note that the agent has ended the lease. It may have been opened again before that was known here."""
        lease.is_over = True
        self.revoke(lease, final=True)

    def complete(self, lease: SimulatedLease, tokens: int) -> None:
        self._agent.complete_lease(lease.key, lease.generation, tokens)

    def revoke(self, lease: SimulatedLease, *, final: bool) -> None:
        """Revoke the lease: from now on no peer reads its blocks."""
        if lease.generation:
            self._agent.revoke_lease(lease.key, final=final)
            lease.generation = 0

    # Sink.

    def pull(self, lease: SimulatedLease, endpoint: str, pull: Pull, now_s: float, budget_s: float) -> None:
        """Fill the blocks of a pull, or tell the source that there are none to fill."""
        try:
            if not pull.blocks:
                self._agent.release(lease.key, endpoint)
                return
            self._agent.pull(
                lease.key,
                endpoint,
                first_token=pull.first_token,
                tokens=pull.tokens,
                blocks=pull.blocks,
                budget_s=budget_s,
            )
        except ValueError as error:
            # The endpoint came with the request. If all is cached, a wrong one only holds the lease until it expires.
            if pull.blocks:
                self.pulls_failed += 1
                self.tally.failed[Cause.UNREACHABLE] += 1
                self._pull_over(lease.key, PeerUnreachable(f"the source cannot be reached: {error}"))
        else:
            lease.watch = PullWatch(now_s, endpoint)
            self._pulls[lease.key] = lease

    def cancel_pull(self, lease: SimulatedLease) -> None:
        if lease.key in self._pulls:
            self._agent.cancel_pull(lease.key)

    # Events.

    def _take_events(self) -> None:
        try:
            events = self._agent.poll()
        except TransferFailed as error:
            self._broke(error)
            return
        for event in events:
            if event.kind in (EventKind.PULL_DONE, EventKind.PULL_FAILED):
                self.tally.add(
                    event.backend,
                    event.cause,
                    moved_bytes=event.bytes,
                    waiting_s=event.waiting_s,
                    moving_s=event.moving_s,
                )
            match event.kind:
                case EventKind.PULL_PROGRESS:
                    if (watch := self._pulls[event.key].watch) is not None:
                        watch.note(event)
                case EventKind.PULL_DONE:
                    lease = self._pulls.pop(event.key)
                    lease.pulled_bytes = event.bytes
                    lease.moving_s = event.moving_s
                    self.bytes_pulled += event.bytes
                    self._pull_over(event.key, None)
                case EventKind.PULL_FAILED:
                    del self._pulls[event.key]
                    self.pulls_failed += event.cause is not Cause.CANCELLED
                    self._pull_over(event.key, _pull_error(event))
                case EventKind.LEASE_RELEASED:
                    self._lease_over(event.key)
                case EventKind.LEASE_ENDED if event.cause is not Cause.REVOKED:
                    self._lease_over(event.key)
                case EventKind.LEASE_ENDED:
                    pass  # This engine revoked the lease itself.
                case EventKind.LEASE_ASKED | EventKind.LEASE_STAGED:
                    pass  # Its agent reads the cache; nothing is staged.


def _pull_error(event: TransferEvent) -> BatonError:
    if event.cause is Cause.DEADLINE:
        return DeadlineExceeded(f"the budget was spent before the KV cache had arrived: {event.detail}")
    return pull_failure(event.cause, f"the KV cache did not arrive ({event.cause}): {event.detail}")
