"""A simulated worker: an engine that computes prompts in chunks, decodes in steps and keeps KV in an LRU cache, and in
a pool beneath it where there is one.

Its state changes only where a *run* of steps ends. The steps of a run have the same sequences and at most one prompt in
full chunks, so the time after any number of them has a closed form, and a run is one event, however long it is:

    |chunk|chunk|chunk|rest + next prompt|decode decode decode decode|decode decode
    └─ run of 3 steps ┘└──── 1 step ─────┘└── until a sequence ends ─┘

What arrives during a run and can change its next step cuts it at the end of the step that is under way.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_simulator.cache import PrefixCache
from baton_simulator.events import EventQueue
from baton_simulator.pool import WorkerPool
from baton_simulator.routers.protocol import Event, Measured, WorkerSpec, WorkerState
from baton_simulator.steps import StepModel


@dataclass(slots=True, eq=False)
class Leg:
    """A request's part on one worker."""

    request: str
    blocks: Sequence[int]
    private_blocks: int
    """Blocks beside `blocks`: the rest of the prompt, and the answer."""
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate on this worker; 0: the prompt is computed for another one."""
    is_pull: bool = False
    """Whether another worker computes the prompt."""
    position: int = 0
    """Prompt tokens whose KV is here."""
    cached_tokens: int = 0
    """Prompt tokens that cache and pool held at admission; before it, those that the cache held on arrival."""
    cached_blocks: int = 0
    """Leading blocks that the device held at admission."""
    promoted_tokens: int = 0
    """Part of `cached_tokens` that is promoted from the pool."""
    promoted_at_s: float = 0.0
    """Instant at which that has ended."""
    promotion_s: float = 0.0
    """Time that it takes, with the promotions before it."""
    is_borrowing: bool = False
    """Whether it waits for a loan of another worker's pool."""
    borrowed_tokens: int = 0
    """Tokens that a loan has brought into the pool."""
    borrowing_s: float = 0.0
    """Time that this took."""


class Listener(Protocol):
    """What a worker tells the replay. No call may change that worker at once."""

    def on_admitted(self, worker: Worker, leg: Leg, evicted: Sequence[int]) -> None:
        """The leg has its memory: its prompt is computed now, or its KV can be pulled."""
        ...

    def on_computed(self, worker: Worker, leg: Leg) -> None:
        """The whole prompt's KV is here."""
        ...

    def on_first_token(self, worker: Worker, leg: Leg) -> None: ...

    def on_ended(self, worker: Worker, leg: Leg) -> None:
        """The last token exists, and the leg's memory is free."""
        ...

    def on_saved(self, worker: Worker, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """The worker's pool has changed."""
        ...

    def before_change(self, worker: Worker) -> None:
        """The worker's state is about to change: a heartbeat that is due still reports the old one."""
        ...


class Run:
    """Consecutive steps with the same work, see the module docstring."""

    __slots__ = ("base_s", "chunks", "counted", "factor", "joiners", "model", "sequences", "start_s", "steps")

    def __init__(self, model: StepModel, start_s: float, steps: int, chunks: list[tuple[Leg, int]]) -> None:
        self.model = model
        self.start_s = start_s
        self.steps = steps
        self.chunks = chunks
        """Prompt tokens per step, by leg."""
        self.joiners: list[Leg] = []
        """Sequences that get their first token in this run, which has one step then."""
        self.sequences = 0
        """Sequences that decode, without `joiners`."""
        self.base_s = 0.0
        self.factor = 1.0
        self.counted = 0
        """Steps whose tokens are in the measurements already."""

    def time_s(self, steps: int) -> float:
        """Return the time that the first `steps` steps take."""
        prompts_s = 0.0
        for leg, tokens in self.chunks:
            prompts_s += self.model.prompt_s(leg.position, leg.position + steps * tokens)
        return self.factor * (steps * self.base_s + prompts_s)

    def steps_at(self, now_s: float) -> int:
        """Return the number of whole steps done."""
        elapsed_s = now_s - self.start_s
        low, high = 0, self.steps
        if not self.chunks:
            # All steps take the same time; the quotient may be one off by rounding.
            steps = min(int(elapsed_s / (self.factor * self.base_s)), high)
            if steps < high and self.factor * ((steps + 1) * self.base_s) <= elapsed_s:
                return steps + 1
            return steps - 1 if steps and self.factor * (steps * self.base_s) > elapsed_s else steps
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.time_s(middle) <= elapsed_s else (low, middle - 1)
        return low


class Worker:
    """One worker. All methods act at the queue's present time."""

    def __init__(
        self,
        spec: WorkerSpec,
        cache: PrefixCache,
        model: StepModel,
        *,
        queue: EventQueue,
        listener: Listener,
        number: int = 0,
        pool: WorkerPool | None = None,
    ) -> None:
        self.spec = spec
        self.number = number
        self.cache = cache
        self.pool = pool
        self.beat_at_s = 0.0
        """Time of the next heartbeat, which the replay sends."""
        self.idle_beats = 0
        """Heartbeats since the last change, of which each found the worker idle."""
        self._idle = WorkerState(spec.name, spec.role, 0, 0, 0, 0, spec.kv_blocks_total, 0)
        """What they tell without a pool, the first one apart, which has measurements."""
        self._model = model
        self._chunk_tokens = spec.step_tokens_max
        self._queue = queue
        self._listener = listener
        self._waiting: deque[Leg] = deque()
        """Prompts without memory, first in first out."""
        self._waiting_tokens = 0
        """Their tokens to compute."""
        self._waiting_pulls: deque[Leg] = deque()
        self._pulling = 0
        self._prompts: deque[Leg] = deque()
        """Prompts under computation, in order."""
        self._promoting: dict[str, Leg] = {}
        """Prompts whose prefix is being promoted, by request."""
        self._joiners: list[Leg] = []
        self._sequences: list[tuple[int, int, Leg]] = []
        """Heap of (last step, serial number, leg)."""
        self._decode_blocks = 0
        self._held = 0
        """Legs whose prompt is computed and waits for its pull."""
        self._step = 0
        self._serial = 0
        self._run: Run | None = None
        self._events: list[Event] = []
        """What was measured since the last heartbeat."""
        self._decoded_tokens = 0
        """Tokens since then, after the first of each sequence."""

    # ------------------------------------------------------------ reading

    def can_hold(self, leg: Leg) -> bool:
        """Return whether the leg fits into the empty worker."""
        return len(leg.blocks) + leg.private_blocks <= self.spec.kv_blocks_total

    def report(self, now_s: float) -> WorkerState:
        """Return the state at `now_s` with the measurements since the last report. Nothing may have changed since."""
        if self.idle_beats and not self.cache.in_use and self.pool is None:
            return self._idle
        run = self._run
        running = len(self._prompts) + len(self._promoting) + len(self._sequences) + len(self._joiners) + self._held
        queued = self._waiting_tokens
        if run is not None:
            done = run.steps_at(now_s)
            self._count(run, done)
            for _, tokens in run.chunks:
                queued -= tokens * done
            running += len(run.joiners)
        for leg in self._prompts:
            queued += leg.prompt_tokens - leg.position
        for leg in self._promoting.values():
            queued += leg.prompt_tokens - leg.position
        measured = Measured(self._events, self._decoded_tokens)
        self._events, self._decoded_tokens = [], 0
        spec, used = self.spec, self.cache.in_use
        return WorkerState(
            name=spec.name,
            role=spec.role,
            running=running,
            waiting=len(self._waiting) + len(self._waiting_pulls) + self._pulling,
            prefill_tokens_queued=queued,
            kv_blocks_used=used,
            kv_blocks_total=spec.kv_blocks_total,
            active_decode_blocks=min(self._decode_blocks, used),
            pool_blocks_free=0 if self.pool is None else self.pool.directory.slots - self.pool.directory.ready,
            measured=measured,
        )

    # ------------------------------------------------------------ what comes from outside

    def submit(self, leg: Leg) -> None:
        """Queue a leg that `can_hold` allows."""
        self._listener.before_change(self)
        if leg.is_pull:
            self._waiting_pulls.append(leg)
            self._admit_pulls()
            # If it was admitted, the KV share has changed, and with it the time of the steps to come.
            self._proceed(cut=not self._waiting_pulls)
            return
        leg.cached_tokens = self._tokens(leg, self.cache.match(leg.blocks))
        self._waiting_tokens += leg.prompt_tokens - leg.cached_tokens
        self._waiting.append(leg)
        now_s = self._queue.now_s
        if self._run is not None:
            # A worker sees each token as it comes: those before this prompt belong to none of its time.
            self._count(self._run, self._run.steps_at(now_s))
        self._events.append(Event(now_s, "entered", leg.request))
        # Behind other prompts it changes nothing: those wait for memory, or for their turn in the chunks.
        self._proceed(cut=len(self._waiting) == 1 and not leg.is_borrowing and self._takes_prompts())

    def loan_ended(
        self, leg: Leg, lender: str = "", size_bytes: int = 0, moving_s: float = 0.0, *, waited_s: float = 0.0
    ) -> None:
        """A loan is in the pool, or comes to nothing (0 bytes): the leg that waited for it can run."""
        self._listener.before_change(self)
        leg.is_borrowing = False
        if size_bytes:
            leg.borrowing_s = waited_s
            now_s = self._queue.now_s
            self._events.append(
                Event(now_s, "borrowed", leg.request, peer=lender, size_bytes=size_bytes, elapsed_s=moving_s)
            )
        self._proceed(cut=self._takes_prompts())

    def _takes_prompts(self) -> bool:
        """Return whether the next step could take a prompt that the present run does without."""
        return self._run is not None and not self._run.chunks

    def pulled(self, leg: Leg, peer: str, size_bytes: int, moving_s: float) -> None:
        """The KV of an admitted pull is here: the sequence joins the next step."""
        self._listener.before_change(self)
        self._pulling -= 1
        leg.position = leg.prompt_tokens
        now_s = self._queue.now_s
        self._events.append(
            Event(
                now_s,
                "pulled",
                leg.request,
                peer=peer,
                size_bytes=size_bytes,
                elapsed_s=moving_s,
                promoted_tokens=leg.promoted_tokens,
            )
        )
        self._listener.on_computed(self, leg)
        self._save(leg)
        if leg.promoted_at_s > now_s:
            self._queue.add(leg.promoted_at_s, self._join, leg)
        else:
            self._join(leg)

    def _join(self, leg: Leg) -> None:
        self._joiners.append(leg)
        self._proceed(cut=True)

    def release(self, leg: Leg) -> None:
        """Another worker has pulled what this one computed."""
        self._listener.before_change(self)
        self._held -= 1
        self.cache.release(leg.blocks, leg.private_blocks)
        self._proceed(cut=False)

    # ------------------------------------------------------------ runs

    def _proceed(self, *, cut: bool) -> None:
        """Start a run if there is none, or cut the present one at its next step."""
        run = self._run
        if run is None:
            self._start()
        elif cut and run.steps > 1:
            now_s = self._queue.now_s
            steps = run.steps_at(now_s)
            if steps == 0 or run.start_s + run.time_s(steps) < now_s:
                steps += 1
            if steps < run.steps:
                run.steps = steps
                self._queue.add(run.start_s + run.time_s(steps), self._on_run_end, (run, steps))

    def _start(self) -> None:
        """Form the next run. The memory of new prompts is reserved here, first in first out."""
        chunks = self._take_chunks()
        if not chunks and not self._sequences and not self._joiners:
            return
        steps = self._sequences[0][0] - self._step if self._sequences else 0
        if self._joiners:
            steps = 1
        elif chunks:
            leg, tokens = chunks[0]
            # Full chunks leave no room for another prompt; the rest does.
            full = (leg.prompt_tokens - leg.position) // tokens if tokens == self._chunk_tokens else 1
            steps = min(steps, full) if steps else full
        run = Run(self._model, self._queue.now_s, steps, chunks)
        run.sequences = len(self._sequences)
        run.joiners, self._joiners = self._joiners, []
        share = self.cache.in_use / self.spec.kv_blocks_total
        run.base_s = self._model.step_s(share, run.sequences + len(run.joiners), len(chunks))
        run.factor = self._model.factor()
        self._run = run
        self._queue.add(run.start_s + run.time_s(steps), self._on_run_end, (run, steps))

    def _take_chunks(self) -> list[tuple[Leg, int]]:
        budget = self._chunk_tokens
        chunks: list[tuple[Leg, int]] = []
        for leg in self._prompts:
            tokens = min(leg.prompt_tokens - leg.position, budget)
            chunks.append((leg, tokens))
            budget -= tokens
        while budget and (leg := self._next_waiting()) is not None and self._fits(leg):
            self._waiting.remove(leg)
            self._waiting_tokens -= leg.prompt_tokens - leg.cached_tokens
            self._admit(leg)
            if leg.promoted_tokens:
                self._promoting[leg.request] = leg
                continue
            self._prompts.append(leg)
            tokens = min(leg.prompt_tokens - leg.position, budget)
            chunks.append((leg, tokens))
            budget -= tokens
        return chunks

    def _next_waiting(self) -> Leg | None:
        return next((leg for leg in self._waiting if not leg.is_borrowing), None)

    def _admit_pulls(self) -> None:
        while self._waiting_pulls and self._fits(self._waiting_pulls[0]):
            self._pulling += 1
            self._admit(self._waiting_pulls.popleft())

    def _fits(self, leg: Leg) -> bool:
        return self.cache.fits(leg.blocks, leg.private_blocks)

    def _admit(self, leg: Leg) -> None:
        leg.cached_blocks, evicted = self.cache.admit(leg.blocks, leg.private_blocks)
        leg.position = leg.cached_tokens = self._tokens(leg, leg.cached_blocks)
        if self.pool is not None:
            self._promote(leg, self.pool)
        self._listener.on_admitted(self, leg, evicted)

    def _promote(self, leg: Leg, pool: WorkerPool) -> None:
        """Begin to promote what the pool holds beyond the cache."""
        reach = pool.match(leg.blocks, leg.cached_blocks)
        if reach == leg.cached_blocks:
            return
        now_s, held_tokens = self._queue.now_s, leg.cached_tokens
        leg.promoted_at_s = pool.promote(leg.blocks, leg.cached_blocks, reach, now_s)
        leg.promotion_s = leg.promoted_at_s - now_s
        leg.position = leg.cached_tokens = self._tokens(leg, reach)
        leg.promoted_tokens = leg.cached_tokens - held_tokens
        self._queue.add(leg.promoted_at_s, self._on_promoted, (leg, reach))

    def _on_promoted(self, promoted: tuple[Leg, int]) -> None:
        leg, reach = promoted
        pool = self.pool
        assert pool is not None
        self._listener.before_change(self)
        pool.promoted(leg.blocks, leg.cached_blocks, reach)
        blocks = reach - leg.cached_blocks
        event = Event(
            self._queue.now_s,
            "promoted",
            leg.request,
            size_bytes=blocks * pool.block_bytes,
            elapsed_s=pool.copy_s(blocks),
        )
        self._events.append(event)
        if self._promoting.pop(leg.request, None) is not None:
            self._prompts.append(leg)
            self._proceed(cut=self._takes_prompts())

    def _save(self, leg: Leg) -> None:
        """Save a prompt in the pool."""
        if self.pool is not None:
            stored, evicted = self.pool.save(leg.blocks)
            if stored or evicted:
                self._listener.on_saved(self, stored, evicted)

    def _tokens(self, leg: Leg, blocks: int) -> int:
        """Return the prompt tokens that cached blocks save; the last token is always computed, to sample from it."""
        return min(blocks * self.spec.block_tokens, leg.prompt_tokens - 1)

    def _on_run_end(self, scheduled: tuple[Run, int]) -> None:
        run, steps = scheduled
        if run is not self._run or run.steps != steps:
            return
        self._listener.before_change(self)
        self._count(run, steps)
        self._run = None
        self._step += steps
        for leg, tokens in run.chunks:
            leg.position += tokens * steps
            if leg.position == leg.prompt_tokens:
                self._prompts.popleft()
                self._on_computed(leg)
        for leg in run.joiners:
            self._on_first_token(leg)
        while self._sequences and self._sequences[0][0] <= self._step:
            _, _, leg = heapq.heappop(self._sequences)
            self._decode_blocks -= len(leg.blocks) + leg.private_blocks
            self._end(leg)
        self._admit_pulls()
        self._proceed(cut=False)

    def _on_computed(self, leg: Leg) -> None:
        computed_tokens = leg.prompt_tokens - leg.cached_tokens
        self._events.append(
            Event(
                self._queue.now_s,
                "computed",
                leg.request,
                computed_tokens,
                leg.prompt_tokens,
                elapsed_s=leg.borrowing_s + leg.promotion_s,
                promoted_tokens=leg.promoted_tokens,
            )
        )
        if not leg.output_tokens:
            self._held += 1
        self._listener.on_computed(self, leg)
        self._save(leg)
        if leg.output_tokens:
            self._on_first_token(leg)

    def _on_first_token(self, leg: Leg) -> None:
        self._events.append(Event(self._queue.now_s, "first_token", leg.request))
        self._listener.on_first_token(self, leg)
        if leg.output_tokens == 1:
            self._end(leg)
            return
        self._serial += 1
        self._decode_blocks += len(leg.blocks) + leg.private_blocks
        heapq.heappush(self._sequences, (self._step + leg.output_tokens - 1, self._serial, leg))

    def _end(self, leg: Leg) -> None:
        self.cache.release(leg.blocks, leg.private_blocks)
        self._events.append(Event(self._queue.now_s, "ended", leg.request))
        self._listener.on_ended(self, leg)

    def _count(self, run: Run, steps: int) -> None:
        """Add the decoded tokens of a run's first steps to the measurements."""
        if run.sequences and steps > run.counted:
            tokens = run.sequences * (steps - run.counted)
            self._decoded_tokens += tokens
            self._events.append(Event(run.start_s + run.time_s(steps), "decoded", tokens=tokens))
            run.counted = steps
