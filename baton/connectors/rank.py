"""The rank's side of the hand-off: carries out a step's plan on this process's transfer agent.

One `HandoffRank` runs in each of an engine's worker processes, beside its part of the KV memory. Each
request is reported exactly once: as sent when no peer reads its blocks any more, since its lease has ended
or was staged, *and* the engine has said that it is done with it, whichever comes first; as received when its
pull has ended, with its failure if it failed.

An error in here must not end the engine: it ends the one request that it belongs to.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from baton.connectors.handoff import LeaseStep, PullOutcome, PullStep, StepPlan, TransferReport
from baton.connectors.place import RankPlace
from baton.transfer import AgentStats, Cause, EventKind, PullWatch, TransferAgent, TransferEvent, Whole

_log = logging.getLogger(__name__)

ALL_LAYERS: Final = -1

IDLE_WAIT_S: Final = 0.004
"""Longest wait of an idle step, in seconds. While a pull runs or a lease is held, an engine with nothing to compute
steps in a loop, at up to 1 kHz and the cost of a processor core. What the engine acts on ends the wait: the end of a
pull, or of a lease that it is done with. Layers that arrive do not, nor does a new request."""


@dataclass(slots=True)
class _Lease:
    request: str
    generations: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Generation by key of the agent's open leases on the same blocks: one for each rank that reads them."""
    blocks: int = 0
    ended: bool = False
    """True once no peer reads the blocks any more, for good."""
    staged: bool = False
    """True once all of it was copied to memory of the agent, where peers read it."""
    held: bool = False
    """True once the engine is done with the request and waits to free its blocks."""
    sent: bool = False
    """True once the engine was told that it may."""


@dataclass(slots=True)
class _Pull:
    step: PullStep
    watches: dict[bytes, PullWatch] = field(default_factory=dict[bytes, PullWatch])
    """Watch by key of the agent's running pulls into the same blocks: one for each rank that has some of the heads."""
    layers: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Layers that have arrived by key of a pull, ended pulls included."""
    outcome: PullOutcome | None = None
    """Outcome of the request's pulls once they have ended."""


@dataclass(slots=True)
class RankResults:
    """Events since the last step, by the engine's request ids."""

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    leases_open: int = 0
    """Change in the number of leases that peers read although their requests are `sent`: the staged ones."""


class HandoffRank:
    def __init__(self, agent: TransferAgent, place: RankPlace, now_s: Callable[[], float] = time.monotonic) -> None:
        self.agent = agent
        self.layers_arrived: dict[bytes, int] = {}
        """Leading layers that are here, whole and verified, by running pull."""
        self._place = place
        self._news = select.poll()
        self._news.register(agent.fileno(), select.POLLIN)
        self._now_s = now_s
        self._leases: dict[bytes, _Lease] = {}
        self._pulls: dict[bytes, _Pull] = {}
        self._whole: dict[bytes, bytes] = {}
        """Key of the whole lease or pull, by the key of the agent's part of it."""
        self._computing: list[tuple[_Lease, LeaseStep]] = []
        self._idle = False
        self._told = False
        """Whether the last step had results. An engine that schedules ahead takes them up after the next one."""
        self._results = RankResults()
        self._outcomes: list[PullOutcome] = []
        self._leases_ended: list[bytes] = []
        self._leased_blocks_told = 0

    # One step, in the order in which an engine calls.

    def revoke(self, plan: StepPlan) -> None:
        """Revoke the leases of blocks that this step overwrites, before it computes anything."""
        for key in plan.revoke:
            if (lease := self._leases.get(key)) and not lease.ended:
                lease.blocks = 0
                lease.staged = False
                with self._ending_lease_on_error(key):
                    for reader in lease.generations:
                        self.agent.revoke_lease(reader, final=False)
        for key in plan.end:
            self.end_lease(key)

    def begin(self, plan: StepPlan) -> None:
        """Start everything that runs beside this step. Pulls write only blocks that the step does not touch."""
        self._idle = not plan.computes
        self._computing = [(lease, step) for step in plan.leases if (lease := self._lease_step(step)) is not None]
        # After the leases: one that has ended and is to be opened again on other blocks stays ended.
        for key in plan.held:
            if lease := self._leases.get(key):
                lease.held = True
                self._settle(key, lease)
        for key in plan.end:
            if (lease := self._leases.get(key)) and not lease.held:
                del self._leases[key]
        for key, endpoints in plan.release:
            # A source that is not told frees by its time limit.
            with self._logged("release"):
                for part, endpoint in self._place.parts(key, endpoints).items():
                    self.agent.release(part, endpoint)
        for step in plan.pulls:
            self._begin_pull(step)
        # A request that was aborted at once is in both lists.
        for key in plan.cancel:
            if pull := self._pulls.get(key):
                self._cancel(pull)

    def layer_saved(self, layer: int) -> None:
        """Note that the step has written its tokens' KV of this layer; `ALL_LAYERS` at the end of the step."""
        for lease, step in self._computing:
            if not lease.ended:
                with self._ending_lease_on_error(step.key):
                    for reader, generation in lease.generations.items():
                        self.agent.post_ready(reader, generation, layer, step.ready_after)

    @property
    def is_active(self) -> bool:
        """Whether a pull runs or a lease is held."""
        return bool(self._pulls or self._leases)

    def watch(self, fileno: int) -> None:
        """Let another source of news end the wait of an idle step."""
        self._news.register(fileno, select.POLLIN)

    def end(self, *, expecting: bool = False) -> RankResults:
        """Close the step and return what has finished since the last one.

        `expecting`: a source that is watched has news to come.
        """
        self._computing = []
        if self._idle and not self._told:
            self._wait(expecting=expecting)
        self._take_events()
        results, self._results = self._results, RankResults()
        self._told = bool(results.sent or results.received)
        return results

    def report(self) -> TransferReport | None:
        """Return the changes not reported to the streaming process yet, or None."""
        leased_blocks = sum(lease.blocks for lease in self._leases.values() if not lease.ended)
        if not self._outcomes and not self._leases_ended and leased_blocks == self._leased_blocks_told:
            return None
        agents: dict[int, AgentStats] = {}
        with self._logged("stats"):
            agents = {self._place.rank: self.agent.stats()}
        report = TransferReport(
            pulls=tuple(self._outcomes),
            leases_ended=tuple(self._leases_ended),
            leased_blocks={self._place.rank: leased_blocks},
            agents=agents,
        )
        self._outcomes, self._leases_ended, self._leased_blocks_told = [], [], leased_blocks
        return report

    # Outside of steps.

    def end_lease(self, key: bytes) -> None:
        """Revoke a lease for good, in any state. Unknown keys are ignored."""
        lease = self._leases.get(key)
        if lease is None or lease.ended:
            return
        for reader in lease.generations:
            with self._logged("revoke"):
                self.agent.revoke_lease(reader, final=True)
        self._lease_ended(key, lease)

    # Inside.

    def _wait(self, *, expecting: bool) -> None:
        """Wait for something that the engine acts on: results of ours, or another source's news."""
        ends_s = self._now_s() + IDLE_WAIT_S
        while (self.is_active or expecting) and not (self._results.sent or self._results.received):
            news = self._news.poll(max(ends_s - self._now_s(), 0.0) * 1000)
            self._take_events()
            if [source for source, _ in news] != [self.agent.fileno()]:
                return

    def _take_events(self) -> None:
        for event in self.agent.poll():
            self._take(event)

    def _lease_step(self, step: LeaseStep) -> _Lease | None:
        if step.key not in self._leases:
            self._new_lease(step)
        lease = self._leases[step.key]
        whole = _whole(step.key, lease.generations)
        with self._ending_lease_on_error(step.key):
            for reader, generation in lease.generations.items():
                if step.opens:
                    opened = self.agent.open_lease(reader, tokens=step.tokens, whole=whole)
                    generation = lease.generations[reader] = opened  # noqa: PLW2901
                if step.blocks:
                    self.agent.extend_lease(reader, generation, step.blocks)
                if step.ready_after == step.tokens:
                    self.agent.complete_lease(reader, generation, step.tokens)
                if step.opens and step.ready_before:
                    self.agent.post_ready(reader, generation, ALL_LAYERS, step.ready_before)
        if lease.ended:
            return None
        lease.blocks += len(step.blocks)
        return lease

    def _new_lease(self, step: LeaseStep) -> None:
        lease = self._leases[step.key] = _Lease(step.request)
        with self._ending_lease_on_error(step.key):
            lease.generations = dict.fromkeys(self._place.readers(step.key, step.sink_ranks), 0)
        self._whole |= dict.fromkeys(lease.generations, step.key)
        if not lease.generations and not lease.ended:
            # All that reads this rank's heads reads them elsewhere.
            self._lease_ended(step.key, lease)

    def _begin_pull(self, step: PullStep) -> None:
        pull = self._pulls[step.key] = _Pull(step)
        now_s = self._now_s()
        try:
            parts = self._place.parts(step.key, step.endpoints)
            pull.layers = dict.fromkeys(parts, 0)
            self.layers_arrived[step.key] = 0
            for part, endpoint in parts.items():
                self.agent.pull(
                    part,
                    endpoint,
                    first_token=step.first_token,
                    tokens=step.tokens,
                    blocks=step.blocks,
                    budget_s=max(step.deadline_s - now_s, 0.0),
                    whole=_whole(step.key, parts),
                )
                self._whole[part] = step.key
                pull.watches[part] = PullWatch(now_s, endpoint)
        except Exception as error:  # noqa: BLE001
            _log.exception("the pull of one request failed")
            # What was not started writes no blocks.
            self._note_end(pull, PullOutcome(key=step.key, cause=Cause.REFUSED, detail=str(error), failed=True))

    def _cancel(self, pull: _Pull) -> None:
        """Cancel the running parts of a pull; each part's end follows."""
        for part in pull.watches:
            # An agent that does not take the order ends the pull at its deadline.
            with self._logged("cancel"):
                self.agent.cancel_pull(part)

    def _take(self, event: TransferEvent) -> None:
        if (key := self._whole.get(event.key)) is None:
            return
        match event.kind:
            case EventKind.PULL_PROGRESS:
                pull = self._pulls[key]
                pull.watches[event.key].note(event)
                pull.layers[event.key] = event.layers
                self.layers_arrived[key] = min(pull.layers.values())
            case EventKind.PULL_DONE | EventKind.PULL_FAILED:
                self._part_ended(self._pulls[key], event)
            case EventKind.LEASE_ASKED:
                pass  # For agents around this one.
            case EventKind.LEASE_STAGED:
                lease = self._leases[key]
                lease.staged, lease.blocks = True, 0
                self._settle(key, lease)
            case EventKind.LEASE_RELEASED | EventKind.LEASE_ENDED:
                # A revocation that we asked for ends nothing: the prompt may be computed again, and an end
                # for good was noted when we asked.
                if event.cause is not Cause.REVOKED:
                    self._reader_ended(key, event.key)

    def _part_ended(self, pull: _Pull, event: TransferEvent) -> None:
        del self._whole[event.key]
        watch, failed = pull.watches.pop(event.key), event.kind is EventKind.PULL_FAILED
        outcome = PullOutcome(
            key=pull.step.key,
            cause=event.cause,
            detail=event.detail,
            tokens=0 if failed else pull.step.tokens - pull.step.first_token,
            moved_bytes=event.bytes,
            moving_s=event.moving_s,
            failed=failed,
            groups=watch.groups(),
        )
        self._note_end(pull, outcome)

    def _note_end(self, pull: _Pull, outcome: PullOutcome) -> None:
        """Note the end of one part of a pull. If it failed, the others are cancelled."""
        pull.outcome = pull.outcome.joined(outcome) if pull.outcome else outcome
        if pull.watches:
            if outcome.failed:
                self._cancel(pull)
            return
        del self._pulls[pull.step.key]
        self.layers_arrived.pop(pull.step.key, None)
        self._results.received.add(pull.step.request)
        if pull.outcome.failed:
            self._results.failed.add(pull.step.request)
        self._outcomes.append(pull.outcome)

    def _reader_ended(self, key: bytes, reader: bytes) -> None:
        lease = self._leases[key]
        del self._whole[reader]
        if lease.generations.pop(reader) > 1:
            # It may have been opened again before its end was known here, and its blocks are about to be freed.
            with self._logged("revoke"):
                self.agent.revoke_lease(reader, final=True)
        if not lease.generations:
            self._lease_ended(key, lease)

    def _lease_ended(self, key: bytes, lease: _Lease) -> None:
        for reader in lease.generations:
            del self._whole[reader]
        lease.generations = {}
        lease.ended = True
        lease.blocks = 0
        self._leases_ended.append(key)
        self._settle(key, lease)

    def _settle(self, key: bytes, lease: _Lease) -> None:
        was_sent = lease.sent
        if lease.held and not was_sent and (lease.ended or lease.staged):
            lease.sent = True
            self._results.sent.add(lease.request)
        if lease.sent:
            self._results.leases_open += (not lease.ended) - was_sent
            if lease.ended:
                del self._leases[key]

    # The boundary: whatever an agent raises ends one request, never the engine.

    @contextmanager
    def _ending_lease_on_error(self, key: bytes) -> Generator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001
            _log.exception("the lease of one request failed")
            self.end_lease(key)

    @contextmanager
    def _logged(self, what: str) -> Generator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001
            _log.exception("%s failed at the transfer agent", what)


def _whole(key: bytes, parts: Collection[bytes]) -> Whole | None:
    """Return what several keys of an agent are parts of; None for one, which is the whole."""
    return Whole(key=key, parts=len(parts)) if len(parts) > 1 else None
