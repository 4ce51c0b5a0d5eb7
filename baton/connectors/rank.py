"""The rank's side of the hand-off: carries out a step's plan on this process's transfer agent.

One `HandoffRank` lives in each of an engine's worker processes, beside its part of the KV memory. Each
request is reported exactly once: as sent when its lease has ended *and* the engine has said that it is
done with it, whichever comes first; as received when its pull has ended, with its failure if it failed.

An error in here must not end the engine: it ends the one request that it belongs to.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from baton.connectors.handoff import LeaseStep, PullOutcome, PullStep, StepPlan, TransferReport
from baton.transfer import AgentStats, Cause, EventKind, PullWatch, TransferAgent, TransferEvent

_log = logging.getLogger(__name__)

ALL_LAYERS: Final = -1

IDLE_WAIT_S: Final = 0.004
"""While a pull runs or a lease is held, an engine with nothing to compute steps in a loop, at up to 1 kHz and the
cost of a processor core. Such steps wait this long for news: none of a transfer comes later, a new request may."""


@dataclass(slots=True)
class _Lease:
    request: str
    generation: int = 0
    blocks: int = 0
    ended: bool = False
    """No peer reads the blocks any more, for good."""
    held: bool = False
    """The engine is done with the request and waits."""


@dataclass(slots=True)
class RankResults:
    """What happened since the last step, by the engine's request ids."""

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])


class HandoffRank:
    def __init__(self, agent: TransferAgent, rank: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.agent = agent
        self.layers_arrived: dict[bytes, int] = {}
        """Of the pulls that run now: how many leading layers are here, whole and verified."""
        self._rank = rank
        self._news = select.poll()
        self._news.register(agent.fileno(), select.POLLIN)
        self._now_s = now_s
        self._leases: dict[bytes, _Lease] = {}
        self._pulls: dict[bytes, PullStep] = {}
        self._watches: dict[bytes, PullWatch] = {}
        self._computing: list[tuple[_Lease, LeaseStep]] = []
        self._idle = False
        self._results = RankResults()
        self._outcomes: list[PullOutcome] = []
        self._leases_ended: list[bytes] = []
        self._leased_blocks_told = 0

    # The step, in the order in which an engine calls.

    def revoke(self, plan: StepPlan) -> None:
        """Before anything of this step is computed: take back what it overwrites."""
        for key in plan.revoke:
            if (lease := self._leases.get(key)) and not lease.ended:
                lease.blocks = 0
                with self._ending_lease_on_error(key):
                    self.agent.revoke_lease(key, final=False)
        for key in plan.end:
            self.end_lease(key)

    def begin(self, plan: StepPlan) -> None:
        """Start everything that runs beside this step. Pulls write only blocks that the step does not touch."""
        for key in plan.held:
            if lease := self._leases.get(key):
                lease.held = True
                self._settle(key, lease)
        self._idle = not plan.computes
        self._computing = [(lease, step) for step in plan.leases if (lease := self._lease_step(step)) is not None]
        for key in plan.cancel:
            with self._failing_pull_on_error(key):
                self.agent.cancel_pull(key)
        for key, endpoints in plan.release:
            # A source that is not told frees by its time limit.
            with self._logged("release"):
                self.agent.release(key, self._endpoint(endpoints))
        for step in plan.pulls:
            self._pulls[step.key] = step
            with self._failing_pull_on_error(step.key):
                self._pull(step)

    def layer_saved(self, layer: int) -> None:
        """The step has written its tokens' KV of this layer; `ALL_LAYERS` at the end of the step."""
        for lease, step in self._computing:
            if not lease.ended:
                with self._ending_lease_on_error(step.key):
                    self.agent.post_ready(step.key, lease.generation, layer, step.ready_after)

    def end(self) -> RankResults:
        """Close the step and return what has been finished since the last one."""
        self._computing = []
        if self._idle and (self._pulls or self._leases) and not self._results.sent and not self._results.received:
            self._news.poll(IDLE_WAIT_S * 1000)
        for event in self.agent.poll():
            self._take(event)
        results, self._results = self._results, RankResults()
        return results

    def report(self) -> TransferReport | None:
        """Return what the streaming process has not heard yet, or None."""
        leased_blocks = sum(lease.blocks for lease in self._leases.values() if not lease.ended)
        if not self._outcomes and not self._leases_ended and leased_blocks == self._leased_blocks_told:
            return None
        agents: dict[int, AgentStats] = {}
        with self._logged("stats"):
            agents = {self._rank: self.agent.stats()}
        report = TransferReport(
            pulls=tuple(self._outcomes),
            leases_ended=tuple(self._leases_ended),
            leased_blocks={self._rank: leased_blocks},
            agents=agents,
        )
        self._outcomes, self._leases_ended, self._leased_blocks_told = [], [], leased_blocks
        return report

    # Outside of steps.

    def end_lease(self, key: bytes) -> None:
        """Revoke a lease for good, wherever it stands. Unknown keys are ignored."""
        lease = self._leases.get(key)
        if lease is None or lease.ended:
            return
        with self._logged("revoke"):
            self.agent.revoke_lease(key, final=True)
        self._lease_ended(key, lease)

    # Inside.

    def _lease_step(self, step: LeaseStep) -> _Lease | None:
        lease = self._leases.setdefault(step.key, _Lease(step.request))
        if lease.ended:
            return None
        with self._ending_lease_on_error(step.key):
            if step.opens:
                lease.generation = self.agent.open_lease(step.key)
            if step.blocks:
                self.agent.extend_lease(step.key, lease.generation, step.blocks)
                lease.blocks += len(step.blocks)
            if step.ready_after == step.tokens:
                self.agent.complete_lease(step.key, lease.generation, step.tokens)
            if step.opens and step.ready_before:
                self.agent.post_ready(step.key, lease.generation, ALL_LAYERS, step.ready_before)
        return None if lease.ended else lease

    def _pull(self, step: PullStep) -> None:
        self.layers_arrived[step.key] = 0
        endpoint = self._endpoint(step.endpoints)
        self._watches[step.key] = PullWatch(self._now_s(), endpoint)
        self.agent.pull(
            step.key,
            endpoint,
            first_token=step.first_token,
            tokens=step.tokens,
            blocks=step.blocks,
            budget_s=max(step.deadline_s - self._now_s(), 0.0),
        )

    def _endpoint(self, endpoints: tuple[str, ...]) -> str:
        if self._rank >= len(endpoints):
            raise ValueError(
                f"the source has {len(endpoints)} tensor-parallel ranks, this engine has rank {self._rank}"
            )
        return endpoints[self._rank]

    def _take(self, event: TransferEvent) -> None:
        match event.kind:
            case EventKind.PULL_PROGRESS:
                if event.key in self.layers_arrived:
                    self.layers_arrived[event.key] = event.layers
                    self._watches[event.key].note(event)
            case EventKind.PULL_DONE | EventKind.PULL_FAILED:
                failed = event.kind is EventKind.PULL_FAILED
                self._pull_ended(event.key, event.cause, event.detail, event.bytes, event.moving_s, failed=failed)
            case EventKind.LEASE_RELEASED | EventKind.LEASE_ENDED:
                lease = self._leases.get(event.key)
                # A revocation that we asked for ends nothing: the prompt may be computed again, and an end
                # for good was noted when we asked.
                if lease is not None and not lease.ended and event.cause is not Cause.REVOKED:
                    self._lease_ended(event.key, lease)

    def _pull_ended(
        self, key: bytes, cause: Cause, detail: str, moved_bytes: int = 0, moving_s: float = 0.0, *, failed: bool
    ) -> None:
        step = self._pulls.pop(key, None)
        if step is None:
            return
        self.layers_arrived.pop(key, None)
        watch = self._watches.pop(key, None)
        self._results.received.add(step.request)
        if failed:
            self._results.failed.add(step.request)
        outcome = PullOutcome(
            key=key,
            cause=cause,
            detail=detail,
            tokens=0 if failed else step.tokens - step.first_token,
            moved_bytes=moved_bytes,
            moving_s=moving_s,
            failed=failed,
            groups=watch.groups() if watch is not None else (),
        )
        self._outcomes.append(outcome)

    def _lease_ended(self, key: bytes, lease: _Lease) -> None:
        lease.ended = True
        lease.blocks = 0
        self._leases_ended.append(key)
        self._settle(key, lease)

    def _settle(self, key: bytes, lease: _Lease) -> None:
        if lease.ended and lease.held:
            del self._leases[key]
            self._results.sent.add(lease.request)

    # The boundary: whatever an agent raises ends one request, never the engine.

    @contextmanager
    def _ending_lease_on_error(self, key: bytes) -> Generator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001
            _log.exception("the lease of one request failed")
            self.end_lease(key)

    @contextmanager
    def _failing_pull_on_error(self, key: bytes) -> Generator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001
            _log.exception("the pull of one request failed")
            # Nothing was started, so nothing writes the blocks.
            self._pull_ended(key, Cause.REFUSED, str(error), failed=True)

    @contextmanager
    def _logged(self, what: str) -> Generator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001
            _log.exception("%s failed at the transfer agent", what)
