"""vLLM in this process: `AsyncLLM`, whose scheduler and workers are children that die with it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

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
from baton.engines.refusals import sentence_of
from baton.engines.vllm.host import VllmHost
from baton.engines.vllm.lending import LEND_METHOD
from baton.engines.vllm.options import DIALECT
from baton.errors import BatonError, EngineFailed, InvalidRequest
from baton.messages.attempts import FinishReason, Sampling
from baton.messages.workers import Role
from baton.transfer import AgentOptions, TransferFaults

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

EVENTS_CONNECT_TIMEOUT_S: Final = 10.0
RPC_TIMEOUT_S: Final = 10.0
OUTCOME_TIMEOUT_S: Final = 1.0
WATCH_INTERVAL_S: Final = 0.1

_FINISH_REASONS: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "error": FinishReason.ERROR,
    "repetition": FinishReason.STOP,
}


class VllmEngine:
    """See `baton.engines.engine.Engine`."""

    def __init__(self, model: str, *, role: Role, options: Mapping[str, object], agent: AgentOptions) -> None:
        self._model = model
        self._role = role
        self._own, self._options = split_options(options, DIALECT)
        self._agent = agent
        self._host: VllmHost | None = None
        self._llm: AsyncLLM | None = None
        self._listener: KvEventListener | None = None
        self._watch: asyncio.Task[None] | None = None
        self._context_tokens_max = 0
        self._hands_off = False
        self._failure = "the engine has not been started"
        self._attempts = Attempts()

    async def start(self) -> EngineFacts:
        self._host = VllmHost(self._model, self._role, self._own, self._options, self._agent)
        self._listener = KvEventListener(DIALECT.engine, self._host.events_endpoint)
        self._listener.start()
        try:
            self._llm = await self._host.start()
            self._host.recorder.on_lease_ended = self._attempts.lease_ended
            self._failure = ""
            self._watch = asyncio.create_task(self._watch_engine(self._llm), name="vllm-watch")
            await self._listener.connected(EVENTS_CONNECT_TIMEOUT_S)
            await self._ask_ranks("baton_events_heard")
            return await self._describe(self._llm, self._host.digest)
        except BaseException:
            await self.close()
            raise

    async def _describe(self, llm: AsyncLLM, digest: str) -> EngineFacts:
        import vllm

        from baton.engines.vllm.sampling import PARAMETERS

        config = llm.vllm_config
        cache = config.cache_config
        ranks: list[dict[str, Any]] = await self._ask_ranks("baton_facts")
        agents = tuple(str(rank["endpoint"]) for rank in ranks if rank["endpoint"])
        self._context_tokens_max = config.model_config.max_model_len
        self._hands_off = bool(agents)
        return EngineFacts(
            engine=f"vllm {vllm.__version__}",
            model_digest=digest,
            block_tokens=cache.block_size,
            kv_blocks=cache.num_gpu_blocks or 0,
            kv_bytes_per_token=sum(int(rank["kv_block_bytes"]) for rank in ranks) // cache.block_size,
            running_max=config.scheduler_config.max_num_seqs,
            step_tokens_max=config.scheduler_config.max_num_batched_tokens,
            context_tokens_max=self._context_tokens_max,
            kv_identity=str(ranks[0]["kv_identity"]),
            agents=agents,
            pool_blocks=min(int(rank["pool_blocks"]) for rank in ranks),
            pool_agents=tuple(str(rank["pool_endpoint"]) for rank in ranks if rank["pool_endpoint"]),
            parameters=tuple(sorted(PARAMETERS)),
        )

    def check_sampling(self, sampling: Sampling) -> None:
        from baton.engines.vllm.sampling import sampling_params

        sampling_params(sampling)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        llm = self._alive()
        with self._attempts.enter(request) as attempt:
            params = self._params(attempt)
            prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(request.tokens)}
            if request.cache_salt:
                prompt["cache_salt"] = request.cache_salt
            name = _engine_id(request.request, request.attempt)
            try:
                generating = llm.generate(prompt, params, name, trace_headers=_trace_headers(llm, request))  # pyright: ignore[reportArgumentType]
                async with aclosing(generating) as stream:
                    async for output in within_budget(attempt, stream):
                        yield await self._delta(attempt, output)
            except BatonError:
                raise
            except Exception as error:
                raise engine_error(error, self._failure) from error

    async def abort(self, request: str, attempt: int) -> None:
        llm = self._alive()
        if self._attempts.running(request, attempt):
            await llm.abort(_engine_id(request, attempt))
        if key := self._attempts.lease(request, attempt):
            await self._ask_ranks("baton_end_lease", key)

    async def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        llm = self._alive()
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                return int(await llm.engine_core.call_utility_async(LEND_METHOD, key, blocks, sink_ranks))  # pyright: ignore
        except TimeoutError as error:
            raise EngineFailed(f"vLLM did not answer {LEND_METHOD} within {RPC_TIMEOUT_S:g} s") from error
        except Exception as error:
            raise EngineFailed(f"vLLM failed in {LEND_METHOD}: {error}") from error

    def load(self) -> EngineLoad:
        self._alive()
        assert self._host is not None
        return replace(self._host.recorder.load, leased=self._attempts.leased)

    def transfers(self) -> TransferFigures:
        self._alive()
        assert self._host is not None
        return self._host.recorder.transfers()

    async def events(self) -> AsyncIterator[EngineEventBatch]:
        self._alive()
        assert self._listener is not None
        async for batch in self._listener.events():
            yield batch

    async def check_health(self) -> None:
        self._alive()

    async def close(self) -> None:
        self._end("the engine has been closed")
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        if self._host is not None:
            await self._host.stop()
            self._host = None
        self._llm = None
        # vLLM's objects form a cycle, and complain if the interpreter's end is the first to break it.
        gc.collect()

    async def set_faults(self, faults: TransferFaults) -> None:
        """Inject faults at this engine's agents, for tests and benchmarks."""
        await self._ask_ranks("baton_set_faults", asdict(faults))

    async def transfer_stats(self) -> list[dict[str, Any]]:
        """Return the agents' counters by rank, for tests and benchmarks."""
        return await self._ask_ranks("baton_transfer_stats")

    def _alive(self) -> AsyncLLM:
        if self._failure or self._llm is None:
            raise EngineFailed(self._failure)
        if self._llm.errored:
            self._end("vLLM's engine process has died")
            raise EngineFailed(self._failure)
        return self._llm

    async def _watch_engine(self, llm: AsyncLLM) -> None:
        """End everything when vLLM's processes die: a killed one sends nothing to the requests that wait for it."""
        # Its own thread notices and sets a flag; nothing can be waited for.
        while not llm.errored:  # noqa: ASYNC110
            await asyncio.sleep(WATCH_INTERVAL_S)
        self._end("vLLM's engine process has died")

    def _end(self, failure: str) -> None:
        self._failure = self._failure or failure
        if self._llm is not None:
            self._llm.output_processor.propagate_error(EngineFailed(failure))
        if self._listener is not None:
            self._listener.close()

    async def _ask_ranks(self, method: str, *arguments: object) -> list[Any]:
        llm = self._alive()
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                return cast("list[Any]", await llm.collective_rpc(method, args=arguments))  # pyright: ignore[reportUnknownMemberType]
        except TimeoutError as error:
            raise EngineFailed(f"vLLM did not answer {method} within {RPC_TIMEOUT_S:g} s") from error
        except Exception as error:
            raise EngineFailed(f"vLLM failed in {method}: {error}") from error

    def _params(self, attempt: EngineAttempt) -> SamplingParams:
        from baton.connectors.vllm_messages import LOAN_PARAMETER, TOKEN_TIME_PARAMETER
        from baton.engines.vllm.sampling import prefill_params, sampling_params

        handoff = handoff_of(attempt, context_tokens_max=self._context_tokens_max, enabled=self._hands_off)
        transfer: dict[str, object] = {} if handoff is None else msgspec.to_builtins(handoff, builtin_types=(bytes,))
        if attempt.request.loan is not None:
            transfer[LOAN_PARAMETER] = msgspec.to_builtins(attempt.request.loan, builtin_types=(bytes,))
        if attempt.request.computing_token_s and self._own.kv_file:
            transfer[TOKEN_TIME_PARAMETER] = attempt.request.computing_token_s
        if attempt.request.leg is Leg.PREFILL:
            return prefill_params(transfer)
        return sampling_params(attempt.request.sampling, transfer or None)

    async def _delta(self, attempt: EngineAttempt, output: RequestOutput) -> EngineDelta:
        from baton.engines.vllm.sampling import token_logprobs

        assert self._host is not None
        completion = output.outputs[0]
        recorder = self._host.recorder
        finish = _FINISH_REASONS[completion.finish_reason] if completion.finish_reason else None
        if not attempt.begun and attempt.request.leg is Leg.DECODE:
            # A pull's end is reported with an earlier step than the first token.
            attempt.outcome = recorder.take_outcome(attempt.key)
        # vLLM ends a request whose grammar cannot be made with an error, and says nothing of its cause.
        constraint_new = (
            not attempt.begun
            and attempt.request.sampling.constraint is not None
            and attempt.request.leg is not Leg.PREFILL
        )
        stages = () if attempt.begun else attempt.stages(output.metrics.scheduled_ts if output.metrics else 0)
        promotion = (
            None
            if attempt.begun
            else recorder.take_promotion(_engine_id(attempt.request.request, attempt.request.attempt))
        )
        attempt.begun = True
        attempt.finish = finish
        if finish is FinishReason.ERROR:
            outcome = attempt.outcome or await recorder.wait_outcome(attempt.key, OUTCOME_TIMEOUT_S)
            raise pull_error(DIALECT.engine, outcome, constraint_new=constraint_new)
        alternatives = attempt.request.sampling.logprobs
        rows: Any = completion.logprobs if alternatives is not None and attempt.request.leg is not Leg.PREFILL else None
        pulled = attempt.outcome
        return EngineDelta(
            # What prefill samples is no part of the answer: decode samples the first token itself.
            tokens=() if attempt.request.leg is Leg.PREFILL else completion.token_ids,
            logprobs=token_logprobs(completion.token_ids, rows, alternatives or 0) if rows else (),
            finish=finish,
            cached_tokens=max((output.num_cached_tokens or 0) - attempt.pulled_tokens, 0),
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


def engine_error(error: Exception, death: str = "") -> BatonError:
    """Return the error that an exception of vLLM's means: it refuses the request, or it failed."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, BatonError):
        return error
    if isinstance(error, EngineDeadError):
        return EngineFailed(death or "vLLM's engine process has died")
    sentence = sentence_of(error)
    if isinstance(error, VLLMClientError):
        return InvalidRequest(f"the engine refuses the request: {sentence}")
    return EngineFailed(f"vLLM ended the request with {type(error).__name__}: {sentence}")


def _engine_id(request: str, attempt: int) -> str:
    return f"{request}/{attempt}"


def _trace_headers(llm: AsyncLLM, request: EngineRequest) -> dict[str, str] | None:
    """Return headers that make vLLM's span a part of the request's trace; None: vLLM exports no spans."""
    wanted = request.trace and llm.vllm_config.observability_config.otlp_traces_endpoint
    return {"traceparent": request.trace} if wanted else None
