"""The contract of loans between KV pools: one suite over all pairs of engines that have pools.

A subclass gives a fixture `pair` as in `engine_suite`, with KV pools of at least 100 blocks on both sides. Its prefill
engine lends, its decode engine borrows.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest

from baton.blocks import BLOCK_TOKENS_DEFAULT, hash_blocks, root_key
from baton.connectors.pool_lending import Loan
from baton.engines.engine import EngineRequest, Leg
from baton.messages.base import pack_tokens
from baton.messages.index import Tier
from baton.worker.shadow import ShadowMap
from tests.harness.engine_pair import GREEDY, Answer, Pair, changed, collect, eventually

PROMPT_TOKENS = 800
LOAN_S = 30.0
"""Time for loans whose deadline is not under test."""
SOON_S = 5.0
"""Less than every time limit of a loan that is not under test."""
LONG = changed(GREEDY, max_tokens=300)


@dataclass
class Turn:
    answer: Answer
    computed_tokens: int
    """Prompt tokens that the borrower computed, by its own count."""
    borrowed_tokens: int

    @property
    def promoted_tokens(self) -> int:
        return self.answer.deltas[0].promoted_tokens


async def lend(pair: Pair, tokens: Sequence[int], salt: str, *, budget_s: float = LOAN_S) -> Loan:
    """Have the lender's pool lend a prompt's prefix."""
    key, root = os.urandom(16), root_key(pair.prefill_facts.model_digest, salt=salt)
    blocks = hash_blocks(root, pack_tokens(tokens), BLOCK_TOKENS_DEFAULT)
    lent_tokens = await pair.prefill.lend(key, blocks, len(pair.decode_facts.pool_agents))
    return Loan(
        key=key,
        endpoints=pair.prefill_facts.pool_agents,
        tokens=lent_tokens,
        deadline_s=time.monotonic() + budget_s,
    )


def borrowable_tokens(pair: Pair, tokens: int) -> int:
    """Return how many leading tokens lie in full blocks of both engines."""
    for facts in (pair.prefill_facts, pair.decode_facts):
        tokens -= tokens % facts.block_tokens
    return tokens


async def computed_by_lender(pair: Pair, tokens: Sequence[int], salt: str) -> None:
    await collect(pair.prefill, pair.request(tokens, salt=salt))
    await pair.settled()


async def prefilled_by_lender(pair: Pair, tokens: Sequence[int], salt: str) -> EngineRequest:
    """Have the lender compute a prompt as a prefill leg, and wait until its pool has it. The lease stays open."""
    prefill = pair.request(tokens, leg=Leg.PREFILL, salt=salt)
    blocks = pair.prefill.load().pool.saved_blocks + len(tokens) // pair.prefill_facts.block_tokens
    await collect(pair.prefill, prefill)
    await eventually(lambda: pair.prefill.load().pool.saved_blocks >= blocks)
    return prefill


async def borrow(pair: Pair, request: EngineRequest, loan: Loan) -> Turn:
    """Answer a request with a loan, and compare the borrower's counters."""
    before = (await pair.settled())[1]
    answer = await collect(pair.decode, replace(request, loan=loan))
    if request.leg is Leg.PREFILL:
        await pair.decode.abort(request.request, request.attempt)
    after = (await pair.settled())[1]
    return Turn(
        answer,
        computed_tokens=after.prompt_tokens_computed - before.prompt_tokens_computed,
        borrowed_tokens=after.pool.borrowed_tokens - before.pool.borrowed_tokens,
    )


async def unpinned(pair: Pair) -> None:
    """Wait until neither pool has a reader."""
    await eventually(lambda: not pair.prefill.load().pool.pinned)
    await eventually(lambda: not pair.decode.load().pool.pinned)


async def check_borrowed(pair: Pair, salt: str) -> None:
    """Borrow a prefix that only the lender computed, and compare with what the borrower says alone."""
    tokens = pair.prompt(PROMPT_TOKENS)
    await computed_by_lender(pair, tokens, salt)
    alone = await collect(pair.decode, pair.request(tokens, salt=f"{salt}, alone"))
    loan = await lend(pair, tokens, salt)
    turn = await borrow(pair, pair.request(tokens, salt=salt), loan)
    borrowable = borrowable_tokens(pair, PROMPT_TOKENS)
    assert turn.answer.tokens == alone.tokens
    assert turn.borrowed_tokens == borrowable
    assert turn.promoted_tokens == min(borrowable, PROMPT_TOKENS - 1)
    assert turn.computed_tokens == PROMPT_TOKENS - turn.promoted_tokens
    borrowed = turn.answer.deltas[0].borrowed
    assert borrowed is not None
    assert borrowed.tokens == borrowable
    # A block of a rank with more heads is pulled as a whole by each rank that takes some of them.
    readers = max(len(pair.decode_facts.pool_agents) // len(pair.prefill_facts.pool_agents), 1)
    assert borrowed.moved_bytes == readers * borrowable * pair.decode_facts.kv_bytes_per_token
    assert borrowed.began_s <= borrowed.ended_s
    assert borrowed.backend
    await unpinned(pair)
    await check_events(pair)


async def check_events(pair: Pair) -> None:
    """Check that the events of the borrower tell of all that its pool has."""
    facts = pair.decode_facts
    shadow = ShadowMap(
        model_digest=facts.model_digest, engine_block_tokens=facts.block_tokens, block_tokens=BLOCK_TOKENS_DEFAULT
    )

    def agrees() -> bool:
        for batch in pair.decode_shadow.batches[shadow.batches :]:
            shadow.apply(batch)
        blocks = pair.decode.load().pool.ready * facts.block_tokens // BLOCK_TOKENS_DEFAULT
        return shadow.fingerprint(Tier.POOL).blocks == blocks

    await eventually(agrees)
    assert shadow.ignored_blocks == 0


async def check_not_borrowed(pair: Pair, tokens: Sequence[int], loan: Loan, salt: str) -> None:
    """Answer with a loan that does not arrive: all is computed, and the answer is the same."""
    alone = await collect(pair.decode, pair.request(tokens, salt=f"{salt}, alone"))
    failed = pair.decode.load().pool.borrows_failed
    turn = await borrow(pair, pair.request(tokens, salt=salt), loan)
    assert turn.answer.tokens == alone.tokens
    assert turn.answer.first_s < SOON_S
    assert (turn.borrowed_tokens, turn.promoted_tokens, turn.computed_tokens) == (0, 0, len(tokens))
    assert pair.decode.load().pool.borrows_failed == failed + 1
    assert pair.decode.load().pool.pinned == 0


class LendingSuite:
    async def test_facts_tell_of_the_pools(self, pair: Pair) -> None:
        for facts in (pair.prefill_facts, pair.decode_facts):
            assert facts.pool_blocks >= 100
            assert len(facts.pool_agents) == len(facts.agents)
            assert not set(facts.pool_agents) & set(facts.agents)

    async def test_a_prefix_that_only_the_lender_computed_is_borrowed(self, pair: Pair) -> None:
        await check_borrowed(pair, "borrowed")

    async def test_what_a_prefill_leg_computed_is_lent(self, pair: Pair) -> None:
        tokens, salt = pair.prompt(PROMPT_TOKENS), "computed by prefill"
        # No decode pulls them, and the blocks are lent while they are under the hand-off's lease, too.
        prefill = await prefilled_by_lender(pair, tokens, salt)
        loan = await lend(pair, tokens, salt)
        alone = await collect(pair.decode, pair.request(tokens, salt=f"{salt}, alone"))
        before = pair.decode.load().pool.borrowed_tokens
        answer = await collect(pair.decode, replace(pair.request(tokens, salt=salt), loan=loan))
        await pair.prefill.abort(prefill.request, prefill.attempt)
        _, after = await pair.settled()
        assert answer.tokens == alone.tokens
        assert after.pool.borrowed_tokens - before == borrowable_tokens(pair, PROMPT_TOKENS)
        await unpinned(pair)

    async def test_a_busy_lender_lends(self, pair: Pair) -> None:
        tokens, salt = pair.prompt(PROMPT_TOKENS), "lent by a busy one"
        alone = await collect(pair.decode, pair.request(tokens, salt=f"{salt}, alone"))
        blocks = pair.prefill.load().pool.saved_blocks + PROMPT_TOKENS // pair.prefill_facts.block_tokens
        busy = [
            asyncio.create_task(collect(pair.prefill, pair.request(pair.prompt(31), LONG, salt="busy")))
            for _ in range(3)
        ]
        try:
            await collect(pair.prefill, pair.request(tokens, salt=salt))
            # The copy into the pool follows the step.
            await eventually(lambda: pair.prefill.load().pool.saved_blocks >= blocks)
            loan = await lend(pair, tokens, salt)
            assert not all(task.done() for task in busy)
            answer = await collect(pair.decode, replace(pair.request(tokens, salt=salt), loan=loan))
            assert answer.tokens == alone.tokens
            assert answer.deltas[0].promoted_tokens >= borrowable_tokens(pair, loan.tokens) - 1
        finally:
            await asyncio.gather(*busy)
        await pair.settled()
        await unpinned(pair)

    async def test_a_prefill_leg_borrows(self, pair: Pair) -> None:
        tokens, salt = pair.prompt(PROMPT_TOKENS), "prefill borrows"
        await computed_by_lender(pair, tokens, salt)
        loan = await lend(pair, tokens, salt)
        turn = await borrow(pair, pair.request(tokens, leg=Leg.PREFILL, salt=salt), loan)
        assert turn.borrowed_tokens == borrowable_tokens(pair, PROMPT_TOKENS)
        assert turn.computed_tokens == PROMPT_TOKENS - turn.promoted_tokens
        await unpinned(pair)

    async def test_own_blocks_and_borrowed_ones_serve_one_request(self, pair: Pair) -> None:
        tokens, salt = pair.prompt(PROMPT_TOKENS), "partly borrowed"
        await computed_by_lender(pair, tokens[:640], salt)
        await collect(pair.decode, pair.request(tokens[:256], salt=salt))
        alone = await collect(pair.decode, pair.request(tokens, salt="partly borrowed, alone"))
        turn = await borrow(pair, pair.request(tokens, salt=salt), await lend(pair, tokens, salt))
        assert turn.answer.tokens == alone.tokens
        assert turn.borrowed_tokens == 640 - 256
        assert turn.computed_tokens == PROMPT_TOKENS - 640

    @pytest.mark.parametrize("case", ["never lent", "nobody there", "late"])
    async def test_a_loan_that_fails_costs_tokens_and_no_request(self, pair: Pair, case: str) -> None:
        tokens, salt = pair.prompt(PROMPT_TOKENS), f"failed: {case}"
        await computed_by_lender(pair, tokens, salt)
        budget_s = {"never lent": 0.5, "nobody there": LOAN_S, "late": 0.0}[case]
        loan = await lend(pair, tokens, salt, budget_s=budget_s)
        if case == "never lent":
            loan = msgspec.structs.replace(loan, key=os.urandom(16))
        elif case == "nobody there":
            loan = msgspec.structs.replace(loan, endpoints=(pair.dead_agent,))
        await check_not_borrowed(pair, tokens, loan, salt)
        await unpinned(pair)

    async def test_what_the_lender_evicted_is_computed(self, pair: Pair) -> None:
        tokens, salt = pair.prompt(PROMPT_TOKENS), "evicted"
        await computed_by_lender(pair, tokens, salt)
        loan = await lend(pair, tokens, salt)
        slots = pair.prefill_facts.pool_blocks * pair.prefill_facts.block_tokens
        others = [pair.prompt(900) for _ in range(-(-slots // 900) + 1)]
        evicted_blocks = pair.prefill.load().pool.evicted_blocks

        async def evict() -> None:
            """Fill the lender's pool with other prompts; what is lent stays until it is read."""
            for other in others:
                await collect(pair.prefill, pair.request(other, changed(GREEDY, max_tokens=1), salt=salt))
                evicting.set()

        evicting = asyncio.Event()
        filling = asyncio.create_task(evict())
        await evicting.wait()
        alone = await collect(pair.decode, pair.request(tokens, salt="evicted, alone"))
        answer = await collect(pair.decode, replace(pair.request(tokens, salt=salt), loan=loan))
        await filling
        assert answer.tokens == alone.tokens
        await pair.settled()
        await unpinned(pair)
        assert pair.prefill.load().pool.evicted_blocks > evicted_blocks
        # Of prompts that were used once, the first ones are evicted first.
        left = await lend(pair, others[0], salt)
        assert left.tokens < borrowable_tokens(pair, len(others[0]))
        alone = await collect(pair.decode, pair.request(others[0], salt=f"{salt}, alone"))
        turn = await borrow(pair, pair.request(others[0], salt=salt), left)
        assert turn.answer.tokens == alone.tokens
        assert turn.borrowed_tokens == borrowable_tokens(pair, left.tokens)
        assert turn.computed_tokens == len(others[0]) - turn.promoted_tokens
        await unpinned(pair)

    async def test_a_request_that_ends_while_it_borrows_leaves_nothing(self, pair: Pair) -> None:
        tokens, salt = pair.prompt(PROMPT_TOKENS), "aborted"
        loan = Loan(
            key=os.urandom(16),
            endpoints=pair.prefill_facts.pool_agents,
            tokens=borrowable_tokens(pair, PROMPT_TOKENS),
            deadline_s=time.monotonic() + LOAN_S,
        )
        request = replace(pair.request(tokens, salt=salt), loan=loan)
        asking = asyncio.create_task(collect(pair.decode, request))
        await eventually(lambda: pair.decode.load().waiting > 0)
        await pair.decode.abort(request.request, request.attempt)
        await asking
        await pair.settled()
        await unpinned(pair)
