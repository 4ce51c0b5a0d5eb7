"""Glue between vLLM's scheduler and a `PoolScheduler`: keys of requests, and blocks held while they are copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from baton.blocks import BLOCK_TOKENS_DEFAULT, split_ids
from baton.connectors.pool_lending import Loan
from baton.connectors.pool_report import PoolReport
from baton.connectors.pool_scheduler import PoolPlan, PoolProgress, PoolScheduler
from baton.engines.kv_events import FILE_MEDIUM, POOL_MEDIUM

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

    def __init__(self, scheduler: PoolScheduler, model_digest: str, block_tokens: int) -> None:
        self.scheduler = scheduler
        self._block_tokens = block_tokens
        self._digest = model_digest
        self._requests: dict[str, Request] = {}

    def admit(self, request: Request, loan: Loan | None, token_s: float) -> None:
        # Keys stand for tokens and a salt, and for nothing else.
        more = request.prompt_embeds is not None or request.mm_features or request.lora_request
        if request.prompt_token_ids is None or more:
            return
        self._requests[request.request_id] = request
        self.scheduler.admit(request.request_id, self._digest, request.cache_salt or "", loan, token_s)

    def borrows(self, request: Request, computed_tokens: int) -> bool:
        return self.scheduler.borrows(request.request_id, request.all_token_ids, computed_tokens)

    def loads(self, request: Request, computed_tokens: int) -> bool:
        return self.scheduler.loads(request.request_id, request.all_token_ids, computed_tokens)

    def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        if self.scheduler.lending is None:
            return 0
        per_block = self._block_tokens // BLOCK_TOKENS_DEFAULT
        return self.scheduler.lending.lend(key, split_ids(blocks)[per_block - 1 :: per_block], sink_ranks)

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

    def report(self) -> PoolReport | None:
        """Return the figures if they have changed, with promotions under the ids that vLLM was given."""
        report = self.scheduler.report()
        if report is None:
            return None
        # vLLM appends a suffix of its own.
        ended = [msgspec.structs.replace(each, request=each.request.rpartition("-")[0]) for each in report.ended]
        return msgspec.structs.replace(report, ended=tuple(ended))

    def take_events(self) -> Iterator[KVCacheEvent]:
        """Yield what the pool and its file have stored and dropped, in vLLM's own form."""
        yield from self._file_events()
        runs, removed = self.scheduler.take_changes()
        if removed:
            yield BlockRemoved(block_hashes=list(removed), medium=POOL_MEDIUM)
        for run in runs:
            yield BlockStored(
                block_hashes=list(run.keys),
                parent_block_hash=run.parent or None,
                token_ids=list(run.tokens),
                block_size=self._block_tokens,
                lora_id=None,
                medium=POOL_MEDIUM,
                lora_name=None,
                extra_keys=[(run.salt,)] if run.salt else None,
            )

    def _file_events(self) -> Iterator[KVCacheEvent]:
        if self.scheduler.filing is None:
            return
        runs, removed = self.scheduler.filing.take_changes()
        if removed:
            yield BlockRemoved(block_hashes=list(removed), medium=FILE_MEDIUM)
        for run in runs:
            yield BlockStored(
                block_hashes=list(run.ids),
                parent_block_hash=run.parent or None,
                token_ids=[],
                block_size=BLOCK_TOKENS_DEFAULT,
                lora_id=None,
                medium=FILE_MEDIUM,
                lora_name=None,
            )
