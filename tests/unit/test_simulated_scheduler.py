"""The simulated engine's scheduler: its plans, and its invariants under any events."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from baton.engines.engine import EngineBlocksRemoved, EngineBlocksStored, Leg
from baton.engines.simulated.blocks import BlockCache
from baton.engines.simulated.scheduler import Scheduler, SimulatedAttempt, SimulatedPhase, Step

BLOCK = 4


class Harness:
    """A scheduler with a shell that does what a step says, in no time."""

    def __init__(self, *, blocks: int = 32, running_max: int = 4, step_tokens_max: int = 16) -> None:
        self.cache = BlockCache(blocks=blocks, block_tokens=BLOCK, nonce=b"n")
        self.scheduler = Scheduler(self.cache, running_max=running_max, step_tokens_max=step_tokens_max)
        self.running_max, self.step_tokens_max = running_max, step_tokens_max
        self.live: list[SimulatedAttempt] = []
        self.known: Counter[bytes] = Counter()
        """The cache's content, as its events tell it."""
        self._numbers = 0

    def submit(self, tokens: list[int], leg: Leg = Leg.WHOLE) -> SimulatedAttempt:
        self._numbers += 1
        attempt = SimulatedAttempt(key=(f"r{self._numbers}", 0), leg=leg, tokens=tokens, prompt_tokens=len(tokens))
        self.scheduler.submit(attempt)
        self.live.append(attempt)
        return attempt

    def end(self, attempt: SimulatedAttempt) -> None:
        self.scheduler.end(attempt)
        self.check()

    def step(self, output: int = 7) -> Step:
        step = self.scheduler.plan_step()
        self.check_step(step)
        self.scheduler.complete_step(step)
        for chunk in step.chunks:
            if chunk.samples and chunk.attempt.phase is SimulatedPhase.RUNNING:
                chunk.attempt.tokens.append(output)
        self.check()
        return step

    def check_step(self, step: Step) -> None:
        assert sum(chunk.end - chunk.start for chunk in step.chunks) <= self.step_tokens_max
        holders = Counter(block for attempt in self.live for block in attempt.blocks)
        for chunk in step.chunks:
            attempt = chunk.attempt
            assert attempt.phase is SimulatedPhase.RUNNING
            assert chunk.start == attempt.computed < chunk.end <= len(attempt.tokens)
            written = attempt.blocks[chunk.start // BLOCK : -(-chunk.end // BLOCK)]
            assert len(attempt.blocks) * BLOCK >= chunk.end
            assert all(holders[block] == 1 for block in written), "no attempt writes what another one reads"
        for pull in step.pulls:
            assert all(holders[block] == 1 for block in pull.blocks), "a pull fills blocks of its own"
        for attempt in step.preempted:
            assert attempt.phase is SimulatedPhase.WAITING
            assert attempt.blocks == []

    def check(self) -> None:
        self.live = [attempt for attempt in self.live if attempt.phase is not SimulatedPhase.ENDED]
        held = {block for attempt in self.live for block in attempt.blocks}
        assert self.cache.used_blocks == len(held)
        assert self.scheduler.running <= self.running_max
        for event in self.cache.drain_events():
            match event:
                case EngineBlocksStored():
                    assert event.parent is None or self.known[event.parent] > 0, "no child without its parent"
                    self.known.update(event.hashes)
                case EngineBlocksRemoved():
                    self.known.subtract(event.hashes)
                    assert min(self.known.values()) >= 0
                case _:
                    raise AssertionError("the cache is never cleared")


def test_a_long_prompt_is_computed_in_chunks_beside_those_that_decode() -> None:
    harness = Harness(step_tokens_max=10)
    short = harness.submit([1, 2, 3])
    harness.step()
    long = harness.submit(list(range(100, 125)))
    chunks = [[(chunk.attempt, chunk.start, chunk.end) for chunk in harness.step().chunks] for _ in range(4)]
    assert chunks == [
        [(short, 3, 4), (long, 0, 9)],
        [(short, 4, 5), (long, 9, 18)],
        [(short, 5, 6), (long, 18, 25)],
        [(short, 6, 7), (long, 25, 26)],
    ]


def test_no_more_than_running_max_run() -> None:
    harness = Harness(running_max=2)
    attempts = [harness.submit([number]) for number in range(3)]
    harness.step()
    assert [attempt.phase for attempt in attempts] == [
        SimulatedPhase.RUNNING,
        SimulatedPhase.RUNNING,
        SimulatedPhase.WAITING,
    ]
    harness.end(attempts[0])
    harness.step()
    assert attempts[2].phase is SimulatedPhase.RUNNING


def test_decode_pulls_what_it_lacks_and_computes_the_last_token() -> None:
    harness = Harness()
    tokens = list(range(11))
    harness.end(harness.submit(tokens[:9]))
    first = harness.submit(tokens[:9])
    harness.step()
    harness.end(first)
    decode = harness.submit(tokens, Leg.DECODE)
    (pull,) = harness.step().pulls
    assert (pull.first_token, pull.tokens) == (8, 10)
    assert pull.blocks == tuple(decode.blocks[2:3])
    assert harness.step().chunks == (), "a pull is off the step"
    harness.scheduler.pull_done(decode)
    (chunk,) = harness.step().chunks
    assert (chunk.start, chunk.end, chunk.samples) == (10, 11, True)
    assert decode.pulled_tokens == 2


def test_decode_that_lacks_nothing_pulls_nothing() -> None:
    harness = Harness()
    tokens = list(range(9))
    first = harness.submit([*tokens, 9])
    harness.step()
    harness.end(first)
    harness.submit(tokens, Leg.DECODE)
    step = harness.step()
    assert [pull.blocks for pull in step.pulls] == [()]
    assert [(chunk.start, chunk.end) for chunk in step.chunks] == [(8, 9)]


def test_a_pull_that_waits_stops_no_attempt_behind_it() -> None:
    harness = Harness()
    harness.submit(list(range(20)), Leg.DECODE)
    behind = harness.submit([1, 2, 3])
    assert [chunk.attempt for chunk in harness.step().chunks] == [behind]


def test_an_aborted_pull_keeps_its_blocks_until_it_is_over() -> None:
    for ending in ("pull_done", "pull_failed"):
        harness = Harness()
        decode = harness.submit(list(range(20)), Leg.DECODE)
        harness.step()
        harness.end(decode)
        assert decode.phase is SimulatedPhase.FENCING
        assert harness.cache.used_blocks == 5
        getattr(harness.scheduler, ending)(decode)
        assert decode.phase is SimulatedPhase.ENDED
        assert harness.cache.used_blocks == 0
        assert harness.cache.drain_events() == (), "what a cancelled pull left in the blocks is unknown"


def test_a_finished_prefill_holds_its_blocks_but_no_run_slot() -> None:
    harness = Harness(running_max=1)
    prefill = harness.submit(list(range(10)), Leg.PREFILL)
    harness.step()
    assert prefill.phase is SimulatedPhase.HELD
    assert harness.scheduler.leased == [prefill]
    other = harness.submit([1, 2])
    harness.step()
    assert other.phase is SimulatedPhase.RUNNING
    assert harness.cache.used_blocks == 4
    harness.end(prefill)
    assert harness.cache.used_blocks == 1


def test_when_blocks_run_out_the_last_to_come_gives_way_and_comes_back() -> None:
    harness = Harness(blocks=5)
    first = harness.submit(list(range(7)))
    second = harness.submit(list(range(50, 57)))
    preempted: list[SimulatedAttempt] = []
    for _ in range(10):
        preempted += harness.step().preempted
    assert preempted == [second]
    assert second.phase is SimulatedPhase.WAITING
    generated = len(second.tokens) - 7
    harness.end(first)
    (chunk,) = harness.step().chunks
    assert chunk.attempt is second
    assert len(second.tokens) == 7 + generated + 1, "what it had generated is computed again, not generated again"


def test_a_preempted_decode_computes_instead_of_pulling_again() -> None:
    harness = Harness(blocks=5)
    first = harness.submit(list(range(7)))
    decode = harness.submit(list(range(50, 57)), Leg.DECODE)
    harness.step()
    harness.scheduler.pull_done(decode)
    for _ in range(8):
        harness.step()
    assert harness.scheduler.preemptions == 1
    harness.end(first)
    # The pulled blocks may have been evicted: this attempt no longer holds them.
    step = harness.step()
    assert step.pulls == ()
    assert step.chunks[0].attempt is decode


@given(seed=st.integers(0, 2**32), blocks=st.integers(8, 40), budget=st.integers(1, 40), running=st.integers(1, 6))
def test_whatever_happens_no_block_is_lost_or_shared_by_writers(
    seed: int, blocks: int, budget: int, running: int
) -> None:
    chance = random.Random(seed)
    harness = Harness(blocks=blocks, running_max=running, step_tokens_max=budget)
    length_max = blocks * BLOCK
    for _ in range(250):
        pulling = [
            attempt for attempt in harness.live if attempt.phase in (SimulatedPhase.PULLING, SimulatedPhase.FENCING)
        ]
        choice = chance.random()
        if choice < 0.2 and len(harness.live) < 12:
            # Few different tokens, so that prompts share prefixes.
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, length_max // 2))]
            harness.submit(tokens, chance.choice(list(Leg)))
        elif choice < 0.3 and harness.live:
            harness.end(chance.choice(harness.live))
        elif choice < 0.45 and pulling:
            attempt = chance.choice(pulling)
            (harness.scheduler.pull_done if chance.random() < 0.7 else harness.scheduler.pull_failed)(attempt)
            harness.check()
        else:
            harness.step(output=chance.randrange(2))
        for attempt in list(harness.live):
            if len(attempt.tokens) >= length_max:
                harness.end(attempt)
    for attempt in list(harness.live):
        harness.end(attempt)
        if attempt.phase is SimulatedPhase.FENCING:
            harness.scheduler.pull_failed(attempt)
    assert harness.cache.used_blocks == 0
    assert harness.step().is_empty


@given(seed=st.integers(0, 2**32))
def test_everything_that_is_submitted_is_served(seed: int) -> None:
    chance = random.Random(seed)
    harness = Harness(blocks=12, running_max=3, step_tokens_max=7)
    for _ in range(10):
        harness.submit([chance.randrange(50) for _ in range(chance.randrange(1, 30))])
    for _ in range(2000):
        if not harness.live:
            return
        harness.step()
        for attempt in list(harness.live):
            if len(attempt.tokens) >= attempt.prompt_tokens + 10:
                harness.end(attempt)
    raise AssertionError("some attempt starves")
