"""Translates SGLang's requests for `HandoffScheduler`, and its decisions for SGLang.

decode    parked ──room for its KV──▶ pulling ──all of it is here──▶ SGLang's queue, behind a prefix hit
                                         └──failed, aborted──▶ slots freed once nothing writes them
prefill   SGLang's queue ──chosen──▶ leased, each layer posted as it is written ──▶ held until no peer reads
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from baton.connectors.agreement import RankAgreement
from baton.connectors.handoff import Handoff, HandoffLeg, HandoffScheduler, LeaseStep
from baton.connectors.link import HANDOFF_PARAMETER
from baton.connectors.rank import ALL_LAYERS, HandoffRank
from baton.connectors.sglang_cache import Arrival, HandoffCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import KVCache


@dataclass(slots=True)
class _Pulling:
    req: Req
    arrival: Arrival
    spare_tokens: int
    aborted: bool = False


class Handoffs:
    """One engine's hand-offs. Requests are named by SGLang's ids, which are our keys."""

    def __init__(
        self,
        cache: HandoffCache,
        pool: KVCache,
        rank: HandoffRank,
        agreement: RankAgreement,
        enqueue: Callable[[Req], None],
    ) -> None:
        self.rank = rank
        self.pulled_tokens = 0
        """Tokens pulled for all requests so far."""
        self._cache = cache
        self._agreement = agreement
        self._enqueue = enqueue
        self._decisions = HandoffScheduler(cache.page_size)
        self._parked: deque[Req] = deque()
        self._pulling: dict[str, _Pulling] = {}
        self._leased_pages: dict[str, torch.Tensor] = {}
        self._moved: list[LeaseStep] = []
        cache.retention = self
        # Read by the hook on SGLang's `set_kv_buffer`: see `baton.engines.sglang.plugins`.
        pool.baton_layer_saved = lambda layer: rank.layer_saved(layer - pool.start_layer)  # pyright: ignore

    @property
    def waiting(self) -> int:
        return len(self._parked) + len(self._pulling)

    @property
    def is_idle(self) -> bool:
        return self._decisions.is_idle and not self.waiting and not self._cache.has_handoffs

    # Requests.

    def admit(self, req: Req) -> bool:
        """Note a new request's hand-off; return whether it has to wait for KV."""
        parameters = req.sampling_params.custom_params
        text = parameters.get(HANDOFF_PARAMETER) if parameters else None
        # SGLang ends a request that it refuses, such as for its grammar, in the queue of those to be computed.
        if text is None or req.is_retracted or req.to_finish is not None:
            return False
        handoff = msgspec.json.decode(text, type=Handoff)
        self._decisions.admit(req.rid, handoff, len(req.origin_input_ids))
        if handoff.leg is HandoffLeg.DECODE:
            self._parked.append(req)
            return True
        return False

    def aborted(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Forget the matching requests that wait for KV; slots that a pull writes stay until it has ended."""
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
        """Note that SGLang took a request out of its queue, or stopped computing its prompt."""
        self._decisions.finished(req.rid, computed=False)
        self._cache.withdraw(req.rid)

    # Steps.

    def settle(self) -> list[Req]:
        """Take the transfers that have ended on all ranks, and start pulls that have room. Called between two steps.

        Returns the requests whose KV did not come.
        """
        results, failed = self._agreement.settle(self.rank.end(), self._pulling, self._leased_pages), []
        for rid in results.failed.difference(results.received):
            # Failed on some rank: the others need not go on.
            self._decisions.finished(rid, computed=False)
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
            self._cache.free_leased(rid)
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

    # Calls from the cache.

    def checkpointed(self, req: Req, tokens: int) -> None:
        leased = self._leased_pages.get(req.rid)
        if leased is None or torch.equal(leased, self._row_pages(req, len(leased) * self._cache.page_size)):
            return
        # Another request computed the same prompt meanwhile, and its slots were first. Ours are free now: their
        # lease is revoked before anything else is written there, and opened again on the slots that hold the KV now.
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
