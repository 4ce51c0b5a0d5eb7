"""KV events about the pool, in the form of the engine that publishes them with its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from baton.connectors.pool_scheduler import PoolScheduler
from baton.engines.kv_events import POOL_MEDIUM

Event = TypeVar("Event")


def take_pool_events(
    scheduler: PoolScheduler,
    block_tokens: int,
    stored: Callable[..., Event],
    removed: Callable[..., Event],
    salted: Callable[[str], Mapping[str, object]],
) -> Iterator[Event]:
    """Yield what the pool has stored and dropped since the last call.

    `stored`, `removed`: the engine's classes of events, which vLLM and SGLang name alike. `salted`: the fields in which
    it tells a `cache_salt`.
    """
    runs, keys = scheduler.take_changes()
    if keys:
        yield removed(block_hashes=list(keys), medium=POOL_MEDIUM)
    for run in runs:
        yield stored(
            block_hashes=list(run.keys),
            parent_block_hash=run.parent or None,
            token_ids=list(run.tokens),
            block_size=block_tokens,
            lora_id=None,
            lora_name=None,
            medium=POOL_MEDIUM,
            **salted(run.salt),
        )
