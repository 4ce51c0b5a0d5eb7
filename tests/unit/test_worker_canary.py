"""The canary: a right mapping passes, each wrong one stops the start with a sentence that says what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.bus import MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.engines.engine import EngineBlocksStored, EngineDelta, EngineRequest
from baton.engines.scripted import FACTS, ScriptedEngine, one_token, stored_prompt
from baton.errors import ConfigurationError, EngineFailed
from baton.messages.base import WorkerAddress
from baton.node.ports import deterministic_ports
from baton.worker.canary import prove_block_identity
from baton.worker.events import EventPublisher
from baton.worker.shadow import ShadowMap


async def prove(
    tell: Callable[[EngineBlocksStored], EngineBlocksStored],
    *,
    engine_block_tokens: int = 32,
    block_tokens: int = 32,
    context_tokens_max: int = 2048,
    fails: bool = False,
) -> None:
    clock = ManualClock()
    network = MemoryNetwork(clock=clock)
    bus = MemoryBus(network)
    facts = replace(FACTS, block_tokens=engine_block_tokens, context_tokens_max=context_tokens_max)

    def answer(request: EngineRequest) -> list[EngineDelta] | None:
        if fails:
            raise EngineFailed("out of memory")
        engine.publish(tell(stored_prompt(request, engine_block_tokens)))
        return one_token(request)

    engine = ScriptedEngine(facts, answer=answer, stores_prompts=False)
    shadow = ShadowMap(
        model_digest=facts.model_digest, engine_block_tokens=engine_block_tokens, block_tokens=block_tokens
    )
    publisher = EventPublisher(
        deterministic_ports(bus, clock, seed=0), WorkerAddress(worker="w", generation=1), facts.model_digest, shadow
    )
    following = asyncio.create_task(publisher.follow(engine.events()))
    proof = asyncio.create_task(
        prove_block_identity(engine, facts, publisher, clock, block_tokens=block_tokens, timeout_s=2.0)
    )
    try:
        await clock.advance(5.0)
        await proof
    finally:
        following.cancel()
        await asyncio.wait([following])
        await bus.close()
        await network.close()


@pytest.mark.parametrize(("engine_tokens", "canonical"), [(32, 32), (16, 32), (64, 32), (128, 32), (32, 256)])
async def test_a_right_mapping_passes(engine_tokens: int, canonical: int) -> None:
    await prove(lambda event: event, engine_block_tokens=engine_tokens, block_tokens=canonical)


async def test_a_short_context_is_enough() -> None:
    await prove(lambda event: event, context_tokens_max=40)


async def test_wrong_tokens_are_noticed() -> None:
    with pytest.raises(ConfigurationError, match="came to 2 blocks held in 1 batches"):
        await prove(lambda event: replace(event, tokens=tuple(token + 1 for token in event.tokens)))


async def test_a_salt_that_does_not_arrive_is_noticed() -> None:
    with pytest.raises(ConfigurationError, match="the canary prompt of a tenant must show as 2 blocks"):
        await prove(lambda event: replace(event, cache_salt=""))


async def test_another_block_size_than_the_engine_stated_is_noticed() -> None:
    with pytest.raises(ConfigurationError, match="0 blocks held in 1 batches, with 2 engine blocks ignored"):
        await prove(lambda event: replace(event, block_tokens=16))


async def test_an_engine_that_cannot_run_the_canary_is_named() -> None:
    with pytest.raises(ConfigurationError, match="cannot run the canary prompt of 67 tokens: out of memory"):
        await prove(lambda event: event, fails=True)
