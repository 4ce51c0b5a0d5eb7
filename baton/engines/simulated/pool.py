"""The simulated engine's KV pool: the decisions and copies of the real engines' connectors, in the engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from baton.connectors.place import RankPlace
from baton.connectors.pool_lending import UNCLAIMED_LOAN_TTL_S
from baton.connectors.pool_rank import PoolRank
from baton.connectors.pool_report import PoolReport, Promotion
from baton.connectors.pool_scheduler import PoolScheduler
from baton.connectors.rank import HandoffRank, RankResults
from baton.engines.engine import EngineBlockEvent, EngineBlocksRemoved, EngineBlocksStored
from baton.messages.index import Tier
from baton.pool.copier import ThreadCopier
from baton.pool.memory import KvPool
from baton.transfer import AgentOptions, Pool, TransferAgent
from baton.transfer.layout import read_layout


@dataclass(frozen=True, slots=True)
class PoolChanges:
    """What has ended at the pool."""

    arrived: dict[str, bool]
    """Requests whose promotion and pull are over, and whether either has failed."""
    unread: tuple[int, ...]
    """The engine's blocks that are not read any more."""
    is_empty: bool


class SimulatedPool:
    """`decisions` is asked by the engine's scheduler. Requests go by the hexadecimal key of their lease."""

    def __init__(
        self,
        cache: Pool,
        budget_bytes: int,
        *,
        agent: AgentOptions,
        make_agent: Callable[[AgentOptions], TransferAgent],
        now_s: Callable[[], float],
    ) -> None:
        """Reserve the pool beside the engine's `cache`. Raises ConfigurationError if there is no memory for it."""
        memory = KvPool(cache, budget_bytes)
        self.report = PoolReport()
        self._block_tokens = cache.block_tokens
        self._copier = ThreadCopier(memory)
        self._agent = make_agent(replace(agent, port=0, rails=(), unclaimed_ttl_s=UNCLAIMED_LOAN_TTL_S))
        self._agent.set_pool(memory.pool)
        lending = HandoffRank(self._agent, RankPlace(layout=read_layout(cache.layout)), now_s)
        self._rank = PoolRank(memory.slots, self._copier, lending)
        self._results = RankResults()
        self.decisions = PoolScheduler(
            block_tokens=cache.block_tokens,
            block_bytes=cache.block_bytes * len(cache.layer_addresses),
            blocks=cache.blocks,
            ranks=1,
        )
        self.settle()

    @property
    def slots(self) -> int:
        return self._rank.slots

    @property
    def endpoint(self) -> str:
        return self._agent.endpoint

    def watch(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        """Call `changed` when a copy or a loan may have ended."""
        for source in (self._copier, self._agent):
            loop.add_reader(source.fileno(), changed)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        for source in (self._copier, self._agent):
            loop.remove_reader(source.fileno())

    def begin(self) -> None:
        """Start what was ordered since the last call. What is saved has been computed by now."""
        self._rank.begin(self.decisions.plan())

    def pulled(self, request: str, *, failed: bool) -> None:
        """Note the end of a request's hand-off; the next `settle` says whether its KV is here in full."""
        self._results.received.add(request)
        if failed:
            self._results.failed.add(request)

    def settle(self) -> PoolChanges:
        """Take what has ended."""
        results, self._results = self._results, RankResults()
        self._rank.end(results)
        progress = self._rank.take_progress()
        unread = self.decisions.progress(progress) if progress is not None else ()
        for request in results.received:
            self.decisions.received(request)
        arrived = {request: request in results.failed for request in results.received}
        return PoolChanges(arrived, unread, is_empty=progress is None and not arrived)

    def take_promotions(self) -> tuple[Promotion, ...]:
        """Renew `report`, and return the promotions that have ended since the last call."""
        report = self.decisions.report()
        if report is None:
            return ()
        self.report = msgspec.structs.replace(report, ended=())
        return report.ended

    def take_events(self) -> list[EngineBlockEvent]:
        """Return what the pool has stored and dropped since the last call."""
        runs, removed = self.decisions.take_changes()
        events: list[EngineBlockEvent] = []
        if removed:
            events.append(EngineBlocksRemoved(hashes=removed, tier=Tier.POOL))
        events += [
            EngineBlocksStored(
                parent=run.parent or None,
                hashes=run.keys,
                tokens=run.tokens,
                block_tokens=self._block_tokens,
                cache_salt=run.salt,
                tier=Tier.POOL,
            )
            for run in runs
        ]
        return events

    def close(self) -> None:
        self._rank.close()
