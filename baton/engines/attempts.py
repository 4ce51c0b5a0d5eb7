"""Running attempts of an engine and the leases that it holds for them, as every real engine tracks them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from baton.connectors.handoff import Handoff, HandoffLeg, PullOutcome
from baton.engines.engine import EngineRequest, Leg, Stage
from baton.engines.stages import prompt_stages
from baton.errors import (
    AttemptFailed,
    BatonError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    TransferFailed,
)
from baton.messages.attempts import FinishReason
from baton.transfer import lease_key, pull_failure

Item = TypeVar("Item")


@dataclass(slots=True)
class EngineAttempt:
    request: EngineRequest
    key: bytes
    entered_s: float
    deadline_s: float
    outcome: PullOutcome | None = None
    begun: bool = False
    finish: FinishReason | None = None

    @property
    def pulled_tokens(self) -> int:
        return self.outcome.tokens if self.outcome else 0

    def stages(self, scheduled_s: float) -> tuple[Stage, ...]:
        """Return the stages before the first token, which has arrived; `scheduled_s`: 0 if unknown."""
        pulled = self.outcome.groups if self.outcome else ()
        begun_s = min(group.began_s for group in pulled) if pulled else scheduled_s
        return prompt_stages(entered_s=self.entered_s, begun_s=begun_s, ended_s=time.monotonic(), pulled=pulled)


class Attempts:
    def __init__(self) -> None:
        self._running: dict[tuple[str, int], EngineAttempt] = {}
        self._leases: dict[tuple[str, int], bytes] = {}
        """Lease keys of prefill legs, from their start until the connector reports the lease's end."""
        self._leased: dict[bytes, tuple[str, int]] = {}
        """The inverse of `_leases`."""

    @contextmanager
    def enter(self, request: EngineRequest) -> Generator[EngineAttempt]:
        """Register an attempt while it runs; its lease stays longer. Raises AttemptFailed if it is registered."""
        name = (request.request, request.attempt)
        if name in self._running or name in self._leases:
            raise AttemptFailed(f"attempt {request.attempt} of request {request.request} is already here")
        key, now_s = lease_key(*name, request.tokens), time.monotonic()
        attempt = self._running[name] = EngineAttempt(request, key, now_s, now_s + request.budget_s)
        if request.leg is Leg.PREFILL:
            self._leases[name], self._leased[key] = key, name
        try:
            yield attempt
        finally:
            del self._running[name]
            if attempt.finish not in (FinishReason.LENGTH, FinishReason.STOP):
                # Either nothing was leased, or the connector revokes it without being asked.
                self.lease_ended(key)

    def running(self, request: str, attempt: int) -> EngineAttempt | None:
        return self._running.get((request, attempt))

    def lease(self, request: str, attempt: int) -> bytes | None:
        """Return the key of the lease that an attempt still holds."""
        return self._leases.get((request, attempt))

    def lease_ended(self, key: bytes) -> None:
        if (name := self._leased.pop(key, None)) is not None:
            del self._leases[name]

    @property
    def leased(self) -> frozenset[tuple[str, int]]:
        return frozenset(self._leases)


def handoff_of(attempt: EngineAttempt, *, context_tokens_max: int, enabled: bool) -> Handoff | None:
    """Return the hand-off that the connector needs for an attempt; None: the attempt has none.

    Raises InvalidRequest, ContextLengthExceeded and TransferFailed for what no engine can run.
    """
    request = attempt.request
    if not request.tokens:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if len(request.tokens) >= context_tokens_max:
        raise ContextLengthExceeded(
            f"the prompt has {len(request.tokens)} tokens and leaves no room for an answer: "
            f"the model's context has {context_tokens_max}"
        )
    if request.leg is Leg.WHOLE:
        return None
    if not enabled:
        raise TransferFailed("this engine was started without a transfer agent (handoff=false)")
    if request.leg is Leg.PREFILL:
        return Handoff(leg=HandoffLeg.PREFILL, key=attempt.key, sink_ranks=request.sink_ranks)
    if request.source is None or not request.source.agents:
        raise TransferFailed("the decode task names no source with a transfer agent")
    return Handoff(
        leg=HandoffLeg.DECODE,
        key=attempt.key,
        endpoints=request.source.agents,
        deadline_s=attempt.deadline_s,
    )


def pull_error(engine: str, outcome: PullOutcome | None, *, constraint_new: bool = False) -> BatonError:
    """Return the error for a request that the engine ended by itself.

    With `constraint_new` it had a constraint and no token yet, so the engine may have refused that constraint.
    """
    if outcome is None or not outcome.failed:
        if constraint_new:
            return InvalidRequest("the engine refuses the request's constraint, or the text delivered under it")
        return EngineFailed(f"{engine} ended the request with an error")
    detail = f"the prompt's KV did not arrive ({outcome.cause}): {outcome.detail}".removesuffix(": ")
    return pull_failure(outcome.cause, detail)


async def within_budget(attempt: EngineAttempt, stream: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """Yield the items of `stream`; raise DeadlineExceeded if the first does not come within the attempt's budget."""
    try:
        # The loop's clock is `time.monotonic`.
        async with asyncio.timeout_at(attempt.deadline_s):
            first = await anext(stream, None)
    except TimeoutError as error:
        raise DeadlineExceeded(f"the engine gave no output within {attempt.request.budget_s:g} s") from error
    if first is None:
        return
    yield first
    async for item in stream:
        yield item
