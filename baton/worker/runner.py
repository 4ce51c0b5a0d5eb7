"""Runs one attempt through the engine and reports its end to the gateway."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final, cast

from baton import subjects
from baton.bus import Bus
from baton.clock import Clock
from baton.engines.engine import Engine, EngineDelta, EngineRequest, Leg, Stage
from baton.engines.stages import BACKEND
from baton.errors import BatonError, EngineFailed
from baton.messages.attempts import FinishReason, Prefilled, PrefillFailed
from baton.messages.base import Context, WorkerAddress
from baton.telemetry import Metrics, Tracing, catalogue
from baton.worker.attempt import Attempt
from baton.worker.frames import FrameSender
from baton.worker.ledger import Ledger
from baton.worker.loans import Loans
from baton.worker.rates import Rates
from baton.worker.tracing import LegTrace, traced_leg

_log = logging.getLogger("baton.worker")

ABORT_TIMEOUT_S: Final = 10.0


class Runner:
    """Runs attempts. `run` is the task of one attempt; `conclude` reports an end, wherever it was decided."""

    def __init__(
        self,
        *,
        bus: Bus,
        clock: Clock,
        tracing: Tracing,
        metrics: Metrics,
        engine: Engine,
        ledger: Ledger,
        rates: Rates,
        loans: Loans,
        frames: FrameSender,
        address: WorkerAddress,
        on_engine_failed: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._tracing = tracing
        self._metrics = metrics
        self._engine = engine
        self._ledger = ledger
        self._rates = rates
        self._loans = loans
        self._frames = frames
        self._address = address
        self._on_engine_failed = on_engine_failed

    async def run(self, attempt: Attempt, request: EngineRequest, trace: str, lender: str) -> None:
        """Take an accepted attempt from RESERVED to its end. Never raises for a failure of one attempt.

        `lender`: the worker to ask for a loan of the prompt's prefix; empty: none.
        """
        if not self._ledger.enter(attempt.key):
            return
        try:
            with traced_leg(self._tracing, self._address.worker, request, trace) as leg:
                expected_tokens = attempt.prompt_tokens - attempt.uncached_tokens
                token_s = self._rates.prefill_s(attempt.prompt_tokens, attempt.prompt_tokens) / attempt.prompt_tokens
                request = replace(request, computing_token_s=token_s)
                request = await self._loans.borrow(lender, request, expected_tokens)
                # An abort that came meanwhile found nothing in the engine.
                reason = FinishReason.CANCELLED
                if not attempt.stopping:
                    reason = await self._generate(attempt, replace(request, trace=leg.trace), leg)
                leg.finish(attempt, reason)
        except BatonError as error:
            await self._fail(attempt, error)
        except Exception:  # noqa: BLE001 - the one boundary of an attempt: a bug ends it, not the worker
            _log.exception("attempt %s/%d failed", request.request, request.attempt)
            await self._fail(attempt, EngineFailed("the worker failed on this attempt; its log has the reason"))
        else:
            await self._succeed(attempt, reason)

    async def _generate(self, attempt: Attempt, request: EngineRequest, leg: LegTrace) -> FinishReason:
        meter = _Meter(attempt, request, self._rates, self._metrics, self._clock, leg.trace)
        try:
            # Every engine's `generate` is an async generator: closing it abandons the attempt.
            deltas = cast("AsyncGenerator[EngineDelta]", self._engine.generate(request))
            async with aclosing(deltas):
                async for delta in deltas:
                    now_s = self._clock.now_s()
                    meter.note(delta, now_s)
                    leg.note(delta, now_s)
                    index = self._ledger.advance(attempt.key, delta, now_s)
                    if index is not None and delta.tokens and attempt.leg is not Leg.PREFILL:
                        self._frames.add(attempt, index)
                    if delta.finish is None:
                        continue
                    if delta.finish in (FinishReason.STOP, FinishReason.LENGTH) or attempt.stopping:
                        return delta.finish
                    raise EngineFailed(f"the engine ended the attempt by itself: {delta.finish}")
        finally:
            meter.close()
        raise EngineFailed("the engine ended the attempt without a finish reason")

    async def _succeed(self, attempt: Attempt, reason: FinishReason) -> None:
        is_computed = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if attempt.leg is not Leg.PREFILL or not is_computed:
            self._ledger.end(attempt.key, reason, None, self._clock.now_s())
            await self.conclude(attempt)
        elif self._ledger.hold(attempt.key):
            context = self._context(attempt)
            await self._tell(attempt, Prefilled(context=context, worker=self._address.worker, usage=attempt.usage()))
        else:
            # Stopped in the step that computed the prompt: the lease was opened after the abort.
            await self.abort(attempt)

    async def abort(self, attempt: Attempt) -> None:
        """Ask the engine to abort an attempt; its `run` ends once the engine has. Never raises."""
        try:
            async with self._clock.timeout(ABORT_TIMEOUT_S):
                await self._engine.abort(*attempt.key)
        except TimeoutError:
            _log.warning("the engine did not take the abort of attempt %s/%d", *attempt.key)
        except BatonError as error:
            _log.warning("attempt %s/%d could not be aborted: %s", *attempt.key, error)
            self._on_engine_failed()
        except Exception:  # noqa: BLE001 - as in `run`; the ledger's time limit ends the attempt
            _log.exception("attempt %s/%d could not be aborted", *attempt.key)

    async def _fail(self, attempt: Attempt, error: BatonError) -> None:
        if self._ledger.end(attempt.key, FinishReason.ERROR, error, self._clock.now_s()) and not attempt.stopping:
            _log.warning("attempt %s/%d ended: %s", *attempt.key, error)
        await self.conclude(attempt)
        if isinstance(error, EngineFailed):
            self._on_engine_failed()

    async def conclude(self, attempt: Attempt) -> None:
        """Report an attempt's end to its gateway, unless no report is wanted."""
        finish = attempt.finish
        if finish is None or (attempt.stopping and attempt.stop_error is None):
            return
        if attempt.leg is not Leg.PREFILL:
            self._frames.add_whole(attempt.gateway, attempt.frame(len(attempt.tokens), finish))
        elif finish.error is not None:
            context = self._context(attempt)
            await self._tell(attempt, PrefillFailed(context=context, worker=self._address.worker, error=finish.error))

    def _context(self, attempt: Attempt) -> Context:
        request, number = attempt.key
        return Context(request=request, attempt=number, budget_s=max(0.0, attempt.deadline_s - self._clock.now_s()))

    async def _tell(self, attempt: Attempt, message: PrefillFailed | Prefilled) -> None:
        try:
            await self._bus.publish(subjects.gateway(attempt.gateway), message)
        except BatonError as error:
            # Only a hint: without it, the gateway learns the same from its timers and the digests.
            _log.warning("gateway %s could not be told of attempt %s/%d: %s", attempt.gateway, *attempt.key, error)


class _Meter:
    """Times one attempt for the worker's rates and metrics."""

    def __init__(
        self, attempt: Attempt, request: EngineRequest, rates: Rates, metrics: Metrics, clock: Clock, trace: str
    ) -> None:
        self._attempt = attempt
        self._peer = request.source.worker if request.source else ""
        self._rates = rates
        self._metrics = metrics
        self._clock = clock
        self._trace = trace
        self._entered_s = clock.now_s()
        self._prefilling = attempt.leg is not Leg.DECODE
        self._decoding = False
        if self._prefilling:
            rates.prefill_began(self._entered_s)

    def note(self, delta: EngineDelta, now_s: float) -> None:
        if self._decoding:
            self._rates.tokens_came(len(delta.tokens), now_s)
        elif self._prefilling or self._attempt.leg is Leg.DECODE:
            self._note_first(delta, now_s)

    def _note_first(self, delta: EngineDelta, now_s: float) -> None:
        attempt, rates = self._attempt, self._rates
        cancelled = delta.finish is FinishReason.CANCELLED
        if not cancelled:
            self._metrics.observe(catalogue.FIRST_OUTPUT, now_s - self._entered_s, attempt.leg, trace=self._trace)
        if self._prefilling:
            self._prefilling = False
            computed_tokens = 0 if cancelled else attempt.prompt_tokens - delta.cached_tokens
            rates.prefill_ended(computed_tokens, attempt.prompt_tokens, now_s, promotion_s=delta.promotion_s)
        if delta.promotion_s:
            rates.promotion_ended(delta.promoted_bytes, delta.promotion_s)
        if delta.transfer_s:
            rates.transfer_ended(self._peer, _backend(delta.stages), delta.transferred_bytes, delta.transfer_s)
        if attempt.leg is not Leg.PREFILL:
            self._decoding = True
            rates.decode_began(now_s)

    def close(self) -> None:
        now_s = self._clock.now_s()
        if self._prefilling:
            self._rates.prefill_ended(0, self._attempt.prompt_tokens, now_s)
        if self._decoding:
            self._rates.decode_ended(now_s)


def _backend(stages: Sequence[Stage]) -> str:
    """Return the backend of the pull among the stages; empty where the engine cannot tell."""
    groups = (group for stage in stages for group in stage.parts)
    return next((str(group.facts[BACKEND]) for group in groups if BACKEND in group.facts), "")
