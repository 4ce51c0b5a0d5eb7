"""Places one attempt: asks the index what workers hold, has `choose` decide, and tells the others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec

from baton import subjects
from baton.bus import Retention
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    MalformedMessage,
    ModelNotFound,
    NoWorkers,
    Overloaded,
)
from baton.messages.base import Context, Refused, WorkerAddress
from baton.messages.codec import AnyMessage
from baton.messages.decisions import Verdict
from baton.messages.index import Match, Matched
from baton.messages.placement import Place, Placed, Placement
from baton.node.service import Node
from baton_scheduler.breakers import Breakers, Cause, Pair
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.loads import Loads
from baton_scheduler.placement import PlacementOptions, choose, soft_placements
from baton_scheduler.policies import POLICIES
from baton_scheduler.policies.protocol import Question
from baton_scheduler.prediction import Demand, PrefixMatch, session_of
from baton_scheduler.recorder import ObservedPolicy, Recorder
from baton_scheduler.team import Serving

logger = logging.getLogger(__name__)

FIRST_ASK_SHARE: Final = 0.3
"""Share of the index timeout after which all indexes are asked. One index mostly answers within a tenth of it."""
WAIT_GROWTH: Final = 4.0
"""An attempt may wait at its worker for this many times the longest predicted wait: predictions err."""
PASSED_OVER_MAX: Final = 4
"""Workers and pairs that a placement's reason names as passed over."""


class Choice(msgspec.Struct, frozen=True, eq=False):
    """A placement that is counted nowhere yet."""

    placement: Placement
    model_digest: str
    question: Question | None
    """What the policy was asked."""


class Committed(msgspec.Struct, frozen=True, eq=False):
    """A placement that is counted here, and that others have still to be told of."""

    place: Place
    choice: Choice
    placed: Placed
    without_index: bool
    held_s: float


class Placer:
    def __init__(self, settings: SchedulerSettings, node: Node, loads: Loads, breakers: Breakers, name: str) -> None:
        self._settings = settings
        self._bus = node.ports.bus
        self._clock = node.ports.clock
        self._random = node.ports.random
        self._loads = loads
        self._breakers = breakers
        self._name = name
        self._policy = ObservedPolicy(POLICIES[settings.policy]())
        retention = Retention(age_s_max=settings.decisions_kept_s, bytes_max=settings.decisions_bytes_max)
        self.recorder = Recorder(node.ports, retention, scheduler=name, policy=settings.policy)
        self._options = PlacementOptions(output_headroom_tokens=settings.output_headroom_tokens)
        self.results = Counter[str]()
        """Placements by kind, and refusals by code."""
        self.without_index = 0
        self.asked_again = 0

    async def look_up(self, place: Place, trace: str) -> PrefixMatch | None:
        """Return how many leading blocks each worker holds; None where the index does not answer in time.

        Raises ModelNotFound or NoWorkers.
        """
        serving = self._serving(place.model)
        if not place.blocks:
            return PrefixMatch()
        timeout_s = min(self._settings.index_timeout_s, place.context.budget_s)
        context = Context(request=place.context.request, attempt=place.context.attempt, budget_s=timeout_s, trace=trace)
        held: dict[str, int] = {}
        pooled: dict[str, int] = {}
        filed: dict[str, int] = {}
        speculative: dict[str, int] = {}
        until_s = self._clock.now_s() + timeout_s
        try:
            for model_digest in sorted(serving.digests):
                match = Match(context=context, model_digest=model_digest, blocks=place.blocks)
                answer = await self._match(match, until_s)
                if isinstance(answer, Refused):
                    raise answer.error.to_error()
                if not isinstance(answer, Matched):
                    raise MalformedMessage(f"the index answered a Match with {type(answer).__name__}")
                held |= answer.held
                pooled |= answer.pooled
                filed |= answer.filed
                speculative |= answer.speculative
        except BatonError as error:
            logger.warning("placing %s without the index: %s", place.context.request, error)
            return None
        return PrefixMatch(held, speculative, pooled, filed)

    async def _match(self, match: Match, until_s: float) -> AnyMessage:
        """Ask one index, and all of them if that one is late. Raises DeadlineExceeded at `until_s`.

        An index that hangs, or whose machine is gone, stays in the queue group for minutes and is handed its share of
        all matches.
        """
        try:
            left_s = until_s - self._clock.now_s()
            return await self._bus.request(subjects.MATCH, match, timeout_s=left_s * FIRST_ASK_SHARE)
        except DeadlineExceeded:
            self.asked_again += 1
            return await self._bus.request(subjects.MATCH_ALL, match, timeout_s=until_s - self._clock.now_s())

    def choose(self, place: Place, match: PrefixMatch | None, *, without: tuple[str, ...] = ()) -> Choice:
        """Return the best placement at the moment, counted nowhere yet; `without` names workers that are just full.

        Raises what `placement.choose` does, and Overloaded where only these workers are left.
        """
        serving = self._serving(place.model)
        avoided = self._breakers.avoided(self._clock.now_s())
        try:
            placement = self._choose(place, match, serving, without, avoided)
        except NoWorkers:
            # Breakers are preferences. A worker that failed this request may be the better one, so the gateway gives up
            # its own exclusions first.
            if not avoided or place.exclude or place.exclude_pairs:
                raise
            avoided = dict[str | Pair, Cause]()
            placement = self._choose(place, match, serving, without, avoided)
        reason = placement.reason.removesuffix(".")
        if match is None:
            reason += "; the index did not answer, so what workers hold is unknown"
        if passed_over := _passed_over(avoided, serving):
            reason += f"; passed over: {passed_over}"
        wait_s = WAIT_GROWTH * self._settings.place_wait_s_max if placement.predicted.waiting_s > 0 else 0.0
        placement = msgspec.structs.replace(placement, reason=f"{reason}.", wait_s=wait_s, scheduler=self._name)
        team = serving.decode
        decode = team.loads[team.rows[placement.decode.worker]]
        return Choice(placement, decode.heartbeat.model_digest, self._policy.question)

    def _choose(
        self,
        place: Place,
        match: PrefixMatch | None,
        serving: Serving,
        without: tuple[str, ...],
        avoided: Mapping[str | Pair, Cause],
    ) -> Placement:
        demand = Demand(
            model=place.model,
            prompt_tokens=place.prompt_tokens,
            output_tokens_max=place.output_tokens_max,
            disaggregation=place.disaggregation or self._settings.disaggregation,
            exclude=frozenset((*place.exclude, *without, *(key for key in avoided if isinstance(key, str)))),
            exclude_pairs=frozenset((*place.exclude_pairs, *(key for key in avoided if not isinstance(key, str)))),
            parameters=frozenset(place.parameters),
            refused=frozenset(place.refused),
            session=session_of(place),
        )
        try:
            found, now_s = match or PrefixMatch(), self._clock.now_s()
            return choose(demand, serving, found, self._policy, self._options, self._random, now_s)
        except NoWorkers as error:
            if not without:
                raise
            raise Overloaded(error.detail) from error

    def commit(
        self, place: Place, choice: Choice, match: PrefixMatch | None, budget_s: float, *, held_s: float = 0.0
    ) -> Committed:
        """Count a placement that was just chosen. `announce` follows once its gateway has the answer."""
        placed = Placed(
            context=Context(request=place.context.request, attempt=place.context.attempt, budget_s=budget_s),
            scheduler=self._name,
            model_digest=choice.model_digest,
            blocks=place.blocks,
            workers=tuple(WorkerAddress(worker=w.worker, generation=w.generation) for w in choice.placement.addresses),
            prompt_tokens=place.prompt_tokens,
            output_tokens_max=place.output_tokens_max,
            predicted=choice.placement.predicted,
            tenant=place.tenant,
            weight=place.weight,
        )
        self.count(placed)
        return Committed(place, choice, placed, match is None, held_s)

    async def announce(self, committed: Committed) -> None:
        """Tell the indexes and the other schedulers of a placement, and record it."""
        place, placement = committed.place, committed.choice.placement
        # The answer is written at the end of this turn of the event loop, so it wakes the gateway before this wakes the
        # others. What the gateway sends next comes in a later turn, so its match sees the placement.
        await self._clock.sleep(0)
        try:
            await self._bus.publish(subjects.PLACED, committed.placed)
        except BatonError as error:
            logger.debug("the placement of %s was not published: %s", place.context.request, error)
        self.results["aggregated" if placement.prefill is None else "disaggregated"] += 1
        self.without_index += committed.without_index
        logger.debug("%s/%d: %s", place.context.request, place.context.attempt, placement.reason)
        self.recorder.note(
            place,
            Verdict.PLACED,
            placement=placement,
            question=committed.choice.question,
            without_index=committed.without_index,
            held_s=committed.held_s,
        )

    def count(self, placed: Placed) -> None:
        """Count a placement as soft, until heartbeats show it."""
        soft = soft_placements(placed, self._loads, now_s=self._clock.now_s(), options=self._options)
        self._loads.place(placed.context.request, soft)
        self._breakers.note_placed(placed, self._clock.now_s())

    def tokens(self, place: Place | Placed) -> int:
        """Return what a placement costs its tenant."""
        return place.prompt_tokens + min(place.output_tokens_max, self._options.output_headroom_tokens)

    def _serving(self, model: str) -> Serving:
        """Return the live workers of a model. Raises ModelNotFound, or NoWorkers if all departed lately."""
        serving = self._loads.serving(model, self._clock.now_s())
        if not serving and self._loads.served_lately(model):
            raise NoWorkers(f"every worker that served the model {model} has left or is lost")
        if not serving:
            raise ModelNotFound(f"no worker serves the model {model}")
        return serving


def _passed_over(avoided: Mapping[str | Pair, Cause], serving: Serving) -> str:
    """Return which of the avoided workers and pairs serve this model, and why they are avoided."""
    if not avoided:
        return ""
    here = {load.worker for load in serving}
    keys = (((key,) if isinstance(key, str) else key, cause) for key, cause in avoided.items())
    named = [(" → ".join(key), cause) for key, cause in keys if here.issuperset(key)]
    return ", ".join(f"{name} ({cause.text})" for name, cause in named[:PASSED_OVER_MAX])
