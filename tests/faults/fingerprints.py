"""Measures when the index's fingerprints of all tiers equal every worker's again, after each fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from uuid import uuid4

from baton import subjects
from baton.bus import Bus, NatsBus
from baton.cli.asking import ask_all
from baton.errors import BatonError
from baton.messages.index import IndexQuery, IndexReport, Tier
from tests.faults.record import Fault
from tests.harness.cluster import Observer
from tests.harness.limits import HANG_S

POLL_S = 0.05


@dataclass
class Fingerprints:
    """`await_equal` after each fault; the results are in `equal_s`."""

    bus: Bus
    observer: Observer
    workers: Sequence[str]
    equal_s_max: float = 5.0
    """Time in which the index must agree with all workers."""
    back_s: float = HANG_S
    """Time in which a process that was killed is started again."""
    equal_s: list[tuple[Fault, float]] = field(default_factory=list[tuple[Fault, float]])
    """Faults after which no other one fell too early, and the time until all fingerprints were equal."""
    tiers: set[Tier] = field(default_factory=set[Tier])
    """Tiers on which any worker had a block then."""

    async def await_equal(self, fault: Fault) -> None:
        """Wait until index and workers agree about caches, pools and files.

        The time begins when all that was struck is heard again: a worker by a heartbeat, the index by an answer.
        """
        beats = self.observer.heartbeats
        before = dict(beats)

        def is_back(worker: str) -> bool:
            old, new = before.get(worker), beats.get(worker)
            if old is None or new is None:
                return new is not None
            is_killed = fault.how == "kill" and fault.victim == worker
            return new is not old and (not is_killed or new.address.generation > old.address.generation)

        await self.observer.until(lambda: all(map(is_back, self.workers)), timeout_s=self.back_s)
        wanted = {name: (beat.address.generation, beat.held_sequence) for name, beat in beats.items()}
        began_s = taken_s = 0.0
        async with asyncio.timeout(self.back_s + 2 * self.equal_s_max):
            while taken_s <= 2 * self.equal_s_max:
                asked_s = time.monotonic()
                if (report := await self._ask()) is not None:
                    began_s = began_s or asked_s
                    taken_s = time.monotonic() - began_s
                    if _is_equal(report, wanted):
                        break
                await asyncio.sleep(POLL_S)
        self.equal_s.append((fault, taken_s))
        for beat in beats.values():
            self.tiers |= {tier for tier, held in zip(Tier, beat.fingerprints or (), strict=False) if held.blocks}

    async def _ask(self) -> IndexReport | None:
        asker = uuid4().hex
        query, answers = IndexQuery(asker=asker), subjects.index_answers(asker)
        with suppress(BatonError):
            return next(iter(await ask_all(self.bus, subjects.INDEX_QUERIES, query, answers, IndexReport)), None)
        return None

    def summary(self) -> str:
        if not self.equal_s:
            return "fingerprints: after each fault came another one too early to judge"
        fault, longest_s = max(self.equal_s, key=lambda each: each[1])
        return (
            f"fingerprints ({', '.join(tier.name for tier in sorted(self.tiers))}) were equal after "
            f"{len(self.equal_s)} faults, at most {longest_s:.1f} s after all were back ({fault})"
        )

    @property
    def good(self) -> bool:
        """Whether the index agreed in time after each fault, and there was something on every tier to agree about."""
        return self.tiers == set(Tier) and all(equal_s <= self.equal_s_max for _, equal_s in self.equal_s)


def _is_equal(report: IndexReport, wanted: dict[str, tuple[int, int]]) -> bool:
    known = {each.worker: (each.generation, each.agreed_sequence) for each in report.workers}
    return all(
        name in known and known[name][0] == generation and known[name][1] >= sequence
        for name, (generation, sequence) in wanted.items()
    )


@asynccontextmanager
async def watched(nats_url: str, workers: Sequence[str], equal_s_max: float) -> AsyncGenerator[Fingerprints]:
    bus, observer = await NatsBus.connect(nats_url, name="faults"), Observer()
    try:
        await bus.subscribe(subjects.HEARTBEAT, observer.see)
        yield Fingerprints(bus, observer, workers, equal_s_max)
    finally:
        await bus.close()
