"""The KV pool in SGLang's scheduler process: what is borrowed and promoted before a request is queued, what is saved.

Both parts of the pool are here, the decisions and the copies, since SGLang's scheduler holds the KV itself. With
several ranks each decides, and all alike, by news on which they agree. The pages of a save are locked in the tree until
they are copied.
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from baton.connectors.agreement import PoolAgreement
from baton.connectors.link import TOKEN_TIME_PARAMETER, LendPrefix
from baton.connectors.pool_events import publish_pool_events
from baton.connectors.pool_lending import Loan
from baton.connectors.pool_rank import PoolRank
from baton.connectors.pool_report import PoolReport
from baton.connectors.pool_scheduler import PoolScheduler
from baton.connectors.rank import RankResults

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import TreeLock

    from baton.connectors.sglang_cache import HandoffCache


class SglangPool:
    def __init__(
        self,
        cache: HandoffCache,
        scheduler: PoolScheduler,
        rank: PoolRank,
        agreement: PoolAgreement,
        model_digest: str,
        *,
        publishes: bool,
    ) -> None:
        """`publishes`: whether this rank's events and reports are taken."""
        self._cache = cache
        self._agreement = agreement
        self._publishes = publishes
        self._lent: list[tuple[bytes, int]] = []
        self._scheduler = scheduler
        self._rank = rank
        self._digest = model_digest
        self._locks: dict[int, TreeLock | None] = {}
        """Locks of the pages that are being saved, by the first of them."""
        self._ended: list[str] = []
        """Requests that have ended; SGLang puts their last KV into the tree after that."""
        cache.pool_events = self.take_events

    @property
    def is_active(self) -> bool:
        return self._rank.is_active

    @property
    def is_busy(self) -> bool:
        return self._scheduler.is_busy or self._rank.is_active

    def admit(self, req: Req, loan: Loan | None, staged_key: bytes = b"") -> None:
        """Note a new request. `staged_key`: see `PoolScheduler.admit`."""
        # Block ids know tokens and salts only.
        if req.multimodal_inputs is None and req.lora_id is None:
            parameters = req.sampling_params.custom_params or {}
            token_s = float(parameters.get(TOKEN_TIME_PARAMETER, 0.0))
            self._scheduler.admit(req.rid, self._digest, req.cache_salt or "", loan, token_s, staged_key)

    def lend(self, order: LendPrefix) -> None:
        """Take an order to lend, to be carried out once all ranks have it; `take_lent` tells how much is lent."""
        self._agreement.ask(order)

    def take_lent(self) -> list[tuple[bytes, int]]:
        """Return the keys and tokens of the loans that were asked for, since the last call."""
        lent, self._lent = self._lent, []
        return lent

    def may_borrow(self, req: Req) -> bool:
        return self._scheduler.may_borrow(req.rid)

    def borrows(self, req: Req, cached_tokens: int) -> bool:
        """Return whether a request waits for what another worker's pool lends beyond `cached_tokens`."""
        return self._scheduler.borrows(req.rid, req.origin_input_ids, cached_tokens)

    def may_load(self, req: Req) -> bool:
        """Return whether the file holds the beginning of a prompt."""
        return self._scheduler.filed(req.rid, req.origin_input_ids)

    def loads(self, req: Req, cached_tokens: int) -> bool:
        """Return whether a request waits for what the file holds beyond `cached_tokens`."""
        return self._scheduler.loads(req.rid, req.origin_input_ids, cached_tokens)

    def offer(self, req: Req, cached_tokens: int) -> int:
        """Return how many tokens of the prompt the pool holds beyond `cached_tokens`, but for the last one."""
        return self._scheduler.offer(req.rid, req.origin_input_ids, cached_tokens)

    def promote(self, req: Req, pages: Sequence[int], *, with_pull: bool) -> None:
        """Order the promotion that was offered into a request's pages; `pages` is the whole of them."""
        self._scheduler.promote(req.rid, pages, with_pull=with_pull, again=False)

    def keep(self, req: Req, pages: Sequence[int], pulled: range) -> None:
        """Order that the full pages of a pull are stored where they are staged."""
        self._scheduler.keep(req.rid, req.origin_input_ids, pages, pulled)

    def checkpointed(self, req: Req, tokens: int, pages: Sequence[int]) -> None:
        """Order saves of the full pages among a request's first `tokens`, which the tree has taken."""
        read = self._scheduler.computes(req.rid, req.full_untruncated_fill_ids[:tokens], pages, tokens)
        if read:
            self._locks[read[0]] = self._cache.lock(req.lock.node) if req.lock is not None else None

    def finished(self, rid: str) -> None:
        self._ended.append(rid)

    def begin(self, leases: Collection[bytes]) -> None:
        """Start the promotions that were ordered. Saves start with the next `end`.

        `leases`: keys of leases of what the step computes. The tree takes its pages after it, so their saves are
        ordered with the next step, when peers may have read all and ended the leases.
        """
        self._rank.begin(self._scheduler.plan(), leases)

    def end(self, results: RankResults) -> None:
        """Take the copies that have ended, and put into `results` the requests whose KV is here in full."""
        for rid in self._ended:
            self._scheduler.finished(rid)
        self._ended.clear()
        self._rank.end(results)
        progress, orders = self._agreement.settle(self._rank.take_progress())
        if progress is not None:
            for page in self._scheduler.progress(progress):
                if page in self._locks:
                    self._cache.unlock(self._locks.pop(page))
        for order in orders:
            tokens = self._scheduler.lend(order.key, order.blocks, order.sink_ranks)
            self._lent.append((order.key, tokens))
        if not self._publishes:
            # Nothing else takes what this rank would tell.
            self._scheduler.report()
            for _ in self.take_events():
                pass

    def received(self, rid: str) -> None:
        """Note that all that a request waited for has ended on all ranks, promotions included."""
        self._scheduler.received(rid)

    def events_heard(self) -> None:
        """Note that the streaming process listens to the engine's events."""
        self._rank.events_heard = True

    @property
    def slots(self) -> int:
        return self._rank.slots

    @property
    def endpoint(self) -> str:
        """Address of the pool's agent, which lends."""
        return self._rank.lending.agent.endpoint if self._rank.lending is not None else ""

    def take_events(self) -> Iterator[KVCacheEvent]:
        """Return what the pool and its file have stored and dropped, in SGLang's own form."""
        # SGLang's hashes are numbers; on their way they may be bytes as well.
        return publish_pool_events(
            self._scheduler,
            self._cache.page_size,
            BlockStored,
            BlockRemoved,
            lambda salt: {"cache_salt": salt or None},
        )

    def report(self) -> PoolReport | None:
        return self._scheduler.report()

    def close(self) -> None:
        self._rank.close()
