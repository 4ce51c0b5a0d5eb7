"""The index as a compressed radix tree, in pure Python.

A node is a run of blocks that the same workers hold, together with the id of the block before it. Since a
block id is a hash over its whole prefix, an edge needs no pointer: `_nodes[id]` finds the node of any block
at once, and a node's parent id says below which block it hangs, also in the middle of another node. So a
branch splits nothing; only a difference in holders does. Workers A and B, blocks a to f, and g behind c:

    A stores a…f              B stores a b c g              A removes b

    [a b c d e f] {A}         [a b c] {A B}                 [a] {A B}
                               ├─[d e f] {A}                 └─[b] {B}
                               └─[g]     {B}                    └─[c] {A B}
                                                                   ├─[d e f] {A}
                                                                   └─[g]     {B}

After the removal A holds c to f without a path to them, which `match` respects: it walks the prompt node by
node and drops each worker at the first node that it does not hold. When A stores b again, nothing else has to
be said about c. A block that nobody holds leaves the tree.

A split cuts one node in two; the shorter part moves to the new node, so re-pointing its ids stays cheap:

    before   N = [a b c d e f] {A}   behind p        split at 2
    after    M = [a b]         {A}   behind p        new; a and b point to M
             N = [c d e f]     {A}   behind b        c…f point to N as before

A join undoes it: a node that comes to be held by the same workers as the node that ends in its parent is
appended to that node. Joins look backwards only, which covers prompts that are stored from front to back.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_kvindex.index import ID_BYTES, IndexSize, Run, UnknownParent, check_ids, check_run, split_ids


class _Node:
    __slots__ = ("blocks", "parent", "workers")

    def __init__(self, parent: bytes, blocks: bytes, workers: set[str]) -> None:
        self.parent = parent
        self.blocks = blocks
        self.workers = workers

    def offset_of(self, block: bytes) -> int:
        """Return where `block` begins in this node, in bytes. The block must be in this node."""
        if self.blocks.startswith(block):
            return 0
        at = self.blocks.index(block)
        while at % ID_BYTES:
            at = self.blocks.index(block, at + 1)
        return at

    def shared(self, start: int, blocks: bytes, at: int) -> int:
        """Return the bytes that this node, from `start` on, and `blocks`, from `at` on, have in common."""
        mine = self.blocks[start:] if start else self.blocks
        if blocks.startswith(mine, at):
            return len(mine)
        # Equality of prefixes is monotone in their length, so the end of the common part is found by bisection.
        low, high = 0, min(len(mine), len(blocks) - at) // ID_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            if blocks.startswith(mine[: middle * ID_BYTES], at):
                low = middle
            else:
                high = middle - 1
        return low * ID_BYTES


class RadixIndex:
    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        """Block → the node it is in."""
        self._held: dict[str, dict[_Node, None]] = {}
        """Worker → the nodes it holds; a dictionary for its order, so that dumps are deterministic."""
        self._holdings: dict[str, int] = {}
        """Worker → the number of blocks it holds."""

    def store(self, worker: str, parent: bytes, blocks: bytes) -> int:
        check_run(parent, blocks)
        if parent:
            node = self._nodes.get(parent)
            if node is None or worker not in node.workers:
                raise UnknownParent(f"worker {worker} stored blocks behind {parent.hex()}, which it does not hold here")
        return self._insert(worker, parent, blocks)

    def remove(self, worker: str, blocks: bytes) -> int:
        check_ids(blocks)
        removed = at = 0
        while at < len(blocks):
            block = blocks[at : at + ID_BYTES]
            node = self._nodes.get(block)
            if node is None or worker not in node.workers:
                at += ID_BYTES
                continue
            start = node.offset_of(block)
            length = node.shared(start, blocks, at)
            self._release(worker, self._isolate(node, start, start + length))
            removed += length // ID_BYTES
            at += length
        self._count(worker, -removed)
        return removed

    def clear(self, worker: str) -> int:
        for node in list(self._held.get(worker, ())):
            self._release(worker, node)
        cleared = self._holdings.get(worker, 0)
        self._count(worker, -cleared)
        return cleared

    def match(self, blocks: bytes) -> dict[str, int]:
        check_ids(blocks)
        leading: dict[str, int] = {}
        alive: set[str] | None = None
        at = 0
        while at < len(blocks) and (alive is None or alive):
            block = blocks[at : at + ID_BYTES]
            node = self._nodes.get(block)
            staying = set[str]() if node is None else node.workers if alive is None else alive & node.workers
            if alive is not None and len(staying) < len(alive):
                leading.update(dict.fromkeys(alive - staying, at // ID_BYTES))
            alive = staying
            at += ID_BYTES if node is None else node.shared(node.offset_of(block), blocks, at)
        leading.update(dict.fromkeys(alive or (), at // ID_BYTES))
        return leading

    def dump(self, worker: str) -> list[Run]:
        return [Run(parent=node.parent, blocks=node.blocks) for node in self._held.get(worker, ())]

    def load(self, worker: str, runs: Sequence[Run]) -> None:
        for run in runs:
            check_run(run.parent, run.blocks)
        self.clear(worker)
        for run in runs:
            self._insert(worker, run.parent, run.blocks)

    def size(self) -> IndexSize:
        return IndexSize(workers=len(self._holdings), blocks=len(self._nodes), holdings=sum(self._holdings.values()))

    def _insert(self, worker: str, parent: bytes, blocks: bytes) -> int:
        new_blocks = at = 0
        while at < len(blocks):
            block = blocks[at : at + ID_BYTES]
            node = self._nodes.get(block)
            if node is None:
                length = self._append(worker, parent, blocks, at)
                new_blocks += length // ID_BYTES
            else:
                start = node.offset_of(block)
                length = node.shared(start, blocks, at)
                if worker not in node.workers:
                    part = self._isolate(node, start, start + length)
                    part.workers.add(worker)
                    self._held.setdefault(worker, {})[part] = None
                    self._join(part)
                    new_blocks += length // ID_BYTES
            at += length
            parent = blocks[at - ID_BYTES : at]
        self._count(worker, new_blocks)
        return new_blocks

    def _append(self, worker: str, parent: bytes, blocks: bytes, at: int) -> int:
        """Add the blocks from `at` on that nobody holds yet, up to the first that somebody does; return their bytes."""
        node = self._nodes.get(parent)
        if node is None or node.workers != {worker} or not node.blocks.endswith(parent):
            node = _Node(parent, b"", {worker})
            self._held.setdefault(worker, {})[node] = None
        end = at
        while end < len(blocks):
            block = blocks[end : end + ID_BYTES]
            if block in self._nodes:
                break
            self._nodes[block] = node
            end += ID_BYTES
        node.blocks += blocks[at:end]
        return end - at

    def _isolate(self, node: _Node, start: int, end: int) -> _Node:
        """Cut so that the bytes `start:end` of `node` are a node of their own, and return that."""
        if end < len(node.blocks):
            node, _ = self._split(node, end)
        if start:
            _, node = self._split(node, start)
        return node

    def _split(self, node: _Node, at: int) -> tuple[_Node, _Node]:
        """Cut `node` at byte `at`, as drawn at the top of this file; return both parts in order."""
        head, tail = node.blocks[:at], node.blocks[at:]
        if len(head) <= len(tail):
            moved = _Node(node.parent, head, set(node.workers))
            node.parent, node.blocks = head[-ID_BYTES:], tail
            parts = (moved, node)
        else:
            moved = _Node(head[-ID_BYTES:], tail, set(node.workers))
            node.blocks = head
            parts = (node, moved)
        self._nodes.update(dict.fromkeys(split_ids(moved.blocks), moved))
        for worker in moved.workers:
            self._held[worker][moved] = None
        return parts

    def _join(self, node: _Node) -> None:
        """Append `node` to the node that ends in its parent, where the same workers hold both."""
        before = self._nodes.get(node.parent)
        if before is None or before is node or before.workers != node.workers:
            return
        if not before.blocks.endswith(node.parent):
            return
        before.blocks += node.blocks
        self._nodes.update(dict.fromkeys(split_ids(node.blocks), before))
        for worker in node.workers:
            del self._held[worker][node]

    def _release(self, worker: str, node: _Node) -> None:
        """Take `worker` from the holders of a whole node; a node without holders leaves the tree."""
        node.workers.discard(worker)
        del self._held[worker][node]
        if not node.workers:
            for block in split_ids(node.blocks):
                del self._nodes[block]

    def _count(self, worker: str, change: int) -> None:
        """Keep the number of blocks per worker; a worker that holds none leaves no trace."""
        holdings = self._holdings.get(worker, 0) + change
        if holdings:
            self._holdings[worker] = holdings
        else:
            self._holdings.pop(worker, None)
            self._held.pop(worker, None)
