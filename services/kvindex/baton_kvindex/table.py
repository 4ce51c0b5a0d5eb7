"""The index as one dictionary per worker: the oracle of the tests and the baseline of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from baton_kvindex.index import IndexSize, Run, UnknownParent, check_ids, check_run, link, split_ids


class TableIndex:
    def __init__(self) -> None:
        self._parents: dict[str, dict[bytes, bytes]] = {}
        """Worker → block → the block before it."""

    def store(self, worker: str, parent: bytes, blocks: bytes) -> int:
        check_run(parent, blocks)
        held = self._parents.get(worker, {})
        if parent and parent not in held:
            raise UnknownParent(f"worker {worker} stored blocks behind {parent.hex()}, which it does not hold here")
        before = len(held)
        for block, its_parent in link(parent, blocks):
            held.setdefault(block, its_parent)
        if held:
            self._parents[worker] = held
        return len(held) - before

    def remove(self, worker: str, blocks: bytes) -> int:
        check_ids(blocks)
        held = self._parents.get(worker, {})
        removed = sum(held.pop(block, None) is not None for block in split_ids(blocks))
        if not held:
            self._parents.pop(worker, None)
        return removed

    def clear(self, worker: str) -> int:
        return len(self._parents.pop(worker, {}))

    def match(self, blocks: bytes) -> dict[str, int]:
        check_ids(blocks)
        ids = split_ids(blocks)
        leading = {
            worker: next((count for count, block in enumerate(ids) if block not in held), len(ids))
            for worker, held in self._parents.items()
        }
        return {worker: count for worker, count in leading.items() if count}

    def dump(self, worker: str) -> list[Run]:
        return [Run(parent=parent, blocks=block) for block, parent in self._parents.get(worker, {}).items()]

    def load(self, worker: str, runs: Sequence[Run]) -> None:
        for run in runs:
            check_run(run.parent, run.blocks)
        held: dict[bytes, bytes] = {}
        for run in runs:
            for block, parent in link(run.parent, run.blocks):
                held.setdefault(block, parent)
        self._parents.pop(worker, None)
        if held:
            self._parents[worker] = held

    def size(self) -> IndexSize:
        holdings = [set(held) for held in self._parents.values()]
        blocks = len(set[bytes]().union(*holdings))
        return IndexSize(workers=len(holdings), blocks=blocks, holdings=sum(map(len, holdings)))
