"""Translates SGLang's requests for `HandoffScheduler`, and its decisions for SGLang.

decode    parked ──room for its KV──▶ pulling ──all of it is here──▶ SGLang's queue, behind a prefix hit
                                         └──failed, aborted──▶ slots freed once nothing writes them
pooled    the same for any request with a prefix in the KV pool: what is there is promoted, and a decode leg pulls
          the rest. Without room, or if the copy fails, it enters SGLang's queue at once
borrows   parked until what another worker's pool lends is in this one, or does not come in time; then pooled
filed     waits until what the pool's file holds is in the pool, or does not come in time; then pooled, or on the decode
          leg parked
prefill   SGLang's queue ──chosen──▶ leased, each layer posted as it is written ──▶ held until no peer reads
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from baton.connectors.agents import staged_key_of
from baton.connectors.agreement import RankAgreement
from baton.connectors.handoff import Handoff, HandoffLeg, HandoffScheduler, LeaseStep, TransferReport
from baton.connectors.link import HANDOFF_PARAMETER, LOAN_PARAMETER
from baton.connectors.pool_lending import Loan
from baton.connectors.rank import ALL_LAYERS, HandoffRank
from baton.connectors.sglang_cache import Arrival, HandoffCache
from baton.connectors.sglang_pool import SglangPool

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

SPARE_PAGES: Final = 2
"""Pages that a request needs beside those of its prompt and its answer before its KV is pulled."""


def answer_tokens(req: Req) -> int:
    """Return the tokens that the rest of an answer takes, as SGLang estimates it."""
    return min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)


def context_tokens_max(context_tokens: int, cache_tokens: int, page_tokens: int) -> int:
    """Return how many tokens prompt and answer may have, where the cache may be smaller than the model's context.

    A longer request would wait for room even in an empty cache, and all behind it. The prompt may begin a page more.
    """
    return min(context_tokens, cache_tokens - (SPARE_PAGES + 1) * page_tokens)


@dataclass(slots=True)
class _Pulling:
    req: Req
    arrival: Arrival
    spare_tokens: int
    promoted_tokens: int = 0
    pulls: bool = True
    """Whether KV comes from a peer, too; otherwise the request can be computed without what comes."""
    aborted: bool = False


class Handoffs:
    """One engine's hand-offs. Requests are named by SGLang's ids, which are our keys."""

    def __init__(
        self,
        cache: HandoffCache,
        rank: HandoffRank,
        agreement: RankAgreement,
        enqueue: Callable[[Req], None],
        kv_pool: SglangPool | None = None,
        *,
        owed_tokens: Callable[[], int] = lambda: 0,
        growing_tokens: Callable[[], int] = lambda: 0,
        staging_slots: int = 0,
        gpu_peers: bool = False,
    ) -> None:
        """`owed_tokens`: returns the room in the cache that SGLang's own requests need first; `growing_tokens`: that
        into which the running ones may grow."""
        self.rank = rank
        self.kv_pool = kv_pool
        self.promoted_tokens = 0
        """Tokens promoted for all requests so far."""
        self.pulled_tokens = 0
        """Tokens pulled for all requests so far."""
        self._cache = cache
        self._agreement = agreement
        self._enqueue = enqueue
        self._owed_tokens = owed_tokens
        self._growing_tokens = growing_tokens
        self._staged = staging_slots > 0
        self._gpu_peers = gpu_peers
        self._decisions = HandoffScheduler(
            cache.page_size, staging_slots=staging_slots, now_s=lambda: agreement.agreed_s
        )
        self._parked: deque[Req] = deque()
        """Requests on the decode leg without room for their KV."""
        self._reading: deque[Req] = deque()
        """Requests on the decode leg of which the pool's file may hold a prefix."""
        self._new: deque[Req] = deque()
        """Other requests, of which the pool or its file may hold a prefix, or may borrow one."""
        self._pulling: dict[str, _Pulling] = {}
        self._leased_pages: dict[str, torch.Tensor] = {}
        self._moved: list[LeaseStep] = []
        cache.retention = self

    @property
    def waiting(self) -> int:
        return len(self._parked) + len(self._reading) + len(self._new) + len(self._pulling)

    @property
    def is_idle(self) -> bool:
        if self.kv_pool is not None and self.kv_pool.is_busy:
            return False
        return self._decisions.is_idle and not self.waiting and not self._cache.has_handoffs

    # Requests.

    def admit(self, req: Req) -> bool:
        """Note a new request; return whether it has to wait for KV."""
        parameters = req.sampling_params.custom_params or {}
        text, loan = parameters.get(HANDOFF_PARAMETER), parameters.get(LOAN_PARAMETER)
        # SGLang ends a request that it refuses, such as for its grammar, in the queue of those to be computed.
        if req.is_retracted or req.to_finish is not None:
            return False
        handoff = None if text is None else msgspec.json.decode(text, type=Handoff)
        if self.kv_pool is not None:
            staged_key = staged_key_of(handoff, gpu_peers=self._gpu_peers) if self._staged else b""
            self.kv_pool.admit(req, None if loan is None else msgspec.json.decode(loan, type=Loan), staged_key)
        if handoff is not None:
            self._decisions.admit(req.rid, handoff, len(req.origin_input_ids))
            if handoff.leg is HandoffLeg.DECODE:
                may_load = self.kv_pool is not None and self.kv_pool.may_load(req)
                (self._reading if may_load else self._parked).append(req)
                return True
        # Asked again once its cached prefix is known.
        pool = self.kv_pool
        if pool is None or not (pool.may_borrow(req) or pool.offer(req, 0) or pool.may_load(req)):
            return False
        self._new.append(req)
        return True

    def aborted(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Forget the matching requests that wait for KV; slots that a pull writes stay until it has ended."""
        ended = [req for req in (*self._parked, *self._reading, *self._new) if matches(req)]
        self._reading = deque(req for req in self._reading if not matches(req))
        self._parked = deque(req for req in self._parked if not matches(req))
        self._new = deque(req for req in self._new if not matches(req))
        for pulling in self._pulling.values():
            if not pulling.aborted and matches(pulling.req):
                pulling.aborted = True
                ended.append(pulling.req)
        for req in ended:
            self._forget(req)
        return ended

    def dropped(self, req: Req) -> None:
        """Note that SGLang took a request out of its queue, or aborted it. May be told twice."""
        self._forget(req)
        self._cache.withdraw(req.rid)

    def _forget(self, req: Req) -> None:
        self._decisions.finished(req.rid, computed=False)
        if self.kv_pool is not None:
            self.kv_pool.finished(req.rid)

    # Steps.

    def settle(self) -> list[Req]:
        """Take the transfers that have ended on all ranks, and start pulls that have room. Called between two steps.

        Returns the requests whose KV did not come.
        """
        kv_pool, failed = self.kv_pool, []
        news = self.rank.end(expecting=kv_pool is not None and kv_pool.is_active)
        if kv_pool is not None:
            kv_pool.end(news)
        results = self._agreement.settle(news, self._pulling, self._leased_pages, waiting=bool(self._parked))
        for rid in results.failed.difference(results.received):
            # Failed on some rank: the others need not go on.
            self._decisions.finished(rid, computed=False)
        for rid in results.received:
            self._decisions.pulled(rid)
            if kv_pool is not None:
                kv_pool.received(rid)
            pulling = self._pulling.pop(rid)
            if rid in results.failed or pulling.aborted:
                self._cache.give_up(pulling.arrival)
                if not pulling.pulls and not pulling.aborted:
                    self._enqueue(pulling.req)
                    continue
                self._decisions.finished(rid, computed=False)
                if not pulling.aborted:
                    failed.append(pulling.req)
            else:
                arrived_tokens = pulling.arrival.tokens - pulling.arrival.cached_tokens
                self.promoted_tokens += pulling.promoted_tokens
                self.pulled_tokens += arrived_tokens - pulling.promoted_tokens
                self._cache.offer(rid, pulling.arrival)
                self._enqueue(pulling.req)
        for rid in results.sent:
            self._decisions.freed(rid)
            self._leased_pages.pop(rid, None)
            self._cache.free_leased(rid)
        self._decisions.leases_open += news.leases_open
        for _ in range(len(self._new)):
            req = self._new.popleft()
            cached_tokens = self._cache.match_prompt(req)
            if kv_pool is not None and (kv_pool.loads(req, cached_tokens) or kv_pool.borrows(req, cached_tokens)):
                self._new.append(req)
            elif not self._start_promotion(req, cached_tokens):
                self._enqueue(req)
        for _ in range(len(self._reading)):
            req = self._reading.popleft()
            waits = kv_pool is not None and kv_pool.loads(req, self._cache.match_prompt(req))
            (self._reading if waits else self._parked).append(req)
        while self._parked and self._start_pull(self._parked[0]):
            self._parked.popleft()
        return failed

    def begin(self, batch: ScheduleBatch | None) -> None:
        """Begin the step that SGLang has chosen to compute; nothing of it is written yet."""
        leases, self._moved = self._moved, []
        for req in batch.reqs if batch is not None and batch.forward_mode.is_extend() else ():
            if self._decisions.leases(req.rid):
                leases.append(self._lease(req, req.prefix_len, req.extend_end))
        plan = self._decisions.plan(leases, computes=batch is not None)
        self.rank.revoke(plan)
        if self.kv_pool is not None:
            self.kv_pool.begin([step.key for step in leases])
        self.rank.begin(plan)

    def report(self) -> TransferReport | None:
        """Return the changes not reported to the streaming process yet, or None."""
        report = self.rank.report()
        pool = self.kv_pool.report() if self.kv_pool is not None else None
        return report if pool is None else msgspec.structs.replace(report or TransferReport(), pool=pool)

    def computed(self) -> None:
        self.rank.layer_saved(ALL_LAYERS)

    def _start_pull(self, req: Req) -> bool:
        spare = self._spare_tokens(req)
        arrival = self._make_room(req, len(req.origin_input_ids) - 1, spare)
        if arrival is None:
            return False
        external = self._decisions.tokens_from_source(req.rid, arrival.cached_tokens)
        if external is None or (not external and arrival.tokens > arrival.cached_tokens):
            # It waits for slots to be staged in, or does not any more: then it is computed here.
            self._cache.give_up(arrival)
            if external is not None:
                self._enqueue(req)
            return external is not None
        promoted = self.kv_pool.offer(req, arrival.cached_tokens) if self.kv_pool is not None and external else 0
        pages = self._pages(arrival.slots)
        pulls = self._decisions.allocated(req.rid, pages, external, promoted)
        if promoted:
            assert self.kv_pool is not None
            self.kv_pool.promote(req, pages, with_pull=pulls)
        if pulls and self.kv_pool is not None:
            end = len(req.origin_input_ids) - 1
            self.kv_pool.keep(req, pages, range(end - external + promoted, end))
        if external:
            self._pulling[req.rid] = _Pulling(req, arrival, spare, promoted)
        else:
            self._cache.offer(req.rid, arrival)
            self._enqueue(req)
        return True

    def _start_promotion(self, req: Req, cached_tokens: int) -> bool:
        """Promote what the pool holds beyond the cache; return False if that is nothing, or has no room."""
        assert self.kv_pool is not None
        promoted = self.kv_pool.offer(req, cached_tokens)
        spare = self._spare_tokens(req)
        arrival = self._make_room(req, cached_tokens + promoted, spare) if promoted else None
        if arrival is None:
            return False
        self.kv_pool.promote(req, self._pages(arrival.slots), with_pull=False)
        self._pulling[req.rid] = _Pulling(req, arrival, spare, promoted, pulls=False)
        return True

    def _make_room(self, req: Req, tokens: int, spare_tokens: int) -> Arrival | None:
        promised = sum(pulling.spare_tokens for pulling in self._pulling.values())
        # What runs may use the room of answers that have not begun, which then wait for its end.
        answers_tokens = max(spare_tokens + promised, self._growing_tokens())
        return self._cache.make_room(req, tokens, answers_tokens + self._owed_tokens())

    def _spare_tokens(self, req: Req) -> int:
        """Return the room for a request's answer.

        Requests that have their prompts' KV and cannot start would block each other.
        """
        return answer_tokens(req) + SPARE_PAGES * self._cache.page_size

    # Calls from the cache.

    def checkpointed(self, req: Req, tokens: int) -> None:
        if self.kv_pool is not None:
            self.kv_pool.checkpointed(req, tokens, self._row_pages(req, tokens).tolist())
        leased = self._leased_pages.get(req.rid)
        if leased is None or torch.equal(leased, self._row_pages(req, len(leased) * self._cache.page_size)):
            return
        # Another request computed the same prompt meanwhile, and its slots were first. Ours are free now: their
        # lease is revoked before anything else is written there, and opened again on the slots that hold the KV now.
        self._decisions.preempted(req.rid)
        self._moved.append(self._lease(req, tokens, tokens))

    def finished(self, req: Req) -> bool:
        if self.kv_pool is not None:
            self.kv_pool.finished(req.rid)
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
