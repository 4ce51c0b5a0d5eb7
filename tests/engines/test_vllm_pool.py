"""The KV pool behind real vLLM: what the engine forgot comes back from the pool, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_pair import AGENT, NUMBERS, OPTIONS, greedy, prompt
from engine_process import EngineProcess

POOL_BYTES = 64 << 20
BLOCK_TOKENS = 32


@dataclass
class Turn:
    tokens: list[int]
    computed: int
    """Prompt tokens that the engine computed, by its own count."""
    cached: int
    promoted: int
    pulled: int = 0


class PoolEngine:
    """An engine with a small cache, and its counters around each request."""

    def __init__(self, model: Path, gate: Path, **options: Any) -> None:
        defaults = {"num_gpu_blocks_override": 64, "max_model_len": 1984, "kv_pool_bytes": POOL_BYTES}
        settings = {"model": str(model), "role": "decode", "options": OPTIONS | defaults | options, "agent": AGENT}
        self.process = EngineProcess(settings, gate)

    def load(self) -> dict[str, Any]:
        return self.process.ask("load")

    def ask(self, tokens: list[int], output_tokens: int = 24, **fields: Any) -> Turn:
        before = self.load()
        name = f"request-{next(NUMBERS)}"
        fields = {"leg": "whole", "sampling": greedy(output_tokens)} | fields
        answer = self.process.send("generate", request=name, tokens=tokens, **fields)
        output = answer.tokens()
        self.saved()
        after = self.load()

        def grown(counter: str) -> int:
            return after[counter] - before[counter]

        return Turn(
            output,
            computed=grown("prompt_tokens_computed"),
            cached=grown("prompt_tokens_cached"),
            promoted=after["pool"]["promoted_tokens"] - before["pool"]["promoted_tokens"],
            pulled=grown("prompt_tokens_pulled"),
        )

    def saved(self) -> None:
        """Wait until all saves have ended: no block is in use any more."""
        self.process.settled()

    def forget(self) -> None:
        """Drop the engine's own cache, not the pool."""
        self.process.ask("preempt")


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolEngine]:
    engine = PoolEngine(tiny_model, tmp_path_factory.mktemp("gate"))
    try:
        engine.process.wait_started()
        yield engine
    finally:
        engine.process.close()


def test_second_turn_after_eviction_computes_hardly_more_than_with_an_endless_cache(engine: PoolEngine) -> None:
    question, more = prompt(700, 1), prompt(45, 2)

    def second_turn(salt: str, *, evicted: bool) -> Turn:
        first = engine.ask(question, cache_salt=salt)
        if evicted:
            # 64 blocks of 32 tokens; these two prompts need all of them.
            for seed in (3, 4):
                engine.ask(prompt(1500, seed), 1)
        return engine.ask([*question, *first.tokens, *more], cache_salt=salt)

    endless = second_turn("endless", evicted=False)
    evicted = second_turn("evicted", evicted=True)
    assert endless.promoted == 0
    assert evicted.cached == 0, "the engine has evicted the first turn"
    assert evicted.tokens == endless.tokens
    assert evicted.computed <= endless.computed + BLOCK_TOKENS + 1
    assert evicted.promoted + evicted.computed == len(question) + 24 + len(more)
