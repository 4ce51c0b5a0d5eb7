"""Baton inside SGLang's scheduler process: the scheduler, and the hand-off that it takes part in.

`BatonScheduler` is SGLang's own, with the few steps overridden at which requests come, batches are chosen and end;
SGLang's hooks put it in place (`HookRegistry`, a class replaced by its subclass). `Handoffs` feeds these events
to `HandoffScheduler` and `HandoffRank`, as vLLM's connector does; here both are in one process.

A request on the decode leg does not enter SGLang's queue before its KV is here. Then it is one with a long prefix
hit: SGLang computes the last token of the prompt, and samples the first of the answer.
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import zmq
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req  # pyright: ignore[reportPrivateUsage]
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_parallel
from sglang.version import __version__ as VERSION

from baton.connectors.agents import make_staged_agent
from baton.connectors.agreement import PoolAgreement, PoolNews, RankAgreement
from baton.connectors.link import (
    KV_DID_NOT_ARRIVE,
    AskStats,
    EndLease,
    EventsHeard,
    Failed,
    LendPrefix,
    Opened,
    PrefixLent,
    RankReport,
    SchedulerEnd,
    SetFaults,
    Setup,
    Stats,
    StepReport,
)
from baton.connectors.place import RankPlace
from baton.connectors.pool_lending import UNCLAIMED_LOAN_TTL_S
from baton.connectors.pool_rank import PoolRank, open_file
from baton.connectors.pool_scheduler import PoolScheduler
from baton.connectors.rank import HandoffRank
from baton.connectors.sglang_cache import HandoffCache
from baton.connectors.sglang_handoffs import Handoffs, answer_tokens, context_tokens_max
from baton.connectors.sglang_kv import SERVES_WHOLE, SglangKv, kv_tensors, read_kv
from baton.connectors.sglang_pool import SglangPool
from baton.errors import ConfigurationError
from baton.identity import KvIdentity, describe_rope
from baton.pool.chain import check_block_tokens
from baton.pool.copier import ThreadCopier
from baton.pool.gpu_agent import GpuAgent
from baton.pool.memory import KvPool
from baton.pool.slot_queue import staging_slots
from baton.pool.staging import StagedAgent
from baton.transfer import AgentOptions, NativeAgent, Pool, TransferAgent
from baton.transfer.device import CopyEngine, cuda_copies, host_copies

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.server_args import PortArgs, ServerArgs

_log = logging.getLogger(__name__)


class BatonScheduler(Scheduler):
    handoffs: Handoffs | None = None

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        self._tp_rank = get_parallel().tp_rank
        self._link = SchedulerEnd(self._tp_rank)
        setup = self._link.setup()
        self._computed_tokens = self._cached_tokens = self._preemptions = 0
        self._begun: list[tuple[bytes, float]] = []
        self._batch: ScheduleBatch | None = None
        self._told = StepReport()
        with _ReportingFailure(self._link):
            super().__init__(server_args, port_args)
            self._open(setup)

    def run_event_loop(self) -> None:
        # SGLang would end its parent with SIGQUIT, and its parent is our whole process.
        try:
            with _ReportingFailure(self._link):
                super().run_event_loop()
        finally:
            if self.handoffs is not None:
                if self.handoffs.kv_pool is not None:
                    self.handoffs.kv_pool.close()
                self.handoffs.rank.agent.close()

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return _ReportingStreamer

    def _open(self, setup: Setup) -> None:
        pool, identity = self.token_to_kv_pool_allocator.get_kvcache(), ""
        if setup.agent is not None:
            kv = self._read_kv(pool, setup)
            identity = self._identity(kv, setup.model_digest)
            described, slots = kv.described(identity), self._staging_slots(setup)
            pool_bytes = self._pool_bytes(setup)
            agent: TransferAgent
            if slots:
                agent = make_staged_agent(
                    setup.agent,
                    self.make_agent,
                    self.make_copies(described.device),
                    slots,
                    pool_bytes=pool_bytes,
                    stream=self._stream,
                    make_direct=NativeAgent if setup.gpu_peers and described.device is not None else None,
                )
            else:
                agent = self.make_agent(setup.agent)
            agent.set_pool(described)
            place = RankPlace(rank=self._tp_rank, size=self.tp_size, layout=kv.layout)
            rank, agreement = HandoffRank(agent, place), RankAgreement(self._vote)
            kv_pool = self._kv_pool(described, rank, place, setup, pool_bytes) if pool_bytes else None
            self.handoffs = Handoffs(
                self.tree_cache,
                rank,
                agreement,
                self._enqueue,
                kv_pool,
                owed_tokens=self._owed_tokens,
                growing_tokens=self._growing_tokens,
                staging_slots=slots,
                gpu_peers=setup.gpu_peers,
            )
            if described.device is None:
                # Read by the hook on SGLang's `set_kv_buffer`: see `baton.engines.sglang.plugins`.
                pool.baton_layer_saved = lambda layer: rank.layer_saved(layer - pool.start_layer)  # pyright: ignore
        self.output_streamer.report = self._report
        if self.load_snapshot_writer is not None:
            # Shared memory with figures for SGLang's own server, which SGLang leaves behind.
            Path(self.load_snapshot_writer.path).unlink(missing_ok=True)
        if self.idle_sleeper is not None:
            self.idle_sleeper.poller.register(self._link.fileno(), zmq.POLLIN)
        opened = Opened(
            version=VERSION,
            kv_identity=identity,
            endpoint=self.handoffs.rank.agent.endpoint if self.handoffs else "",
            block_tokens=self.page_size,
            blocks=self.max_total_num_tokens // self.page_size,
            pool_blocks=self.handoffs.kv_pool.slots if self.handoffs and self.handoffs.kv_pool else 0,
            pool_endpoint=self.handoffs.kv_pool.endpoint if self.handoffs and self.handoffs.kv_pool else "",
            block_bytes=sum(tensor[: self.page_size].nbytes for tensor in kv_tensors(pool)),
            running_max=self.max_running_requests,
            step_tokens_max=self.chunked_prefill_size or self.max_prefill_tokens,
            context_tokens_max=context_tokens_max(
                self.model_config.context_len, self.max_total_num_tokens, self.page_size
            ),
            vocabulary=self.model_config.vocab_size,
            grammars=self.grammar_manager.grammar_backend is not None,
        )
        self._link.tell(opened)

    def _pool_bytes(self, setup: Setup) -> int:
        """Return the size of this rank's part of the KV pool; 0 if there is to be none, or cannot be one."""
        if not setup.kv_pool_bytes:
            return 0
        try:
            check_block_tokens(self.page_size)
        except ConfigurationError as refusal:
            _log.warning("this engine runs without a KV pool: %s", refusal)
            return 0
        return setup.kv_pool_bytes // self.tp_size

    def _kv_pool(self, cache: Pool, rank: HandoffRank, place: RankPlace, setup: Setup, pool_bytes: int) -> SglangPool:
        """Return the KV pool. If a rank has no memory for its part, the pool never has anything, on all ranks."""
        scheduler = PoolScheduler(
            block_tokens=self.page_size,
            block_bytes=place.size * cache.block_bytes * len(cache.layer_addresses),
            blocks=cache.blocks,
            ranks=place.size,
            has_file=bool(setup.kv_file),
        )
        part = self._pool_rank(cache, rank, place, setup, pool_bytes)
        agreement = PoolAgreement(self._least, self._gather) if place.size > 1 else PoolAgreement()
        publishes = place.rank == 0
        return SglangPool(self.tree_cache, scheduler, part, agreement, setup.model_digest, publishes=publishes)

    def _pool_rank(self, cache: Pool, rank: HandoffRank, place: RankPlace, setup: Setup, pool_bytes: int) -> PoolRank:
        assert setup.agent is not None
        staged = rank.agent if isinstance(rank.agent, (StagedAgent, GpuAgent)) else None
        try:
            pool = KvPool(cache, pool_bytes) if staged is None else staged.memory
        except ConfigurationError as refusal:
            _log.warning("this engine runs without a KV pool: %s", refusal)
            return PoolRank(0, None)
        if not pool.slots:
            return PoolRank(0, None)
        copier = ThreadCopier(pool) if staged is None else staged.copier
        agent = self.make_agent(replace(setup.agent, port=0, rails=(), unclaimed_ttl_s=UNCLAIMED_LOAN_TTL_S))
        agent.set_pool(pool.pool)
        for source in (copier, agent):
            rank.watch(source.fileno())
            if self.idle_sleeper is not None:
                self.idle_sleeper.poller.register(source.fileno(), zmq.POLLIN)
        file = open_file(setup.kv_file, setup.kv_file_bytes, pool, place)
        if file is not None:
            rank.watch(file.fileno())
        sharing = None if staged is None else staged.copier
        lending = HandoffRank(agent, place)
        return PoolRank(pool.slots, copier, lending, file, cells=pool.cells, sharing=sharing, events_heard=False)

    def make_agent(self, options: AgentOptions) -> NativeAgent:
        """Return an agent of this process; tests may bring their own."""
        return NativeAgent(options)

    def make_copies(self, device: int | None) -> CopyEngine:
        """Return the engine that copies between the cache and host memory; tests may bring their own."""
        return host_copies() if device is None else cuda_copies(device)

    def _stream(self) -> int | None:
        """Return the CUDA stream in which the model runs; None on a CPU, whose writes have ended.

        Without SGLang's overlapped schedule, which Baton switches off, that is the scheduler's own.
        """
        return self.schedule_stream.cuda_stream if self.device == "cuda" else None

    def _staging_slots(self, setup: Setup) -> int:
        if setup.staging_tokens is None:
            return 0
        return staging_slots(
            setup.staging_tokens,
            min(self.model_config.context_len, self.max_total_num_tokens),
            blocks=self.max_total_num_tokens // self.page_size,
            block_tokens=self.page_size,
        )

    def _read_kv(self, pool: KVCache, setup: Setup) -> SglangKv:
        if not isinstance(self.tree_cache, HandoffCache):
            raise ConfigurationError(
                f"SGLang keeps this model's prefixes in a {type(self.tree_cache).__name__}, "
                f"through which Baton cannot hand off {SERVES_WHOLE}"
            )
        heads = self.model_config.get_total_num_kv_heads()
        return read_kv(
            pool,
            page_tokens=self.page_size,
            kv_heads=heads,
            rank=self._tp_rank,
            ranks=self.tp_size,
            staged=setup.staging_tokens is not None,
        )

    def _vote(self, votes: list[int]) -> list[int]:
        if self.tp_size == 1:
            return votes
        # Our process knows of each rank's part by the time that the first one acts on what is agreed.
        self._report()
        return self._least(votes)

    def _least(self, votes: list[int]) -> list[int]:
        tensor = torch.tensor(votes, dtype=torch.int64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=self.tp_cpu_group)
        return tensor.tolist()

    def _gather(self, news: PoolNews) -> list[PoolNews]:
        gathered = [news] * self.tp_size
        torch.distributed.all_gather_object(gathered, news, group=self.tp_cpu_group)
        return gathered

    def _identity(self, kv: SglangKv, model_digest: str) -> str:
        layout = kv.layout
        config = self.model_config.hf_text_config.to_dict()
        identity = KvIdentity(
            model=str(config.get("model_type")),
            digest=model_digest,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            dim=layout.dim,
            dtype=layout.dtype,
            rope=describe_rope(config),
        )
        return str(identity)

    # ------------------------------------------------------------ requests

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self._preemptions += is_retracted
        if self.handoffs is None or not self.handoffs.admit(req):
            super()._add_request_to_queue(req, is_retracted)

    def _enqueue(self, req: Req) -> None:
        super()._add_request_to_queue(req)
        queue = self.waiting_queue
        if queue and queue[-1] is req and self.tree_cache.has_arrived(req.rid):
            # It holds its KV: behind a retracted request that needs room, each of the two could wait for the other.
            queue.insert(next(place for place, each in enumerate(queue) if each.is_retracted or each is req), req)
            queue.pop()

    def _owed_tokens(self) -> int:
        """Return the room that SGLang's own requests need before KV is pulled or promoted for others.

        A retracted request has lost all of its room. One whose prompt is half computed goes on in any case: without
        room for the rest, SGLang's scheduler ends.
        """
        if any(req.is_retracted for req in self.waiting_queue):
            return self.max_total_num_tokens
        if (req := self.chunked_req) is None:
            return 0
        return len(req.full_untruncated_fill_ids) - req.extend_end + self._answer_tokens(req)

    def _growing_tokens(self) -> int:
        """Return the room into which what runs may grow.

        SGLang retracts all but one for room, and aborts the last one if that is not enough: it cannot take back what is
        pulled. So the longest answer counts.
        """
        running = (req for req in self.collect_inflight_reqs() if req is not self.chunked_req and not req.finished())
        return max((self._answer_tokens(req) for req in running), default=0)

    def _answer_tokens(self, req: Req) -> int:
        """Return the room that the rest of an answer needs; a page more, since it may begin one."""
        return answer_tokens(req) + self.page_size

    def abort_request(self, recv_req: AbortReq) -> None:
        if self.handoffs is not None:
            ended = self.handoffs.aborted(lambda req: recv_req.abort_all or req.rid.startswith(recv_req.rid))
            for req in ended:
                self.send_abort_output(_make_abort_req(req, finished_reason=recv_req.finished_reason), req)
        super().abort_request(recv_req)

    def send_abort_output(self, abort_req: AbortReq, req: Req) -> None:
        # Of a request that SGLang aborts for lack of room, and of one whose KV did not come, nothing else tells.
        if self.handoffs is not None:
            self.handoffs.dropped(req)
        super().send_abort_output(abort_req, req)

    def _release_aborted_request(self, req: Req) -> None:
        super()._release_aborted_request(req)
        if self.handoffs is not None:
            self.handoffs.dropped(req)

    # ------------------------------------------------------------ steps

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> Any:
        self._follow_orders()
        failed = self.handoffs.settle() if self.handoffs is not None else ()
        if self.handoffs is not None and self.handoffs.kv_pool is not None:
            for key, tokens in self.handoffs.kv_pool.take_lent():
                self._link.tell(PrefixLent(key=key, tokens=tokens))
        self._report()
        for req in failed:
            reason = {"type": "abort", "message": KV_DID_NOT_ARRIVE}
            self.send_abort_output(_make_abort_req(req, finished_reason=reason), req)
        plan = super().get_next_batch_to_run(running_batch, last_batch)
        self._batch = plan.batch_to_run
        self._count(plan.batch_to_run)
        if self.handoffs is not None:
            self.handoffs.begin(plan.batch_to_run)
        return plan

    def run_batch(self, batch: ScheduleBatch, *arguments: object) -> GenerationBatchResult:
        result = super().run_batch(batch, *arguments)
        if self.handoffs is not None:
            self.handoffs.computed()
        return result

    def is_fully_idle(self, *arguments: bool, **named: bool) -> bool:
        return super().is_fully_idle(*arguments, **named) and (self.handoffs is None or self.handoffs.is_idle)

    def _count(self, batch: ScheduleBatch | None) -> None:
        if batch is None or not batch.forward_mode.is_extend():
            return
        now_s = time.monotonic()
        decoding = batch.decoding_reqs or ()
        for req in batch.reqs:
            if req in decoding or req.retracted_stain:
                continue
            self._computed_tokens += req.extend_len
            if req.extend_batch_idx == 1:
                self._cached_tokens += req.prefix_len
                self._begun.append((bytes.fromhex(req.rid), now_s))

    def _follow_orders(self) -> None:
        for order in self._link.orders():
            rank = self.handoffs.rank if self.handoffs is not None else None
            match order:
                case EndLease(key=key) if rank is not None:
                    rank.end_lease(key)
                case EventsHeard():
                    if self.handoffs is not None and self.handoffs.kv_pool is not None:
                        self.handoffs.kv_pool.events_heard()
                case LendPrefix(key=key):
                    if self.handoffs is not None and self.handoffs.kv_pool is not None:
                        self.handoffs.kv_pool.lend(order)
                    else:
                        self._link.tell(PrefixLent(key=key, tokens=0))
                case SetFaults(faults=faults, rank=wanted) if rank is not None:
                    if wanted in (None, self._tp_rank):
                        rank.agent.set_faults(faults)
                case AskStats() if rank is not None:
                    arrived = {key.hex(): layers for key, layers in rank.layers_arrived.items()}
                    self._link.tell(Stats(figures=asdict(rank.agent.stats()), layers_arrived=arrived))
                case _:
                    pass

    def _report(self) -> None:
        if self._tp_rank:
            transfers = self.handoffs.rank.report() if self.handoffs is not None else None
            if transfers is not None:
                self._link.tell(RankReport(transfers=transfers))
            return
        handoffs, total = self.handoffs, self.max_total_num_tokens
        free = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        pulled = handoffs.pulled_tokens if handoffs is not None else 0
        promoted = handoffs.promoted_tokens if handoffs is not None else 0
        running = self.collect_inflight_reqs().union(self._batch.reqs if self._batch is not None else ())
        report = StepReport(
            running=sum(not req.finished() for req in running),
            waiting=len(self.waiting_queue) + (handoffs.waiting if handoffs is not None else 0),
            kv_usage=(total - free) / total,
            prompt_tokens_computed=self._computed_tokens,
            prompt_tokens_cached=max(self._cached_tokens - pulled - promoted, 0),
            prompt_tokens_pulled=pulled,
            preemptions=self._preemptions,
            begun=tuple(self._begun),
            transfers=handoffs.report() if handoffs is not None else None,
        )
        self._begun.clear()
        if report != self._told:
            self._link.tell(report)
            self._told = msgspec.structs.replace(report, begun=(), transfers=None)


class _ReportingStreamer(SchedulerOutputStreamer):
    """Sends the scheduler's report ahead of the step's tokens, which need it to be understood."""

    report: Callable[[], None] = staticmethod(lambda: None)

    def stream_output(self, *arguments: object, **named: object) -> None:
        self.report()
        super().stream_output(*arguments, **named)


class _ReportingFailure:
    """Reports to our process why this one ends, and ends it without SGLang's signal to its parent."""

    def __init__(self, link: SchedulerEnd) -> None:
        self._link = link

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Exception):
            _log.error("SGLang's scheduler ends", exc_info=error)
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            self._link.tell(Failed(reason=reason))
            raise SystemExit(1) from error
