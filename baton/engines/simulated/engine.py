"""The simulated engine: an inference engine except for the model, without torch and without a GPU.

It schedules (`scheduler.py`), keeps real KV bytes in a paged pool (`kv.py`), hands them off with a real
transfer agent (`handoff.py`), and takes as long as a timing model says (`options.py`). This file is the
shell around those: it waits, carries out what the scheduler decided, and answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from baton.blocks import model_digest
from baton.clock import Clock, SystemClock
from baton.connectors.pool_report import PoolReport
from baton.engines.engine import (
    EngineDelta,
    EngineEventBatch,
    EngineFacts,
    EngineLoad,
    EngineRequest,
    Leg,
    TransferFigures,
)
from baton.engines.simulated.blocks import HASH_BYTES, BlockCache
from baton.engines.simulated.handoff import SimulatedHandoff
from baton.engines.simulated.kv import ContextReader, KvChunk, KvPool, read_contexts
from baton.engines.simulated.options import SimulatedOptions, parse_options
from baton.engines.simulated.pool import SimulatedPool
from baton.engines.simulated.sampling import SimulatedModel, check_sampling, choose_token, read_model, stop_tokens
from baton.engines.simulated.scheduler import Chunk, Scheduler, SimulatedAttempt, SimulatedPhase, Step
from baton.engines.simulated.stream import Stream, check_request
from baton.errors import (
    AttemptFailed,
    BatonError,
    ConfigurationError,
    DeadlineExceeded,
    EngineFailed,
    TransferFailed,
)
from baton.messages.attempts import FinishReason, Sampling, TokenLogprob
from baton.pool.chain import check_block_tokens
from baton.transfer import AgentOptions, NativeAgent, Pool, TransferAgent

ENGINE: Final = "simulated 1"
_EVENT_BATCHES_MAX: Final = 65_536
"""Bound of the batches kept for a slow consumer; beyond it the oldest are lost, and the sequence shows a gap."""
_LAG_MAX_S: Final = 0.05
"""Longest lateness of steps, from coarse timers, for which later steps make up."""

_log = logging.getLogger(__name__)


class SimulatedEngine:
    """See `Engine`. `model` is a folder with config.json and tokenizer.json, or just a name."""

    def __init__(
        self,
        model: str,
        *,
        options: Mapping[str, object],
        agent: AgentOptions,
        clock: Clock | None = None,
        make_agent: Callable[[AgentOptions], TransferAgent] = NativeAgent,
    ) -> None:
        self._model_name = model
        self._options: SimulatedOptions = parse_options(options)
        self._agent_options = agent
        self._clock: Clock = clock or SystemClock()
        self._make_agent = make_agent
        self._random = random.Random(self._options.seed)
        self._streams: dict[tuple[str, int], Stream] = {}
        self._leases: dict[bytes, Stream] = {}
        self._batches: deque[EngineEventBatch] = deque(maxlen=_EVENT_BATCHES_MAX)
        self._batches_made = 0
        self._batches_changed = asyncio.Event()
        self._work = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None
        self._step_end_s = 0.0
        self._failure: EngineFailed | None = EngineFailed("the engine has not been started")
        self._model: SimulatedModel
        self._context_tokens_max: int
        self._pool: KvPool
        self._cache: BlockCache
        self._scheduler: Scheduler
        self._handoff: SimulatedHandoff
        self._kv_pool: SimulatedPool | None = None
        self._model_digest = ""

    # ------------------------------------------------------------ lifecycle

    async def start(self) -> EngineFacts:
        options = self._options
        folder = _model_folder(self._model_name)
        self._model = await asyncio.to_thread(read_model, folder, options.vocabulary)
        digest = await asyncio.to_thread(_digest, self._model_name, folder)
        capacity_tokens = options.blocks * options.block_tokens
        self._context_tokens_max = options.context_tokens_max or min(self._model.context_tokens_max, capacity_tokens)
        self._pool = KvPool(
            layers=options.layers,
            blocks=options.blocks,
            block_tokens=options.block_tokens,
            layer_words=options.layer_words,
        )
        self._cache = BlockCache(
            blocks=options.blocks, block_tokens=options.block_tokens, nonce=self._random.randbytes(HASH_BYTES)
        )
        identity = self._pool.identity(ENGINE, digest)
        described = self._pool.describe(identity)
        pool = self._kv_pool = self._open_pool(described)
        self._scheduler = Scheduler(
            self._cache,
            running_max=options.running_max,
            step_tokens_max=options.step_tokens_max,
            pool=pool.decisions if pool else None,
        )
        agent = self._make_agent(self._agent_options)
        agent.set_pool(described)
        self._model_digest = digest
        self._handoff = SimulatedHandoff(agent, self._pull_over, self._lease_over, self._agent_broke)
        self._handoff.watch(asyncio.get_running_loop())
        if pool is not None:
            pool.watch(asyncio.get_running_loop(), self._settle_pool)
        self._failure = None
        self._step_end_s = self._clock.now_s()
        self._steps = asyncio.create_task(self._run(), name="simulated engine")
        return EngineFacts(
            engine=ENGINE,
            model_digest=digest,
            block_tokens=options.block_tokens,
            kv_blocks=options.blocks,
            kv_bytes_per_token=options.kv_bytes_per_token,
            running_max=options.running_max,
            step_tokens_max=options.step_tokens_max,
            context_tokens_max=self._context_tokens_max,
            kv_identity=identity,
            agents=(agent.endpoint,),
            pool_blocks=pool.slots if pool else 0,
            pool_agents=(pool.endpoint,) if pool else (),
            parameters=tuple(sorted(options.parameters)),
        )

    def _open_pool(self, cache: Pool) -> SimulatedPool | None:
        """Return the KV pool; None: there is to be none. Raises ConfigurationError."""
        budget_bytes = self._options.kv_pool_bytes
        if not budget_bytes:
            return None
        check_block_tokens(self._options.block_tokens)
        return SimulatedPool(
            cache, budget_bytes, agent=self._agent_options, make_agent=self._make_agent, now_s=self._clock.now_s
        )

    async def check_health(self) -> None:
        self._check_alive()

    async def close(self) -> None:
        if self._steps is None:
            self._failure = EngineFailed("the engine is closed")
            return
        self._fail(EngineFailed("the engine is closed"))
        self._steps.cancel()
        with suppress(asyncio.CancelledError):
            await self._steps
        self._steps = None
        # The agent writes into the pool until it is closed, so it goes first.
        await asyncio.to_thread(self._handoff.close)
        if self._kv_pool is not None:
            await asyncio.to_thread(self._kv_pool.close)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: EngineFailed) -> None:
        self._failure = failure
        if self._steps is not None:
            self._handoff.unwatch(asyncio.get_running_loop())
            if self._kv_pool is not None:
                self._kv_pool.unwatch(asyncio.get_running_loop())
        for stream in self._streams.values():
            if stream.finish is None and stream.error is None:
                stream.error = failure
            stream.changed.set()
        self._streams.clear()
        self._leases.clear()
        self._batches_changed.set()

    # ------------------------------------------------------------ requests

    def check_sampling(self, sampling: Sampling) -> None:
        check_sampling(sampling, self._model.vocabulary, self._options.parameters)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        stream = self._submit(request)
        finished = False
        try:
            delta = await self._first_delta(stream)
            while True:
                if delta is not None:
                    finished = delta.finish is not None
                    yield delta
                    if finished:
                        return
                await stream.changed.wait()
                delta = stream.take_delta(self._clock.now_s())
        finally:
            if not finished:
                self._drop(stream)

    async def abort(self, request: str, attempt: int) -> None:
        self._check_alive()
        stream = self._streams.get((request, attempt))
        if stream is not None:
            self._drop(stream)
            if stream.finish is None:
                stream.finish = FinishReason.CANCELLED
            stream.changed.set()

    async def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        self._check_alive()
        if self._kv_pool is None:
            return 0
        tokens = self._kv_pool.decisions.lend(key, blocks, sink_ranks)
        self._work.set()
        return tokens

    def load(self) -> EngineLoad:
        self._check_alive()
        leased = self._scheduler.leased
        pool = self._kv_pool.report if self._kv_pool is not None else PoolReport()
        return EngineLoad(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            kv_usage=self._cache.used_blocks / self._cache.blocks,
            leased_blocks=sum(len(attempt.blocks) for attempt in leased),
            leased=frozenset(attempt.key for attempt in leased),
            prompt_tokens_computed=self._scheduler.prompt_tokens_computed,
            prompt_tokens_cached=self._scheduler.prompt_tokens_cached,
            prompt_tokens_pulled=self._scheduler.prompt_tokens_pulled,
            bytes_pulled=self._handoff.bytes_pulled,
            preemptions=self._scheduler.preemptions,
            pulls_failed=self._handoff.pulls_failed,
            prompt_tokens_promoted=pool.promoted_tokens,
            pool=pool,
        )

    def transfers(self) -> TransferFigures:
        self._check_alive()
        return self._handoff.figures()

    async def events(self) -> AsyncIterator[EngineEventBatch]:
        while True:
            self._check_alive()
            while self._batches:
                yield self._batches.popleft()
            self._batches_changed.clear()
            # Ends with the engine: `_fail` sets it too.
            await self._batches_changed.wait()

    def _submit(self, request: EngineRequest) -> Stream:
        self._check_alive()
        check_request(request, vocabulary=self._model.vocabulary, context_tokens_max=self._context_tokens_max)
        if request.leg is not Leg.PREFILL:
            self.check_sampling(request.sampling)
        if (request.request, request.attempt) in self._streams:
            raise AttemptFailed(f"attempt {request.attempt} of request {request.request!r} is here already")
        stop = stop_tokens(self._model, request.sampling)
        stream = Stream.of(request, ContextReader(self._pool), stop, self._clock.now_s())
        self._streams[stream.attempt.key] = self._leases[stream.lease.key] = stream
        if self._kv_pool is not None:
            name, salt = stream.attempt.name, request.cache_salt
            self._kv_pool.decisions.admit(name, self._model_digest, salt, request.loan)
        self._scheduler.submit(stream.attempt)
        self._work.set()
        return stream

    async def _first_delta(self, stream: Stream) -> EngineDelta:
        try:
            async with self._clock.timeout(stream.request.budget_s):
                while (delta := stream.take_delta(self._clock.now_s())) is None:
                    await stream.changed.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine gave no output within {stream.request.budget_s:g} s") from error
        return delta

    def _drop(self, stream: Stream) -> None:
        """Free what an attempt holds, in any state; blocks that a pull writes follow when the pull has ended."""
        if self._streams.get(stream.attempt.key) is not stream:
            return
        if stream.attempt.phase is SimulatedPhase.PULLING:
            self._handoff.cancel_pull(stream.lease)
        # Before the blocks are free: no peer may read what the next owner writes.
        self._handoff.revoke(stream.lease, final=True)
        self._scheduler.end(stream.attempt)
        self._forget_ended(stream)

    def _forget_ended(self, stream: Stream) -> None:
        if stream.attempt.phase is SimulatedPhase.ENDED:
            if self._kv_pool is not None:
                self._kv_pool.decisions.finished(stream.attempt.name)
            del self._streams[stream.attempt.key], self._leases[stream.lease.key]
        self._work.set()

    # ------------------------------------------------------------ what the agent reports

    def _pull_over(self, key: bytes, error: BatonError | None) -> None:
        stream = self._leases.get(key)
        if stream is None:
            return
        if self._kv_pool is None:
            self._arrived(stream, error)
            return
        stream.pull_error = error
        self._kv_pool.pulled(stream.attempt.name, failed=error is not None)
        self._settle_pool()

    def _settle_pool(self) -> None:
        """Take the copies and loans that have ended."""
        assert self._kv_pool is not None
        changes = self._kv_pool.settle()
        if changes.is_empty:
            return
        self._scheduler.copied(changes.unread)
        for promotion in self._kv_pool.take_promotions():
            if (stream := self._leases.get(bytes.fromhex(promotion.request))) is not None:
                stream.promotion = promotion
        for name, failed in changes.arrived.items():
            if (stream := self._leases.get(bytes.fromhex(name))) is not None:
                error = stream.pull_error or TransferFailed("a prefix could not be copied from the KV pool")
                self._arrived(stream, error if failed else None)
        self._work.set()

    def _arrived(self, stream: Stream, error: BatonError | None) -> None:
        """Go on with an attempt whose pull and promotion are over."""
        if error is None:
            self._scheduler.pull_done(stream.attempt)
        else:
            if stream.attempt.phase is SimulatedPhase.PULLING:
                stream.error = error
                stream.changed.set()
            self._scheduler.pull_failed(stream.attempt)
        self._forget_ended(stream)

    def _agent_broke(self, error: TransferFailed) -> None:
        self._fail(EngineFailed(f"the transfer agent failed: {error.detail}"))
        if self._steps is not None:
            self._steps.cancel()

    def _lease_over(self, key: bytes) -> None:
        stream = self._leases.get(key)
        if stream is None:
            return
        self._handoff.give_up(stream.lease)
        # A prefill that still computes goes on: its blocks are worth caching, and it frees them when done.
        if stream.attempt.phase is SimulatedPhase.HELD:
            self._scheduler.end(stream.attempt)
            self._forget_ended(stream)

    # ------------------------------------------------------------ steps

    async def _run(self) -> None:
        try:
            while True:
                self._work.clear()
                step = self._scheduler.plan_step()
                self._begin_pool()
                self._begin(step)
                if step.chunks:
                    await self._compute(step)
                    self._scheduler.complete_step(step)
                    self._begin_pool()
                    self._hold(step)
                    self._sample(step)
                self._publish_events()
                if step.is_empty:
                    # Nothing can move until a request comes, ends, or is answered by the agent: each sets it.
                    await self._work.wait()
                    self._step_end_s = self._clock.now_s()
        except Exception as error:  # noqa: BLE001 - the one boundary of the engine's own task.
            _log.exception("the simulated engine died")
            self._fail(EngineFailed(f"the simulated engine died: {error!r}"))

    def _begin_pool(self) -> None:
        """Start the promotions, saves and loans that were ordered."""
        if self._kv_pool is not None:
            self._kv_pool.begin()
            self._settle_pool()

    def _begin(self, step: Step) -> None:
        """Revoke what was preempted, before its blocks are written again, then tell the agent of the rest."""
        for attempt in step.preempted:
            stream = self._stream(attempt)
            stream.reader.forget()
            self._handoff.revoke(stream.lease, final=False)
        for pull in step.pulls:
            stream = self._stream(pull.attempt)
            source = stream.request.source
            assert source is not None, "only a decode leg pulls"
            now_s = self._clock.now_s()
            stream.begin(now_s)
            self._handoff.pull(stream.lease, source.agents[0], pull, now_s, max(0.0, stream.deadline_s - now_s))
        for chunk in step.chunks:
            if chunk.start < chunk.attempt.prompt_tokens:
                self._stream(chunk.attempt).begin(self._clock.now_s())
            if chunk.attempt.leg is Leg.PREFILL:
                self._handoff.lease_blocks(self._stream(chunk.attempt).lease, chunk.attempt.blocks, ready=chunk.start)

    async def _compute(self, step: Step) -> None:
        """Write the step's KV into the pool over the time that the step takes."""
        posting = [chunk for chunk in step.chunks if chunk.attempt.leg is Leg.PREFILL]
        layers = self._options.layers
        # Nobody reads the layers of a step without a lease before its end.
        spans = [slice(layer, layer + 1) for layer in range(layers)] if posting else [slice(0, layers)]
        start_s = max(self._step_end_s, self._clock.now_s() - _LAG_MAX_S)
        sizes = [chunk.end - chunk.start for chunk in step.chunks]
        decode_sequences = sizes.count(1)
        duration_s = self._options.step_s(
            prefill_tokens=sum(sizes) - decode_sequences,
            decode_sequences=decode_sequences,
            context_tokens=sum(chunk.end for chunk in step.chunks),
        )
        for number, span in enumerate(spans, start=1):
            chunks = [
                KvChunk(chunk.attempt.blocks, chunk.attempt.tokens[chunk.start : chunk.end], chunk.start)
                for chunk in _alive(step.chunks)
            ]
            self._pool.write(chunks, span)
            self._step_end_s = start_s + duration_s * number / len(spans)
            await self._sleep_until(self._step_end_s)
            for chunk in _alive(posting):
                self._handoff.post(self._stream(chunk.attempt).lease, span.start, chunk.end)

    async def _sleep_until(self, instant_s: float) -> None:
        # Even a step that takes no time lets others run.
        await self._clock.sleep(max(0.0, instant_s - self._clock.now_s()))

    def _hold(self, step: Step) -> None:
        """Answer the prefills that this step completed. Their blocks stay, unless decode is done with them already."""
        for chunk in step.chunks:
            if chunk.attempt.phase is not SimulatedPhase.HELD:
                continue
            stream = self._stream(chunk.attempt)
            stream.finish = FinishReason.LENGTH
            stream.changed.set()
            if stream.lease.is_over:
                self._scheduler.end(chunk.attempt)
                self._forget_ended(stream)
            else:
                self._handoff.complete(stream.lease, chunk.attempt.prompt_tokens)

    def _sample(self, step: Step) -> None:
        """Read back the contexts that this step completed, and choose the next token of each from its digest."""
        streams = [self._stream(chunk.attempt) for chunk in _alive(step.chunks) if chunk.samples]
        if not streams:
            return
        contexts = [(stream.reader, stream.attempt.blocks, len(stream.attempt.tokens)) for stream in streams]
        for stream, digest in zip(streams, read_contexts(self._pool, contexts), strict=True):
            attempt = stream.attempt
            token, logprob = choose_token(
                self._model,
                stream.request.sampling,
                digest=digest,
                tokens=attempt.tokens,
                prompt_tokens=attempt.prompt_tokens,
                eos_probability=self._options.eos_probability,
                draw=self._random.random,
            )
            self._append(stream, token, logprob)

    def _append(self, stream: Stream, token: int, logprob: TokenLogprob | None) -> None:
        attempt, sampling = stream.attempt, stream.request.sampling
        attempt.tokens.append(token)
        stream.tokens.append(token)
        if logprob is not None:
            stream.logprobs.append(logprob)
        output_tokens = len(attempt.tokens) - attempt.prompt_tokens
        if token in stream.stops and output_tokens >= sampling.min_tokens:
            stream.finish = FinishReason.STOP
        elif output_tokens >= sampling.max_tokens or len(attempt.tokens) >= self._context_tokens_max:
            stream.finish = FinishReason.LENGTH
        if stream.finish is not None:
            self._scheduler.end(attempt)
            self._forget_ended(stream)
        stream.changed.set()

    def _publish_events(self) -> None:
        events = self._cache.drain_events()
        if self._kv_pool is not None:
            events += tuple(self._kv_pool.take_events())
        if events:
            self._batches_made += 1
            self._batches.append(EngineEventBatch(sequence=self._batches_made, events=events))
            self._batches_changed.set()

    def _stream(self, attempt: SimulatedAttempt) -> Stream:
        return self._streams[attempt.key]


def _alive(chunks: list[Chunk] | tuple[Chunk, ...]) -> list[Chunk]:
    """Return the chunks whose attempt was not ended while the step ran."""
    return [chunk for chunk in chunks if chunk.attempt.phase is SimulatedPhase.RUNNING]


def _model_folder(model: str) -> Path | None:
    """Return the model's folder; None where `model` is just a name."""
    if model and Path(model).is_dir():
        return Path(model)
    if not model or model.startswith((".", "/", "~")):
        raise ConfigurationError(f"the model folder {model!r} does not exist", param="model")
    return None


def _digest(model: str, folder: Path | None) -> str:
    return (
        blake2b(f"simulated/{model}".encode(), digest_size=32).hexdigest() if folder is None else model_digest(folder)
    )
