"""The simulated engine's scheduler: continuous batching, with no clock, no randomness and no bytes inside.

The shell calls `plan_step`, carries the step out, tells `complete_step`, and reports what happened
between steps (`submit`, `end`, `pull_done`, `pull_failed`). As in vLLM's V1 scheduler there are no
phases of a step: every attempt has tokens and a count of tokens whose KV is computed, and a step moves
the counts on, running attempts first. When blocks run out, the attempt that came last gives up its
blocks and later computes them again.

    WAITING ──▶ RUNNING ──▶ ENDED          a whole request; preemption leads back to WAITING
    WAITING ──▶ PULLING ──▶ RUNNING        decode, and prefixes promoted from the KV pool; an aborted one is FENCING
                                           until nothing writes any more
                RUNNING ──▶ HELD           prefill, until its lease is over
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from baton.connectors.pool_scheduler import PoolScheduler
from baton.engines.engine import Leg
from baton.engines.simulated.blocks import BlockCache


class SimulatedPhase(Enum):
    WAITING = auto()
    PULLING = auto()
    FENCING = auto()
    RUNNING = auto()
    HELD = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class SimulatedAttempt:
    """One attempt as the scheduler sees it. `tokens` are prompt and output, of which `computed` have their KV."""

    key: tuple[str, int]
    leg: Leg
    tokens: list[int]
    prompt_tokens: int
    name: str = ""
    """Name by which the KV pool knows it."""
    cache_salt: str = ""
    phase: SimulatedPhase = SimulatedPhase.WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list[int])
    hashes: list[bytes] = field(default_factory=list[bytes])
    """Hashes of the full blocks of `tokens`."""
    cached_tokens: int = 0
    """Tokens found in the prefix cache and in the KV pool when first admitted."""
    pulled_tokens: int = 0
    arriving_tokens: int = 0
    """Tokens that it has once its promotion and pull are over, while it is PULLING."""
    promoting_tokens: int = 0
    """Part of them that is promoted."""
    admitted: bool = False
    """True once it has run or pulled; a preempted decode must not pull again from a lease that is gone."""


class Chunk(msgspec.Struct, frozen=True):
    """Tokens of one attempt to compute in a step; where `samples`, the next token follows from them."""

    attempt: SimulatedAttempt
    start: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks to fill with the KV of tokens [first_token, tokens) from elsewhere; none: all is cached here."""

    attempt: SimulatedAttempt
    first_token: int
    tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Orders for one step: revoke, then start pulls, then compute."""

    chunks: tuple[Chunk, ...]
    pulls: tuple[Pull, ...]
    preempted: tuple[SimulatedAttempt, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.pulls or self.preempted)


class Scheduler:
    def __init__(
        self, cache: BlockCache, *, running_max: int, step_tokens_max: int, pool: PoolScheduler | None = None
    ) -> None:
        """`pool`: decisions of the KV pool; None: there is none."""
        self._cache = cache
        self._pool = pool
        self._running_max = running_max
        self._step_tokens_max = step_tokens_max
        self._waiting: deque[SimulatedAttempt] = deque()
        self._running: list[SimulatedAttempt] = []
        self._pulling: set[SimulatedAttempt] = set()
        """Attempts that are PULLING or FENCING."""
        self._held: set[SimulatedAttempt] = set()
        self.preemptions = 0
        self.prompt_tokens_computed = 0
        self.prompt_tokens_cached = 0
        self.prompt_tokens_pulled = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Attempts that do not compute yet, those that pull included."""
        return len(self._waiting) + len(self._pulling)

    @property
    def leased(self) -> list[SimulatedAttempt]:
        """Prefills whose blocks are leased to decode, whether they still compute or hold them."""
        return [*self._held, *(attempt for attempt in self._running if attempt.leg is Leg.PREFILL)]

    # What happens between steps.

    def submit(self, attempt: SimulatedAttempt) -> None:
        self._waiting.append(attempt)

    def end(self, attempt: SimulatedAttempt) -> None:
        """Free what an attempt holds. One that pulls keeps its blocks until the pull is over."""
        match attempt.phase:
            case SimulatedPhase.WAITING:
                self._waiting.remove(attempt)
            case SimulatedPhase.RUNNING:
                self._running.remove(attempt)
            case SimulatedPhase.HELD:
                self._held.remove(attempt)
            case SimulatedPhase.PULLING:
                attempt.phase = SimulatedPhase.FENCING
                return
            case SimulatedPhase.FENCING | SimulatedPhase.ENDED:
                return
        self._free(attempt, SimulatedPhase.ENDED)

    def pull_done(self, attempt: SimulatedAttempt) -> None:
        """Note that the pull and the promotion that `plan_step` asked for have filled their blocks."""
        self._pulling.remove(attempt)
        if attempt.phase is SimulatedPhase.FENCING:
            self._free(attempt, SimulatedPhase.ENDED)
            return
        pulled_tokens = attempt.arriving_tokens - attempt.computed - attempt.promoting_tokens
        attempt.pulled_tokens += pulled_tokens
        self.prompt_tokens_pulled += pulled_tokens
        self._advance(attempt, attempt.arriving_tokens)
        attempt.phase = SimulatedPhase.RUNNING
        self._running.append(attempt)

    def pull_failed(self, attempt: SimulatedAttempt) -> None:
        """Note that a pull has failed: nothing writes its blocks any more, and their content is invalid."""
        self._pulling.remove(attempt)
        self._free(attempt, SimulatedPhase.ENDED)

    def copied(self, blocks: Sequence[int]) -> None:
        """Let go of blocks that were saved in the KV pool."""
        self._cache.give_back(blocks)

    # Steps.

    def plan_step(self) -> Step:
        """Decide what to compute next and take the blocks for it."""
        budget = self._step_tokens_max
        chunks: list[Chunk] = []
        preempted: list[SimulatedAttempt] = []
        index = 0
        while index < len(self._running) and budget:
            attempt = self._running[index]
            end = min(len(attempt.tokens), attempt.computed + budget)
            has_room = end <= len(attempt.blocks) * self._cache.block_tokens
            if not has_room and not self._make_room(attempt, end, preempted):
                break
            chunks.append(Chunk(attempt, attempt.computed, end, _samples(attempt, end)))
            budget -= end - attempt.computed
            index += 1
        pulls: list[Pull] = []
        # After a preemption the blocks are reserved: the preempted attempt is the next to come back.
        while budget and not preempted and len(self._running) + len(self._pulling) < self._running_max:
            waiting = next((attempt for attempt in self._waiting if not self._is_parked(attempt)), None)
            admitted = self._admit(waiting, budget, pulls) if waiting is not None else None
            if admitted is None:
                break
            self._waiting.remove(admitted)
            if admitted.phase is SimulatedPhase.RUNNING:
                end = min(len(admitted.tokens), admitted.computed + budget)
                chunks.append(Chunk(admitted, admitted.computed, end, _samples(admitted, end)))
                budget -= end - admitted.computed
        return Step(tuple(chunks), tuple(pulls), tuple(preempted))

    def complete_step(self, step: Step) -> None:
        """Note that the step's KV is in the pool. A prefill whose prompt is done becomes HELD."""
        for chunk in step.chunks:
            attempt = chunk.attempt
            if attempt.phase is not SimulatedPhase.RUNNING:
                continue
            if chunk.start < attempt.prompt_tokens:
                self.prompt_tokens_computed += min(chunk.end, attempt.prompt_tokens) - chunk.start
            self._advance(attempt, chunk.end)
            if attempt.leg is Leg.PREFILL and attempt.computed == attempt.prompt_tokens:
                self._running.remove(attempt)
                self._held.add(attempt)
                attempt.phase = SimulatedPhase.HELD

    def _make_room(self, attempt: SimulatedAttempt, end: int, preempted: list[SimulatedAttempt]) -> bool:
        """Take blocks for tokens up to `end`, preempting the latest attempts if needed; False: `attempt` is one."""
        fresh = self._blocks(end) - len(attempt.blocks)
        while fresh > self._cache.free_blocks:
            victim = self._running.pop()
            self._free(victim, SimulatedPhase.WAITING)
            victim.computed = 0
            self._waiting.appendleft(victim)
            preempted.append(victim)
            self.preemptions += 1
            if victim is attempt:
                return False
        attempt.blocks += self._cache.take_fresh(max(0, fresh))
        return True

    def _cached(self, attempt: SimulatedAttempt) -> list[int]:
        """Return the blocks of an attempt's prefix that the cache holds."""
        self._cache.extend_hashes(attempt.hashes, attempt.tokens, attempt.cache_salt)
        # The last token is computed here whatever the cache holds, since the next one is sampled from it.
        return self._cache.match(attempt.hashes[: (len(attempt.tokens) - 1) // self._cache.block_tokens])

    def _is_parked(self, attempt: SimulatedAttempt) -> bool:
        """Return whether an attempt waits for blocks from the KV pool's file, or that another worker's pool lends."""
        pool = self._pool
        if pool is None or not (pool.may_load(attempt.name) or pool.may_borrow(attempt.name)):
            return False
        cached_tokens = len(self._cached(attempt)) * self._cache.block_tokens
        question = attempt.name, attempt.tokens, cached_tokens
        return pool.loads(*question) or pool.borrows(*question)

    def _admit(self, attempt: SimulatedAttempt, budget: int, pulls: list[Pull]) -> SimulatedAttempt | None:
        """Give a waiting attempt its first blocks; None: there are too few."""
        length, cached = len(attempt.tokens), self._cached(attempt)
        cached_tokens = len(cached) * self._cache.block_tokens
        promoted = self._pool.offer(attempt.name, attempt.tokens, cached_tokens) if self._pool is not None else 0
        ready_tokens = cached_tokens + promoted
        pulling = attempt.leg is Leg.DECODE and not attempt.admitted
        end = length if pulling else min(length, ready_tokens + budget)
        fresh = self._blocks(end) - len(cached)
        if not self._cache.can_take(cached, fresh):
            return None
        self._cache.take(cached)
        attempt.blocks = cached + self._cache.take_fresh(fresh)
        attempt.computed = cached_tokens
        again, attempt.admitted = attempt.admitted, True
        if not again:
            attempt.cached_tokens = ready_tokens
            self.prompt_tokens_cached += cached_tokens
        lacking: tuple[int, ...] = ()
        if pulling:
            if ready_tokens < length - 1:
                first = ready_tokens // self._cache.block_tokens
                lacking = tuple(attempt.blocks[first : self._blocks(length - 1)])
            pulls.append(Pull(attempt, ready_tokens, length - 1, lacking))
        if self._pool is not None and promoted:
            self._pool.promote(attempt.name, attempt.blocks, with_pull=bool(lacking), again=again)
        if promoted or lacking:
            attempt.promoting_tokens, attempt.arriving_tokens = promoted, length - 1 if lacking else ready_tokens
            attempt.phase = SimulatedPhase.PULLING
            self._pulling.add(attempt)
            return attempt
        attempt.phase = SimulatedPhase.RUNNING
        self._running.append(attempt)
        return attempt

    def _advance(self, attempt: SimulatedAttempt, computed: int) -> None:
        first = attempt.computed // self._cache.block_tokens
        attempt.computed = computed
        full = computed // self._cache.block_tokens
        if full > first:
            self._cache.extend_hashes(attempt.hashes, attempt.tokens, attempt.cache_salt)
            self._cache.register(attempt.blocks, attempt.hashes[:full], attempt.tokens, first, attempt.cache_salt)
            if self._pool is not None:
                self._cache.take(self._pool.computes(attempt.name, attempt.tokens, attempt.blocks, computed))

    def _free(self, attempt: SimulatedAttempt, phase: SimulatedPhase) -> None:
        self._cache.give_back(attempt.blocks)
        attempt.blocks = []
        attempt.phase = phase

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._cache.block_tokens)


def _samples(attempt: SimulatedAttempt, end: int) -> bool:
    return end == len(attempt.tokens) and attempt.leg is not Leg.PREFILL
