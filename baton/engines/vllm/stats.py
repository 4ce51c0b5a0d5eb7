"""Reports of vLLM's scheduler and of our connector, which come with every step.

vLLM calls a stat logger's `record` on the event loop, after it has put the step's tokens into their
streams. The connector's own figures travel the same way, as `kv_connector_stats` (`TransferReport`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from baton.connectors.handoff import TransferReport
from baton.engines.recorder import LoadRecorder

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class StatLogger(LoadRecorder):
    """A recorder with vLLM's interface (`StatLoggerBase`)."""

    _external_tokens = 0
    """Prompt tokens whose KV was pulled or promoted."""

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
                # Requests whose KV is being pulled count as skipped in vLLM.
                waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                kv_usage=scheduler_stats.kv_cache_usage,
            )
            if scheduler_stats.kv_connector_stats:
                self.record_transfers(msgspec.convert(scheduler_stats.kv_connector_stats, TransferReport))
        if iteration_stats is not None:
            prompt = iteration_stats.prompt_token_stats
            load = self.load
            self._external_tokens += prompt.external_kv_transfer
            self.load = replace(
                load,
                prompt_tokens_computed=load.prompt_tokens_computed + prompt.computed,
                prompt_tokens_cached=load.prompt_tokens_cached + prompt.local_cache_hit,
                # vLLM counts a promotion when its request is scheduled, later than the pool does.
                prompt_tokens_pulled=max(
                    load.prompt_tokens_pulled, self._external_tokens - self.load.pool.promoted_tokens
                ),
                preemptions=load.preemptions + iteration_stats.num_preempted_reqs,
            )

    def log_engine_initialized(self) -> None:
        """Do nothing: the worker announces its engine."""

    def log(self) -> None:
        """Do nothing: heartbeats carry the figures."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """Do nothing: Baton never puts an engine to sleep."""
