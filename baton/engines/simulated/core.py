"""Core of the simulated engine, from its start to its end: streams, the scheduler's steps, and what agents report."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from baton.clock import Clock
from baton.connectors.pool_report import PoolReport
from baton.engines.engine import EngineEventBatch, EngineLoad, EngineRequest, Leg, TransferFigures
from baton.engines.simulated.blocks import HASH_BYTES, BlockCache
from baton.engines.simulated.handoff import SimulatedHandoff
from baton.engines.simulated.kv import ContextReader, KvChunk, KvPool, read_contexts
from baton.engines.simulated.options import SimulatedOptions
from baton.engines.simulated.pool import SimulatedPool
from baton.engines.simulated.sampling import (
    SimulatedModel,
    choose_token,
    is_determined,
    likeliest_token,
    stop_tokens,
)
from baton.engines.simulated.scheduler import Chunk, Scheduler, SimulatedAttempt, SimulatedPhase, Step
from baton.engines.simulated.stream import Stream, check_request
from baton.errors import AttemptFailed, BatonError, EngineFailed, TransferFailed
from baton.messages.attempts import FinishReason, TokenLogprob
from baton.transfer import TransferAgent

_EVENT_BATCHES_MAX: Final = 65_536
"""Bound of the batches kept for a slow consumer; beyond it the oldest are lost, and the sequence shows a gap."""
_LAG_MAX_S: Final = 0.05
"""Longest lateness of steps, from coarse timers, for which later steps make up."""

_log = logging.getLogger(__name__)


class EngineCore:
    """Carries out what the scheduler decides, in a task of its own, until `close` or a failure."""

    def __init__(
        self,
        model: SimulatedModel,
        options: SimulatedOptions,
        kv: KvPool,
        agent: TransferAgent,
        *,
        clock: Clock,
        pool: SimulatedPool | None,
        model_digest: str,
        context_tokens_max: int,
    ) -> None:
        """`kv`: the engine's own cache, which `agent` serves. `pool`: the KV pool beside it."""
        self.model = model
        self.context_tokens_max = context_tokens_max
        self.failure: EngineFailed | None = None
        self._options = options
        self._clock = clock
        self._random = random.Random(options.seed)
        self._kv = kv
        self._cache = BlockCache(
            blocks=options.blocks, block_tokens=options.block_tokens, nonce=self._random.randbytes(HASH_BYTES)
        )
        self._pool = pool
        self._scheduler = Scheduler(
            self._cache,
            running_max=options.running_max,
            step_tokens_max=options.step_tokens_max,
            pool=pool.decisions if pool else None,
        )
        self._model_digest = model_digest
        self._streams: dict[tuple[str, int], Stream] = {}
        self._leases: dict[bytes, Stream] = {}
        self._batches: deque[EngineEventBatch] = deque(maxlen=_EVENT_BATCHES_MAX)
        self._batches_made = 0
        self._batches_changed = asyncio.Event()
        self._work = asyncio.Event()
        self._handoff = SimulatedHandoff(agent, self._pull_over, self._lease_over, self._agent_broke)
        self._step_end_s = clock.now_s()
        loop = asyncio.get_running_loop()
        self._handoff.watch(loop)
        if pool is not None:
            pool.watch(loop, self._settle_pool)
        self._steps = asyncio.create_task(self._run(), name="simulated engine")

    async def close(self) -> None:
        self._fail(EngineFailed("the engine is closed"))
        self._steps.cancel()
        with suppress(asyncio.CancelledError):
            await self._steps
        # The agent writes into the cache until it is closed, so it goes first.
        await asyncio.to_thread(self._handoff.close)
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)

    def _fail(self, failure: EngineFailed) -> None:
        self.failure = failure
        loop = asyncio.get_running_loop()
        self._handoff.unwatch(loop)
        if self._pool is not None:
            self._pool.unwatch(loop)
        for stream in self._streams.values():
            if stream.finish is None and stream.error is None:
                stream.error = failure
            stream.changed.set()
        self._streams.clear()
        self._leases.clear()
        self._batches_changed.set()

    # ------------------------------------------------------------ requests

    def submit(self, request: EngineRequest) -> Stream:
        """Queue a request. Raises InvalidRequest, AttemptFailed."""
        check_request(request, vocabulary=self.model.vocabulary, context_tokens_max=self.context_tokens_max)
        if (request.request, request.attempt) in self._streams:
            raise AttemptFailed(f"attempt {request.attempt} of request {request.request!r} is here already")
        stop = stop_tokens(self.model, request.sampling)
        determined = is_determined(self.model, request.sampling, self._options.eos_probability)
        reader, now_s = ContextReader(self._kv), self._clock.now_s()
        stream = Stream.of(request, reader, stop, now_s, is_determined=determined)
        self._streams[stream.attempt.key] = self._leases[stream.lease.key] = stream
        if self._pool is not None:
            self._pool.decisions.admit(
                stream.attempt.name, self._model_digest, request.cache_salt, request.loan, request.computing_token_s
            )
        self._scheduler.submit(stream.attempt)
        self._work.set()
        return stream

    def abort(self, request: str, attempt: int) -> None:
        """End an attempt in any state; its stream ends with CANCELLED."""
        stream = self._streams.get((request, attempt))
        if stream is not None:
            self.drop(stream)
            if stream.finish is None:
                stream.finish = FinishReason.CANCELLED
            stream.changed.set()

    def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        if self._pool is None:
            return 0
        tokens = self._pool.decisions.lend(key, blocks, sink_ranks)
        self._work.set()
        return tokens

    def load(self) -> EngineLoad:
        leased = self._scheduler.leased
        pool = self._pool.report if self._pool is not None else PoolReport()
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
        return self._handoff.figures()

    async def events(self) -> AsyncIterator[EngineEventBatch]:
        while self.failure is None:
            while self._batches:
                yield self._batches.popleft()
            self._batches_changed.clear()
            # Ends with the engine: `_fail` sets it too.
            await self._batches_changed.wait()
        raise self.failure

    def drop(self, stream: Stream) -> None:
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
            if self._pool is not None:
                self._pool.decisions.finished(stream.attempt.name)
            del self._streams[stream.attempt.key], self._leases[stream.lease.key]
        self._work.set()

    # ------------------------------------------------------------ what the agent reports

    def _pull_over(self, key: bytes, error: BatonError | None) -> None:
        stream = self._leases.get(key)
        if stream is None:
            return
        if self._pool is None:
            self._arrived(stream, error)
            return
        stream.pull_error = error
        self._pool.pulled(stream.attempt.name, failed=error is not None)
        self._settle_pool()

    def _settle_pool(self) -> None:
        """Take the copies, loans and jobs of the file that have ended."""
        assert self._pool is not None
        changes = self._pool.settle()
        if changes.is_empty:
            return
        self._scheduler.copied(changes.unread)
        for promotion in self._pool.take_promotions():
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
        if self._pool is not None:
            self._pool.begin()
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
            self._kv.write(chunks, span)
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
        for stream, digest in zip(streams, read_contexts(self._kv, contexts), strict=True):
            if stream.is_determined:
                self._append(stream, likeliest_token(self.model, digest), None)
                continue
            attempt = stream.attempt
            token, logprob = choose_token(
                self.model,
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
        elif output_tokens >= sampling.max_tokens or len(attempt.tokens) >= self.context_tokens_max:
            stream.finish = FinishReason.LENGTH
        if stream.finish is not None:
            self._scheduler.end(attempt)
            self._forget_ended(stream)
        stream.changed.set()

    def _publish_events(self) -> None:
        events = self._cache.drain_events()
        if self._pool is not None:
            events += tuple(self._pool.take_events())
        if events:
            self._batches_made += 1
            self._batches.append(EngineEventBatch(sequence=self._batches_made, events=events))
            self._batches_changed.set()

    def _stream(self, attempt: SimulatedAttempt) -> Stream:
        return self._streams[attempt.key]


def _alive(chunks: list[Chunk] | tuple[Chunk, ...]) -> list[Chunk]:
    """Return the chunks whose attempt was not ended while the step ran."""
    return [chunk for chunk in chunks if chunk.attempt.phase is SimulatedPhase.RUNNING]
