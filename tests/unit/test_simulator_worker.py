"""The simulated worker against one that takes every step by itself, and its cache against a naive one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from baton_simulator.cache import PrefixCache
from baton_simulator.events import EventQueue
from baton_simulator.routers.protocol import WorkerSpec
from baton_simulator.steps import MockerSteps, StepModel
from baton_simulator.worker import Leg, Worker
from hypothesis import given
from hypothesis import strategies as st

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
IN_USE_MAX = 40
BLOCKS_MAX = 60


@dataclass(slots=True)
class Job:
    """A leg, when it comes, and how long its pull takes once it has memory."""

    at_s: float
    leg: Leg
    pull_s: float = 0.0


@dataclass(slots=True)
class Times:
    first_s: dict[str, float] = field(default_factory=dict[str, float])
    last_s: dict[str, float] = field(default_factory=dict[str, float])
    cached: dict[str, int] = field(default_factory=dict[str, int])


class Recorder:
    """A listener that pulls as the jobs say."""

    def __init__(self, jobs: Sequence[Job], queue: EventQueue) -> None:
        self.times = Times()
        self._jobs = {job.leg.request: job for job in jobs}
        self._queue = queue

    def on_admitted(self, worker: Worker, leg: Leg, evicted: Sequence[int]) -> None:
        assert worker.cache.in_use <= IN_USE_MAX
        assert len(worker.cache) <= BLOCKS_MAX
        self.times.cached[leg.request] = leg.cached_tokens
        if leg.is_pull:
            ready_s = self._queue.now_s + self._jobs[leg.request].pull_s
            self._queue.add(ready_s, lambda ready: worker.pulled(ready, "peer", 0, 0.0), leg)

    def on_computed(self, worker: Worker, leg: Leg) -> None: ...

    def on_first_token(self, worker: Worker, leg: Leg) -> None:
        assert leg.request not in self.times.first_s
        self.times.first_s[leg.request] = self._queue.now_s

    def on_saved(self, worker: Worker, stored: Sequence[int], evicted: Sequence[int]) -> None: ...

    def on_ended(self, worker: Worker, leg: Leg) -> None:
        assert leg.request not in self.times.last_s
        self.times.last_s[leg.request] = self._queue.now_s

    def before_change(self, worker: Worker) -> None: ...


def simulate(jobs: Sequence[Job], model: StepModel) -> tuple[Times, Worker]:
    queue = EventQueue()
    recorder = Recorder(jobs, queue)
    spec = WorkerSpec("w", "aggregated", IN_USE_MAX, BLOCK_TOKENS, step_tokens_max=CHUNK_TOKENS)
    cache = PrefixCache(in_use_max=IN_USE_MAX, blocks_max=BLOCKS_MAX)
    worker = Worker(spec, cache, model, queue=queue, listener=recorder)
    for job in jobs:
        queue.add(job.at_s, worker.submit, job.leg)
    while queue.step():
        pass
    return recorder.times, worker


class SlowWorker:
    """The same engine, one step after the other."""

    def __init__(self, jobs: Sequence[Job], model: StepModel) -> None:
        self.times = Times()
        self._model = model
        self._cache = PrefixCache(in_use_max=IN_USE_MAX, blocks_max=BLOCKS_MAX)
        self._jobs = sorted(jobs, key=lambda job: job.at_s)
        self._waiting: list[Leg] = []
        self._waiting_pulls: list[Job] = []
        self._pulling: list[tuple[float, Leg]] = []
        self._prompts: list[Leg] = []
        self._joiners: list[Leg] = []
        self._running: dict[str, tuple[Leg, int]] = {}
        """Request → its leg and the tokens that are missing."""
        self._now_s = 0.0

    def run(self) -> Times:
        while True:
            while not self._step():
                upcoming = [job.at_s for job in self._jobs[:1]] + [ready_s for ready_s, _ in self._pulling]
                if not upcoming:
                    return self.times
                self._now_s = min(upcoming)
                self._arrive(self._now_s, most=1)

    def _arrive(self, until_s: float, *, most: int = 1 << 30) -> None:
        """Take what comes by a time, in order."""
        for _ in range(most):
            ready = min(self._pulling, key=lambda pull: pull[0], default=None)
            if ready and ready[0] <= until_s and (not self._jobs or ready[0] < self._jobs[0].at_s):
                self._pulling.remove(ready)
                self._joiners.append(ready[1])
            elif self._jobs and self._jobs[0].at_s <= until_s:
                job = self._jobs.pop(0)
                if job.leg.is_pull:
                    self._waiting_pulls.append(job)
                    self._admit_pulls(job.at_s)
                else:
                    self._waiting.append(job.leg)
            else:
                return

    def _admit_pulls(self, now_s: float) -> None:
        while self._waiting_pulls and self._admit(self._waiting_pulls[0].leg):
            job = self._waiting_pulls.pop(0)
            self._pulling.append((now_s + job.pull_s, job.leg))

    def _admit(self, leg: Leg) -> bool:
        if not self._cache.fits(leg.blocks, leg.private_blocks):
            return False
        held, _ = self._cache.admit(leg.blocks, leg.private_blocks)
        leg.position = self.times.cached[leg.request] = min(held * BLOCK_TOKENS, leg.prompt_tokens - 1)
        return True

    def _step(self) -> bool:
        """Take one step, if there is work."""
        budget, chunks = CHUNK_TOKENS, list[tuple[Leg, int]]()
        for leg in self._prompts:
            chunks.append((leg, min(budget, leg.prompt_tokens - leg.position)))
            budget -= chunks[-1][1]
        while budget and self._waiting and self._admit(self._waiting[0]):
            leg = self._waiting.pop(0)
            self._prompts.append(leg)
            chunks.append((leg, min(budget, leg.prompt_tokens - leg.position)))
            budget -= chunks[-1][1]
        joiners, self._joiners = self._joiners, []
        if not (chunks or joiners or self._running):
            return False
        share = self._cache.in_use / IN_USE_MAX
        step_s = self._model.step_s(share, len(self._running) + len(joiners), len(chunks))
        step_s += sum(self._model.prompt_s(leg.position, leg.position + tokens) for leg, tokens in chunks)
        self._now_s += step_s
        self._arrive(self._now_s)
        for request, (leg, missing) in list(self._running.items()):
            self._running[request] = leg, missing - 1
        computed: list[Leg] = []
        for leg, tokens in chunks:
            leg.position += tokens
            if leg.position == leg.prompt_tokens:
                self._prompts.remove(leg)
                computed.append(leg)
        for leg in (*computed, *joiners):
            self.times.first_s[leg.request] = self._now_s
            self._running[leg.request] = leg, leg.output_tokens - 1
            if leg.output_tokens == 1:
                self._end(leg)
        for leg in [leg for leg, missing in self._running.values() if missing == 0]:
            self._end(leg)
        self._admit_pulls(self._now_s)
        return True

    def _end(self, leg: Leg) -> None:
        del self._running[leg.request]
        self.times.last_s[leg.request] = self._now_s
        self._cache.release(leg.blocks, leg.private_blocks)


def make_jobs(seed: int, count: int, pull_share: float) -> list[Job]:
    random = Random(seed)
    jobs: list[Job] = []
    for number in range(count):
        prefix = random.randrange(3)
        shared = random.randint(0, 8)
        own = random.randint(0, 8)
        blocks = [prefix * 100 + n for n in range(shared)] + [1000 * (number + 1) + n for n in range(own)]
        prompt_tokens = len(blocks) * BLOCK_TOKENS + random.randint(1, BLOCK_TOKENS - 1)
        output_tokens = random.randint(1, 60)
        total = -(-(prompt_tokens + output_tokens) // BLOCK_TOKENS)
        is_pull = random.random() < pull_share
        leg = Leg(str(number), blocks, total - len(blocks), prompt_tokens, output_tokens, is_pull)
        jobs.append(Job(random.uniform(0, 0.1 * count), leg, random.uniform(0, 0.2)))
    return jobs


@given(st.integers(0, 1 << 32), st.integers(1, 30), st.sampled_from([0.0, 0.5, 1.0]))
def test_runs_in_closed_form_equal_single_steps(seed: int, count: int, pull_share: float) -> None:
    fast, worker = simulate(make_jobs(seed, count, pull_share), MockerSteps())
    slow = SlowWorker(make_jobs(seed, count, pull_share), MockerSteps()).run()
    assert fast.cached == slow.cached
    for mine, other in ((fast.first_s, slow.first_s), (fast.last_s, slow.last_s)):
        assert mine.keys() == other.keys() == {str(number) for number in range(count)}
        assert all(abs(mine[request] - other[request]) < 1e-6 for request in mine)
    assert worker.cache.in_use == 0


def test_a_report_counts_the_tokens_of_a_run_that_goes_on() -> None:
    queue = EventQueue()
    leg = Leg("r", [], 10, 15, 100)
    recorder = Recorder([], queue)
    cache = PrefixCache(in_use_max=IN_USE_MAX, blocks_max=BLOCKS_MAX)
    spec = WorkerSpec("w", "aggregated", IN_USE_MAX, BLOCK_TOKENS, step_tokens_max=CHUNK_TOKENS)
    model = MockerSteps()
    worker = Worker(spec, cache, model, queue=queue, listener=recorder)
    worker.submit(leg)
    queue.step()
    first_s, step_s = queue.now_s, model.step_s(10 / IN_USE_MAX, 1, 0)
    state = worker.report(first_s + 10.5 * step_s)
    assert state.running == 1
    assert state.kv_blocks_used == state.active_decode_blocks == 10
    assert state.measured.decoded_tokens == 10
    assert [(event.kind, event.tokens) for event in state.measured.events[-2:]] == [("first_token", 0), ("decoded", 10)]
    assert worker.report(first_s + 12.5 * step_s).measured.decoded_tokens == 2


def test_the_tokens_before_a_prompt_count_before_it() -> None:
    """The worker's fit would charge the prompt for their time."""
    queue = EventQueue()
    recorder = Recorder([], queue)
    cache = PrefixCache(in_use_max=IN_USE_MAX, blocks_max=BLOCKS_MAX)
    spec = WorkerSpec("w", "aggregated", IN_USE_MAX, BLOCK_TOKENS, step_tokens_max=CHUNK_TOKENS)
    model = MockerSteps()
    worker = Worker(spec, cache, model, queue=queue, listener=recorder)
    worker.submit(Leg("r", [], 10, 15, 100))
    queue.step()
    enters_s = queue.now_s + 10.5 * model.step_s(10 / IN_USE_MAX, 1, 0)
    queue.add(enters_s, worker.submit, Leg("late", [], 10, 15, 100))
    while queue.now_s < enters_s:
        queue.step()
    events = worker.report(queue.now_s).measured.events
    assert [(event.kind, event.tokens) for event in events[-2:]] == [("decoded", 10), ("entered", 0)]
    assert events[-2].at_s <= events[-1].at_s == enters_s


class SlowCache:
    """A cache that looks through all of its blocks."""

    def __init__(self) -> None:
        self.users: dict[int, list[str]] = {}
        self.released: dict[int, int] = {}
        self.private = 0
        self._count = 0

    def admit(self, request: str, blocks: Sequence[int], private: int) -> tuple[int, list[int]]:
        held = 0
        while held < len(blocks) and blocks[held] in self.users:
            held += 1
        for block in blocks:
            self.users.setdefault(block, []).append(request)
        self.private += private
        evicted: list[int] = []
        while len(self.users) + self.private > BLOCKS_MAX:
            oldest = min((b for b, users in self.users.items() if not users), key=lambda b: self.released[b])
            del self.users[oldest]
            evicted.append(oldest)
        return held, evicted

    def release(self, request: str, blocks: Sequence[int], private: int) -> None:
        for block in reversed(blocks):
            self.users[block].remove(request)
            self._count += 1
            self.released[block] = self._count
        self.private -= private


@given(st.integers(0, 1 << 32))
def test_the_cache_evicts_like_a_naive_lru(seed: int) -> None:
    random = Random(seed)
    cache, slow = PrefixCache(in_use_max=IN_USE_MAX, blocks_max=BLOCKS_MAX), SlowCache()
    running: list[tuple[str, Sequence[int], int]] = []
    for number in range(80):
        # A tree of prefixes: block n of branch b is the same for all that took the branch up to there.
        branch, length = random.randrange(4), random.randint(0, 12)
        blocks = [n if n < 3 else branch * 100 + n for n in range(length)] + [1000 + number] * random.randint(0, 1)
        private = random.randint(0, 3)
        in_use = {block for _, held, _ in running for block in held} | set(blocks)
        fits = len(in_use) + slow.private + private <= IN_USE_MAX
        assert cache.fits(blocks, private) == fits
        if fits:
            assert cache.match(blocks) == next((n for n, b in enumerate(blocks) if b not in slow.users), len(blocks))
            assert cache.admit(blocks, private) == slow.admit(str(number), blocks, private)
            running.append((str(number), blocks, private))
        if running and (not fits or random.random() < 0.5):
            request, held, kept = running.pop(random.randrange(len(running)))
            cache.release(held, kept)
            slow.release(request, held, kept)
        assert cache.in_use <= IN_USE_MAX
        assert len(cache) == len(slow.users) + slow.private <= BLOCKS_MAX
