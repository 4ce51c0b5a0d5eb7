"""The simulated engine: an inference engine except for the model, without torch and without a GPU.

It schedules (`scheduler.py`), keeps real KV bytes in a paged pool (`kv.py`), hands them off with a real
transfer agent (`handoff.py`), and takes as long as a timing model says (`options.py`). `core.py` is the
shell around those: it waits, carries out what the scheduler decided, and answers. This file starts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final

from baton.blocks import model_digest
from baton.clock import Clock, SystemClock
from baton.connectors.pool_rank import open_file
from baton.engines.engine import (
    EngineDelta,
    EngineEventBatch,
    EngineFacts,
    EngineLoad,
    EngineRequest,
    Leg,
    TransferFigures,
)
from baton.engines.options import KV_POOL_AUTO, auto_pool_bytes
from baton.engines.simulated.core import EngineCore
from baton.engines.simulated.kv import KvPool
from baton.engines.simulated.options import SimulatedOptions, parse_options
from baton.engines.simulated.pool import MakeFile, SimulatedPool
from baton.engines.simulated.sampling import check_sampling, read_model
from baton.engines.simulated.stream import Stream
from baton.errors import ConfigurationError, DeadlineExceeded, EngineFailed
from baton.messages.attempts import Sampling
from baton.pool.chain import check_block_tokens
from baton.transfer import AgentOptions, NativeAgent, Pool, TransferAgent

_log = logging.getLogger(__name__)

ENGINE: Final = "simulated 1"


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
        make_file: MakeFile = open_file,
    ) -> None:
        self._model_name = model
        self._options: SimulatedOptions = parse_options(options)
        self._agent_options = agent
        self._clock: Clock = clock or SystemClock()
        self._make_agent = make_agent
        self._make_file = make_file
        self._core: EngineCore | None = None
        self._failure = EngineFailed("the engine has not been started")
        """Why there is no core."""

    async def start(self) -> EngineFacts:
        options = self._options
        folder = _model_folder(self._model_name)
        model = await asyncio.to_thread(read_model, folder, options.vocabulary)
        digest = await asyncio.to_thread(_digest, self._model_name, folder)
        capacity_tokens = options.blocks * options.block_tokens
        context_tokens_max = options.context_tokens_max or min(model.context_tokens_max, capacity_tokens)
        kv = KvPool(
            layers=options.layers,
            blocks=options.blocks,
            block_tokens=options.block_tokens,
            layer_words=options.layer_words,
        )
        identity = kv.identity(ENGINE, digest)
        described = kv.describe(identity)
        pool = self._open_pool(described)
        agent = self._make_agent(self._agent_options)
        agent.set_pool(described)
        self._core = EngineCore(
            model,
            options,
            kv,
            agent,
            clock=self._clock,
            pool=pool,
            model_digest=digest,
            context_tokens_max=context_tokens_max,
        )
        return EngineFacts(
            engine=ENGINE,
            model_digest=digest,
            block_tokens=options.block_tokens,
            kv_blocks=options.blocks,
            kv_bytes_per_token=options.kv_bytes_per_token,
            running_max=options.running_max,
            step_tokens_max=options.step_tokens_max,
            context_tokens_max=context_tokens_max,
            kv_identity=identity,
            agents=(agent.endpoint,),
            pool_blocks=pool.slots if pool else 0,
            pool_agents=(pool.endpoint,) if pool else (),
            parameters=tuple(sorted(options.parameters)),
        )

    def _open_pool(self, cache: Pool) -> SimulatedPool | None:
        """Return the KV pool; None: there is to be none. Raises ConfigurationError."""
        options = self._options
        asked = options.kv_pool_bytes
        budget_bytes = auto_pool_bytes(options.kv_pool_workers) if asked == KV_POOL_AUTO else asked
        if not budget_bytes:
            return None
        try:
            check_block_tokens(options.block_tokens)
            return SimulatedPool(
                cache,
                budget_bytes,
                options,
                agent=self._agent_options,
                make_agent=self._make_agent,
                make_file=self._make_file,
                clock=self._clock,
            )
        except ConfigurationError as refusal:
            if asked != KV_POOL_AUTO:
                raise
            _log.warning("this engine runs without a KV pool: %s", refusal)
            return None

    async def check_health(self) -> None:
        self._alive()

    async def close(self) -> None:
        self._failure = EngineFailed("the engine is closed")
        core, self._core = self._core, None
        if core is not None:
            await core.close()

    def _alive(self) -> EngineCore:
        if self._core is None:
            raise self._failure
        if self._core.failure is not None:
            raise self._core.failure
        return self._core

    def check_sampling(self, sampling: Sampling) -> None:
        check_sampling(sampling, self._alive().model.vocabulary, self._options.parameters)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        core = self._alive()
        if request.leg is not Leg.PREFILL:
            self.check_sampling(request.sampling)
        stream = core.submit(request)
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
                core.drop(stream)

    async def _first_delta(self, stream: Stream) -> EngineDelta:
        try:
            async with self._clock.timeout(stream.request.budget_s):
                while (delta := stream.take_delta(self._clock.now_s())) is None:
                    await stream.changed.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine gave no output within {stream.request.budget_s:g} s") from error
        return delta

    async def abort(self, request: str, attempt: int) -> None:
        self._alive().abort(request, attempt)

    async def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        return self._alive().lend(key, blocks, sink_ranks)

    def load(self) -> EngineLoad:
        return self._alive().load()

    def transfers(self) -> TransferFigures:
        return self._alive().transfers()

    async def events(self) -> AsyncIterator[EngineEventBatch]:
        async for batch in self._alive().events():
            yield batch


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
