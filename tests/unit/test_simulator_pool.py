"""KV pools under simulated workers: what is saved and promoted, what placement knows of it, and what it brings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from baton_simulator.policies import on_fleet
from baton_simulator.pool import WorkerPool
from baton_simulator.replay import Fleet, Outcome, Replay
from baton_simulator.routers.prefix_index import PrefixIndex
from baton_simulator.traffic.trace import Request, Trace
from hypothesis import given
from hypothesis import strategies as st

from baton.messages.index import Tier
from baton.pool.policy import PolicyName
from benchmarks.pool_replay import hit_rate

BLOCK_TOKENS = 512
BLOCK_BYTES = BLOCK_TOKENS * 131_072
FLEET = Fleet(aggregated=1, kv_tokens_in_use=20 * BLOCK_TOKENS, kv_tokens=20 * BLOCK_TOKENS)
"""One worker whose device holds 20 blocks."""


def turns(prompts: list[tuple[int, ...]], *, gap_s: float = 30.0) -> Trace:
    requests = [Request(number * gap_s, blocks, len(blocks) * BLOCK_TOKENS, 2) for number, blocks in enumerate(prompts)]
    return Trace("turns", BLOCK_TOKENS, requests)


def play(trace: Trace, fleet: Fleet, policy: str = "baton") -> tuple[list[Outcome], Replay]:
    on, new_router = on_fleet(policy, fleet)
    replay = Replay(trace, on, new_router, seed=1)
    return replay.run(), replay


@pytest.mark.parametrize("policy", PolicyName)
def test_a_second_turn_that_the_device_has_evicted_is_promoted(policy: PolicyName) -> None:
    first, other = tuple(range(15)), tuple(range(100, 115))
    trace = turns([first, other] * 10)
    evicted, _ = play(trace, FLEET)
    # The device evicts tails first, and has kept the beginning of the first prompt.
    kept_tokens = 4 * BLOCK_TOKENS
    assert [outcome.cached_tokens for outcome in evicted[:3]] == [0, 0, kept_tokens]
    promoted, replay = play(trace, replace(FLEET, kv_pool_bytes=30 * BLOCK_BYTES, kv_pool_policy=policy))
    # The last token is always computed.
    saved_tokens = 15 * BLOCK_TOKENS - 1
    assert (promoted[2].cached_tokens, promoted[2].promoted_tokens) == (saved_tokens, saved_tokens - kept_tokens)
    assert [outcome.promoted_tokens for outcome in promoted[:2]] == [0, 0]
    copy_s = 11 * BLOCK_BYTES / FLEET.promotion_bytes_per_s
    then, now = promoted[2].ttft_s, evicted[2].ttft_s
    assert then is not None
    assert now is not None
    assert copy_s < then < now
    assert promoted[-1].predicted_ttft_s == pytest.approx(promoted[-1].ttft_s, rel=0.2), "the bandwidth is learned"
    worker = next(iter(replay.workers.values()))
    assert worker.pool is not None
    assert worker.pool.directory.pinned == 0


def test_a_pool_serves_prefill_and_decode_alike() -> None:
    tokens = 40 * BLOCK_TOKENS
    fleet = Fleet(prefill=1, decode=1, kv_tokens_in_use=tokens, kv_tokens=tokens, kv_pool_bytes=90 * BLOCK_BYTES)
    first, *others = (tuple(range(n, n + 15)) for n in (0, 100, 200, 300))
    outcomes, replay = play(turns([first, *others, first]), fleet)
    assert all(outcome.last_s is not None for outcome in outcomes)
    assert outcomes[-1].promoted_tokens > 0
    assert all(worker.pool and worker.pool.directory.pinned == 0 for worker in replay.workers.values())


def test_a_pool_smaller_than_one_prompt_keeps_its_beginning() -> None:
    first, other = tuple(range(15)), tuple(range(100, 115))
    outcomes, _ = play(turns([first, other, other[:3] + first]), replace(FLEET, kv_pool_bytes=4 * BLOCK_BYTES))
    assert all(outcome.last_s is not None for outcome in outcomes)


def play_burst(fleet: Fleet) -> tuple[list[Outcome], Replay]:
    """Let two workers get prompts with one long beginning, which only the first has computed, at the same time."""
    begin = tuple(range(120))
    requests = [Request(0.0, begin, len(begin) * BLOCK_TOKENS, 2)]
    requests += [
        Request(30.0 + 0.01 * n, (*begin, *range(1000 + 20 * n, 1020 + 20 * n)), 140 * BLOCK_TOKENS, 2)
        for n in range(8)
    ]
    outcomes, replay = play(Trace("burst", BLOCK_TOKENS, requests), fleet, "baton-without-objectives")
    assert all(outcome.last_s is not None for outcome in outcomes)
    assert all(worker.pool and worker.pool.directory.pinned == 0 for worker in replay.workers.values())
    assert all(worker.pool and worker.pool.directory.filling == 0 for worker in replay.workers.values())
    return outcomes, replay


def test_a_worker_borrows_what_only_another_one_has() -> None:
    fleet = Fleet(aggregated=2, kv_pool_bytes=400 * BLOCK_BYTES)
    alone, _ = play_burst(replace(fleet, kv_loans=False))
    assert not any(outcome.borrowed_tokens for outcome in alone)
    lent, replay = play_burst(fleet)
    borrowers = [outcome for outcome in lent if outcome.borrowed_tokens]
    (one, *_) = borrowers
    assert one.decode != lent[0].decode
    assert one.borrowed_tokens == one.cached_tokens == 120 * BLOCK_TOKENS
    assert max(outcome.ttft_s or 0.0 for outcome in lent) < max(outcome.ttft_s or 0.0 for outcome in alone)
    pools = [worker.pool.lending for worker in replay.workers.values() if worker.pool]
    assert sum(pool.lent_tokens for pool in pools) >= sum(outcome.borrowed_tokens for outcome in lent)


def test_a_loan_that_is_late_is_given_up() -> None:
    # The link is far slower than the guess that placement starts with.
    fleet = Fleet(aggregated=2, kv_pool_bytes=400 * BLOCK_BYTES, link_bytes_per_s=1e8)
    outcomes, replay = play_burst(fleet)
    assert not any(outcome.borrowed_tokens for outcome in outcomes)
    assert sum(worker.pool.lending.borrows_failed for worker in replay.workers.values() if worker.pool) > 0


def test_without_a_pool_nothing_changes() -> None:
    trace = turns([tuple(range(n, n + 12)) for n in range(0, 60, 6)], gap_s=0.3)
    plain, _ = play(trace, FLEET)
    tiny, _ = play(trace, replace(FLEET, kv_pool_bytes=BLOCK_BYTES - 1))
    assert plain == tiny, "a pool of less than a block is none"


TIERS = st.sampled_from([Tier.DEVICE, Tier.POOL])


@given(
    changes=st.lists(
        st.tuples(st.sampled_from("abc"), TIERS, st.integers(0, 7), st.booleans()),
        max_size=40,
    ),
    prompt=st.permutations(range(8)),
)
def test_a_match_of_both_tiers_equals_a_recount(changes: list[tuple[str, Tier, int, bool]], prompt: list[int]) -> None:
    index = PrefixIndex("abc", 0.0)
    held: dict[tuple[str, Tier], set[int]] = {(worker, tier): set() for worker in "abc" for tier in Tier}
    for worker, tier, block, stored in changes:
        mine = held[worker, tier]
        if stored and block not in mine:
            index.change(worker, [block], [], 0.0, tier)
            mine.add(block)
        elif not stored and block in mine:
            index.change(worker, [], [block], 0.0, tier)
            mine.remove(block)

    def leading(known: set[int]) -> int:
        return next((at for at, block in enumerate(prompt) if block not in known), len(prompt))

    device = {worker: leading(held[worker, Tier.DEVICE]) for worker in "abc"}
    either = {worker: leading(held[worker, Tier.DEVICE] | held[worker, Tier.POOL]) for worker in "abc"}
    found = index.match(prompt, 0.0)
    assert found.held == {worker: count for worker, count in device.items() if count}
    assert found.pooled == {worker: count for worker, count in either.items() if count > device[worker]}


def test_promotions_follow_each_other() -> None:
    pool = WorkerPool(slots=8, policy=PolicyName.LRU, block_tokens=512, block_bytes=100, bytes_per_s=50.0)
    stored, evicted = pool.save([1, 2, 3])
    assert (set(stored), evicted) == ({1, 2, 3}, [])
    assert pool.match([1, 2, 3, 4], 1) == 3
    assert pool.promote([1, 2, 3, 4], 1, 3, 10.0) == 14.0
    assert pool.promote([1, 2], 0, 2, 11.0) == 18.0
    assert pool.promote([1], 0, 1, 30.0) == 32.0


def test_scans_hurt_lru_more() -> None:
    prompts = [tuple(range(n % 40 * 100, n % 40 * 100 + 60)) for n in range(400)]
    rates = {policy: hit_rate(prompts, 2600, policy, scans=True) for policy in PolicyName}
    assert rates[PolicyName.S3_FIFO] > rates[PolicyName.LRU] + 0.01
