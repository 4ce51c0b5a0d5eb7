"""A radix tree of prompts by the workers that they were sent to: what a proxy knows of caches without asking.

sglang-router 0.3.2 (`src/policies/tree.rs`) and vllm-router 0.1.17 (`src/tree.rs`) keep the same tree over characters;
this one is over blocks. A prompt's tail, the tokens after its last whole block, is a leaf of its own, since a trace
cannot say what it shares.

    "1 2 3 4" sent to a, then "1 2 5 6" to b

         root                root
          |                   |
      1 2 3 4 [a]    ->    1 2 [a b]
                            /      \\
                       3 4 [a]    5 6 [b]
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

Blocks = tuple[int, ...]

REFRESH_EVERY = 8
"""Only every eighth number of the clock refreshes what a match found."""


class Node:
    """A run of blocks, with the clock's reading when each worker last used it."""

    __slots__ = ("blocks", "children", "parent", "tokens", "used", "worker")

    def __init__(self, blocks: Blocks, tokens: int, parent: Node | None, used: dict[str, int], worker: str) -> None:
        self.blocks = blocks
        self.tokens = tokens
        self.parent = parent
        self.used = used
        self.worker = worker
        """The worker that a match names: the first that was sent this run, as long as it is in `used`."""
        self.children: dict[int, Node] = {}

    def ends(self, worker: str) -> bool:
        """Whether the worker's prompts go no further than this run."""
        return worker in self.used and all(worker not in child.used for child in self.children.values())


class HistoryTree:
    """Prompts sent to each worker, the least recently used forgotten above `worker_tokens_max` at each `evict`."""

    def __init__(self, block_tokens: int, worker_tokens_max: int) -> None:
        self.worker_tokens: dict[str, int] = {}
        self._block_tokens = block_tokens
        self._worker_tokens_max = worker_tokens_max
        self._root = Node((), 0, None, {}, "")
        self._clock = count()
        self._tails = count(-1, -1)

    def match(self, blocks: Blocks) -> tuple[Node, int]:
        """Return the last node that the prompt reaches, maybe not to that node's end, and the tokens that match."""
        node, at = self._root, 0
        while at < len(blocks) and (child := node.children.get(blocks[at])) is not None:
            shared = shared_blocks(child.blocks, blocks, at)
            node, at = child, at + shared
            if shared < len(child.blocks):
                break
        return node, at * self._block_tokens

    def name(self, node: Node) -> str:
        """Return the worker that a match names, and refresh it now and then."""
        if node.worker not in node.used:
            node.worker = next(iter(node.used), "")
        if (now := next(self._clock)) % REFRESH_EVERY == 0 and node.worker:
            node.used[node.worker] = now
        return node.worker

    def insert(self, blocks: Blocks, prompt_tokens: int, worker: str) -> None:
        """Record that the prompt was sent to the worker."""
        if prompt_tokens > len(blocks) * self._block_tokens:
            blocks = (*blocks, next(self._tails))
        self.worker_tokens.setdefault(worker, 0)
        node, at, tokens = self._root, 0, 0
        while at < len(blocks):
            child = node.children.get(blocks[at])
            if child is None:
                leaf = Node(blocks[at:], prompt_tokens - tokens, node, {worker: next(self._clock)}, worker)
                node.children[blocks[at]] = leaf
                self.worker_tokens[worker] += leaf.tokens
                return
            shared = shared_blocks(child.blocks, blocks, at)
            if shared < len(child.blocks):
                child = self._split(child, shared)
            if worker not in child.used:
                child.used[worker] = 0
                self.worker_tokens[worker] += child.tokens
            node, at, tokens = child, at + shared, tokens + child.tokens
        node.used[worker] = next(self._clock)

    def _split(self, node: Node, at: int) -> Node:
        """Cut the run after `at` blocks and return its first part, a new node above the old one."""
        assert node.parent is not None
        upper = Node(node.blocks[:at], at * self._block_tokens, node.parent, dict(node.used), node.worker)
        node.parent.children[upper.blocks[0]] = upper
        upper.children[node.blocks[at]] = node
        node.blocks, node.tokens, node.parent = node.blocks[at:], node.tokens - upper.tokens, upper
        return upper

    def evict(self) -> None:
        """Forget, for each worker with too much, its least recently used runs, leaves first."""
        over = {worker for worker, tokens in self.worker_tokens.items() if tokens > self._worker_tokens_max}
        if not over:
            return
        number = count()
        heap = [
            (used, next(number), worker, node)
            for node in self
            for worker, used in node.used.items()
            if worker in over and node.ends(worker)
        ]
        heapq.heapify(heap)
        while heap:
            _, _, worker, node = heapq.heappop(heap)
            if self.worker_tokens[worker] <= self._worker_tokens_max:
                continue
            self.worker_tokens[worker] -= node.tokens
            del node.used[worker]
            parent = node.parent
            assert parent is not None
            if not node.children and not node.used:
                del parent.children[node.blocks[0]]
            if parent is not self._root and parent.ends(worker):
                heapq.heappush(heap, (parent.used[worker], next(number), worker, parent))

    def __iter__(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


def shared_blocks(run: Blocks, blocks: Blocks, at: int) -> int:
    """Return how many blocks of the run follow in `blocks` from `at` on."""
    if blocks[at : at + len(run)] == run:
        return len(run)
    return next(shared for shared, block in enumerate(run) if blocks[at + shared : at + shared + 1] != (block,))
