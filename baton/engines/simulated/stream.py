"""One attempt in the simulated engine, from its request to the deltas that are not read yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.connectors.pool_report import Promotion
from baton.engines.engine import EngineDelta, EngineRequest, Leg, Stage
from baton.engines.simulated.handoff import SimulatedLease
from baton.engines.simulated.kv import ContextReader
from baton.engines.simulated.scheduler import SimulatedAttempt
from baton.engines.stages import prompt_stages
from baton.errors import AttemptFailed, BatonError, ContextLengthExceeded, InvalidRequest
from baton.messages.attempts import FinishReason, TokenLogprob
from baton.transfer import lease_key


class Change:
    """An event for one reader: `asyncio.Event` is for several, and costs half as much again."""

    __slots__ = ("_is_set", "_loop", "_reader")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_set = False
        self._reader: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        if not self._is_set:
            assert self._reader is None or self._reader.done(), "a stream has one reader"
            self._reader = self._loop.create_future()
            await self._reader


@dataclass(slots=True, eq=False)
class Stream:
    """One attempt and its unread output (bounded by the tokens it may generate)."""

    request: EngineRequest
    attempt: SimulatedAttempt
    lease: SimulatedLease
    reader: ContextReader
    stops: frozenset[int]
    is_determined: bool
    """See `sampling.is_determined`."""
    entered_s: float
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish: FinishReason | None = None
    error: BatonError | None = None
    pull_error: BatonError | None = None
    """Failure of its hand-off, while a promotion still runs."""
    promotion: Promotion | None = None
    begun_s: float | None = None
    """Start of its first step or of its pull."""
    delta_taken: bool = False
    """True once a delta was taken."""
    changed: Change = field(default_factory=lambda: Change(asyncio.get_running_loop()))

    @classmethod
    def of(
        cls,
        request: EngineRequest,
        reader: ContextReader,
        stops: frozenset[int],
        now_s: float,
        *,
        is_determined: bool,
    ) -> Stream:
        attempt = SimulatedAttempt(
            key=(request.request, request.attempt),
            leg=request.leg,
            tokens=list(request.tokens),
            prompt_tokens=len(request.tokens),
            cache_salt=request.cache_salt,
        )
        lease = SimulatedLease(lease_key(request.request, request.attempt, request.tokens))
        attempt.name = lease.key.hex()
        return cls(request, attempt, lease, reader, stops, is_determined, now_s)

    @property
    def deadline_s(self) -> float:
        return self.entered_s + self.request.budget_s

    def begin(self, now_s: float) -> None:
        """Note that the engine starts the attempt, for the first time or again."""
        if self.begun_s is None:
            self.begun_s = now_s

    def take_delta(self, now_s: float) -> EngineDelta | None:
        """Return the new output. Raises the attempt's error after everything before it was taken."""
        self.changed.clear()
        if not self.tokens and self.finish is None:
            if self.error is not None:
                raise self.error
            return None
        promotion = None if self.delta_taken else self.promotion
        delta = EngineDelta(
            tokens=self.tokens,
            logprobs=self.logprobs,
            finish=self.finish,
            cached_tokens=self.attempt.cached_tokens,
            promoted_tokens=promotion.tokens if promotion else 0,
            loaded_tokens=promotion.loaded_tokens if promotion else 0,
            promoted_bytes=promotion.copied_bytes if promotion else 0,
            promotion_s=promotion.copying_s if promotion else 0.0,
            borrowed=promotion.borrowed if promotion else None,
            transferred_tokens=self.attempt.pulled_tokens,
            transferred_bytes=self.lease.pulled_bytes,
            transfer_s=self.lease.moving_s,
            stages=() if self.delta_taken else self._stages(now_s),
        )
        self.delta_taken = True
        self.tokens = []
        if self.logprobs:
            self.logprobs = []
        return delta

    def _stages(self, now_s: float) -> tuple[Stage, ...]:
        return prompt_stages(
            entered_s=self.entered_s,
            begun_s=now_s if self.begun_s is None else self.begun_s,
            ended_s=now_s,
            pulled=self.lease.watch.groups() if self.lease.watch else (),
        )


def check_request(request: EngineRequest, *, vocabulary: int, context_tokens_max: int) -> None:
    """Raise InvalidRequest for a prompt that this engine cannot run, AttemptFailed for an impossible leg."""
    if not request.tokens:
        raise InvalidRequest("a prompt needs at least one token", param="prompt")
    wrong = next((token for token in request.tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocabulary}", param="prompt")
    if len(request.tokens) >= context_tokens_max:
        raise ContextLengthExceeded(
            f"the prompt has {len(request.tokens)} tokens, which leaves no room for an answer in a context of "
            f"{context_tokens_max}",
            param="prompt",
        )
    if (request.source is not None) != (request.leg is Leg.DECODE):
        raise AttemptFailed(f"a {request.leg} leg {'needs a' if request.source is None else 'has no'} source")
    if request.source is not None and len(request.source.agents) != 1:
        raise AttemptFailed(f"the source has {len(request.source.agents)} agents; this engine has one")
