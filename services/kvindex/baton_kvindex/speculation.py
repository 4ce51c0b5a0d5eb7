"""What workers are about to hold: the prompts that were placed on them, until the truth takes over. Pure.

A scheduler tells every index what it placed, so the next match sees it whichever index answers. An expectation ends
with whichever comes first:

    the worker stores the prompt's last block, removes any of its blocks, or clears its cache
    the worker's heartbeat does not list the attempt, once it had time to: finished, cancelled, or refused
    the request's deadline, a later attempt of the request on this worker, the end of the worker's life
    `blocks_max` blocks of newer expectations

Nothing of this is written down, told to others, or part of a fingerprint: it is a hope, not a holding.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from baton_kvindex.index import ID_BYTES, NewIndex, split_ids
from baton_kvindex.trees import Trees


@dataclass(frozen=True, slots=True)
class Expectation:
    attempt: int
    model_digest: str
    blocks: bytes
    placed_s: float
    until_s: float


class Speculation:
    def __init__(self, new_index: NewIndex, *, blocks_max: int, listed_after_s: float) -> None:
        # Several prompts may share their beginning, so each block counts how many expect it.
        self._trees = Trees(lambda: new_index(counts_copies=True))
        self._blocks_max = blocks_max
        self._listed_after_s = listed_after_s
        self._expected: dict[tuple[str, str], Expectation] = {}
        """(worker, request) → the newest, the oldest first."""
        self._requests: dict[str, set[str]] = {}
        """Worker → requests that something is expected of."""
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._expected)

    def match(self, model_digest: str, blocks: bytes) -> dict[str, int]:
        """Return the leading blocks that each worker is expected to hold."""
        return self._trees.match(model_digest, blocks)

    def expect(self, worker: str, request: str, expectation: Expectation) -> None:
        self._end(worker, request)
        count = len(expectation.blocks) // ID_BYTES
        if not 0 < count <= self._blocks_max:
            return
        while self.blocks + count > self._blocks_max:
            self._end(*next(iter(self._expected)))
        self._trees.assign(worker, expectation.model_digest).store(worker, b"", expectation.blocks)
        self._expected[worker, request] = expectation
        self._requests.setdefault(worker, set()).add(request)
        self.blocks += count

    def on_heartbeat(self, worker: str, attempts: Collection[tuple[str, int]], now_s: float) -> None:
        if worker not in self._requests:
            return
        listed = set(attempts)
        for request in list(self._requests[worker]):
            one = self._expected[worker, request]
            is_due = now_s >= one.placed_s + self._listed_after_s
            if now_s >= one.until_s or (is_due and (request, one.attempt) not in listed):
                self._end(worker, request)

    def on_stored(self, worker: str, blocks: bytes) -> None:
        if worker not in self._requests:
            return
        for request in list(self._requests[worker]):
            if _contains(blocks, self._expected[worker, request].blocks[-ID_BYTES:]):
                self._end(worker, request)

    def on_removed(self, worker: str, blocks: bytes) -> None:
        if worker not in self._requests:
            return
        index = self._trees.assign(worker, self._model_of(worker))
        # Seldom: engines evict what was not used for long. So what is left is stored anew instead of being looked up.
        if not index.remove(worker, blocks):
            return
        gone = set(split_ids(blocks))
        index.clear(worker)
        for request in list(self._requests[worker]):
            one = self._expected[worker, request]
            # `_end` takes back what was stored, so it is stored first.
            index.store(worker, b"", one.blocks)
            if not gone.isdisjoint(split_ids(one.blocks)):
                self._end(worker, request)

    def drop(self, worker: str) -> None:
        for request in list(self._requests.get(worker, ())):
            self._end(worker, request)

    def _model_of(self, worker: str) -> str:
        return self._expected[worker, next(iter(self._requests[worker]))].model_digest

    def _end(self, worker: str, request: str) -> None:
        one = self._expected.pop((worker, request), None)
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
