"""The contract of every engine: one suite over all implementations of `baton.engines.engine.Engine`.

A subclass gives a fixture `pair`: a prefill and a decode engine over the same model, started, and shared by as many
tests as the engine's start is expensive. So each test uses prompts of its own (`Pair.prompt`) and compares loads before
and after. Both engines compute in float32, or equality between them would be luck.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing, suppress

import pytest

from baton.engines.engine import (
    Engine,
    EngineRequest,
    Leg,
)
from baton.errors import (
    AttemptFailed,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    PeerUnreachable,
    TransferFailed,
)
from baton.messages.attempts import FinishReason, Sampling
from tests.harness.engine_pair import (
    GREEDY,
    Answer,
    Pair,
    changed,
    collect,
    eventually,
    first_delta,
    moved_bytes,
)


class EngineSuite:
    # ------------------------------------------------------------ generation

    async def test_facts_describe_the_engine(self, pair: Pair) -> None:
        for facts in (pair.prefill_facts, pair.decode_facts):
            assert facts.engine
            assert facts.kv_blocks * facts.block_tokens >= facts.context_tokens_max > 0
            assert facts.running_max > 0
            assert facts.kv_bytes_per_token > 0
            assert len(facts.agents) == len(set(facts.agents)) > 0
        assert pair.prefill_facts.model_digest == pair.decode_facts.model_digest
        assert pair.prefill_facts.agents != pair.decode_facts.agents

    async def test_greedy_output_has_the_length_asked_for(self, pair: Pair) -> None:
        for length in (1, 2, 17):
            answer = await collect(pair.decode, pair.request(pair.prompt(40), changed(GREEDY, max_tokens=length)))
            assert len(answer.tokens) == length
            assert answer.last.finish is FinishReason.LENGTH
            assert all(0 <= token < pair.vocabulary for token in answer.tokens)
        await pair.settled()

    async def test_greedy_output_depends_on_nothing_but_the_prompt(self, pair: Pair) -> None:
        prompts = [pair.prompt(length) for length in (5, 33, 64, 130)]
        alone = [await collect(pair.decode, pair.request(prompt)) for prompt in prompts]
        together = await asyncio.gather(*(collect(pair.decode, pair.request(prompt)) for prompt in prompts))
        elsewhere = await asyncio.gather(*(collect(pair.prefill, pair.request(prompt)) for prompt in prompts))
        assert [answer.tokens for answer in alone] == [answer.tokens for answer in together]
        assert [answer.tokens for answer in alone] == [answer.tokens for answer in elsewhere]
        assert len({tuple(answer.tokens) for answer in alone}) == len(prompts)

    async def test_tokens_come_one_by_one(self, pair: Pair) -> None:
        answer = await collect(pair.decode, pair.request(pair.prompt(40), changed(GREEDY, max_tokens=30)))
        assert len(answer.deltas) > 10

    async def test_a_second_request_joins_while_the_first_decodes(self, pair: Pair) -> None:
        stream, _ = await first_delta(pair.decode, pair.request(pair.prompt(40), changed(GREEDY, max_tokens=400)))
        async with aclosing(stream):  # pyright: ignore[reportArgumentType]
            second = await collect(pair.decode, pair.request(pair.prompt(40), changed(GREEDY, max_tokens=5)))
            assert len(second.tokens) == 5
            assert pair.decode.load().running == 1
        await pair.settled()

    async def test_a_reader_that_does_not_read_stops_no_other(self, pair: Pair) -> None:
        stream, _ = await first_delta(pair.decode, pair.request(pair.prompt(40), changed(GREEDY, max_tokens=60)))
        await collect(pair.decode, pair.request(pair.prompt(40), changed(GREEDY, max_tokens=80)))
        rest = [token async for delta in stream for token in delta.tokens]
        assert 0 < len(rest) < 60

    async def test_stop_tokens_end_the_output_and_are_its_last(self, pair: Pair) -> None:
        prompt = pair.prompt(40)
        free = (await collect(pair.decode, pair.request(prompt))).tokens
        stopped = await collect(
            pair.decode,
            pair.request(prompt, changed(GREEDY, stop_token_ids=(free[4],))),
        )
        assert stopped.tokens == free[: free.index(free[4]) + 1]
        assert stopped.last.finish is FinishReason.STOP

    async def test_min_tokens_puts_the_stop_off(self, pair: Pair) -> None:
        prompt = pair.prompt(40)
        free = (await collect(pair.decode, pair.request(prompt))).tokens
        sampling = changed(GREEDY, stop_token_ids=(free[0],), min_tokens=6)
        answer = await collect(pair.decode, pair.request(prompt, sampling))
        assert len(answer.tokens) >= 6
        assert free[0] not in answer.tokens[:6]

    async def test_a_seed_makes_sampling_repeatable(self, pair: Pair) -> None:
        prompt = pair.prompt(40)

        async def sample(seed: int | None) -> list[int]:
            sampling = Sampling(max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True)
            return (await collect(pair.decode, pair.request(prompt, sampling))).tokens

        assert await sample(7) == await sample(7)
        assert await sample(7) != await sample(8)
        assert await sample(None) != await sample(None)

    async def test_logprobs_are_those_of_the_tokens(self, pair: Pair) -> None:
        prompt = pair.prompt(40)
        plain = await collect(pair.decode, pair.request(prompt))
        asked = await collect(pair.decode, pair.request(prompt, changed(GREEDY, logprobs=3)))
        assert plain.logprobs == []
        assert plain.tokens == asked.tokens
        assert len(asked.logprobs) == len(asked.tokens)
        for token, entry in zip(asked.tokens, asked.logprobs, strict=True):
            assert len(entry.top) == 3
            assert entry.top[0] == (token, entry.logprob), "greed takes the likeliest"
            values = [logprob for _, logprob in entry.top]
            assert values == sorted(values, reverse=True)
            assert all(logprob <= 0 for logprob in values)

    async def test_what_cannot_be_served_is_refused_and_named(self, pair: Pair) -> None:
        good = pair.prompt(20)
        refused = [
            pair.request([]),
            pair.request([*good, pair.vocabulary + 5]),
            pair.request(good, Sampling(max_tokens=0)),
            pair.request(good, Sampling(max_tokens=5, temperature=-1.0)),
            pair.request(good, Sampling(max_tokens=5, top_p=2.0)),
            pair.request(good, Sampling(max_tokens=5, extensions={"no_such_parameter": 1})),
        ]
        for request in refused:
            with pytest.raises(InvalidRequest) as caught:
                await collect(pair.decode, request)
            assert caught.value.detail
        with pytest.raises(ContextLengthExceeded):
            await collect(pair.decode, pair.request(pair.prompt(pair.decode_facts.context_tokens_max + 1)))
        assert len((await collect(pair.decode, pair.request(good))).tokens) == GREEDY.max_tokens
        await pair.settled()

    # ------------------------------------------------------------ prefix cache

    async def test_a_prompt_seen_before_is_taken_from_the_cache(self, pair: Pair) -> None:
        size = pair.decode_facts.block_tokens
        prompt = pair.prompt(4 * size + 1)
        before = pair.decode.load()
        first = await collect(pair.decode, pair.request(prompt))
        second = await collect(pair.decode, pair.request(prompt))
        after = pair.decode.load()
        assert first.last.cached_tokens == 0
        assert second.deltas[0].cached_tokens == second.last.cached_tokens == 4 * size
        assert first.tokens == second.tokens
        assert after.prompt_tokens_cached - before.prompt_tokens_cached == 4 * size
        assert after.prompt_tokens_computed - before.prompt_tokens_computed == 4 * size + 2

    async def test_a_salt_keeps_tenants_apart(self, pair: Pair) -> None:
        prompt = pair.prompt(3 * pair.decode_facts.block_tokens)
        first = await collect(pair.decode, pair.request(prompt, salt="one"))
        other = await collect(pair.decode, pair.request(prompt, salt="two"))
        again = await collect(pair.decode, pair.request(prompt, salt="one"))
        assert other.last.cached_tokens == 0
        # The last block of a prompt is found in a pool only: an engine computes it to sample from it.
        cached = len(prompt) - 1 if pair.decode_facts.pool_blocks else 2 * pair.decode_facts.block_tokens
        assert again.last.cached_tokens == cached
        assert first.tokens == other.tokens == again.tokens

    async def test_events_tell_what_the_cache_holds(self, pair: Pair) -> None:
        size = pair.decode_facts.block_tokens
        prompt = pair.prompt(5 * size + 3)
        whole_tokens = len(prompt) // size * size
        assert pair.decode_shadow.prefix_tokens(prompt) == 0
        await collect(pair.decode, pair.request(prompt, salt="a salt"))
        await eventually(lambda: pair.decode_shadow.prefix_tokens(prompt, "a salt") == whole_tokens)
        assert pair.decode_shadow.prefix_tokens(prompt) == 0, "another tenant has nothing of it"
        again = await collect(pair.decode, pair.request(prompt, salt="a salt"))
        assert again.last.cached_tokens == min(whole_tokens, len(prompt) - 1)

    async def test_events_tell_of_pulled_blocks(self, pair: Pair) -> None:
        size = pair.decode_facts.block_tokens
        prompt = pair.prompt(4 * size + 1)
        await pair.hand_off(prompt)
        await eventually(lambda: pair.decode_shadow.prefix_tokens(prompt) == len(prompt) // size * size)

    # ------------------------------------------------------------ hand-off

    @pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 200, 1500])
    async def test_a_handed_off_prompt_gives_the_same_answer(self, pair: Pair, length: int) -> None:
        prompt = pair.prompt(length)
        before, moved_before = pair.decode.load(), moved_bytes(pair.decode)
        answer = await pair.hand_off(prompt)
        after = pair.decode.load()
        aggregated = await collect(pair.prefill, pair.request(prompt, salt="computed here"))
        assert answer.tokens == aggregated.tokens
        assert after.prompt_tokens_computed - before.prompt_tokens_computed <= 1
        assert answer.last.transferred_tokens in (length - 1, length)
        assert answer.deltas[0].transferred_bytes == after.bytes_pulled - before.bytes_pulled
        assert answer.deltas[0].transferred_bytes == moved_bytes(pair.decode) - moved_before
        await pair.settled()

    async def test_a_seeded_sample_is_the_same_after_a_hand_off(self, pair: Pair) -> None:
        sampling = Sampling(max_tokens=16, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True, logprobs=2)
        prompt = pair.prompt(100)
        answer = await pair.hand_off(prompt, sampling)
        # Compared with decode's own answer: each engine defines the meaning of a seed.
        aggregated = await collect(pair.decode, pair.request(prompt, sampling, salt="computed here"))
        assert answer.tokens == aggregated.tokens
        assert len(answer.logprobs) == 16

    async def test_many_hand_offs_at_once(self, pair: Pair) -> None:
        prompts = [pair.prompt(20 + 13 * number) for number in range(12)]
        answers = await asyncio.gather(*(pair.hand_off(prompt) for prompt in prompts))
        expected = [await collect(pair.prefill, pair.request(prompt, salt="computed here")) for prompt in prompts]
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        await pair.settled()

    async def test_a_prompt_that_prefill_had_cached_is_handed_off(self, pair: Pair) -> None:
        prompt = pair.prompt(3 * pair.prefill_facts.block_tokens + 5)
        expected = await collect(pair.prefill, pair.request(prompt))
        answer = await pair.hand_off(prompt)
        assert answer.tokens == expected.tokens
        await pair.settled()

    async def test_a_second_turn_moves_only_what_decode_lacks(self, pair: Pair) -> None:
        size = pair.decode_facts.block_tokens
        prompt = pair.prompt(6 * size + 7)
        first = await pair.hand_off(prompt)
        turn = [*prompt, *first.tokens, *pair.prompt(2 * size)]
        before = pair.decode.load()
        second = await pair.hand_off(turn)
        after = pair.decode.load()
        held = (len(prompt) + len(first.tokens) - 1) // size * size
        assert second.last.cached_tokens == held
        # Whole blocks of the side with the larger ones.
        size = max(size, pair.prefill_facts.block_tokens)
        blocks_moved = -(-(len(turn) - 1) // size) - held // size
        assert after.bytes_pulled - before.bytes_pulled <= blocks_moved * size * pair.decode_facts.kv_bytes_per_token
        assert after.bytes_pulled - before.bytes_pulled >= (len(turn) - 1 - held) * pair.decode_facts.kv_bytes_per_token
        expected = await collect(pair.prefill, pair.request(turn, salt="computed here"))
        assert second.tokens == expected.tokens

    @pytest.mark.parametrize("decode_first", [True, False])
    async def test_either_leg_may_come_long_before_the_other(self, pair: Pair, decode_first: bool) -> None:
        prompt = pair.prompt(150)
        prefill = pair.request(prompt, leg=Leg.PREFILL)
        decode = pair.request(prompt, leg=Leg.DECODE, name=prefill.request)
        legs = {"prefill": (pair.prefill, prefill), "decode": (pair.decode, decode)}
        first, second = ("decode", "prefill") if decode_first else ("prefill", "decode")
        waiting = asyncio.create_task(collect(*legs[first]))
        await asyncio.sleep(0.3)
        assert waiting.done() is not decode_first, "decode waits for prefill, and prefill for no other"
        answers = {second: await collect(*legs[second]), first: await waiting}
        expected = await collect(pair.prefill, pair.request(prompt, salt="computed here"))
        assert answers["decode"].tokens == expected.tokens
        await pair.settled()

    async def test_a_lease_is_held_until_decode_has_it(self, pair: Pair) -> None:
        prompt = pair.prompt(100)
        prefill = pair.request(prompt, leg=Leg.PREFILL)
        await collect(pair.prefill, prefill)
        load = pair.prefill.load()
        assert load.leased_blocks > 0
        assert load.kv_usage > 0
        assert load.leased in (None, frozenset({(prefill.request, 1)}))
        await collect(pair.decode, pair.request(prompt, leg=Leg.DECODE, name=prefill.request))
        await pair.settled()

    @pytest.mark.parametrize("endpoint", ["dead", "malformed"])
    async def test_an_unreachable_source_is_named_as_such(self, pair: Pair, endpoint: str) -> None:
        before, failed_before = pair.decode.load(), pair.decode.transfers().pulls.failed.total()
        agent = pair.dead_agent if endpoint == "dead" else "no endpoint"
        with pytest.raises(PeerUnreachable):
            await collect(pair.decode, pair.request(pair.prompt(50), leg=Leg.DECODE, agents=(agent,)))
        await pair.settled()
        assert pair.decode.load().pulls_failed == before.pulls_failed + 1
        assert pair.decode.transfers().pulls.failed.total() == failed_before + 1

    async def test_a_lease_that_never_comes_ends_at_the_deadline(self, pair: Pair) -> None:
        request = pair.request(pair.prompt(50), leg=Leg.DECODE, budget_s=0.4)
        with pytest.raises((AttemptFailed, DeadlineExceeded)):
            await collect(pair.decode, request)
        await pair.settled()

    async def test_kv_of_another_prompt_is_not_found(self, pair: Pair) -> None:
        """The attempt is the same, and so is the length, so they are easily mixed up."""
        prefill = pair.request(pair.prompt(100), leg=Leg.PREFILL)
        await collect(pair.prefill, prefill)
        decode = pair.request(pair.prompt(100), leg=Leg.DECODE, name=prefill.request, budget_s=0.4)
        with pytest.raises((AttemptFailed, DeadlineExceeded)):
            await collect(pair.decode, decode)
        await pair.prefill.abort(prefill.request, prefill.attempt)
        await pair.settled()

    async def test_a_budget_that_runs_out_before_the_first_token_ends_the_request(self, pair: Pair) -> None:
        with pytest.raises(DeadlineExceeded):
            await collect(pair.decode, pair.request(pair.prompt(3000), budget_s=0.001))
        await pair.settled()

    async def test_a_generation_that_has_begun_outlives_its_budget(self, pair: Pair) -> None:
        for budget_s in (1.0, 4.0, 16.0):
            request = pair.request(pair.prompt(50), changed(GREEDY, max_tokens=4000), budget_s=budget_s)
            began_s = time.monotonic()
            with suppress(DeadlineExceeded):  # A busy machine may need longer for the first token.
                stream, _ = await first_delta(pair.decode, request)
                break
        else:
            raise AssertionError("no token came in time")
        while time.monotonic() < began_s + 1.2 * request.budget_s:
            assert (await anext(stream)).finish is None
        await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        await pair.settled()

    # ------------------------------------------------------------ aborts

    @pytest.mark.parametrize("by_closing", [True, False])
    async def test_an_abort_while_generating_frees_everything(self, pair: Pair, by_closing: bool) -> None:
        request = pair.request(pair.prompt(90), changed(GREEDY, max_tokens=1000))
        stream, _ = await first_delta(pair.decode, request)
        if by_closing:
            await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        else:
            await pair.decode.abort(request.request, request.attempt)
            rest = [delta async for delta in stream]
            assert rest[-1].finish is FinishReason.CANCELLED
        await pair.settled()

    @pytest.mark.parametrize("by_closing", [True, False])
    async def test_an_abort_while_pulling_frees_everything(self, pair: Pair, by_closing: bool) -> None:
        request = pair.request(pair.prompt(90), leg=Leg.DECODE)
        running = asyncio.create_task(collect(pair.decode, request))
        await eventually(lambda: pair.decode.load().kv_usage > 0)
        await end(pair.decode, request, running, by_closing=by_closing)
        await pair.settled()

    @pytest.mark.parametrize("by_closing", [True, False])
    async def test_an_abort_while_prefill_computes_frees_everything(self, pair: Pair, by_closing: bool) -> None:
        request = pair.request(pair.prompt(3000), leg=Leg.PREFILL)
        running = asyncio.create_task(collect(pair.prefill, request))
        await eventually(lambda: pair.prefill.load().running > 0)
        await end(pair.prefill, request, running, by_closing=by_closing)
        await pair.settled()

    async def test_an_abort_of_a_held_lease_frees_it_and_fails_its_sink(self, pair: Pair) -> None:
        prompt = pair.prompt(90)
        prefill = pair.request(prompt, leg=Leg.PREFILL)
        await collect(pair.prefill, prefill)
        await pair.prefill.abort(prefill.request, prefill.attempt)
        await pair.settled()
        with pytest.raises((TransferFailed, DeadlineExceeded)):
            await collect(pair.decode, pair.request(prompt, leg=Leg.DECODE, name=prefill.request, budget_s=1.0))
        await pair.settled()

    async def test_an_abort_of_prefill_under_a_pull_fails_decode(self, pair: Pair) -> None:
        prompt = pair.prompt(3000)
        prefill = pair.request(prompt, leg=Leg.PREFILL)
        decode = pair.request(prompt, leg=Leg.DECODE, name=prefill.request, budget_s=3.0)
        computing = asyncio.create_task(collect(pair.prefill, prefill))
        pulling = asyncio.create_task(collect(pair.decode, decode))
        await eventually(lambda: pair.prefill.load().running > 0)
        await eventually(lambda: pair.decode.load().kv_usage > 0)
        await pair.prefill.abort(prefill.request, prefill.attempt)
        assert (await computing).last.finish is FinishReason.CANCELLED
        with pytest.raises((TransferFailed, DeadlineExceeded)):
            await pulling
        await pair.settled()

    async def test_aborts_of_nothing_are_ignored(self, pair: Pair) -> None:
        await pair.decode.abort("nobody", 3)
        request = pair.request(pair.prompt(20))
        await collect(pair.decode, request)
        await pair.decode.abort(request.request, request.attempt)

    async def test_fifty_requests_with_random_cancels_leave_nothing(self, pair: Pair) -> None:
        chance = random.Random(2)

        async def one(number: int) -> bool:
            prompt = pair.prompt(chance.randrange(1, 400))
            sampling = Sampling(max_tokens=chance.randrange(1, 30), temperature=0.7, ignore_eos=True)
            whole = pair.request(prompt, sampling)
            prefill = pair.request(prompt, sampling, leg=Leg.PREFILL)
            decode = pair.request(prompt, sampling, leg=Leg.DECODE, name=prefill.request)
            legs = [(pair.decode, whole)] if number % 3 == 0 else [(pair.prefill, prefill), (pair.decode, decode)]
            running = [asyncio.create_task(collect(engine, request)) for engine, request in legs]
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() * 0.3)
                for engine, request in legs:
                    await engine.abort(request.request, request.attempt)
            ended = await asyncio.gather(*running, return_exceptions=True)
            for end in ended:
                # A cancel reaches both legs one after the other, so decode may see prefill's lease end first.
                assert isinstance(end, Answer | TransferFailed | DeadlineExceeded), end
            return all(isinstance(end, Answer) for end in ended)

        whole = await asyncio.gather(*(one(number) for number in range(50)))
        assert sum(whole) >= 20
        await pair.settled()


async def end(engine: Engine, request: EngineRequest, running: asyncio.Task[Answer], *, by_closing: bool) -> None:
    """End an attempt: by cancelling its reader, which closes the iterator, or by `abort`."""
    if by_closing:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    else:
        await engine.abort(request.request, request.attempt)
        assert (await running).last.finish is FinishReason.CANCELLED
