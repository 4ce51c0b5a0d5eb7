"""An exact index of which worker holds which prefix, a fixed time behind the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from baton_scheduler.prediction import PrefixMatch

from baton.messages.index import Tier


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
        self._pooled: dict[int, int] = {}
        """Blocks in pools."""
        self._speculative: dict[int, int] = {}
        self._copies: dict[int, dict[int, int]] = {bit: {} for bit in self._bits.values()}
        """Bit → block → number of prompts that will bring it."""
        self._pending: deque[tuple[float, int, Tier, Sequence[int], Sequence[int], Sequence[int]]] = deque()
        """(due, bit, tier, stored, evicted, no longer speculative)."""

    def change(
        self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float, tier: Tier = Tier.DEVICE
    ) -> None:
        self._pending.append((now_s + self._lag_s, self._bits[worker], tier, stored, evicted, ()))

    def speculate(self, worker: str, blocks: Sequence[int]) -> None:
        bit, speculative = self._bits[worker], self._speculative
        copies = self._copies[bit]
        for block in blocks:
            speculative[block] = speculative.get(block, 0) | bit
            copies[block] = copies.get(block, 0) + 1

    def settle(self, worker: str, blocks: Sequence[int], now_s: float) -> None:
        """Take back `speculate`: the blocks are held now."""
        self._pending.append((now_s + self._lag_s, self._bits[worker], Tier.DEVICE, (), (), blocks))

    def match(self, blocks: Sequence[int], now_s: float) -> PrefixMatch:
        """Return the leading blocks of a prompt that each worker holds or will hold."""
        while self._pending and self._pending[0][0] <= now_s:
            _, bit, tier, stored, evicted, settled = self._pending.popleft()
            self._apply(bit, self._held if tier is Tier.DEVICE else self._pooled, stored, evicted, settled)
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
        return PrefixMatch(counts, expected, self._match_pools(blocks, counts) if self._pooled else {})

    def _match_pools(self, blocks: Sequence[int], counts: Mapping[str, int]) -> dict[str, int]:
        """Return the leading blocks that workers hold on either tier, where these are more than on the device."""
        held, pooled = self._held, self._pooled
        reaches: dict[str, int] = {}
        holding = (1 << len(self._names)) - 1
        for count, block in enumerate(blocks):
            here = holding & (held.get(block, 0) | pooled.get(block, 0))
            self._note(holding & ~here, count, reaches)
            holding = here
            if not holding:
                break
        self._note(holding, len(blocks), reaches)
        return {worker: reach for worker, reach in reaches.items() if reach > counts.get(worker, 0)}

    def _note(self, bits: int, count: int, counts: dict[str, int]) -> None:
        """Note the number of leading blocks of the workers with these bits."""
        while bits:
            lowest = bits & -bits
            counts[self._names[lowest.bit_length() - 1]] = count
            bits ^= lowest

    def _apply(
        self, bit: int, held: dict[int, int], stored: Sequence[int], evicted: Sequence[int], settled: Sequence[int]
    ) -> None:
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
