"""Gathers the transfer reports of an engine's ranks in the streaming process."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Final

from baton.connectors.handoff import PullOutcome, TransferReport
from baton.connectors.pool_report import Promotion
from baton.engines.engine import EngineLoad, TransferFigures
from baton.transfer import AgentStats, PullTally

OUTCOMES_MAX: Final = 10_000
"""Bound of the ended pulls remembered for their requests; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class _RankOutcomes:
    """Joined outcome of one pull, from `ranks` tensor-parallel ranks. The first failure stands for all."""

    ranks: int
    outcome: PullOutcome


class LoadRecorder:
    """Keeps the latest load and the outcomes of pulls."""

    def __init__(self, ranks: int) -> None:
        self.load = EngineLoad()
        self.on_lease_ended: Callable[[bytes], None] = lambda _key: None
        self._ranks = ranks
        self._leased_blocks: dict[int, int] = {}
        self._agents: dict[int, AgentStats] = {}
        self._leases_ended = Counter[bytes]()
        """Number of ranks on which a lease has ended, for leases that other ranks still hold."""
        self._tally = PullTally()
        self._outcomes: OrderedDict[bytes, _RankOutcomes] = OrderedDict()
        self._promotions: OrderedDict[str, Promotion] = OrderedDict()
        self._changed = asyncio.Event()

    def take_outcome(self, key: bytes) -> PullOutcome | None:
        """Return a pull's outcome over all ranks, once; None while it runs."""
        known = self._outcomes.get(key)
        if known is None or known.ranks < self._ranks:
            return None
        del self._outcomes[key]
        return known.outcome

    def take_promotion(self, request: str) -> Promotion | None:
        """Return what was promoted for a request, once."""
        return self._promotions.pop(request, None)

    async def wait_outcome(self, key: bytes, timeout_s: float) -> PullOutcome | None:
        """Return a pull's outcome, or None when it is still unknown after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while (outcome := self.take_outcome(key)) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return outcome
        except TimeoutError:
            return None

    def transfers(self) -> TransferFigures:
        ranks = self._agents.values()
        sums = {figure.name: sum(getattr(rank, figure.name) for rank in ranks) for figure in fields(AgentStats)}
        return TransferFigures(pulls=self._tally, agents=AgentStats(**sums) if ranks else None)

    def record_transfers(self, report: TransferReport) -> None:
        self._leased_blocks.update(report.leased_blocks)
        self._agents.update(report.agents)
        for outcome in report.pulls:
            self._record_outcome(outcome)
            self._tally.add(
                outcome.groups[-1].backend if outcome.groups else "",
                outcome.cause,
                moved_bytes=outcome.moved_bytes,
                waiting_s=sum(group.waiting_s for group in outcome.groups),
                moving_s=outcome.moving_s,
            )
        for key in report.leases_ended:
            self._leases_ended[key] += 1
            if self._leases_ended[key] == self._ranks:
                del self._leases_ended[key]
                self.on_lease_ended(key)
        pool = report.pool or self.load.pool
        for promotion in report.pool.ended if report.pool else ():
            self._promotions[promotion.request] = promotion
            while len(self._promotions) > OUTCOMES_MAX:
                self._promotions.popitem(last=False)
        self.load = replace(
            self.load,
            # All ranks lease the same blocks of their parts of the model.
            leased_blocks=max(self._leased_blocks.values(), default=0),
            bytes_pulled=self.load.bytes_pulled + sum(outcome.moved_bytes for outcome in report.pulls),
            pulls_failed=self.load.pulls_failed + sum(outcome.failed for outcome in report.pulls),
            pool=pool,
            prompt_tokens_promoted=pool.promoted_tokens,
        )

    def _record_outcome(self, outcome: PullOutcome) -> None:
        known = self._outcomes.pop(outcome.key, None)
        if known is None:
            merged = _RankOutcomes(1, outcome)
        else:
            merged = _RankOutcomes(known.ranks + 1, known.outcome.joined(outcome))
        self._outcomes[outcome.key] = merged
        while len(self._outcomes) > OUTCOMES_MAX:
            self._outcomes.popitem(last=False)
        self._changed.set()
