"""Baton's KV connector for vLLM, out of tree: thin glue between vLLM's hooks and the hand-off.

vLLM builds it twice: as SCHEDULER in the `EngineCore` process, where it feeds a `HandoffScheduler`, and
as WORKER in each rank's process, where it feeds a `HandoffRank`. The order of a worker's calls per step:

    handle_preemptions → bind_connector_metadata → per layer wait_for_layer_load, save_kv_layer
    → start_load_kv → wait_for_save → get_transfer_results → get_kv_connector_stats → clear_connector_metadata

Source: `vllm/distributed/kv_transfer/kv_connector/v1/base.py` and `v1/core/sched/scheduler.py` (0.32).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.request import RequestStatus

from baton.connectors.agents import make_staged_agent, staged_key_of
from baton.connectors.handoff import Handoff, HandoffScheduler, LeaseStep, TransferReport
from baton.connectors.place import RankPlace
from baton.connectors.pool_lending import UNCLAIMED_LOAN_TTL_S, Loan
from baton.connectors.pool_plan import PoolProgress
from baton.connectors.pool_rank import PoolRank, open_file
from baton.connectors.pool_scheduler import PoolScheduler
from baton.connectors.rank import ALL_LAYERS, HandoffRank
from baton.connectors.vllm_kv import read_kv
from baton.connectors.vllm_messages import (
    LOAN_PARAMETER,
    SETTINGS,
    TOKEN_TIME_PARAMETER,
    BatonStats,
    ConnectorSettings,
    ProgressMetadata,
    StepMetadata,
)
from baton.connectors.vllm_pool import VllmPool
from baton.engines.processes import bind_to_parent
from baton.engines.vllm.process import unname_shared_memory
from baton.errors import ConfigurationError
from baton.pool.chain import check_block_tokens
from baton.pool.copier import Copier, ThreadCopier
from baton.pool.gpu_agent import GpuAgent
from baton.pool.memory import KvPool
from baton.pool.slot_queue import staging_slots
from baton.pool.staging import StagedAgent
from baton.transfer import AgentOptions, NativeAgent, Pool, TransferAgent, TransferFaults
from baton.transfer.device import CopyEngine, cuda_copies, host_copies
from baton.transfer.layout import read_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

HANDED_OFF = (FullAttentionSpec, MLAAttentionSpec)
"""Kinds of caches that keep all blocks of a prompt. Others free those outside of a window, or have states instead."""


class BatonConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        bind_to_parent()
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings: ConnectorSettings = self._kv_transfer_config.kv_connector_extra_config[SETTINGS]
        self._scheduler: HandoffScheduler | None = None
        self._rank: HandoffRank | None = None
        self._layers: dict[str, int] = {}
        self.kv_block_bytes = 0
        """Size of one block of the cache, all layers of this rank."""
        self.kv_identity = ""
        self._staging_slots = 0
        """Slots of host memory through which KV is handed off; 0: peers read the cache itself."""
        self._device: int | None = None
        self._leases_open = 0
        """Change in the number of open leases that was not told yet, see `RankResults`."""
        self._pool_scheduler: VllmPool | None = None
        self._pool_rank: PoolRank | None = None
        if self._settings.agent is None:
            return
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ConfigurationError(
                f"this model has {len(kv_cache_config.kv_cache_groups)} groups of KV caches; "
                "Baton hands off models with one (engine option handoff=false serves it whole)"
            )
        kind = type(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
        if kind not in HANDED_OFF:
            raise ConfigurationError(
                f"vLLM keeps this model's KV by {kind.__name__}, under which a prompt's blocks do not stay until a "
                "peer has read them (engine option handoff=false serves it whole)"
            )
        self._block_tokens = block_tokens = vllm_config.cache_config.block_size
        self._pool_bytes = self._settings.kv_pool_bytes
        try:
            check_block_tokens(block_tokens)
        except ConfigurationError as refusal:
            if self._pool_bytes and role is KVConnectorRole.WORKER:
                _log.warning("this engine runs without a KV pool: %s", refusal)
            self._pool_bytes = 0
        if self._settings.staging_tokens is not None:
            self._staging_slots = staging_slots(
                self._settings.staging_tokens,
                vllm_config.model_config.max_model_len,
                blocks=kv_cache_config.num_blocks,
                block_tokens=block_tokens,
            )
        if role is KVConnectorRole.SCHEDULER:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            self._scheduler = HandoffScheduler(block_tokens, staging_slots=self._staging_slots)
            if self._pool_bytes:
                pool = PoolScheduler(
                    block_tokens=block_tokens,
                    block_bytes=ranks
                    * sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
                    // kv_cache_config.num_blocks,
                    blocks=kv_cache_config.num_blocks,
                    ranks=ranks,
                    has_file=bool(self._settings.kv_file),
                )
                self._pool_scheduler = VllmPool(pool, self._settings.model_digest, block_tokens)

    # ------------------------------------------------------------------ scheduler

    def on_new_request(self, request: Request) -> None:
        parameters = dict(request.kv_transfer_params or {})
        loan, token_s = parameters.pop(LOAN_PARAMETER, None), parameters.pop(TOKEN_TIME_PARAMETER, 0.0)
        try:
            handoff = msgspec.convert(parameters or None, Handoff | None)
            if self._pool_scheduler is not None:
                loan, token_s = msgspec.convert(loan, Loan | None), msgspec.convert(token_s, float)
                staged_key = staged_key_of(handoff, gpu_peers=self._settings.gpu_peers) if self._staging_slots else b""
                self._pool_scheduler.admit(request, loan, token_s, staged_key)
            if self._scheduler is not None and handoff is not None:
                self._scheduler.admit(request.request_id, handoff, request.num_prompt_tokens)
        except msgspec.ValidationError:
            # The request then runs here as a whole, which is slower but correct.
            _log.exception("a request's hand-off or loan is malformed")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        if (pool := self._pool_scheduler) is not None and (
            pool.loads(request, num_computed_tokens) or pool.borrows(request, num_computed_tokens)
        ):
            return None, False
        tokens = self._scheduler.tokens_from_source(request.request_id, num_computed_tokens)
        if tokens is None:
            return None, False
        if self._pool_scheduler is not None:
            tokens = max(tokens, self._pool_scheduler.offer(request, num_computed_tokens))
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is None:
            return
        name, table, promoted_tokens = request.request_id, blocks.get_block_ids()[0], 0
        if self._pool_scheduler is not None and num_external_tokens:
            promoted_tokens = self._pool_scheduler.scheduler.offered_tokens(name)
        pulls = self._scheduler.allocated(name, table, num_external_tokens, promoted_tokens)
        if self._pool_scheduler is not None:
            if promoted_tokens:
                self._pool_scheduler.scheduler.promote(name, table, with_pull=pulls, again=request.num_preemptions > 0)
            if pulls:
                self._pool_scheduler.keep(request, table, num_external_tokens - promoted_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        scheduler = self._scheduler
        if scheduler is None:
            return StepMetadata()
        for request in scheduler_output.preempted_req_ids or ():
            scheduler.preempted(request)
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        after = {name: computed[name] + new for name, new in scheduler_output.num_scheduled_tokens.items()}
        leases: list[LeaseStep] = []
        for request in filter(scheduler.leases, after):
            assert self._kv_cache_manager is not None
            table = self._kv_cache_manager.get_block_ids(request)[0]
            step = scheduler.computes(request, table, computed[request], after[request])
            if step.opens and step.ready_before:
                step = replace(step, ready_before=self._ready_before(step, table, computed, after))
            leases.append(step)
        metadata = StepMetadata(scheduler.plan(leases, computes=scheduler_output.total_num_scheduled_tokens > 0))
        if self._pool_scheduler is not None:
            assert self._kv_cache_manager is not None
            metadata.pool = self._pool_scheduler.plan(self._kv_cache_manager, after)
        return metadata

    def _ready_before(
        self, step: LeaseStep, table: Sequence[int], computed: Mapping[str, int], after: Mapping[str, int]
    ) -> int:
        """Return how many of a prompt's cached tokens are there before the step.

        vLLM counts a block as cached once it is scheduled, so another request of this very step may write it.
        """
        assert self._kv_cache_manager is not None
        size, manager = self._block_tokens, self._kv_cache_manager
        written: set[int] = set()
        for request, end in after.items():
            if request != step.request:
                written.update(manager.get_block_ids(request)[0][computed[request] // size : -(-end // size)])
        cached = table[: step.ready_before // size]
        return size * next((number for number, block in enumerate(cached) if block in written), len(cached))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        progress = connector_output.kv_connector_worker_meta
        if self._scheduler is not None:
            for request in connector_output.finished_recving or ():
                self._scheduler.pulled(request)
            for request in connector_output.finished_sending or ():
                self._scheduler.freed(request)
            if isinstance(progress, ProgressMetadata):
                self._scheduler.leases_open += progress.leases_open
        if self._pool_scheduler is not None:
            assert self._kv_cache_manager is not None
            self._pool_scheduler.progress(self._kv_cache_manager, progress)
            for request in connector_output.finished_recving or ():
                self._pool_scheduler.scheduler.received(request)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, object] | None]:
        if self._scheduler is None:
            return False, None
        loads = False
        if self._pool_scheduler is not None:
            # vLLM frees these blocks when it is told of the promotion's end, and takes no other word for it then.
            loads = self._pool_scheduler.scheduler.promotes(request.request_id)
            self._pool_scheduler.finished(request.request_id)
        computed = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        return self._scheduler.finished(request.request_id, computed=computed, loads=loads), None

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while orders wait for the workers."""
        if self._pool_scheduler is not None and self._pool_scheduler.scheduler.is_busy:
            return True
        scheduler = self._scheduler
        return scheduler is not None and (scheduler.has_orders or scheduler.leases_open > 0)

    def reset_cache(self) -> bool | None:
        """Refuse what vLLM asks after a change of weights: Baton starts such an engine anew."""
        return None if self._pool_scheduler is None else False

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._pool_scheduler is None else self._pool_scheduler.take_events()

    def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        """See `baton.engines.engine.Engine.lend`; `baton.engines.vllm.lending` calls it between two steps."""
        return 0 if self._pool_scheduler is None else self._pool_scheduler.scheduler.lend(key, blocks, sink_ranks)

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        unname_shared_memory()
        names = sorted(kv_caches, key=extract_layer_index)
        self._layers = {name: layer for layer, name in enumerate(names)}
        tensors = [kv_caches[name] for name in names]
        blocks = self._kv_cache_config.num_blocks
        self.kv_block_bytes = sum(tensor.nbytes for tensor in tensors) // blocks
        if self._settings.agent is None:
            return
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        pool = read_kv(
            tensors,
            [self._vllm_config.compilation_config.static_forward_context[name] for name in names],
            self._vllm_config,
            blocks=blocks,
            model_digest=self._settings.model_digest,
            tp_rank=get_tensor_model_parallel_rank(),
            staged=self._staging_slots > 0,
        )
        self._device = pool.device
        self.kv_identity = pool.fingerprint
        if self._staging_slots:
            agent = make_staged_agent(
                self._settings.agent,
                self.make_agent,
                self.make_copies(),
                self._staging_slots,
                pool_bytes=self._pool_bytes // ranks,
                stream=self.stream,
                make_direct=self.make_direct if self._settings.gpu_peers else None,
            )
        else:
            agent = self.make_agent(self._settings.agent)
        agent.set_pool(pool)
        place = RankPlace(
            rank=get_tensor_model_parallel_rank(),
            size=ranks,
            layout=read_layout(pool.layout) if pool.layout else None,
        )
        self._rank = HandoffRank(agent, place)
        if self._pool_bytes:
            self._start_pool(pool, place)

    def _start_pool(self, cache: Pool, place: RankPlace) -> None:
        """Reserve this rank's part of the KV pool. Without that memory the engine serves on without a pool."""
        assert self._rank is not None
        assert self._settings.agent is not None
        staged = self._rank.agent if isinstance(self._rank.agent, (StagedAgent, GpuAgent)) else None
        try:
            pool = KvPool(cache, self._pool_bytes // place.size) if staged is None else staged.memory
        except ConfigurationError as refusal:
            _log.warning("this engine runs without a KV pool: %s", refusal)
            self._pool_rank = PoolRank(0, None)
            return
        if not pool.slots:
            self._pool_rank = PoolRank(0, None)
            return
        copier = self.make_copier(pool) if staged is None else staged.copier
        file = open_file(self._settings.kv_file, self._settings.kv_file_bytes, pool, place)
        agent = self.make_agent(replace(self._settings.agent, port=0, rails=(), unclaimed_ttl_s=UNCLAIMED_LOAN_TTL_S))
        agent.set_pool(pool.pool)
        for source in (copier, agent):
            self._rank.watch(source.fileno())
        if file is not None:
            self._rank.watch(file.fileno())
        sharing = None if staged is None else staged.copier
        lending = HandoffRank(agent, place)
        self._pool_rank = PoolRank(
            pool.slots, copier, lending, file, cells=pool.cells, sharing=sharing, events_heard=False
        )

    def make_copies(self) -> CopyEngine:
        """Return the engine that copies between the cache and host memory; tests may bring their own."""
        return host_copies() if self._device is None else cuda_copies(self._device)

    def stream(self) -> int | None:
        """Return the CUDA stream in which the model runs; None on a CPU, whose writes have ended."""
        return None if self._device is None else torch.cuda.current_stream(self._device).cuda_stream

    def make_copier(self, pool: KvPool) -> Copier:
        """Return the copier of this rank's pool; tests may bring their own."""
        return ThreadCopier(pool)

    def make_agent(self, options: AgentOptions) -> TransferAgent:
        """Return this rank's agent; tests may bring their own."""
        return NativeAgent(options)

    def make_direct(self, options: AgentOptions) -> NativeAgent | None:
        """Return the agent of the cache itself for GPUs of this host; None on a CPU. Tests may bring their own."""
        return None if self._device is None else NativeAgent(options)

    @property
    def rank(self) -> HandoffRank | None:
        return self._rank

    @property
    def pool_rank(self) -> PoolRank | None:
        return self._pool_rank

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._rank is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._rank.revoke(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Pulls start here rather than in `start_load_kv`, which comes after the forward pass: submitting
        # one costs microseconds, and its blocks are no part of this step.
        if self._rank is not None and isinstance(connector_metadata, StepMetadata):
            if self._pool_rank is not None:
                self._pool_rank.begin(connector_metadata.pool)
            self._rank.begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Do nothing: see `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no step is scheduled before its KV is here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: object
    ) -> None:
        # On a GPU the layer is only queued by now, or this is the capture of a graph: see `wait_for_save`.
        if self._rank is not None and self._device is None:
            self._rank.layer_saved(self._layers[layer_name])

    def wait_for_save(self) -> None:
        if self._rank is not None:
            self._rank.layer_saved(ALL_LAYERS)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._rank is None:
            return KVConnectorTransferResults()
        results = self._rank.end(expecting=self._pool_rank is not None and self._pool_rank.is_active)
        self._leases_open += results.leases_open
        if self._pool_rank is not None:
            self._pool_rank.end(results)
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        progress = self._pool_rank.take_progress() if self._pool_rank is not None else None
        leases_open, self._leases_open = self._leases_open, 0
        return ProgressMetadata(progress or PoolProgress(), leases_open) if progress or leases_open else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the figures of this rank, or in the scheduler's process those of the KV pool."""
        if self._pool_scheduler is not None:
            pool = self._pool_scheduler.report()
            return None if pool is None else BatonStats.of(TransferReport(pool=pool))
        report = self._rank.report() if self._rank is not None else None
        return None if report is None else BatonStats.of(report)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, object] | None = None) -> KVConnectorStats | None:
        return BatonStats(data=data or {})

    def set_faults(self, faults: TransferFaults) -> None:
        if self._rank is not None:
            self._rank.agent.set_faults(faults)

    def shutdown(self) -> None:
        if self._pool_rank is not None:
            self._pool_rank.close()
        if self._rank is not None:
            self._rank.agent.close()
