"""What our process, vLLM's scheduler and its ranks tell each other, in the forms that vLLM carries.

our process ──ConnectorSettings, at the start──▶ scheduler and ranks
our process ──a request's parameters──▶ scheduler ──StepMetadata──▶ ranks
ranks ──ProgressMetadata──▶ scheduler            ranks, scheduler ──BatonStats──▶ our process
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from baton.connectors.handoff import StepPlan, TransferReport
from baton.connectors.pool_plan import PoolPlan, PoolProgress
from baton.transfer import AgentOptions

SETTINGS: Final = "baton"
"""Key of the `ConnectorSettings` in `kv_connector_extra_config`."""
TOKEN_TIME_PARAMETER: Final = "computing_token_s"
"""Key of `EngineRequest.computing_token_s` beside a request's `Handoff`."""
LOAN_PARAMETER: Final = "loan"
"""Key of a request's `Loan` beside its `Handoff`, which may be absent."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConnectorSettings:
    """Settings of the connector. vLLM writes its configuration into logs; the agent's secret is not to be there."""

    agent: AgentOptions | None
    """None: the engine does not hand off."""
    model_digest: str
    kv_pool_bytes: int = 0
    """Size of the KV pool of all ranks; 0: no pool."""
    staging_tokens: int | None = None
    """Tokens of hand-offs that are staged at a time, 0 for the default; None: KV is not staged."""
    gpu_peers: bool = False
    """Whether peers' GPUs read the cache itself, where it is staged for others."""
    kv_file: str = ""
    """Path of the KV pool's file; empty: none."""
    kv_file_bytes: int = 0

    def __repr__(self) -> str:
        return "ConnectorSettings(…)"


@dataclass
class StepMetadata(KVConnectorMetadata):
    plan: StepPlan = field(default_factory=StepPlan)
    pool: PoolPlan = field(default_factory=PoolPlan)


class ProgressMetadata(KVConnectorWorkerMetadata):
    """What ranks have done, on its way to the scheduler."""

    def __init__(self, progress: PoolProgress, leases_open: int) -> None:
        self.progress = progress
        self.leases_open = leases_open

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ProgressMetadata)
        return ProgressMetadata(self.progress.joined(other.progress), self.leases_open + other.leases_open)


class BatonStats(KVConnectorStats):
    """A `TransferReport` in the form that vLLM carries to the streaming process."""

    @classmethod
    def of(cls, report: TransferReport) -> BatonStats:
        return cls(data=msgspec.to_builtins(report, builtin_types=(bytes,)))

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}

    def reduce(self) -> dict[str, int | float]:
        report = msgspec.convert(self.data, TransferReport)
        return {"pulls": len(report.pulls), "leases_ended": len(report.leases_ended)}

    def aggregate(self, other: KVConnectorStats) -> BatonStats:
        """Join the reports of two ranks, or of two steps."""
        ours, theirs = (msgspec.convert(data, TransferReport) for data in (self.data, other.data))
        joined = TransferReport(
            pulls=ours.pulls + theirs.pulls,
            leases_ended=ours.leases_ended + theirs.leases_ended,
            leased_blocks=ours.leased_blocks | theirs.leased_blocks,
            agents=ours.agents | theirs.agents,
            pool=theirs.pool or ours.pool,
        )
        return BatonStats.of(joined)
