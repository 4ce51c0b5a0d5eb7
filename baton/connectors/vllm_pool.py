"""Glue between vLLM's scheduler and a `PoolScheduler`: keys of requests, and blocks held while they are copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from baton.blocks import root_key
from baton.connectors.pool_scheduler import PoolPlan, PoolProgress, PoolScheduler
from baton.engines.kv_events import POOL_MEDIUM
from baton.pool.events import PoolEvent, PoolRemoved

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class ProgressMetadata(KVConnectorWorkerMetadata):
    """A `PoolProgress` on its way from the ranks to the scheduler."""

    def __init__(self, progress: PoolProgress) -> None:
        self.progress = progress

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ProgressMetadata)
        return ProgressMetadata(self.progress.joined(other.progress))


class VllmPool:
    """The pool's part of the connector in vLLM's scheduler process."""

    def __init__(self, scheduler: PoolScheduler, model_digest: str) -> None:
        self.scheduler = scheduler
        self._digest = model_digest
        self._requests: dict[str, Request] = {}

    def admit(self, request: Request) -> None:
        # Block ids know tokens only.
        if request.prompt_token_ids is None or request.prompt_embeds is not None or request.mm_features:
            return
        lora = request.lora_request.lora_name if request.lora_request else ""
        self._requests[request.request_id] = request
        salt = request.cache_salt or ""
        # vLLM appends eight characters to the ids that it is given.
        name = request.request_id.rpartition("-")[0]
        self.scheduler.admit(request.request_id, root_key(self._digest, lora, salt), salt, name)

    def take_events(self) -> list[KVCacheEvent]:
        """Return the changes of the pool's contents as vLLM publishes them."""
        return [_event(event) for event in self.scheduler.take_events()]

    def offer(self, request: Request, computed_tokens: int) -> int:
        return self.scheduler.offer(request.request_id, request.all_token_ids, computed_tokens)

    def finished(self, request: str) -> None:
        self._requests.pop(request, None)
        self.scheduler.finished(request)

    def plan(self, manager: KVCacheManager, computed: Mapping[str, int]) -> PoolPlan:
        """Return this step's orders. `computed`: the tokens that each scheduled request has once it is over.

        vLLM frees a block whenever its requests end or are preempted, so copies that read it hold it, too.
        """
        blocks = manager.block_pool
        for name, tokens in computed.items():
            if (request := self._requests.get(name)) is not None:
                table = manager.get_block_ids(name)[0]
                read = self.scheduler.computes(name, request.all_token_ids, table, tokens)
                blocks.touch([blocks.blocks[number] for number in read])
        return self.scheduler.plan()

    def progress(self, manager: KVCacheManager, metadata: KVConnectorWorkerMetadata | None) -> None:
        if isinstance(metadata, ProgressMetadata):
            read = self.scheduler.progress(metadata.progress)
            blocks = manager.block_pool
            # vLLM evicts first what is freed first: of a prompt, its last block.
            blocks.free_blocks([blocks.blocks[number] for number in reversed(read)])


def _event(event: PoolEvent) -> KVCacheEvent:
    if isinstance(event, PoolRemoved):
        return BlockRemoved(block_hashes=list(event.keys), medium=POOL_MEDIUM)
    return BlockStored(
        block_hashes=[event.key],
        parent_block_hash=event.parent,
        token_ids=list(event.tokens),
        block_size=len(event.tokens),
        lora_id=None,
        medium=POOL_MEDIUM,
        lora_name=None,
        extra_keys=[(event.salt,)] if event.salt else None,
    )
