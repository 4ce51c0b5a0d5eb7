"""The rates of a worker, measured around an engine that takes time as the model of a step says."""

from __future__ import annotations

from random import Random

import pytest

from baton.messages.workers import PEERS_MAX, StepFit
from baton.worker.rates import STEP_GUESS, Rates, prompt_pairs

STEP_TOKENS_MAX = 2048
TRUTH = StepFit(
    prompt_step_s=0.0165, prompt_token_s=1.5e-5, prompt_pair_s=4.2e-10, decode_step_s=0.006, sequence_s=3e-4, kv_s=0.02
)


class SteppedEngine:
    """Computes prompts first in, first out, in chunks, each step together with all running sequences."""

    def __init__(self, rates: Rates, random: Random, *, noise: float = 0.1, apart_s: float = 0.00005) -> None:
        self.rates = rates
        self.random = random
        self.noise = noise
        self.apart_s = apart_s
        self.now_s = 0.0
        self.queue: list[tuple[int, int, int]] = []
        """(tokens done, uncached tokens, prompt's tokens) of each prompt."""
        self.sequences: list[int] = []
        """Tokens still to generate by each sequence."""
        self.kv_share = 0.0
        self._ticked_s = 0.0

    def begin(self, uncached_tokens: int, prompt_tokens: int) -> None:
        self.queue.append((0, uncached_tokens, prompt_tokens))
        self.rates.prefill_began(self.now_s)

    def step(self, output_tokens: int = 50) -> None:
        room, seconds, ended = STEP_TOKENS_MAX, 0.0, list[tuple[int, int]]()
        if self.queue:
            seconds += TRUTH.prompt_step_s
        while self.queue and room:
            done, uncached_tokens, prompt_tokens = self.queue.pop(0)
            chunk = min(room, uncached_tokens - done)
            start = prompt_tokens - uncached_tokens + done
            seconds += TRUTH.prompt_token_s * chunk + TRUTH.prompt_pair_s * prompt_pairs(start + chunk, chunk)
            room -= chunk
            if done + chunk < uncached_tokens:
                self.queue.insert(0, (done + chunk, uncached_tokens, prompt_tokens))
            else:
                ended.append((uncached_tokens, prompt_tokens))
        if self.sequences:
            seconds += TRUTH.decode_step_s + TRUTH.sequence_s * len(self.sequences) + TRUTH.kv_s * self.kv_share
        self.now_s += seconds * self.random.lognormvariate(0.0, self.noise)
        self._give_out(ended, output_tokens)

    def _give_out(self, ended: list[tuple[int, int]], output_tokens: int) -> None:
        for number, left in enumerate(list(self.sequences)):
            self.now_s += self.apart_s
            self.rates.tokens_came(1, self.now_s)
            self.sequences[number] = left - 1
        for uncached_tokens, prompt_tokens in ended:
            self.now_s += self.apart_s
            self.rates.prefill_ended(uncached_tokens, prompt_tokens, self.now_s)
            if output_tokens:
                self.sequences.append(output_tokens)
                self.rates.decode_began(self.now_s)
        for left in [left for left in self.sequences if left <= 0]:
            self.sequences.remove(left)
            self.rates.decode_ended(self.now_s)
        if self.now_s - self._ticked_s >= 0.25:
            self.kv_share = min(1.0, len(self.sequences) / 64)
            self.rates.tick(self.kv_share, self.now_s)
            self._ticked_s = self.now_s

    def serve(self, seconds: float, rate: float, *, output_tokens: int = 50) -> None:
        """Serve random prompts, `rate` of them per second."""
        end_s = self.now_s + seconds
        next_s = self.now_s + self.random.expovariate(rate)
        while self.now_s < end_s:
            while next_s <= self.now_s:
                prompt_tokens = int(self.random.lognormvariate(8.0, 1.0)) + 50
                self.begin(max(1, int(prompt_tokens * self.random.random())), prompt_tokens)
                next_s += self.random.expovariate(rate)
            if self.queue or self.sequences:
                self.step(output_tokens)
            else:
                self.now_s = next_s


def interval_s(fit: StepFit, sequences: int, kv_share: float) -> float:
    return fit.decode_step_s + fit.sequence_s * sequences + fit.kv_s * kv_share


def prompt_s(fit: StepFit, tokens: int) -> float:
    steps = -(-tokens // STEP_TOKENS_MAX)
    return fit.prompt_step_s * steps + fit.prompt_token_s * tokens + fit.prompt_pair_s * tokens**2


@pytest.mark.parametrize("seed", range(6))
def test_equal_workers_read_alike_whatever_runs_beside_their_prompts(seed: int) -> None:
    """A prefill worker, an aggregated one with short answers, and one with long answers. Today's rates read a prompt
    beside running sequences as a slower prompt."""
    fits: list[StepFit] = []
    for output_tokens in (0, 20, 200):
        rates = Rates(STEP_TOKENS_MAX)
        SteppedEngine(rates, Random(f"{seed} {output_tokens}")).serve(60.0, 4.0, output_tokens=output_tokens)
        fits.append(rates.steps())
    for tokens in (2000, 8000):
        truth = prompt_s(TRUTH, tokens)
        assert [prompt_s(fit, tokens) for fit in fits] == pytest.approx([truth] * 3, rel=0.15)


@pytest.mark.parametrize("seed", range(6))
def test_token_intervals_are_those_without_prompts(seed: int) -> None:
    rates = Rates(STEP_TOKENS_MAX)
    engine = SteppedEngine(rates, Random(seed))
    engine.serve(60.0, 3.0, output_tokens=200)
    sequences = len(engine.sequences)
    expected = interval_s(TRUTH, sequences, engine.kv_share)
    assert interval_s(rates.steps(), sequences, engine.kv_share) == pytest.approx(expected, rel=0.2)


def test_prompts_that_one_step_computes_end_together_and_count_once() -> None:
    rates = Rates(STEP_TOKENS_MAX)
    engine = SteppedEngine(rates, Random(0), noise=0.0)
    for _ in range(20):
        for _ in range(4):
            engine.begin(500, 500)
        engine.step(output_tokens=0)
        engine.now_s += 1.0
    together_s = TRUTH.prompt_step_s + 2000 * TRUTH.prompt_token_s + 4 * 500**2 * TRUTH.prompt_pair_s
    fit = rates.steps()
    read_s = fit.prompt_step_s + 2000 * fit.prompt_token_s + 4 * 500**2 * fit.prompt_pair_s
    assert read_s == pytest.approx(together_s, rel=0.05)
    assert fit.samples == 19, "the last one is still open"


def test_outputs_of_one_step_count_as_one() -> None:
    rates = Rates(STEP_TOKENS_MAX)
    for step in range(5):
        for sequence in range(30):
            at_s = step * 0.01 + sequence * 0.00003
            rates.decode_began(at_s) if step == 0 else rates.tokens_came(1, at_s)
    assert rates.output_steps == 5


def test_prompts_that_were_stopped_say_nothing() -> None:
    rates = Rates(STEP_TOKENS_MAX)
    rates.prefill_began(1.0)
    rates.prefill_ended(0, 5000, 9.0)
    rates.tick(0.0, 10.0)
    assert rates.steps().samples == 0


def test_an_engine_that_stood_still_for_once_is_not_taken_for_slow() -> None:
    rates = Rates(STEP_TOKENS_MAX)
    engine = SteppedEngine(rates, Random(1))
    engine.serve(30.0, 3.0)
    before = rates.steps()
    engine.now_s += 30.0
    engine.serve(1.0, 3.0)
    assert prompt_s(rates.steps(), 4000) == pytest.approx(prompt_s(before, 4000), rel=0.2)
    assert interval_s(rates.steps(), 8, 0.1) == pytest.approx(interval_s(before, 8, 0.1), rel=0.25)


def test_the_oldest_prompt_has_been_computed_since_the_one_before_it_ended() -> None:
    rates = Rates(STEP_TOKENS_MAX)
    assert rates.prefill_elapsed_s(5.0) == 0.0
    rates.prefill_began(10.0)
    rates.prefill_began(10.5)
    assert rates.prefill_elapsed_s(11.0) == 1.0
    rates.prefill_ended(500, 500, 12.0)
    rates.tick(0.0, 12.25)
    assert rates.prefill_elapsed_s(12.5) == 0.5
    rates.prefill_ended(500, 500, 13.0)
    assert rates.prefill_elapsed_s(14.0) == 0.0


def test_a_prediction_counts_the_steps_of_the_sequences_beside_the_prompt() -> None:
    rates = Rates(STEP_TOKENS_MAX)
    alone_s = rates.prefill_s(4096, 4096)
    assert alone_s == pytest.approx(prompt_s(STEP_GUESS, 4096))
    for _ in range(8):
        rates.decode_began(0.0)
    rates.tick(0.5, 0.1)
    assert rates.prefill_s(4096, 4096) - alone_s == pytest.approx(2 * interval_s(STEP_GUESS, 8, 0.5))
    assert rates.token_interval_s == pytest.approx(interval_s(STEP_GUESS, 8, 0.5))


def test_bandwidth_is_measured_by_peer_and_begins_anew_with_another_backend() -> None:
    rates = Rates(STEP_TOKENS_MAX)
    rates.transfer_ended("p1", "shm", 1 << 10, 0.5)
    assert rates.transfers() == (), "too small to tell"
    for _ in range(20):
        rates.transfer_ended("p1", "shm", 1 << 30, 0.2)
        rates.transfer_ended("p2", "tcp", 1 << 30, 1.0)
    one, two = rates.transfers()
    assert (one.peer, one.backend, one.samples) == ("p1", "shm", 20)
    assert one.bytes_per_s == pytest.approx(5 << 30, rel=0.05)
    assert two.bytes_per_s == pytest.approx(1 << 30, rel=0.05)
    rates.transfer_ended("p1", "tcp", 1 << 30, 1.0)
    assert rates.transfers()[-1].bytes_per_s == pytest.approx(1 << 30, rel=0.05)
    assert rates.transfers()[-1].samples == 1


def test_the_peers_that_were_pulled_from_last_are_remembered() -> None:
    rates = Rates(STEP_TOKENS_MAX)
    for number in range(PEERS_MAX + 8):
        rates.transfer_ended(f"p{number}", "shm", 1 << 30, 0.2)
        rates.transfer_ended("first", "shm", 1 << 30, 0.2)
    peers = {each.peer for each in rates.transfers()}
    assert len(peers) == PEERS_MAX
    assert {"first", f"p{PEERS_MAX + 7}"} <= peers


def test_busy_time_counts_once_and_while_it_lasts() -> None:
    rates = Rates(STEP_TOKENS_MAX)
    assert rates.busy_s(5.0) == 0
    rates.prefill_began(10.0)
    rates.decode_began(11.0)
    rates.prefill_ended(10, 10, 12.0)
    assert rates.busy_s(13.0) == 3.0
    rates.decode_ended(14.0)
    assert rates.busy_s(99.0) == 4.0
