"""A synthetic trace with skewed prefixes: their popularity follows Zipf's law with exponent 1.1."""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Final

from baton_simulator.traffic.trace import Request, Trace

BLOCK_TOKENS: Final = 512
SEED: Final = 11
REQUESTS: Final = 6000
DURATION_S: Final = 1800.0
PREFIXES: Final = 1000
EXPONENT: Final = 1.1
PREFIX_BLOCKS: Final = (4, 48)
SUFFIX_TOKENS: Final = (128, 4096)
OUTPUT_TOKENS: Final = (16, 1024)
"""Outputs are log-uniform between these, and so are suffixes."""


def generate(seed: int = SEED) -> Trace:
    random = Random(seed)
    lengths = [random.randint(*PREFIX_BLOCKS) for _ in range(PREFIXES)]
    weights = list(accumulate((rank + 1) ** -EXPONENT for rank in range(PREFIXES)))
    next_id = PREFIXES * PREFIX_BLOCKS[1]
    requests: list[Request] = []
    for at_s in sorted(random.uniform(0, DURATION_S) for _ in range(REQUESTS)):
        (prefix,) = random.choices(range(PREFIXES), cum_weights=weights)
        suffix_tokens = log_uniform(SUFFIX_TOKENS, random)
        first = prefix * PREFIX_BLOCKS[1]
        own = range(next_id, next_id + suffix_tokens // BLOCK_TOKENS)
        next_id += len(own)
        blocks = (*range(first, first + lengths[prefix]), *own)
        prompt_tokens = lengths[prefix] * BLOCK_TOKENS + suffix_tokens
        requests.append(Request(at_s, blocks, prompt_tokens, log_uniform(OUTPUT_TOKENS, random)))
    return Trace("skewed", BLOCK_TOKENS, requests)


def log_uniform(bounds: tuple[int, int], random: Random) -> int:
    low, high = bounds
    return round(low * (high / low) ** random.random())
