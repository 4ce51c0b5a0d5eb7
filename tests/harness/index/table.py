"""An index of plain dictionaries: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_kvindex.index import IndexSize, Run, Tier, UnknownParent, check_ids, check_run, link, split_ids

from baton.messages.workers import Fingerprint


@dataclass(slots=True)
class _Block:
    parent: bytes
    copies: int = 1


class TableIndex:
    def __init__(self, *, counts_copies: bool = False) -> None:
        self._counts_copies = counts_copies
        self._held: dict[tuple[str, Tier], dict[bytes, _Block]] = {}
        """Holder → block → the block before it."""

    def store(self, worker: str, parent: bytes, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
        check_run(parent, blocks)
        if parent and not any(parent in self._held.get((worker, each), {}) for each in Tier):
            raise UnknownParent(f"worker {worker} stored blocks behind {parent.hex()}, which it does not hold here")
        return self._insert((worker, tier), parent, blocks)

    def remove(self, worker: str, blocks: bytes, tier: Tier = Tier.DEVICE) -> int:
        check_ids(blocks)
        held = self._held.get((worker, tier), {})
        found = 0
        for block in split_ids(blocks):
            if (mine := held.get(block)) is None:
                continue
            found += 1
            mine.copies -= 1
            if not mine.copies:
                del held[block]
        if not held:
            self._held.pop((worker, tier), None)
        return found

    def clear(self, worker: str) -> int:
        return sum(len(self._held.pop((worker, tier), {})) for tier in Tier)

    def match(self, blocks: bytes, tier: Tier = Tier.DEVICE) -> dict[str, int]:
        check_ids(blocks)
        ids = split_ids(blocks)
        leading: dict[str, int] = {}
        for worker in dict.fromkeys(worker for worker, _ in self._held):
            caches = [held for each in Tier if each <= tier and (held := self._held.get((worker, each)))]
            count = next((at for at, block in enumerate(ids) if not any(block in held for held in caches)), len(ids))
            if count:
                leading[worker] = count
        return leading

    def match_tiers(self, blocks: bytes) -> dict[str, tuple[int, int, int]]:
        device, pool, file = (self.match(blocks, tier) for tier in Tier)
        return {worker: (device.get(worker, 0), pool.get(worker, 0), reach) for worker, reach in file.items()}

    def dump(self, worker: str, tier: Tier = Tier.DEVICE) -> list[Run]:
        held = self._held.get((worker, tier), {})
        return [Run(parent=mine.parent, blocks=block) for block, mine in held.items() for _ in range(mine.copies)]

    def fingerprint(self, worker: str, tier: Tier = Tier.DEVICE) -> Fingerprint:
        held = self._held.get((worker, tier), {})
        return Fingerprint.of(sum(int.from_bytes(block, "little") for block in held), len(held))

    def load(self, worker: str, runs: Sequence[Run], tier: Tier = Tier.DEVICE) -> None:
        for run in runs:
            check_run(run.parent, run.blocks)
        self._held.pop((worker, tier), None)
        for run in runs:
            self._insert((worker, tier), run.parent, run.blocks)

    def size(self) -> IndexSize:
        blocks = len(set[bytes]().union(*self._held.values()))
        workers = len({worker for worker, _ in self._held})
        return IndexSize(workers=workers, blocks=blocks, holdings=sum(map(len, self._held.values())))

    def _insert(self, holder: tuple[str, Tier], parent: bytes, blocks: bytes) -> int:
        held = self._held.get(holder, {})
        before = len(held)
        for block, its_parent in link(parent, blocks):
            if (mine := held.get(block)) is None:
                held[block] = _Block(its_parent)
            elif self._counts_copies:
                mine.copies += 1
        if held:
            self._held[holder] = held
        return len(held) - before
