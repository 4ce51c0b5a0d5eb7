"""Lenders that are stopped or killed once they have granted a loan, or evict meanwhile, for every pair of engines."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from cross_engines import Engines, make_pair
from struck_handoffs import attempt, moving, struck

from baton.engines.engine import Leg
from tests.contract.lending_suite import PROMPT_TOKENS, borrow, borrowable_tokens, lend, prefilled_by_lender
from tests.harness.engine_pair import GREEDY, Pair, changed, collect, eventually

DEADLINE_S = 2.0
SLACK_S = 1.0
"""By this much an answer may be later than by the loan's end, which the engine notices between two steps."""
ANSWERED_S = 60.0
ONCE = changed(GREEDY, max_tokens=1)


async def struck_delay_s(engines: Engines, names: tuple[str, str], how: signal.Signals | None) -> float:
    """Borrow from a lender that is struck, or evicts (None), and compare the answer with one without a loan.

    It comes while the lender is still stopped. Returns how much later its first token is.
    """
    pair = await make_pair(engines, *names)
    tokens, salt = pair.prompt(PROMPT_TOKENS), f"struck by {how}"
    # An engine's first prompt of this length takes longer.
    await collect(pair.decode, pair.request(tokens, salt=f"{salt}, first"))
    alone = await collect(pair.decode, pair.request(tokens, salt=f"{salt}, alone"))
    await collect(pair.prefill, pair.request(tokens, salt=salt))
    await pair.settled()
    loan = await lend(pair, tokens, salt, budget_s=DEADLINE_S)
    assert loan.tokens >= PROMPT_TOKENS // 2
    async with _evicting(pair) if how is None else struck(pair.prefill, how), asyncio.timeout(ANSWERED_S):
        answer = await collect(pair.decode, replace(pair.request(tokens, salt=salt), loan=loan))
    if how is signal.SIGKILL:
        await engines.lose(names[0])
    assert answer.tokens == alone.tokens
    await eventually(lambda: not (pair.decode.load().pool.pinned or pair.decode.load().kv_usage))
    case = how.name if how else "evicts"
    print(f"{'-to-'.join(names)}, {case}: first token after {answer.first_s:.2f} s, alone {alone.first_s:.2f} s")
    return answer.first_s - alone.first_s


@asynccontextmanager
async def _evicting(pair: Pair) -> AsyncGenerator[None]:
    """Have the lender compute more prompts than its pool has room for."""
    facts, evicted_blocks = pair.prefill_facts, pair.prefill.load().pool.evicted_blocks
    prompts = facts.pool_blocks * facts.block_tokens // 900 + 1
    filling = [asyncio.create_task(collect(pair.prefill, pair.request(pair.prompt(900), ONCE))) for _ in range(prompts)]
    yield
    await asyncio.gather(*filling)
    assert pair.prefill.load().pool.evicted_blocks > evicted_blocks


async def check_prefill_killed_after_it_lent(engines: Engines, names: tuple[str, str]) -> None:
    """Kill prefill in the midst of a hand-off: decode goes on from what a third engine had borrowed from it."""
    third = next(name for name in ("vllm-32", "sglang-32") if name not in names)
    lent, pair, left = [await make_pair(engines, *each) for each in ((names[0], third), names, (third, names[1]))]
    tokens, salt = pair.prompt(2400), "prefill killed"
    begin = tokens[:PROMPT_TOKENS]
    alone = await collect(pair.decode, pair.request(tokens, salt=f"{salt}, alone"))
    # A vLLM that has not run a step yet computes the prompt instead of borrowing; a worker's canary is its first step.
    await collect(lent.decode, lent.request(lent.prompt(40), ONCE))
    first = await prefilled_by_lender(pair, begin, salt)
    await pair.prefill.abort(first.request, first.attempt)
    await lent.settled()
    loan = await lend(lent, begin, salt)
    turn = await borrow(lent, lent.request(begin, ONCE, salt=salt), loan)
    assert turn.borrowed_tokens == borrowable_tokens(lent, loan.tokens) >= 256
    prefill = pair.request(tokens, leg=Leg.PREFILL, salt=salt)
    decode = pair.request(tokens, leg=Leg.DECODE, name=prefill.request, salt=salt)
    legs = [asyncio.create_task(attempt(pair.prefill, prefill)), asyncio.create_task(attempt(pair.decode, decode))]
    await moving(pair, legs[1])
    async with struck(pair.prefill, signal.SIGKILL):
        assert await asyncio.gather(*legs) == [None, None]
    await engines.lose(names[0])
    loan = await lend(left, tokens, salt)
    turn = await borrow(left, replace(left.request(tokens, salt=salt), attempt=2), loan)
    assert turn.answer.tokens == alone.tokens
    assert turn.borrowed_tokens == turn.promoted_tokens == borrowable_tokens(left, loan.tokens) >= 256
    assert turn.computed_tokens == len(tokens) - turn.promoted_tokens
