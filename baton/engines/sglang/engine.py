"""SGLang in this process: `sglang.Engine`, whose schedulers and detokenizer are children that die with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import msgspec

from baton.connectors.link import (
    DELIVERED_PARAMETER,
    HANDOFF_PARAMETER,
    KV_DID_NOT_ARRIVE,
    LOAN_PARAMETER,
    TOKEN_TIME_PARAMETER,
    AskStats,
    EndLease,
    EventsHeard,
    LendPrefix,
    Opened,
    PrefixLent,
    RankReport,
    Report,
    SetFaults,
    Stats,
    StepReport,
)
from baton.engines.attempts import Attempts, EngineAttempt, handoff_of, pull_error, within_budget
from baton.engines.engine import (
    EngineDelta,
    EngineEventBatch,
    EngineFacts,
    EngineLoad,
    EngineRequest,
    Leg,
    TransferFigures,
)
from baton.engines.kv_events import KvEventListener
from baton.engines.options import split_options
from baton.engines.recorder import LoadRecorder
from baton.engines.refusals import sentence_of
from baton.engines.sglang.host import SglangHost
from baton.engines.sglang.options import DIALECT, tensor_parallel_ranks
from baton.errors import BatonError, EngineFailed, InvalidRequest
from baton.messages.attempts import FinishReason, Sampling
from baton.messages.workers import Role
from baton.transfer import AgentOptions, TransferFaults

EVENTS_CONNECT_TIMEOUT_S: Final = 10.0
STATS_TIMEOUT_S: Final = 10.0
LEND_TIMEOUT_S: Final = 10.0

_FINISH_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}


class SglangEngine:
    """See `baton.engines.engine.Engine`."""

    def __init__(self, model: str, *, role: Role, options: Mapping[str, object], agent: AgentOptions) -> None:
        self._model = model
        self._role = role
        self._own, self._options = split_options(options, DIALECT)
        self._agent = agent
        self._host: SglangHost | None = None
        self._opened: Opened | None = None
        """Facts of the first rank, which are all ranks' but for its agent and the size of its blocks."""
        self._hands_off = False
        self._listener: KvEventListener | None = None
        self._failure = "the engine has not been started"
        self._died = asyncio.Event()
        self._ranks = tensor_parallel_ranks(self._options)
        self._recorder = LoadRecorder(self._ranks)
        self._attempts = Attempts()
        self._recorder.on_lease_ended = self._attempts.lease_ended
        self._begun_s: dict[bytes, float] = {}
        """Instants at which running attempts were first computed; 0: not yet, or not known."""
        self._lending: dict[bytes, asyncio.Future[int]] = {}
        """Loans that the scheduler has not answered yet, by key."""
        self._stats: dict[int, Stats] = {}
        """Answers to `AskStats`, by rank."""
        self._all_stats = asyncio.Event()

    async def start(self) -> EngineFacts:
        self._host = SglangHost(self._model, self._role, self._own, self._options, self._agent)
        self._host.on_report, self._host.on_death = self._take_report, self._died_unexpectedly
        # SGLang begins by saying that its cache is empty.
        self._listener = KvEventListener(DIALECT.engine, self._host.events_endpoint, initial_batches=1)
        self._listener.start()
        try:
            ranks = await self._host.start()
            self._opened = ranks[0]
            self._failure = ""
            await self._listener.connected(EVENTS_CONNECT_TIMEOUT_S)
            self._host.tell(EventsHeard())
        except BaseException:
            await self.close()
            raise
        from baton.engines.sglang.sampling import PARAMETERS

        opened, agents = self._opened, tuple(rank.endpoint for rank in ranks if rank.endpoint)
        self._hands_off = bool(agents)
        return EngineFacts(
            engine=f"sglang {opened.version}",
            model_digest=self._host.digest,
            block_tokens=opened.block_tokens,
            kv_blocks=opened.blocks,
            kv_bytes_per_token=sum(rank.block_bytes for rank in ranks) // opened.block_tokens,
            running_max=opened.running_max,
            step_tokens_max=opened.step_tokens_max,
            context_tokens_max=opened.context_tokens_max,
            kv_identity=opened.kv_identity,
            agents=agents,
            parameters=tuple(sorted(PARAMETERS)) if opened.grammars else (),
            pool_blocks=opened.pool_blocks,
            pool_agents=tuple(rank.pool_endpoint for rank in ranks if rank.pool_endpoint),
        )

    def check_sampling(self, sampling: Sampling) -> None:
        from baton.engines.sglang.sampling import sampling_params

        opened = self._alive()[1]
        sampling_params(sampling, opened.vocabulary, grammars=opened.grammars)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        host, opened = self._alive()
        with self._attempts.enter(request) as attempt:
            fields = self._fields(attempt, opened)
            self._begun_s[attempt.key] = 0.0
            generating = host.generate(attempt.key.hex(), list(request.tokens), **fields)
            try:
                async with aclosing(generating), aclosing(self._until_death(generating)) as stream:
                    async for step in within_budget(attempt, stream):
                        yield self._delta(attempt, step)
            except BatonError:
                raise
            except Exception as error:
                sentence = sentence_of(error)
                raise EngineFailed(f"SGLang ended the request with {type(error).__name__}: {sentence}") from error
            finally:
                self._begun_s.pop(attempt.key, None)
                self._recorder.take_outcome(attempt.key)

    async def abort(self, request: str, attempt: int) -> None:
        host, _ = self._alive()
        if running := self._attempts.running(request, attempt):
            host.abort(running.key.hex())
        if key := self._attempts.lease(request, attempt):
            host.tell(EndLease(key=key))

    async def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        host, _ = self._alive()
        if (lent := self._lending.get(key)) is None:
            lent = self._lending[key] = asyncio.get_running_loop().create_future()
            host.tell(LendPrefix(key=key, blocks=blocks, sink_ranks=sink_ranks))
        try:
            async with asyncio.timeout(LEND_TIMEOUT_S):
                return await asyncio.shield(lent)
        except TimeoutError as error:
            raise EngineFailed(f"SGLang did not answer within {LEND_TIMEOUT_S:g} s") from error
        finally:
            self._lending.pop(key, None)

    def load(self) -> EngineLoad:
        self._alive()
        return replace(self._recorder.load, leased=self._attempts.leased)

    def transfers(self) -> TransferFigures:
        self._alive()
        return self._recorder.transfers()

    async def events(self) -> AsyncIterator[EngineEventBatch]:
        self._alive()
        assert self._listener is not None
        async for batch in self._listener.events():
            yield batch

    async def check_health(self) -> None:
        self._alive()

    async def close(self) -> None:
        self._end("the engine has been closed")
        if self._host is not None:
            await self._host.stop()
            self._host = None

    async def set_faults(self, faults: TransferFaults, rank: int | None = None) -> None:
        """Inject faults at one rank's agent, or at all, for tests and benchmarks."""
        self._alive()[0].tell(SetFaults(faults=faults, rank=rank))

    async def transfer_stats(self) -> list[dict[str, Any]]:
        """Return the agents' counters by rank, for tests and benchmarks; one call at a time."""
        host, _ = self._alive()
        self._stats.clear()
        self._all_stats.clear()
        host.tell(AskStats())
        async with asyncio.timeout(STATS_TIMEOUT_S):
            await self._all_stats.wait()
        return [{**stats.figures, "layers_arrived": stats.layers_arrived} for _, stats in sorted(self._stats.items())]

    # ------------------------------------------------------------ inside

    def _alive(self) -> tuple[SglangHost, Opened]:
        if self._failure or self._host is None or self._opened is None:
            raise EngineFailed(self._failure)
        return self._host, self._opened

    def _died_unexpectedly(self) -> None:
        self._end("SGLang's engine process has died")

    def _end(self, failure: str) -> None:
        self._failure = self._failure or failure
        self._died.set()
        for lent in self._lending.values():
            if not lent.done():
                lent.set_exception(EngineFailed(self._failure))
        if self._listener is not None:
            self._listener.close()

    async def _until_death(
        self, generating: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the items of `generating`; a killed engine sends nothing to the requests that wait for it."""
        died = step = asyncio.ensure_future(self._died.wait())
        try:
            while True:
                step = asyncio.ensure_future(anext(generating, None))
                await asyncio.wait((step, died), return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    raise EngineFailed(self._failure)
                if (result := step.result()) is None:
                    return
                yield result
        finally:
            step.cancel()
            died.cancel()
            await asyncio.gather(step, died, return_exceptions=True)

    def _fields(self, attempt: EngineAttempt, opened: Opened) -> dict[str, object]:
        from baton.engines.sglang.sampling import prefill_params, sampling_params

        request, sampling = attempt.request, attempt.request.sampling
        handoff = handoff_of(attempt, context_tokens_max=opened.context_tokens_max, enabled=self._hands_off)
        largest = max(request.tokens)
        if largest >= opened.vocabulary:
            raise InvalidRequest(f"token id {largest} is not in the vocabulary of {opened.vocabulary}", param="prompt")
        if request.leg is Leg.PREFILL:
            params = prefill_params()
        else:
            # SGLang refuses requests that exceed its context, or ask for more tokens than that has room for; other
            # engines end the answer there.
            room = opened.context_tokens_max - len(request.tokens)
            params = sampling_params(sampling, opened.vocabulary, grammars=opened.grammars)
            params["max_new_tokens"] = min(sampling.max_tokens, room)
            params["min_new_tokens"] = min(sampling.min_tokens, room)
        custom: dict[str, object] = {}
        if handoff is not None:
            custom[HANDOFF_PARAMETER] = msgspec.json.encode(handoff).decode()
        if request.loan is not None:
            custom[LOAN_PARAMETER] = msgspec.json.encode(request.loan).decode()
        if sampling.constraint is not None and request.leg is not Leg.PREFILL:
            custom[DELIVERED_PARAMETER] = sampling.delivered_tokens
        if request.computing_token_s and self._own.kv_file:
            custom[TOKEN_TIME_PARAMETER] = request.computing_token_s
        params["custom_params"] = custom or None
        asked = sampling.logprobs is not None and request.leg is not Leg.PREFILL
        return {
            "sampling_params": params,
            "return_logprob": asked,
            "logprob_start_len": -1,
            "top_logprobs_num": sampling.logprobs or 0 if asked else 0,
            "cache_salt": request.cache_salt or None,
        }

    def _delta(self, attempt: EngineAttempt, step: dict[str, Any]) -> EngineDelta:
        from baton.engines.sglang.sampling import refusal_of, token_logprobs

        request, meta = attempt.request, step["meta_info"]
        reason = meta["finish_reason"]
        finish = _FINISH_REASONS.get(reason["type"], FinishReason.ERROR) if reason else None
        if not attempt.begun and request.leg is Leg.DECODE:
            attempt.outcome = self._recorder.take_outcome(attempt.key)
        pulled = attempt.outcome
        # An abort ends its pull as well, and the pull's end may arrive first.
        if reason and reason.get("message") == KV_DID_NOT_ARRIVE:
            raise pull_error(DIALECT.engine, pulled)
        if reason and (refusal := refusal_of(reason)):
            raise refusal
        stages = () if attempt.begun else attempt.stages(self._begun_s[attempt.key])
        promotion = None if attempt.begun else self._recorder.take_promotion(attempt.key.hex())
        attempt.begun = True
        attempt.finish = finish
        # SGLang repeats the last token with a cancellation. What prefill samples is no part of the answer: decode
        # samples the first token itself.
        tokens = () if finish is FinishReason.CANCELLED or request.leg is Leg.PREFILL else tuple(step["output_ids"])
        return EngineDelta(
            tokens=tokens,
            logprobs=token_logprobs(meta, request.sampling.logprobs)
            if tokens and request.sampling.logprobs is not None
            else (),
            finish=finish,
            cached_tokens=max(meta.get("cached_tokens", 0) - attempt.pulled_tokens, 0),
            promoted_tokens=promotion.tokens if promotion else 0,
            promoted_bytes=promotion.copied_bytes if promotion else 0,
            loaded_tokens=promotion.loaded_tokens if promotion else 0,
            promotion_s=promotion.copying_s if promotion else 0.0,
            borrowed=promotion.borrowed if promotion else None,
            transferred_tokens=attempt.pulled_tokens,
            transferred_bytes=pulled.moved_bytes if pulled else 0,
            transfer_s=pulled.moving_s if pulled else 0.0,
            stages=stages,
        )

    def _take_report(self, rank: int, report: Report) -> None:
        match report:
            case StepReport():
                # Reports of attempts that have ended come late.
                self._begun_s |= {key: begun_s for key, begun_s in report.begun if key in self._begun_s}
                self._recorder.load = replace(
                    self._recorder.load,
                    running=report.running,
                    waiting=report.waiting,
                    kv_usage=report.kv_usage,
                    prompt_tokens_computed=report.prompt_tokens_computed,
                    prompt_tokens_cached=report.prompt_tokens_cached,
                    prompt_tokens_pulled=report.prompt_tokens_pulled,
                    preemptions=report.preemptions,
                )
                if report.transfers is not None:
                    self._recorder.record_transfers(report.transfers)
            case RankReport():
                self._recorder.record_transfers(report.transfers)
            case PrefixLent(key=key, tokens=tokens):
                if (lent := self._lending.get(key)) is not None and not lent.done():
                    lent.set_result(tokens)
            case Stats():
                self._stats[rank] = report
                if len(self._stats) == self._ranks:
                    self._all_stats.set()
            case _:
                pass
