"""Speculative blocks: blocks of prompts that were placed on a worker and are not held by it yet. Pure.

A scheduler tells every index what it placed, so the next match sees it, whichever index answers. A speculative prompt
ends with the first of these:

    the worker stores the prompt's last block, removes any of its blocks, or clears its cache
    a heartbeat does not list the attempt `LISTED_AFTER_S` or more after its placement: finished, cancelled, or refused
    the request's deadline, a later attempt of the request on this worker, the end of the worker's generation
    `blocks_max` blocks of newer prompts

Speculative blocks are never written to Redis, sent to others, or part of a fingerprint.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from baton_kvindex.index import ID_BYTES, NewIndex, split_ids
from baton_kvindex.trees import Trees

BLOCKS_MAX: Final = 1 << 18
LISTED_AFTER_S: Final = 0.25
"""Age of a placement from which on a heartbeat lists its attempt, if the worker has it."""


@dataclass(frozen=True, slots=True)
class SpeculativePrompt:
    attempt: int
    model_digest: str
    blocks: bytes
    placed_s: float
    until_s: float


class Speculation:
    def __init__(self, new_index: NewIndex, *, blocks_max: int = BLOCKS_MAX) -> None:
        # Prompts may share a prefix, so the index counts how many of them have each block.
        self._trees = Trees(lambda: new_index(counts_copies=True))
        self._blocks_max = blocks_max
        self._prompts: dict[tuple[str, str], SpeculativePrompt] = {}
        """(worker, request) → its newest prompt; the oldest entry first."""
        self._requests: dict[str, set[str]] = {}
        """Worker → requests whose prompts were placed there."""
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def match(self, model_digest: str, blocks: bytes) -> dict[str, int]:
        """Return the leading speculative blocks of each worker."""
        return self._trees.match(model_digest, blocks)

    def add(self, worker: str, request: str, prompt: SpeculativePrompt) -> None:
        self._end(worker, request)
        count = len(prompt.blocks) // ID_BYTES
        if not 0 < count <= self._blocks_max:
            return
        while self.blocks + count > self._blocks_max:
            self._end(*next(iter(self._prompts)))
        self._trees.assign(worker, prompt.model_digest).store(worker, b"", prompt.blocks)
        self._prompts[worker, request] = prompt
        self._requests.setdefault(worker, set()).add(request)
        self.blocks += count

    def on_heartbeat(self, worker: str, attempts: Collection[tuple[str, int]], now_s: float) -> None:
        if worker not in self._requests:
            return
        listed = set(attempts)
        for request in list(self._requests[worker]):
            one = self._prompts[worker, request]
            is_due = now_s >= one.placed_s + LISTED_AFTER_S
            if now_s >= one.until_s or (is_due and (request, one.attempt) not in listed):
                self._end(worker, request)

    def on_stored(self, worker: str, blocks: bytes) -> None:
        if worker not in self._requests:
            return
        for request in list(self._requests[worker]):
            if _contains(blocks, self._prompts[worker, request].blocks[-ID_BYTES:]):
                self._end(worker, request)

    def on_removed(self, worker: str, blocks: bytes) -> None:
        if worker not in self._requests:
            return
        index = self._trees.assign(worker, self._model_of(worker))
        # Rare: engines evict what was not used for long. So the remaining prompts are simply stored again.
        if not index.remove(worker, blocks):
            return
        gone = set(split_ids(blocks))
        index.clear(worker)
        for request in list(self._requests[worker]):
            one = self._prompts[worker, request]
            # `_end` takes back what was stored, so it is stored first.
            index.store(worker, b"", one.blocks)
            if not gone.isdisjoint(split_ids(one.blocks)):
                self._end(worker, request)

    def drop(self, worker: str) -> None:
        for request in list(self._requests.get(worker, ())):
            self._end(worker, request)

    def _model_of(self, worker: str) -> str:
        return self._prompts[worker, next(iter(self._requests[worker]))].model_digest

    def _end(self, worker: str, request: str) -> None:
        one = self._prompts.pop((worker, request), None)
        if one is None:
            return
        self._trees.assign(worker, one.model_digest).remove(worker, one.blocks)
        self.blocks -= len(one.blocks) // ID_BYTES
        self._requests[worker].discard(request)
        if not self._requests[worker]:
            del self._requests[worker]
            self._trees.drop(worker)


def _contains(blocks: bytes, block: bytes) -> bool:
    at = blocks.find(block)
    while at >= 0 and at % ID_BYTES:
        at = blocks.find(block, at + 1)
    return at >= 0
