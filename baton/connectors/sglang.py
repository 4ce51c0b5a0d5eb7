"""Baton inside SGLang's scheduler process: the scheduler, and the hand-off that it takes part in.

`BatonScheduler` is SGLang's own, with the few steps overridden at which requests come, batches are chosen and end;
it takes its place by SGLang's hooks (`HookRegistry`, a class replaced by its subclass). `Handoffs` feeds what
happens there to `HandoffScheduler` and `HandoffRank`, as vLLM's connector does: one process is both here.

A request on the decode leg does not enter SGLang's queue before its KV is here. Then it is one with a long prefix
hit: SGLang computes the last token of the prompt, and samples the first of the answer.
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import zmq
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req  # pyright: ignore[reportPrivateUsage]
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.version import __version__ as VERSION

from baton.connectors.handoff import Handoff, HandoffLeg, HandoffScheduler, LeaseStep
from baton.connectors.link import (
    HANDOFF_PARAMETER,
    KV_DID_NOT_ARRIVE,
    AskStats,
    EndLease,
    Failed,
    Opened,
    SchedulerEnd,
    SetFaults,
    Setup,
    Stats,
    StepReport,
)
from baton.connectors.rank import ALL_LAYERS, HandoffRank
from baton.connectors.sglang_cache import Arrival, HandoffCache
from baton.errors import ConfigurationError
from baton.transfer import NativeAgent, Pool
from baton.transfer.layout import Layout

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import PortArgs, ServerArgs

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pulling:
    req: Req
    arrival: Arrival
    spare_tokens: int
    aborted: bool = False


class Handoffs:
    """One engine's hand-offs. Requests are named by SGLang's ids, which are our keys."""

    def __init__(
        self, cache: HandoffCache, pool: MHATokenToKVPool, rank: HandoffRank, enqueue: Callable[[Req], None]
    ) -> None:
        self.rank = rank
        self.pulled_tokens = 0
        """Of all requests whose KV has come."""
        self._cache = cache
        self._enqueue = enqueue
        self._decisions = HandoffScheduler(cache.page_size)
        self._parked: deque[Req] = deque()
        self._pulling: dict[str, _Pulling] = {}
        self._leased_pages: dict[str, torch.Tensor] = {}
        self._moved: list[LeaseStep] = []
        cache.keeper = self
        # Read by the hook on SGLang's `set_kv_buffer`: see `baton.engines.sglang.plugins`.
        pool.baton_layer_saved = lambda layer: rank.layer_saved(layer - pool.start_layer)  # pyright: ignore

    @property
    def waiting(self) -> int:
        return len(self._parked) + len(self._pulling)

    @property
    def is_idle(self) -> bool:
        return self._decisions.is_idle and not self.waiting and self._cache.is_empty_handed

    # Requests.

    def admit(self, req: Req) -> bool:
        """Note a new request's hand-off; return whether it has to wait for KV."""
        parameters = req.sampling_params.custom_params
        text = parameters.get(HANDOFF_PARAMETER) if parameters else None
        if text is None or req.is_retracted:
            return False
        handoff = msgspec.json.decode(text, type=Handoff)
        self._decisions.admit(req.rid, handoff, len(req.origin_input_ids))
        if handoff.leg is HandoffLeg.DECODE:
            self._parked.append(req)
            return True
        return False

    def aborted(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Forget the requests that wait for KV and match; what is being written stays until nothing writes it."""
        ended = [req for req in self._parked if matches(req)]
        self._parked = deque(req for req in self._parked if not matches(req))
        for pulling in self._pulling.values():
            if not pulling.aborted and matches(pulling.req):
                pulling.aborted = True
                ended.append(pulling.req)
        for req in ended:
            self._decisions.finished(req.rid, computed=False)
        return ended

    def dropped(self, req: Req) -> None:
        """SGLang took a request out of its queue, or stopped computing its prompt."""
        self._decisions.finished(req.rid, computed=False)
        self._cache.withdraw(req.rid)

    # Steps.

    def settle(self) -> list[Req]:
        """Between two steps: take what the agent has finished, and start what there is room for.

        Returns the requests whose KV did not come.
        """
        results, failed = self.rank.end(), []
        for rid in results.received:
            self._decisions.pulled(rid)
            pulling = self._pulling.pop(rid)
            if rid in results.failed or pulling.aborted:
                self._cache.give_up(pulling.arrival)
                self._decisions.finished(rid, computed=False)
                if not pulling.aborted:
                    failed.append(pulling.req)
            else:
                self.pulled_tokens += pulling.arrival.tokens - pulling.arrival.cached_tokens
                self._cache.offer(rid, pulling.arrival)
                self._enqueue(pulling.req)
        for rid in results.sent:
            self._decisions.freed(rid)
            self._leased_pages.pop(rid, None)
            self._cache.let_go(rid)
        while self._parked and self._start_pull(self._parked[0]):
            self._parked.popleft()
        return failed

    def begin(self, batch: ScheduleBatch | None) -> None:
        """SGLang has chosen what to compute next; nothing of it is written yet."""
        leases, self._moved = self._moved, []
        for req in batch.reqs if batch is not None and batch.forward_mode.is_extend() else ():
            if self._decisions.leases(req.rid):
                leases.append(self._lease(req, req.prefix_len, req.extend_end))
        plan = self._decisions.plan(leases, computes=batch is not None)
        self.rank.revoke(plan)
        self.rank.begin(plan)

    def computed(self) -> None:
        self.rank.layer_saved(ALL_LAYERS)

    def _start_pull(self, req: Req) -> bool:
        tokens = len(req.origin_input_ids) - 1
        # Room for the answers, too: requests that have their prompts' KV and cannot start would block each other.
        spare = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS) + 2 * self._cache.page_size
        promised = sum(pulling.spare_tokens for pulling in self._pulling.values())
        arrival = self._cache.make_room(req, tokens, spare + promised)
        if arrival is None:
            return False
        external = self._decisions.tokens_from_source(req.rid, arrival.cached_tokens)
        self._decisions.allocated(req.rid, self._pages(arrival.slots), external)
        if external:
            self._pulling[req.rid] = _Pulling(req, arrival, spare)
        else:
            self._cache.offer(req.rid, arrival)
            self._enqueue(req)
        return True

    # What the cache asks.

    def checkpointed(self, req: Req, tokens: int) -> None:
        leased = self._leased_pages.get(req.rid)
        if leased is None or torch.equal(leased, self._row_pages(req, len(leased) * self._cache.page_size)):
            return
        # Another request computed the same prompt meanwhile, and its slots were first. Ours are free now: what was
        # promised of them is revoked before anything else is written there, and promised anew where it is now.
        self._decisions.preempted(req.rid)
        self._moved.append(self._lease(req, tokens, tokens))

    def finished(self, req: Req) -> bool:
        computed = isinstance(req.finished_reason, FINISH_LENGTH | FINISH_MATCHED_TOKEN)
        return self._decisions.finished(req.rid, computed=computed) and computed

    def _lease(self, req: Req, before: int, after: int) -> LeaseStep:
        pages = self._row_pages(req, after)
        self._leased_pages[req.rid] = pages
        return self._decisions.computes(req.rid, pages.tolist(), before, after)

    def _row_pages(self, req: Req, tokens: int) -> torch.Tensor:
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :tokens]
        return row[:: self._cache.page_size] // self._cache.page_size

    def _pages(self, slots: torch.Tensor) -> Sequence[int]:
        return (slots[:: self._cache.page_size] // self._cache.page_size).tolist()


class BatonScheduler(Scheduler):
    handoffs: Handoffs | None = None

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        self._link = SchedulerEnd()
        setup = self._link.setup()
        self._computed_tokens = self._cached_tokens = self._preemptions = 0
        self._begun: list[tuple[bytes, float]] = []
        self._batch: ScheduleBatch | None = None
        self._told = StepReport()
        with _ReportingFailure(self._link):
            super().__init__(server_args, port_args)
            self._open(setup)

    def run_event_loop(self) -> None:
        # SGLang would end its parent with SIGQUIT: that is our whole process.
        try:
            with _ReportingFailure(self._link):
                super().run_event_loop()
        finally:
            if self.handoffs is not None:
                self.handoffs.rank.agent.close()

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return _ReportingStreamer

    def _open(self, setup: Setup) -> None:
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        if setup.agent is not None:
            agent = self.make_agent(setup)
            agent.set_pool(self._pool(pool, setup.model_digest))
            self.handoffs = Handoffs(self.tree_cache, pool, HandoffRank(agent, 0), self._enqueue)
        self.output_streamer.report = self._report
        if self.idle_sleeper is not None:
            self.idle_sleeper.poller.register(self._link.fileno(), zmq.POLLIN)
        opened = Opened(
            version=VERSION,
            endpoint=self.handoffs.rank.agent.endpoint if self.handoffs else "",
            block_tokens=self.page_size,
            blocks=self.max_total_num_tokens // self.page_size,
            block_bytes=sum(tensor[: self.page_size].nbytes for tensor in (*pool.k_buffer, *pool.v_buffer)),
            running_max=self.max_running_requests,
            context_tokens_max=min(self.model_config.context_len, self.max_total_num_tokens),
            vocabulary=self.model_config.vocab_size,
        )
        self._link.tell(opened)

    def make_agent(self, setup: Setup) -> NativeAgent:
        """Return this process's agent; tests may bring their own."""
        assert setup.agent is not None
        return NativeAgent(setup.agent)

    def _pool(self, pool: Any, model_digest: str) -> Pool:
        """Describe the pool. K and V of a layer have a tensor each, `[slots, heads, dimensions]`."""
        if (
            type(pool) is not MHATokenToKVPool
            or pool.kv_cache_layout != "nhd"
            or not isinstance(self.tree_cache, HandoffCache)
        ):
            raise ConfigurationError(
                f"SGLang keeps this model's KV in a {type(pool).__name__} that Baton cannot hand off "
                "(engine option handoff=false serves requests whole)"
            )
        key, page = pool.k_buffer[0], self.page_size
        if key.device.type != "cpu":
            raise ConfigurationError(
                f"the KV cache lies on {key.device.type}, and this build moves host memory only "
                "(engine option handoff=false serves requests whole)"
            )
        layout = Layout(
            layers=len(pool.k_buffer),
            kv_heads=self.model_config.get_total_num_kv_heads(),
            dim=key.shape[2],
            dtype=str(key.dtype).removeprefix("torch."),
            order="NHD",
            form="split",
            packing="plain",
            block_tokens=page,
        )
        return Pool(
            layer_addresses=tuple(
                tensor.data_ptr() for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for tensor in pair
            ),
            blocks=key.shape[0] // page,
            block_bytes=key[:page].nbytes,
            block_stride_bytes=key[:page].nbytes,
            block_tokens=page,
            fingerprint=model_digest,
            layout=str(layout),
        )

    # ------------------------------------------------------------ requests

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self._preemptions += is_retracted
        if self.handoffs is None or not self.handoffs.admit(req):
            super()._add_request_to_queue(req, is_retracted)

    def _enqueue(self, req: Req) -> None:
        super()._add_request_to_queue(req)

    def abort_request(self, recv_req: AbortReq) -> None:
        if self.handoffs is not None:
            ended = self.handoffs.aborted(lambda req: recv_req.abort_all or req.rid.startswith(recv_req.rid))
            for req in ended:
                self.send_abort_output(_make_abort_req(req, finished_reason=recv_req.finished_reason), req)
        super().abort_request(recv_req)

    def _release_aborted_request(self, req: Req) -> None:
        super()._release_aborted_request(req)
        if self.handoffs is not None:
            self.handoffs.dropped(req)

    # ------------------------------------------------------------ steps

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> Any:
        self._follow_orders()
        failed = self.handoffs.settle() if self.handoffs is not None else ()
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
                case SetFaults(faults=faults) if rank is not None:
                    rank.agent.set_faults(faults)
                case AskStats() if rank is not None:
                    arrived = {key.hex(): layers for key, layers in rank.layers_arrived.items()}
                    self._link.tell(Stats(figures=asdict(rank.agent.stats()), layers_arrived=arrived))
                case _:
                    pass

    def _report(self) -> None:
        handoffs, total = self.handoffs, self.max_total_num_tokens
        free = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        pulled = handoffs.pulled_tokens if handoffs is not None else 0
        running = self.collect_inflight_reqs().union(self._batch.reqs if self._batch is not None else ())
        report = StepReport(
            running=sum(not req.finished() for req in running),
            waiting=len(self.waiting_queue) + (handoffs.waiting if handoffs is not None else 0),
            kv_usage=(total - free) / total,
            prompt_tokens_computed=self._computed_tokens,
            prompt_tokens_cached=max(self._cached_tokens - pulled, 0),
            prompt_tokens_pulled=pulled,
            preemptions=self._preemptions,
            begun=tuple(self._begun),
            transfers=handoffs.rank.report() if handoffs is not None else None,
        )
        self._begun.clear()
        if report != self._told:
            self._link.tell(report)
            self._told = msgspec.structs.replace(report, begun=(), transfers=None)


class _ReportingStreamer(SchedulerOutputStreamer):
    """Sends ahead of a step's tokens what is needed to understand them, and how the scheduler stands with them."""

    report: Callable[[], None] = staticmethod(lambda: None)

    def stream_output(self, *arguments: object, **named: object) -> None:
        self.report()
        super().stream_output(*arguments, **named)


class _ReportingFailure:
    """Tells our process why this one ends, and ends it without SGLang's signal to its parent."""

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
