"""KV events about the pool and its file, in the form of the engine that publishes them with its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from baton.blocks import BLOCK_TOKENS_DEFAULT
from baton.connectors.pool_scheduler import PoolScheduler
from baton.engines.kv_events import FILE_MEDIUM, POOL_MEDIUM

Event = TypeVar("Event")


def take_pool_events(
    scheduler: PoolScheduler,
    block_tokens: int,
    stored: Callable[..., Event],
    removed: Callable[..., Event],
    salted: Callable[[str], Mapping[str, object]],
) -> Iterator[Event]:
    """Yield what the pool and its file have stored and dropped since the last call.

    `stored`, `removed`: the engine's classes of events, which vLLM and SGLang name alike. `salted`: the fields in which
    it tells a `cache_salt`. Blocks of the file are told by their ids, without tokens.
    """
    if scheduler.filing is not None:
        filed, ids = scheduler.filing.take_changes()
        if ids:
            yield removed(block_hashes=list(ids), medium=FILE_MEDIUM)
        for run in filed:
            yield stored(
                block_hashes=list(run.ids),
                parent_block_hash=run.parent or None,
                token_ids=[],
                block_size=BLOCK_TOKENS_DEFAULT,
                lora_id=None,
                lora_name=None,
                medium=FILE_MEDIUM,
            )
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
