"""KV events about the pool and its file: as Baton knows them, and in the form of the engine that publishes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from baton.blocks import BLOCK_TOKENS_DEFAULT
from baton.connectors.pool_scheduler import PoolScheduler
from baton.engines.engine import EngineBlocksRemoved, EngineBlocksStored
from baton.messages.index import Tier

Event = TypeVar("Event")

POOL_MEDIUM: Final = "BATON_POOL"
"""Medium of the events about Baton's KV pool: no engine's own offloading has this name."""
FILE_MEDIUM: Final = "BATON_FILE"
"""Medium of the events about the pool's file. They name blocks by their canonical ids, without tokens."""
_MEDIA: Final = {Tier.POOL: POOL_MEDIUM, Tier.FILE: FILE_MEDIUM}


def take_pool_events(scheduler: PoolScheduler, block_tokens: int) -> Iterator[EngineBlocksStored | EngineBlocksRemoved]:
    """Yield what the pool and its file have stored and dropped since the last call.

    Blocks of the file are told by their ids, without tokens.
    """
    if scheduler.filing is not None:
        filed, ids = scheduler.filing.take_changes()
        if ids:
            yield EngineBlocksRemoved(hashes=ids, tier=Tier.FILE)
        for run in filed:
            yield EngineBlocksStored(
                parent=run.parent or None,
                hashes=run.ids,
                tokens=(),
                block_tokens=BLOCK_TOKENS_DEFAULT,
                tier=Tier.FILE,
            )
    runs, keys = scheduler.take_changes()
    if keys:
        yield EngineBlocksRemoved(hashes=keys, tier=Tier.POOL)
    for run in runs:
        yield EngineBlocksStored(
            parent=run.parent or None,
            hashes=run.keys,
            tokens=run.tokens,
            block_tokens=block_tokens,
            cache_salt=run.salt,
            tier=Tier.POOL,
        )


def publish_pool_events(
    scheduler: PoolScheduler,
    block_tokens: int,
    stored: Callable[..., Event],
    removed: Callable[..., Event],
    salted: Callable[[str], Mapping[str, object]],
) -> Iterator[Event]:
    """Yield the same as the engine's own events.

    `stored`, `removed`: the engine's classes of events, which vLLM and SGLang name alike. `salted`: the fields in which
    it tells a `cache_salt`.
    """
    for event in take_pool_events(scheduler, block_tokens):
        hashes, medium = list(event.hashes), _MEDIA[event.tier]
        if isinstance(event, EngineBlocksRemoved):
            yield removed(block_hashes=hashes, medium=medium)
        else:
            yield stored(
                block_hashes=hashes,
                parent_block_hash=event.parent,
                token_ids=list(event.tokens),
                block_size=event.block_tokens,
                lora_id=None,
                lora_name=None,
                medium=medium,
                **salted(event.cache_salt),
            )
