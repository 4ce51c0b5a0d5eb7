"""The KV pool behind real vLLM on a CPU: `make bench-pool-engine`.

Two engines with the same model, one with a pool. First the time to the first token of a long prompt that the pool's
engine computes, promotes from the pool, or finds in its own cache; that its pool lends to a third engine; and that a
fourth one reads from its pool's file after a restart. Then the throughput of both engines on prompts of which nothing
is ever used again, so that the pool only costs: in pairs of rounds that alternate in order, so that a drift of the
machine affects both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from baton.blocks import hash_blocks, root_key
from baton.cli.tiny_model import make_tiny_model
from baton.connectors.pool_lending import Loan
from baton.engines.engine import EngineFacts, EngineRequest, Leg
from baton.engines.vllm.engine import VllmEngine
from baton.messages.attempts import Sampling
from baton.messages.base import pack_tokens
from baton.messages.workers import Role
from baton.transfer import AgentOptions, lease_key
from benchmarks.report import Row, report
from benchmarks.vllm_pair import BUDGET_S, OPTIONS

POOL_BYTES: Final = 128 << 20
BLOCK_TOKENS: Final = 32
LONG_TOKENS: Final = 1500
PROMPT_TOKENS: Final = 400
OUTPUT_TOKENS: Final = 64
CONCURRENCY: Final = 4


@dataclass
class Engines:
    off: VllmEngine
    on: VllmEngine
    on_facts: EngineFacts
    numbers: count[int]

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt that differs from all others from its first token on."""
        number = next(self.numbers)
        return [(number * 7919 + index * 104729) % 8000 + 50 for index in range(tokens)]

    async def first_token_s(
        self,
        engine: VllmEngine,
        tokens: Sequence[int],
        output_tokens: int = 1,
        *,
        loan: Loan | None = None,
        patient: bool = False,
    ) -> float:
        """Return the time to a request's first token. `patient`: it waits for the file however long that takes."""
        request = EngineRequest(
            request=f"request-{next(self.numbers)}",
            attempt=0,
            leg=Leg.WHOLE,
            tokens=tokens,
            sampling=Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            budget_s=BUDGET_S,
            loan=loan,
            computing_token_s=BUDGET_S if patient else 0.0,
        )
        began_s, first_s = time.monotonic(), 0.0
        async for delta in engine.generate(request):
            if delta.tokens and not first_s:
                first_s = time.monotonic() - began_s
        return first_s

    async def tokens_per_s(self, engine: VllmEngine, requests: int) -> float:
        waiting = [self.prompt(PROMPT_TOKENS) for _ in range(requests)]

        async def client() -> None:
            while waiting:
                await self.first_token_s(engine, waiting.pop(), OUTPUT_TOKENS)

        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(client())
        return requests * (PROMPT_TOKENS + OUTPUT_TOKENS) / (time.monotonic() - began_s)


async def forget(engine: VllmEngine) -> None:
    """Drop the engine's own cache once it is idle; saves may still hold blocks."""
    async with asyncio.timeout(10.0):
        while not await engine._llm.reset_prefix_cache():  # noqa: ASYNC110  # pyright: ignore
            await asyncio.sleep(0.01)


async def measure_first_tokens(engines: Engines, repeats: int) -> list[Row]:
    computed: list[float] = []
    cached: list[float] = []
    promoted: list[float] = []
    for _ in range(repeats):
        tokens = engines.prompt(LONG_TOKENS)
        computed.append(await engines.first_token_s(engines.on, tokens))
        cached.append(await engines.first_token_s(engines.on, tokens))
        await forget(engines.on)
        before = engines.on.load().pool.promoted_tokens
        promoted.append(await engines.first_token_s(engines.on, tokens))
        after = engines.on.load().pool.promoted_tokens
        assert after - before == LONG_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS, "its full blocks came from the pool"
    ours, recomputed, at_hand = (statistics.median(series) * 1e3 for series in (promoted, computed, cached))
    name = f"time to first token of {LONG_TOKENS} prompt tokens from the pool"
    return [Row.against(name, "ms", ours, computed=recomputed, cached=at_hand)]


async def measure_elsewhere(engines: Engines, borrower: VllmEngine, repeats: int) -> list[Row]:
    """Measure prompts that `engines.on` has computed: lent by its pool to `borrower`, which has none of them."""
    computed: list[float] = []
    lent: list[float] = []
    root = root_key(engines.on_facts.model_digest)
    # An engine's pool is known to its scheduler from the first step on.
    await engines.first_token_s(borrower, engines.prompt(LONG_TOKENS))
    for _ in range(repeats):
        tokens = engines.prompt(LONG_TOKENS)
        computed.append(await engines.first_token_s(engines.on, tokens))
        await forget(engines.on)
        key = lease_key(f"loan-{next(engines.numbers)}", 0, tokens)
        began_s = time.monotonic()
        blocks = hash_blocks(root, pack_tokens(tokens), BLOCK_TOKENS)
        lent_tokens = await engines.on.lend(key, blocks, 1)
        assert lent_tokens == LONG_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS, "its full blocks are lent"
        loan = Loan(key=key, endpoints=engines.on_facts.pool_agents, tokens=lent_tokens, deadline_s=began_s + BUDGET_S)
        asking_s = time.monotonic() - began_s
        lent.append(asking_s + await engines.first_token_s(borrower, tokens, loan=loan))
    assert borrower.load().pool.borrowed_tokens == repeats * (LONG_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS
    ours, recomputed = (statistics.median(series) * 1e3 for series in (lent, computed))
    return [Row.against(f"time to first token of {LONG_TOKENS} prompt tokens lent", "ms", ours, computed=recomputed)]


async def measure_file(
    engines: Engines, start: Callable[[], Awaitable[tuple[VllmEngine, EngineFacts]]], repeats: int
) -> list[Row]:
    """Measure prompts that an engine computed before it ended, and its successor reads from the file."""
    prompts = [engines.prompt(LONG_TOKENS) for _ in range(repeats)]
    engine, _ = await start()
    try:
        await engines.first_token_s(engine, engines.prompt(LONG_TOKENS))
        computed = [await engines.first_token_s(engine, tokens) for tokens in prompts]
        await written(engine)
    finally:
        await engine.close()
    engine, _ = await start()
    try:
        await engines.first_token_s(engine, engines.prompt(LONG_TOKENS))
        loaded = [await engines.first_token_s(engine, tokens, patient=True) for tokens in prompts]
        file = engine.load().pool.file
        assert file is not None
        assert file.loaded_tokens == repeats * (LONG_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS, "all came from the file"
        reading_ms = file.loading_s / repeats * 1e3
    finally:
        await engine.close()
    ours, recomputed = (statistics.median(series) * 1e3 for series in (loaded, computed))
    name = f"time to first token of {LONG_TOKENS} prompt tokens from the file"
    return [
        Row.against(name, "ms", ours, computed=recomputed),
        Row(name="of it, reading", unit="ms", ours=reading_ms),
    ]


async def written(engine: VllmEngine) -> None:
    """Wait until the file has all that the pool has."""
    async with asyncio.timeout(BUDGET_S):
        while (pool := engine.load().pool).file is None or pool.file.ready < pool.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def measure_cost(engines: Engines, pairs: int, requests: int) -> tuple[list[Row], str]:
    rates: dict[VllmEngine, list[float]] = {engines.off: [], engines.on: []}
    for number in range(pairs):
        order = (engines.off, engines.on) if number % 2 == 0 else (engines.on, engines.off)
        for engine in order:
            rates[engine].append(await engines.tokens_per_s(engine, requests))
    on, off = rates[engines.on], rates[engines.off]
    low, middle, high = median_interval([with_pool / without for with_pool, without in zip(on, off, strict=True)])
    load = engines.on.load()
    rows = [
        Row.against("throughput, nothing used again", "tokens/s", statistics.median(on), off=statistics.median(off)),
        Row(name="median of the pairs' ratios", unit="", ours=middle, ratio=middle),
        Row(name="its 95 % interval, from", unit="", ours=low, ratio=low),
        Row(name="its 95 % interval, to", unit="", ours=high, ratio=high),
    ]
    return rows, f"{load.pool.saved_blocks} blocks saved, {load.pool.evicted_blocks} evicted"


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median between the two order statistics that enclose it with a probability of at least 95 %."""
    ordered, size = sorted(values), len(values)
    rank = 0
    while sum(math.comb(size, below) for below in range(rank + 1)) / 2**size <= 0.025:
        rank += 1
    low = max(rank - 1, 0)
    return ordered[low], statistics.median(ordered), ordered[size - 1 - low]


async def start(model: Path, options: Mapping[str, object]) -> tuple[VllmEngine, EngineFacts]:
    engine = VllmEngine(
        str(model), role=Role.DECODE, options={**OPTIONS, **options}, agent=AgentOptions(secret="bench")
    )
    return engine, await engine.start()


async def measure(model: Path, *, pairs: int, requests: int, repeats: int) -> tuple[list[Row], str]:
    started: list[VllmEngine] = []
    try:
        off, _ = await start(model, {})
        started.append(off)
        on, on_facts = await start(model, {"kv_pool_bytes": POOL_BYTES})
        started.append(on)
        engines = Engines(off=off, on=on, on_facts=on_facts, numbers=count())
        for engine in started:
            await engines.tokens_per_s(engine, requests)
        rows = await measure_first_tokens(engines, repeats)
        borrower, _ = await start(model, {"kv_pool_bytes": POOL_BYTES})
        try:
            rows += await measure_elsewhere(engines, borrower, repeats)
        finally:
            await borrower.close()
        options = {"kv_pool_bytes": POOL_BYTES, "kv_file": str(model / "kv"), "kv_file_bytes": 2 * POOL_BYTES}
        rows += await measure_file(engines, lambda: start(model, options), repeats)
        cost, notes = await measure_cost(engines, pairs, requests)
        return rows + cost, notes
    finally:
        for engine in started:
            await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=16, help="pairs of rounds (default 16)")
    parser.add_argument("--requests", type=int, default=24, help="requests of a round (default 24)")
    parser.add_argument("--repeats", type=int, default=15, help="prompts of the first part (default 15)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder))
        rows, notes = asyncio.run(
            measure(Path(folder), pairs=arguments.pairs, requests=arguments.requests, repeats=arguments.repeats)
        )
    report("pool_engine", rows, notes=f"{arguments.pairs} pairs of rounds of {arguments.requests} requests; {notes}")


if __name__ == "__main__":
    main()
