"""An exact index of which worker holds which prefix, a fixed time behind the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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
        self._copies: dict[int, dict[int, int]] = {bit: {} for bit in self._bits.values()}
        """Bit → block → number of prompts that will bring it."""
        self._pending: deque[tuple[float, int, Sequence[int], Sequence[int], Sequence[int]]] = deque()
        """(due, bit, stored, evicted, no longer speculative)."""

    def change(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        self._pending.append((now_s + self._lag_s, self._bits[worker], stored, evicted, ()))

    def speculate(self, worker: str, blocks: Sequence[int]) -> None:
        bit, speculative = self._bits[worker], self._speculative
        copies = self._copies[bit]
        for block in blocks:
            speculative[block] = speculative.get(block, 0) | bit
            copies[block] = copies.get(block, 0) + 1

    def settle(self, worker: str, blocks: Sequence[int], now_s: float) -> None:
        """Take back `speculate`: the blocks are held now."""
        self._pending.append((now_s + self._lag_s, self._bits[worker], (), (), blocks))

    def match(self, blocks: Sequence[int], now_s: float) -> PrefixMatch:
        """Return the leading blocks of a prompt that each worker holds or will hold."""
        while self._pending and self._pending[0][0] <= now_s:
            _, bit, stored, evicted, settled = self._pending.popleft()
            self._apply(bit, stored, evicted, settled)
        held, speculative = self._held, self._speculative
        counts: dict[str, int] = {}
        expected: dict[str, int] = {}
        # Bits of the workers that hold all blocks so far, and of those that will hold them.
        holding = coming = -1
        for count, block in enumerate(blocks):
            here = held.get(block, 0)
            # All that hold the blocks so far will hold them.
            if coming & ~here:
                soon = here | speculative.get(block, 0)
                if count:
                    self._note(coming & ~soon & ~holding, count, expected)
                    self._note(holding & ~here, count, counts)
                holding &= here
                coming &= soon
                if not coming:
                    break
        else:
            if blocks:
                self._note(coming & ~holding, len(blocks), expected)
                self._note(holding, len(blocks), counts)
        return PrefixMatch(counts, expected)

    def _note(self, bits: int, count: int, counts: dict[str, int]) -> None:
        """Note the number of leading blocks of the workers with these bits."""
        while bits:
            lowest = bits & -bits
            counts[self._names[lowest.bit_length() - 1]] = count
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
        copies, speculative = self._copies[bit], self._speculative
        for block in settled:
            if copies[block] > 1:
                copies[block] -= 1
                continue
            del copies[block]
            left = speculative[block] & ~bit
            if left:
                speculative[block] = left
            else:
                del speculative[block]
