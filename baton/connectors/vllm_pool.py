"""Glue between vLLM's scheduler and a `PoolScheduler`: keys of requests, and blocks held while they are copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from baton.connectors.pool_events import publish_pool_events
from baton.connectors.pool_lending import Loan
from baton.connectors.pool_plan import PoolPlan
from baton.connectors.pool_report import PoolReport
from baton.connectors.pool_scheduler import PoolScheduler
from baton.connectors.vllm_messages import ProgressMetadata

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class VllmPool:
    """The pool's part of the connector in vLLM's scheduler process."""

    def __init__(self, scheduler: PoolScheduler, model_digest: str, block_tokens: int) -> None:
        self.scheduler = scheduler
        self._block_tokens = block_tokens
        self._digest = model_digest
        self._requests: dict[str, Request] = {}

    def admit(self, request: Request, loan: Loan | None, token_s: float, staged_key: bytes) -> None:
        # Keys stand for tokens and a salt, and for nothing else.
        more = request.prompt_embeds is not None or request.mm_features or request.lora_request
        if request.prompt_token_ids is None or more:
            return
        self._requests[request.request_id] = request
        salt = request.cache_salt or ""
        self.scheduler.admit(request.request_id, self._digest, salt, loan, token_s, staged_key)

    def borrows(self, request: Request, computed_tokens: int) -> bool:
        return self.scheduler.borrows(request.request_id, request.all_token_ids, computed_tokens)

    def loads(self, request: Request, computed_tokens: int) -> bool:
        return self.scheduler.loads(request.request_id, request.all_token_ids, computed_tokens)

    def offer(self, request: Request, computed_tokens: int) -> int:
        return self.scheduler.offer(request.request_id, request.all_token_ids, computed_tokens)

    def keep(self, request: Request, table: Sequence[int], pulled_tokens: int) -> None:
        end = request.num_prompt_tokens - 1
        self.scheduler.keep(request.request_id, request.all_token_ids, table, range(end - pulled_tokens, end))

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

    def report(self) -> PoolReport | None:
        """Return the figures if they have changed, with promotions under the ids that vLLM was given."""
        report = self.scheduler.report()
        if report is None:
            return None
        # vLLM appends a suffix of its own.
        ended = [msgspec.structs.replace(each, request=each.request.rpartition("-")[0]) for each in report.ended]
        return msgspec.structs.replace(report, ended=tuple(ended))

    def take_events(self) -> Iterator[KVCacheEvent]:
        """Return what the pool and its file have stored and dropped, in vLLM's own form."""
        return publish_pool_events(
            self.scheduler,
            self._block_tokens,
            BlockStored,
            BlockRemoved,
            lambda salt: {"extra_keys": [(salt,)] if salt else None},
        )
