"""Records decisions in a stream, for `baton explain`.

A decision is only noted when it is made: references to vectors that do not change any more, in a bounded queue. A task
packs and publishes it later. Where the queue is full, decisions are dropped and counted; placing never waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from math import inf
from typing import Final

import msgspec
import numpy as np

from baton import subjects
from baton.bus import Retention
from baton.errors import BatonError
from baton.messages.base import ErrorReport
from baton.messages.decisions import Considered, Decision, Verdict
from baton.messages.placement import Candidate, Place, Placement
from baton.node.ports import Ports
from baton_scheduler.policies.protocol import Policy, Question
from baton_scheduler.prediction import Computing, Receiving

logger = logging.getLogger(__name__)

NOTED_MAX: Final = 128
"""Decisions that wait to be published."""
ROWS_MAX: Final = 64
"""Workers listed for each leg."""
LEGS_MAX: Final = 8
NAMES_MAX: Final = 16
"""Workers listed as avoided."""
BATCH_S: Final = 0.1
"""Longest time for which decisions are gathered: they are packed and written together, and no answer waits for that."""
BATCH: Final = 16
"""Decisions packed in one step of the event loop: requests that arrive need not wait for all that was noted."""
KEEP_AGAIN_S: Final = 30.0
"""Interval at which the stream is looked at: it may be missing, or another scheduler changed it at the same moment."""
KEEP_RETRY_S: Final = 3.0
"""Time after which it is looked at again where that failed: what is published without a stream is lost."""


class ObservedPolicy(Policy):
    """A policy that remembers what it was asked last."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.question: Question | None = None

    def rank(self, question: Question) -> list[Candidate]:
        self.question = question
        return self._policy.rank(question)


class NotedLeg(msgspec.Struct, frozen=True, eq=False):
    """One leg of a decision."""

    name: str
    leg: Computing | Receiving


class Noted(msgspec.Struct, frozen=True, eq=False):
    """A decision that is not packed yet."""

    decision: Decision
    legs: tuple[NotedLeg, ...]


class Recorder:
    """Decisions of one scheduler. `run` is its task."""

    def __init__(self, ports: Ports, retention: Retention, *, scheduler: str, policy: str) -> None:
        self._bus = ports.bus
        self._clock = ports.clock
        self._retention = retention
        self._scheduler = scheduler
        self._policy = policy
        self._noted: deque[Noted] = deque()
        self._begun = asyncio.Event()
        """Set while something is noted."""
        self._half_full = asyncio.Event()
        self._kept = retention
        """Bounds of the stream, as they were last."""
        self._is_failing = False
        """Whether the stream could not be looked at last; it is logged once."""
        self.published = 0
        self.dropped = 0

    def note(
        self,
        place: Place,
        verdict: Verdict,
        *,
        placement: Placement | None = None,
        question: Question | None = None,
        error: BatonError | None = None,
        held_s: float = 0.0,
        without_index: bool = False,
    ) -> None:
        """Note a decision of this instant: the placement that it is about, and what the policy was asked for it.

        Takes a few microseconds, whatever the number of workers.
        """
        if not place.gateway:
            return  # A probe of readiness.
        if len(self._noted) >= NOTED_MAX:
            self.dropped += 1
            return
        avoided = (*place.exclude, *place.refused, *place.unavailable)
        decision = Decision(
            request=place.context.request,
            attempt=place.context.attempt,
            scheduler=self._scheduler,
            at_s=self._clock.wall_s(),
            verdict=verdict,
            policy=self._policy,
            model=place.model,
            prompt_tokens=place.prompt_tokens,
            output_tokens_max=place.output_tokens_max,
            held_s=held_s,
            avoided=avoided[:NAMES_MAX],
            avoided_left_out=max(0, len(avoided) - NAMES_MAX),
            without_index=without_index,
            reason=placement.reason if placement else "",
            candidates=placement.candidates if placement else (),
            error=ErrorReport.of(error) if error else None,
        )
        legs = tuple(_legs(question))[:LEGS_MAX] if question else ()
        self._noted.append(Noted(decision, legs))
        self._begun.set()
        if len(self._noted) >= NOTED_MAX // 2:
            self._half_full.set()

    async def run(self) -> None:
        """Publish what is noted, for ever."""
        reconnects, keep_at_s = -1, -inf
        while True:
            with suppress(TimeoutError):
                async with self._clock.timeout(max(0.0, keep_at_s - self._clock.now_s())):
                    await self._begun.wait()
            # A server that came back may have lost its streams.
            if reconnects != self._bus.reconnects or self._clock.now_s() >= keep_at_s:
                reconnects = self._bus.reconnects
                is_kept = await self._keep()
                keep_at_s = self._clock.now_s() + (KEEP_AGAIN_S if is_kept else KEEP_RETRY_S)
            if not self._begun.is_set():
                continue
            with suppress(TimeoutError):
                async with self._clock.timeout(BATCH_S):
                    await self._half_full.wait()
            self._half_full.clear()
            await self.publish_noted()

    async def publish_noted(self) -> None:
        """Publish all that is noted."""
        while self._noted:
            for _ in range(min(BATCH, len(self._noted))):
                try:
                    decision = self.pack_next()
                    await self._bus.publish(subjects.decisions(decision.request), decision)
                    self.published += 1
                except BatonError as error:
                    self.dropped += 1
                    logger.debug("a decision was not recorded: %s", error)
                except Exception:
                    # The boundary of one record: without it, placements are as good.
                    self.dropped += 1
                    logger.exception("a decision could not be recorded")
            await self._clock.sleep(0)

    async def _keep(self) -> bool:
        """Make the stream, or widen its bounds to this scheduler's; return False where it may be missing."""
        try:
            kept = await self._bus.keep(subjects.DECISIONS_STREAM, subjects.DECISIONS_ALL, self._retention)
        except BatonError as error:
            if not self._is_failing:
                logger.warning("decisions are not kept, so `baton explain` cannot show them: %s", error)
            self._is_failing = True
            return False
        self._is_failing = False
        if kept != self._kept:
            logger.warning(
                "decisions are kept for %g s and %d bytes, more than this scheduler asks for: see docs/explain.md",
                kept.age_s_max,
                kept.bytes_max,
            )
            self._kept = kept
        return True

    def pack_next(self) -> Decision:
        """Return the decision that was noted first, with the terms of the workers."""
        noted = self._noted.popleft()
        if not self._noted:
            self._begun.clear()
        ranked = noted.decision.candidates
        chosen = {ranked[0].decode, ranked[0].prefill} if ranked else set[str]()
        return msgspec.structs.replace(noted.decision, considered=tuple(pack_leg(leg, chosen) for leg in noted.legs))


def _legs(question: Question) -> Iterator[NotedLeg]:
    if question.whole is not None:
        yield NotedLeg("aggregated", question.whole)
    for source, sink in question.pools:
        yield NotedLeg("prefill", source)
        yield NotedLeg("decode", sink)


def pack_leg(noted: NotedLeg, chosen: Collection[str]) -> Considered:
    """Return the workers of a leg with their terms: all of them, or the cheapest and in any case the chosen one."""
    leg, names, rows = noted.leg, tuple(noted.leg.places), noted.leg.rows
    left_out = len(leg) - ROWS_MAX
    if left_out <= 0:
        listed, left_out = list(range(len(leg))), 0
    else:
        ranks = leg.cost_s.copy()
        for name in chosen:
            # The rows are in order.
            index = np.searchsorted(rows, leg.places.get(name, len(names)))
            if index < len(rows) and names[rows[index]] == name:
                ranks[index] = -inf
        listed = np.argpartition(ranks, ROWS_MAX)[:ROWS_MAX].tolist()
    terms, values = leg.terms(listed)
    workers = names if len(listed) == len(names) else tuple(map(names.__getitem__, rows[listed]))
    return Considered(leg=noted.name, workers=workers, terms=terms, values=values, left_out=left_out)
