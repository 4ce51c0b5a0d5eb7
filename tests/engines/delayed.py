"""Connectors whose pool copies end late and in any order, as planted faults of these need it to show."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from gated import GatedConnector

from baton.connectors.place import RankPlace
from baton.connectors.pool_plan import PoolProgress
from baton.connectors.pool_rank import PoolRank
from baton.connectors.pool_scheduler import PoolScheduler
from baton.connectors.rank import RankResults
from baton.connectors.vllm import BatonConnector
from baton.pool.copier import Copier, CopyJob, ThreadCopier
from baton.pool.memory import KvPool
from baton.transfer import Pool

DELAY_S = 0.3


class DelayedCopier(ThreadCopier):
    """Takes any of the jobs that wait, after a delay. Bytes are read and written at its end."""

    def __init__(self, pool: KvPool) -> None:
        self._random = Random(1)
        super().__init__(pool)

    def _next(self) -> CopyJob | None:
        job = super()._next()
        if job is None:
            return None
        time.sleep(DELAY_S)
        with self._changed:
            (self._promotions if job.promotes else self._saves).append(job)
            queue = self._random.choice([queue for queue in (self._promotions, self._saves) if queue])
            queue.rotate(self._random.randrange(len(queue)))
            return queue.popleft()


class HoldingCopier(ThreadCopier):
    """Begins no save before `$BATON_TEST_GATE/copy` exists: it reads the engine's blocks then, not when it was told."""

    def _next(self) -> CopyJob | None:
        return self._next_behind("copy", held=self._saves, others=self._promotions)

    def _next_behind(self, gate: str, *, held: deque[CopyJob], others: deque[CopyJob]) -> CopyJob | None:
        opened = Path(os.environ["BATON_TEST_GATE"]) / gate
        with self._changed:
            while not self._closed:
                if others:
                    return others.popleft()
                if held and opened.exists():
                    return held.popleft()
                self._changed.wait(0.01)
            return None


class WaitingCopier(HoldingCopier):
    """Begins no promotion before `$BATON_TEST_GATE/promote` exists."""

    def _next(self) -> CopyJob | None:
        return self._next_behind("promote", held=self._promotions, others=self._saves)


class WaitingConnector(GatedConnector):
    def make_copier(self, pool: KvPool) -> Copier:
        return WaitingCopier(pool)


class HoldingConnector(BatonConnector):
    def make_copier(self, pool: KvPool) -> Copier:
        return HoldingCopier(pool)


class DelayedConnector(BatonConnector):
    def make_copier(self, pool: KvPool) -> Copier:
        return DelayedCopier(pool)


class _PromisesEarly(PoolRank):
    def end(self, results: RankResults) -> None:
        for arrival in self._arrivals.values():
            arrival.copying = False
        self._requests.clear()
        super().end(results)


class _FreesEarly(PoolScheduler):
    def computes(
        self, request: str, tokens: Sequence[int], table: Sequence[int], computed_tokens: int
    ) -> tuple[int, ...]:
        super().computes(request, tokens, table, computed_tokens)
        return ()

    def progress(self, progress: PoolProgress) -> tuple[int, ...]:
        super().progress(progress)
        return ()


class PromisingConnector(DelayedConnector):
    """Planted fault: a request goes on before its promotion is copied."""

    def _start_pool(self, cache: Pool, place: RankPlace) -> None:
        super()._start_pool(cache, place)
        assert self._pool_rank is not None
        self._pool_rank.__class__ = _PromisesEarly


class FreeingConnector(HoldingConnector):
    """Planted fault: blocks are free although a copy still reads them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._pool_scheduler is not None:
            self._pool_scheduler.scheduler.__class__ = _FreesEarly
