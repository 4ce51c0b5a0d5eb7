"""What vLLM's scheduler and our connector report with every step, gathered in the streaming process.

vLLM calls a stat logger's `record` on the event loop, after it has put the step's tokens into their
streams. The connector's own figures travel the same way, as `kv_connector_stats` (`TransferReport`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

import msgspec

from baton.connectors.handoff import PullOutcome, TransferReport
from baton.engines.engine import EngineLoad, TransferFigures
from baton.transfer import AgentStats, PullTally

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

OUTCOMES_MAX: Final = 10_000
"""Ended pulls remembered for their requests; the oldest go first."""


@dataclass(frozen=True, slots=True)
class _RankOutcomes:
    """What the tensor-parallel ranks said about one pull. The first failure stands for all."""

    ranks: int
    outcome: PullOutcome


class LoadRecorder:
    """A vLLM stat logger that keeps the latest load and the outcomes of pulls."""

    def __init__(self, ranks: int) -> None:
        self.load = EngineLoad()
        self.on_lease_ended: Callable[[bytes], None] = lambda _key: None
        self._ranks = ranks
        self._leased_blocks: dict[int, int] = {}
        self._agents: dict[int, AgentStats] = {}
        self._leases_ended = Counter[bytes]()
        """Of leases that some ranks still have: how many have not."""
        self._tally = PullTally()
        self._outcomes: OrderedDict[bytes, _RankOutcomes] = OrderedDict()
        self._changed = asyncio.Event()

    def take_outcome(self, key: bytes) -> PullOutcome | None:
        """Return how a pull ended on all ranks together, once, or None when it has not."""
        known = self._outcomes.get(key)
        if known is None or known.ranks < self._ranks:
            return None
        del self._outcomes[key]
        return known.outcome

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

    # vLLM's interface (`StatLoggerBase`).

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.load = replace(
                self.load,
                running=scheduler_stats.num_running_reqs,
                # Requests whose KV is on its way count as skipped in vLLM.
                waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                kv_usage=scheduler_stats.kv_cache_usage,
            )
            if scheduler_stats.kv_connector_stats:
                self._record_transfers(scheduler_stats.kv_connector_stats)
        if iteration_stats is not None:
            prompt = iteration_stats.prompt_token_stats
            load = self.load
            self.load = replace(
                load,
                prompt_tokens_computed=load.prompt_tokens_computed + prompt.computed,
                prompt_tokens_cached=load.prompt_tokens_cached + prompt.local_cache_hit,
                prompt_tokens_pulled=load.prompt_tokens_pulled + prompt.external_kv_transfer,
                preemptions=load.preemptions + iteration_stats.num_preempted_reqs,
            )

    def log_engine_initialized(self) -> None:
        """Nothing to say: the worker announces its engine."""

    def log(self) -> None:
        """Nothing to say: figures leave with heartbeats."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """Baton never puts an engine to sleep."""

    def _record_transfers(self, payload: Mapping[str, object]) -> None:
        report = msgspec.convert(payload, TransferReport)
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
        self.load = replace(
            self.load,
            # All ranks lease the same blocks of their parts of the model.
            leased_blocks=max(self._leased_blocks.values(), default=0),
            bytes_pulled=self.load.bytes_pulled + sum(outcome.moved_bytes for outcome in report.pulls),
            pulls_failed=self.load.pulls_failed + sum(outcome.failed for outcome in report.pulls),
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
