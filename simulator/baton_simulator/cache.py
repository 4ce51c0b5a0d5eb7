"""A worker's KV memory: blocks of running requests, and those kept for later prompts in LRU order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """KV blocks of one worker.

    Prompt blocks are shared by equal id and counted once. A request's other blocks (the rest of its prompt, its answer)
    are private and kept no longer than the request. Blocks that no request uses stay until the memory is needed; the
    least recently used go first, of one prompt its tail first. A block is therefore never kept without those before it.
    """

    __slots__ = ("_blocks_max", "_idle", "_in_use_max", "_pins", "_private")

    def __init__(self, *, in_use_max: int, blocks_max: int) -> None:
        self._in_use_max = in_use_max
        self._blocks_max = max(blocks_max, in_use_max)
        self._pins: dict[int, int] = {}
        """Block → number of requests that use it."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks that no request uses, the next to evict first."""
        self._private = 0

    @property
    def in_use(self) -> int:
        return len(self._pins) + self._private

    def __len__(self) -> int:
        return len(self._pins) + len(self._idle) + self._private

    def __contains__(self, block: int) -> bool:
        return block in self._pins or block in self._idle

    def fits(self, blocks: Sequence[int], private: int) -> bool:
        """Return whether a request could run now."""
        room = self._in_use_max - self.in_use - private
        return room >= len(blocks) or room >= self.added(blocks)

    def added(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks no running request holds."""
        pins = self._pins
        return sum(block not in pins for block in blocks)

    def match(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks are held."""
        pins, idle = self._pins, self._idle
        for count, block in enumerate(blocks):
            if block not in pins and block not in idle:
                return count
        return len(blocks)

    def admit(self, blocks: Sequence[int], private: int) -> tuple[int, list[int]]:
        """Take a request that `fits`. Return how many leading blocks were held, and the blocks evicted for the rest."""
        pins, idle = self._pins, self._idle
        held = self.match(blocks)
        for block in blocks:
            pinned = pins.get(block)
            if pinned is None:
                idle.pop(block, None)
                pins[block] = 1
            else:
                pins[block] = pinned + 1
        self._private += private
        surplus = len(self) - self._blocks_max
        return held, [idle.popitem(last=False)[0] for _ in range(surplus)]

    def release(self, blocks: Sequence[int], private: int) -> None:
        """Give up a request's blocks; the shared ones stay as long as there is room."""
        pins, idle = self._pins, self._idle
        for block in reversed(blocks):
            pinned = pins[block]
            if pinned == 1:
                del pins[block]
                idle[block] = None
            else:
                pins[block] = pinned - 1
        self._private -= private
