"""An exact index of which worker holds which prefix, a fixed time behind the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from baton_scheduler.prediction import PrefixMatch


class PrefixIndex:
    """Held and speculative blocks of all workers, one bit per worker.

    KV events count from `lag_s` after they happened. Speculative blocks (prompts placed and not computed yet) count at
    once and until the events of their computation do.
    """

    def __init__(self, workers: Sequence[str], lag_s: float) -> None:
        self._names = list(workers)
        self._bits = {name: 1 << number for number, name in enumerate(workers)}
        self._lag_s = lag_s
        self._held: dict[int, int] = {}
        self._speculative: dict[int, int] = {}
        self._copies: dict[tuple[int, int], int] = {}
        """(bit, block) → number of prompts that will bring it."""
        self._pending: deque[tuple[float, int, Sequence[int], Sequence[int], Sequence[int]]] = deque()
        """(due, bit, stored, evicted, no longer speculative)."""

    def change(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        self._pending.append((now_s + self._lag_s, self._bits[worker], stored, evicted, ()))

    def speculate(self, worker: str, blocks: Sequence[int]) -> None:
        bit, speculative, copies = self._bits[worker], self._speculative, self._copies
        for block in blocks:
            speculative[block] = speculative.get(block, 0) | bit
            copies[bit, block] = copies.get((bit, block), 0) + 1

    def settle(self, worker: str, blocks: Sequence[int], now_s: float) -> None:
        """Take back `speculate`: the blocks are held now."""
        self._pending.append((now_s + self._lag_s, self._bits[worker], (), (), blocks))

    def match(self, blocks: Sequence[int], now_s: float) -> PrefixMatch:
        """Return the leading blocks of a prompt that each worker holds or will hold."""
        while self._pending and self._pending[0][0] <= now_s:
            _, bit, stored, evicted, settled = self._pending.popleft()
            self._apply(bit, stored, evicted, settled)
        held, speculative = self._held, self._speculative
        counts = dict(self._count(held.get(block, 0) for block in blocks))
        either = self._count(held.get(block, 0) | speculative.get(block, 0) for block in blocks)
        expected = {worker: count for worker, count in either if count > counts.get(worker, 0)}
        return PrefixMatch(counts, expected)

    def _count(self, holders: Iterator[int]) -> Iterator[tuple[str, int]]:
        """Yield, for each worker, how many leading blocks have its bit, if any have."""
        count, left = 0, -1
        for count, bits in enumerate(holders):
            if count == 0:
                left = bits
            gone, left = left & ~bits, left & bits
            yield from self._workers(gone, count)
            if not left:
                return
        if left > 0:
            yield from self._workers(left, count + 1)

    def _workers(self, bits: int, count: int) -> Iterator[tuple[str, int]]:
        while bits:
            lowest = bits & -bits
            yield self._names[lowest.bit_length() - 1], count
            bits ^= lowest

    def _apply(self, bit: int, stored: Sequence[int], evicted: Sequence[int], settled: Sequence[int]) -> None:
        held = self._held
        for block in stored:
            held[block] = held.get(block, 0) | bit
        for block in evicted:
            left = held[block] & ~bit
            if left:
                held[block] = left
            else:
                del held[block]
        for block in settled:
            copies = self._copies[bit, block] - 1
            if copies:
                self._copies[bit, block] = copies
                continue
            del self._copies[bit, block]
            left = self._speculative[block] & ~bit
            if left:
                self._speculative[block] = left
            else:
                del self._speculative[block]
