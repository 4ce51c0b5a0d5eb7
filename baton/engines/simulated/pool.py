"""The simulated engine's KV pool: the decisions and copies of the real engines' connectors, in the engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from baton.clock import Clock
from baton.connectors.place import RankPlace
from baton.connectors.pool_events import take_pool_events
from baton.connectors.pool_lending import UNCLAIMED_LOAN_TTL_S
from baton.connectors.pool_rank import PoolRank
from baton.connectors.pool_report import PoolReport, Promotion
from baton.connectors.pool_scheduler import PoolScheduler
from baton.connectors.rank import HandoffRank, RankResults
from baton.engines.engine import EngineBlockEvent
from baton.engines.simulated.options import SimulatedOptions
from baton.pool.copier import Copier, ThreadCopier
from baton.pool.file_io import FileTier
from baton.pool.memory import KvPool
from baton.transfer import AgentOptions, Pool, TransferAgent
from baton.transfer.layout import read_layout

MakeFile = Callable[[str, int, KvPool, RankPlace], FileTier | None]
"""Opens the file under a pool, see `open_file`."""


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
        options: SimulatedOptions,
        *,
        agent: AgentOptions,
        make_agent: Callable[[AgentOptions], TransferAgent],
        make_file: MakeFile,
        clock: Clock,
    ) -> None:
        """Reserve the pool beside the engine's `cache`. Raises ConfigurationError if there is no memory for it."""
        memory = KvPool(cache, budget_bytes)
        self.report = PoolReport()
        self._block_tokens = cache.block_tokens
        self._copier = ThreadCopier(memory)
        self._agent = make_agent(replace(agent, port=0, rails=(), unclaimed_ttl_s=UNCLAIMED_LOAN_TTL_S))
        self._agent.set_pool(memory.pool)
        place = RankPlace(layout=read_layout(cache.layout))
        self._clock = clock
        self._changed: Callable[[], None] | None = None
        self._file = make_file(options.kv_file, options.kv_file_bytes, memory, place)
        lending = HandoffRank(self._agent, place, clock.now_s)
        self._rank = PoolRank(memory.slots, self._copier, lending, self._file, clock.now_s)
        self._results = RankResults()
        self.decisions = PoolScheduler(
            block_tokens=cache.block_tokens,
            block_bytes=cache.block_bytes * len(cache.layer_addresses),
            blocks=cache.blocks,
            ranks=1,
            has_file=self._file is not None,
        )
        self.settle()
        self.take_promotions()

    @property
    def slots(self) -> int:
        return self._rank.slots

    @property
    def endpoint(self) -> str:
        return self._agent.endpoint

    def watch(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        """Call `changed` when a copy, a loan or a job of the file may have ended, or is late."""
        self._changed = changed
        for source in self._sources:
            loop.add_reader(source.fileno(), changed)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._changed = None
        for source in self._sources:
            loop.remove_reader(source.fileno())

    @property
    def _sources(self) -> tuple[Copier | TransferAgent | FileTier, ...]:
        return (self._copier, self._agent, *filter(None, (self._file,)))

    def begin(self) -> None:
        """Start what was ordered since the last call. What is saved has been computed by now."""
        plan = self.decisions.plan()
        self._rank.begin(plan)
        for load in plan.filing.loads:
            self._clock.call_later(load.budget_s, self._late)

    def _late(self) -> None:
        if self._changed is not None:
            self._changed()

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
        """Return what the pool and its file have stored and dropped since the last call."""
        return list(take_pool_events(self.decisions, self._block_tokens))

    def close(self) -> None:
        self._rank.close()
