"""Canary prompt at start-up: proves that the engine's block events map to our block ids.

A wrong mapping would not break any answer. It would turn every prefix hit into a miss, unnoticed for
months. So a worker whose canary fails refuses to start.
"""

from __future__ import annotations

from typing import Final

from baton.blocks import hash_blocks, root_key, split_ids
from baton.clock import Clock
from baton.engines.engine import Engine, EngineFacts, EngineRequest, Leg
from baton.errors import BatonError, ConfigurationError
from baton.messages.attempts import Sampling
from baton.messages.base import pack_tokens
from baton.worker.events import EventPublisher

_SALTS: Final = ("", "baton-canary")
"""One prompt without a tenant and one of a tenant: their blocks must differ."""
_POLL_S: Final = 0.02


def canary_tokens(count: int) -> list[int]:
    """Return tokens that every vocabulary has, in an order that no cache holds by chance."""
    return [3 + (position * position + 7 * position) % 97 for position in range(count)]


async def prove_block_identity(
    engine: Engine, facts: EngineFacts, publisher: EventPublisher, clock: Clock, *, block_tokens: int, timeout_s: float
) -> None:
    """Raise ConfigurationError unless a prompt through the engine yields the expected canonical blocks."""
    # Engines store full blocks only, so the prompt is some whole blocks of both sizes, and a rest.
    unit_tokens = max(block_tokens, facts.block_tokens)
    units = 2 if 2 * unit_tokens + 4 <= facts.context_tokens_max else 1
    tokens = canary_tokens(units * unit_tokens + 3)
    for salt in _SALTS:
        root = root_key(facts.model_digest, salt=salt)
        expected = split_ids(hash_blocks(root, pack_tokens(tokens[: units * unit_tokens]), block_tokens))
        await _run(engine, tokens, salt, timeout_s)
        give_up_at_s = clock.now_s() + timeout_s
        while not all(held := await publisher.holds(expected)):
            if clock.now_s() >= give_up_at_s:
                raise ConfigurationError(_explain(facts, block_tokens, expected, held, publisher, salt, timeout_s))
            await clock.sleep(_POLL_S)


async def _run(engine: Engine, tokens: list[int], salt: str, budget_s: float) -> None:
    request = EngineRequest(
        request=f"canary-{salt or 'plain'}",
        attempt=0,
        leg=Leg.WHOLE,
        tokens=tokens,
        sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
        cache_salt=salt,
        budget_s=budget_s,
    )
    try:
        async for _ in engine.generate(request):
            pass
    except BatonError as error:
        raise ConfigurationError(f"the engine cannot run the canary prompt of {len(tokens)} tokens: {error}") from error


def _explain(
    facts: EngineFacts,
    block_tokens: int,
    expected: list[bytes],
    held: list[bool],
    publisher: EventPublisher,
    salt: str,
    timeout_s: float,
) -> str:
    missing = ", ".join(block.hex() for block, is_held in zip(expected, held, strict=True) if not is_held)
    prompt = "the canary prompt of a tenant" if salt else "the canary prompt"
    return (
        f"{prompt} must show as {len(expected)} blocks of {block_tokens} tokens, but {timeout_s:g} s later the block"
        f" events of {facts.engine} (blocks of {facts.block_tokens} tokens) came to {publisher.describe()}; missing:"
        f" {missing}. Is prefix caching switched off, or is this engine version not supported?"
    )
