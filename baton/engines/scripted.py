"""An engine whose owner dictates each step, for tests of the code around engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from hashlib import blake2b

from baton.engines.engine import (
    EngineBlockEvent,
    EngineBlocksStored,
    EngineDelta,
    EngineEventBatch,
    EngineFacts,
    EngineLoad,
    EngineRequest,
    TransferFigures,
)
from baton.errors import BatonError, EngineFailed, InvalidRequest
from baton.messages.attempts import FinishReason, Sampling
from baton.messages.base import pack_tokens

STEPS_MAX = 1024
"""Bound of the steps and batches that wait for their consumer."""

FACTS = EngineFacts(
    engine="scripted 1",
    model_digest="00" * 32,
    block_tokens=32,
    kv_blocks=100,
    kv_bytes_per_token=64,
    running_max=8,
    step_tokens_max=512,
    context_tokens_max=2048,
    kv_identity="model=scripted",
    agents=("scripted",),
    parameters=("mode",),
)


def one_token(request: EngineRequest) -> list[EngineDelta] | None:
    """Answer requests for a single token at once, such as a canary; leave all others to the owner."""
    if request.sampling.max_tokens != 1:
        return None
    return [EngineDelta(tokens=[7], finish=FinishReason.LENGTH)]


class ScriptedEngine:
    """See `baton.engines.engine.Engine`. `steps` feeds the attempts that `answer` leaves open."""

    def __init__(
        self,
        facts: EngineFacts = FACTS,
        *,
        answer: Callable[[EngineRequest], Sequence[EngineDelta] | None] = one_token,
        stores_prompts: bool = True,
    ) -> None:
        self.facts = facts
        self.requests: dict[tuple[str, int], EngineRequest] = {}
        """All requests so far."""
        self.running: set[tuple[str, int]] = set()
        self.aborted: list[tuple[str, int]] = []
        self.takes_aborts = True
        self.refuses: InvalidRequest | None = None
        """Error that `check_sampling` raises, if any."""
        self.load_now = EngineLoad()
        self._answer = answer
        self._stores_prompts = stores_prompts
        self._steps: dict[tuple[str, int], asyncio.Queue[EngineDelta | BatonError]] = {}
        self._batches: asyncio.Queue[EngineEventBatch | EngineFailed] = asyncio.Queue(STEPS_MAX)
        self._sequence = 0
        self._failure: EngineFailed | None = None

    # ------------------------------------------------------------ for the owner

    def step(self, key: tuple[str, int], result: EngineDelta | BatonError) -> None:
        """Let an attempt yield a delta, or fail."""
        self._steps.setdefault(key, asyncio.Queue(STEPS_MAX)).put_nowait(result)

    def publish(self, *events: EngineBlockEvent, lost: int = 0) -> None:
        """Publish changes of the prefix cache; the consumer never sees `lost` batches before this one."""
        self._sequence += 1 + lost
        self._batches.put_nowait(EngineEventBatch(sequence=self._sequence, events=events))

    @property
    def batches_waiting(self) -> int:
        """Batches of block events that are not read yet."""
        return self._batches.qsize()

    def die(self, detail: str) -> None:
        """End the engine as a crash would."""
        self._failure = EngineFailed(detail)
        self._batches.put_nowait(self._failure)
        for key in self.running:
            self.step(key, self._failure)

    # ------------------------------------------------------------ the protocol

    async def start(self) -> EngineFacts:
        return self.facts

    def check_sampling(self, sampling: Sampling) -> None:
        if self.refuses is not None:
            raise self.refuses

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta]:
        self._check()
        key = (request.request, request.attempt)
        self.requests[key] = request
        self.running.add(key)
        if self._stores_prompts:
            self.publish(stored_prompt(request, self.facts.block_tokens))
        try:
            for delta in self._answer(request) or ():
                self.step(key, delta)
            steps = self._steps.setdefault(key, asyncio.Queue(STEPS_MAX))
            while True:
                result = await steps.get()
                if isinstance(result, BatonError):
                    raise result
                yield result
                if result.finish is not None:
                    return
        finally:
            self.running.discard(key)
            self._steps.pop(key, None)

    async def abort(self, request: str, attempt: int) -> None:
        self._check()
        key = (request, attempt)
        self.aborted.append(key)
        if key in self.running and self.takes_aborts:
            self.step(key, EngineDelta(finish=FinishReason.CANCELLED))

    async def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        return 0

    def load(self) -> EngineLoad:
        self._check()
        return self.load_now

    def transfers(self) -> TransferFigures:
        return TransferFigures()

    async def events(self) -> AsyncGenerator[EngineEventBatch]:
        while True:
            batch = await self._batches.get()
            if isinstance(batch, EngineFailed):
                raise batch
            yield batch

    async def check_health(self) -> None:
        self._check()

    async def close(self) -> None:
        self.die("the engine is closed")

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def stored_prompt(request: EngineRequest, block_tokens: int) -> EngineBlocksStored:
    """Return the event of an engine that stores all full blocks of a prompt, under hashes of its own."""
    full = len(request.tokens) // block_tokens
    tokens = tuple(request.tokens[: full * block_tokens])
    prefixes = (pack_tokens(tokens[: (number + 1) * block_tokens]) for number in range(full))
    return EngineBlocksStored(
        parent=None,
        hashes=tuple(blake2b(prefix, digest_size=8, key=request.cache_salt.encode()).digest() for prefix in prefixes),
        tokens=tokens,
        block_tokens=block_tokens,
        cache_salt=request.cache_salt,
    )
