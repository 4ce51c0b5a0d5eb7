"""Baton's side of the simulated workers: each one's book of attempts, its measured rates, its heartbeats.

The book reserves as a worker's ledger does: a run slot and KV for the prompt and some output, from the placement on. An
attempt that finds no room waits for it, first in first out and holding nothing; a pair starts on both workers or on
neither. What the messages between the two workers take is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from baton.messages.base import WorkerAddress
from baton.messages.workers import Heartbeat, Role
from baton.worker.kv_book import Holding, KvBook
from baton.worker.rates import Rates, prompt_pairs
from baton_simulator.routers.protocol import Measured, WorkerSpec, WorkerState

MODEL: Final = "model"
RUNNING_MAX: Final = 256
"""Run slots of a worker, vLLM's default on a GPU of 80 GB."""
LEASED_SHARE_MAX: Final = 0.4
"""Share of its KV that a prefill worker leases out."""
BACKEND: Final = "simulated"


@dataclass(slots=True, eq=False)
class Attempt:
    """One placed request, in the books of its workers."""

    request: str
    blocks: Sequence[int]
    """Ids of the whole blocks of its prompt."""
    decode: str
    prefill: str
    """Empty: the decode worker computes the prompt."""
    prompt_tokens: int
    uncached_tokens: int
    """Prompt tokens to compute, as the scheduler told."""
    output_tokens: int
    """Output for which decode reserves KV."""
    until_s: float
    """Instant until which it may wait for room."""
    is_started: bool = False

    @property
    def workers(self) -> Sequence[str]:
        return (self.prefill, self.decode) if self.prefill else (self.decode,)

    @property
    def computed_on(self) -> str:
        return self.prefill or self.decode


@dataclass(slots=True)
class _Book:
    """One worker's ledger."""

    spec: WorkerSpec
    rates: Rates
    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict[tuple[str, int], Attempt])
    """All, in order of arrival, by request and attempt as heartbeats list them."""
    prompts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    """Attempts whose prompt is to be computed here, in order of arrival."""
    pulls: dict[str, int] = field(default_factory=dict[str, int])
    """Request → blocks that it holds here for KV that has not come."""
    waiting: deque[Attempt] = field(default_factory=deque[Attempt])
    kv: KvBook = field(default_factory=KvBook)
    address: WorkerAddress = field(init=False)
    role: Role = field(init=False)
    holdings: dict[str, Holding] = field(default_factory=dict[str, Holding])
    """Blocks by request, of those that hold a slot, too."""
    told: tuple[WorkerState, Heartbeat] | None = None
    """The newest heartbeat, of a worker that holds no attempts, and the state that it tells."""

    def __post_init__(self) -> None:
        self.role = Role.PREFILL if self.spec.role == "prefill" else Role.DECODE
        self.address = WorkerAddress(worker=self.spec.name, generation=1, agents=(self.spec.name,))

    def enter(self, attempt: Attempt) -> None:
        self.attempts[attempt.request, 0] = attempt
        if attempt.uncached_tokens and attempt.computed_on == self.spec.name:
            self.prompts[attempt.request] = attempt

    def leave(self, attempt: Attempt) -> bool:
        """Forget an attempt and what it holds; return whether it was here."""
        request = attempt.request
        if self.attempts.pop((request, 0), None) is None:
            return False
        self.prompts.pop(request, None)
        self.pulls.pop(request, None)
        if attempt.is_started:
            self.kv.release(self.holdings.pop(request))
        else:
            self.waiting.remove(attempt)
        return True

    def holding(self, attempt: Attempt) -> Holding:
        output_tokens = 0 if attempt.prefill == self.spec.name else attempt.output_tokens
        blocks = -(-(attempt.prompt_tokens + output_tokens) // self.spec.block_tokens)
        return Holding(blocks, attempt.blocks)

    def has_room(self, attempt: Attempt) -> bool:
        share = LEASED_SHARE_MAX if attempt.prefill == self.spec.name else 1.0
        blocks_max = int(self.spec.kv_blocks_total * share)
        return len(self.holdings) < RUNNING_MAX and self.kv.used + self.kv.lacking(self.holding(attempt)) <= blocks_max

    def take(self, attempt: Attempt) -> None:
        holding = self.holdings[attempt.request] = self.holding(attempt)
        self.kv.take(holding)
        if attempt.prefill and attempt.decode == self.spec.name:
            self.pulls[attempt.request] = holding.blocks

    def computed(self, request: str, missing_tokens: int) -> None:
        """Record that the prompt's KV exists here, of which so much did not before."""
        self.prompts.pop(request, None)
        if (holding := self.holdings.get(request)) is not None:
            cached_tokens = self.attempts[request, 0].prompt_tokens - missing_tokens
            self.kv.settle(holding, cached_tokens // self.spec.block_tokens)


class Ledgers:
    """The books of all workers."""

    def __init__(self, workers: Sequence[WorkerSpec]) -> None:
        self._books: Mapping[str, _Book] = {spec.name: _Book(spec, Rates(spec.step_tokens_max)) for spec in workers}
        self._attempts: dict[str, Attempt] = {}

    # ------------------------------------------------------------ attempts

    def place(self, attempt: Attempt) -> bool:
        """Book an attempt; return whether it starts at once."""
        books = [self._books[worker] for worker in attempt.workers]
        self._attempts[attempt.request] = attempt
        for book in books:
            book.enter(attempt)
        if all(not book.waiting and book.has_room(attempt) for book in books):
            self._start(attempt)
            return True
        for book in books:
            book.waiting.append(attempt)
        return False

    def prefilled(self, request: str) -> list[Attempt]:
        """Give up what prefill leased for a request; return the attempts that start in that room."""
        attempt = self._attempts[request]
        self._books[attempt.decode].pulls.pop(request, None)
        return self._leave(attempt, attempt.prefill) if attempt.prefill else []

    def end(self, request: str) -> list[Attempt]:
        """Give up all that a request holds; return the attempts that start in that room."""
        attempt = self._attempts.pop(request)
        return [each for worker in attempt.workers for each in self._leave(attempt, worker)]

    def is_any_waiting(self) -> bool:
        return any(book.waiting for book in self._books.values())

    def end_late(self, now_s: float) -> tuple[list[Attempt], list[Attempt]]:
        """Give up attempts that have waited for too long; return them, and those that start in their room."""
        late = {each.request: each for book in self._books.values() for each in book.waiting if each.until_s <= now_s}
        given_up: list[Attempt] = []
        started: list[Attempt] = []
        for attempt in late.values():
            # One that starts in the room of another is not late after all.
            if not attempt.is_started:
                given_up.append(attempt)
                started += self.end(attempt.request)
        return given_up, started

    def _leave(self, attempt: Attempt, worker: str) -> list[Attempt]:
        book = self._books[worker]
        return self._start_waiting(book) if book.leave(attempt) else []

    def _start_waiting(self, book: _Book) -> list[Attempt]:
        started: list[Attempt] = []
        for attempt in list(book.waiting):
            if not book.has_room(attempt):
                # Smaller attempts behind it must not take its room again and again.
                break
            books = [self._books[worker] for worker in attempt.workers]
            # Where its other worker has no room, the next one is tried.
            if all(each.has_room(attempt) for each in books):
                for each in books:
                    each.waiting.remove(attempt)
                self._start(attempt)
                started.append(attempt)
        return started

    def _start(self, attempt: Attempt) -> None:
        attempt.is_started = True
        for worker in attempt.workers:
            self._books[worker].take(attempt)

    def prefill_s(self, worker: str, tokens: int, prompt_tokens: int) -> float:
        """Return the time in which a worker computes the last `tokens` of a prompt, by its own rates."""
        return self._books[worker].rates.prefill_s(tokens, prompt_tokens)

    # ------------------------------------------------------------ heartbeats

    def beat(self, state: WorkerState, now_s: float) -> Heartbeat:
        """Return the heartbeat that the worker would send in this state."""
        book = self._books[state.name]
        if book.told is not None and book.told[0] is state and not book.attempts:
            # It has been idle since.
            return book.told[1]
        _measure(book, state.measured)
        book.rates.tick(min(1.0, state.kv_blocks_used / state.kv_blocks_total), now_s)
        heartbeat = _heartbeat(book, state, now_s)
        book.told = None if book.attempts else (state, heartbeat)
        return heartbeat


def _measure(book: _Book, measured: Measured) -> None:
    """Feed a worker's rates with what it measured."""
    rates = book.rates
    events = measured.events
    for event in sorted(events, key=attrgetter("at_s")) if len(events) > 1 else events:
        match event.kind:
            case "decoded":
                rates.tokens_came(event.tokens, event.at_s)
            case "entered":
                rates.prefill_began(event.at_s)
            case "computed":
                rates.prefill_ended(event.tokens, event.prompt_tokens, event.at_s, promotion_s=event.elapsed_s)
                # What was promoted took room like what was computed.
                book.computed(event.request, event.tokens + event.promoted_tokens)
            case "pulled":
                rates.transfer_ended(event.peer, BACKEND, event.size_bytes, event.elapsed_s)
                pulled_tokens = event.size_bytes // book.spec.kv_bytes_per_token
                book.computed(event.request, pulled_tokens + event.promoted_tokens)
            case "borrowed":
                rates.transfer_ended(event.peer, BACKEND, event.size_bytes, event.elapsed_s)
            case "promoted":
                rates.promotion_ended(event.size_bytes, event.elapsed_s)
            case "first_token":
                rates.decode_began(event.at_s)
            case "ended":
                rates.decode_ended(event.at_s)


def _heartbeat(book: _Book, state: WorkerState, now_s: float) -> Heartbeat:
    spec, rates = book.spec, book.rates
    tokens_queued = pairs_queued = lacking_blocks = 0
    elapsed_s = 0.0
    for attempt in book.prompts.values():
        if not tokens_queued:
            predicted_s = rates.prefill_s(attempt.uncached_tokens, attempt.prompt_tokens)
            elapsed_s = min(rates.prefill_elapsed_s(now_s), predicted_s)
        tokens_queued += attempt.uncached_tokens
        pairs_queued += prompt_pairs(attempt.prompt_tokens, attempt.uncached_tokens)
    for attempt in book.waiting:
        lacking_blocks += book.kv.lacking(book.holding(attempt))
    return Heartbeat(
        address=book.address,
        role=book.role,
        model=MODEL,
        model_path=MODEL,
        model_digest=MODEL,
        engine="simulated",
        engine_kind="simulated",
        block_tokens=spec.block_tokens,
        context_tokens_max=spec.kv_blocks_total * spec.block_tokens,
        running=state.running,
        waiting=state.waiting,
        overbooked=len(book.waiting),
        overbooked_kv_tokens=lacking_blocks * spec.block_tokens,
        pulling=len(book.pulls),
        pulling_kv_blocks=sum(book.pulls.values()),
        running_max=RUNNING_MAX,
        kv_blocks_used=min(max(book.kv.used, state.kv_blocks_used), spec.kv_blocks_total),
        kv_blocks_total=spec.kv_blocks_total,
        kv_shared_share=book.kv.shared_share,
        engine_block_tokens=spec.block_tokens,
        prefill_tokens_queued=tokens_queued,
        prefill_pairs_queued=pairs_queued,
        prefill_elapsed_s=elapsed_s,
        step_tokens_max=spec.step_tokens_max,
        steps=rates.steps(),
        transfers=rates.transfers(),
        promotion=rates.promotion() if spec.pool_blocks else None,
        pool_tokens_free=state.pool_blocks_free * spec.block_tokens,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        attempts=tuple(book.attempts),
    )
