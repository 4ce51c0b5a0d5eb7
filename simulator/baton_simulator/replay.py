"""Replay of a trace over simulated workers on virtual time, with one router."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, floor, inf
from random import Random
from typing import Final

from baton.errors import BatonError, ContextLengthExceeded
from baton.pool.policy import PolicyName
from baton_simulator.bound import SharedCache
from baton_simulator.cache import PrefixCache
from baton_simulator.events import EventQueue
from baton_simulator.links import Links, Pull
from baton_simulator.loans import Loans
from baton_simulator.pool import WorkerPool
from baton_simulator.routers.protocol import Arrival, HoldingRouter, Role, Route, Router, TieredRouter, WorkerSpec
from baton_simulator.steps import StepModel, mocker_steps
from baton_simulator.traffic.trace import Request, Trace
from baton_simulator.worker import Leg, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The workers of a replay: either `aggregated` ones, or `prefill` and `decode` ones."""

    aggregated: int = 0
    prefill: int = 0
    decode: int = 0
    kv_tokens_in_use: int = 512_000
    """Most tokens of KV that running requests of one worker hold."""
    kv_tokens: int = 1_024_000
    """Tokens of KV that one worker keeps, those in use included."""
    kv_bytes_per_token: int = 131_072
    link_bytes_per_s: float = 10e9
    chunk_tokens: int = 2048
    prefill_chunk_tokens: int = 8192
    """Chunks of workers that only prefill."""
    layers: int = 32
    """Layers of the model: a pull goes layer by layer, so one layer of the last chunk is left when that is computed."""
    beat_s: float = 0.25
    kv_pool_bytes: int = 0
    """Host memory of each worker's KV pool; 0: there is none."""
    kv_pool_policy: PolicyName = PolicyName.S3_FIFO
    kv_loans: bool = True
    """Whether pools lend to other workers."""
    promotion_bytes_per_s: float = 25e9
    """Bandwidth from host memory to the device: of PCIe 4, 16 lanes."""
    shared_cache: bool = False
    """An infinite cache, shared by all workers: for the bound."""

    @property
    def workers(self) -> int:
        return self.aggregated + self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.aggregated} aggregated" if self.aggregated else f"{self.prefill} prefill + {self.decode} decode"

    def specs(self, block_tokens: int) -> list[WorkerSpec]:
        counts: tuple[tuple[Role, int], ...] = (
            ("aggregated", self.aggregated),
            ("prefill", self.prefill),
            ("decode", self.decode),
        )
        return [
            WorkerSpec(
                f"{role}-{n}",
                role,
                kv_blocks_total=self.kv_tokens_in_use // block_tokens,
                block_tokens=block_tokens,
                kv_bytes_per_token=self.kv_bytes_per_token,
                step_tokens_max=self.prefill_chunk_tokens if role == "prefill" else self.chunk_tokens,
                pool_blocks=(slots := self.kv_pool_bytes // (block_tokens * self.kv_bytes_per_token)),
                lends=self.kv_loans and slots > 0,
            )
            for role, count in counts
            for n in range(count)
        ]


COLLECT_AFTER: Final = 100_000
"""New objects after which garbage is collected."""
IDLE_BEATS: Final = 40
"""Heartbeats that an idle worker sends: after 10 s they would say nothing new."""

RouterFactory = Callable[[Sequence[WorkerSpec], Random], Router]
StepsOf = Callable[[WorkerSpec, Random], StepModel]
"""Returns the step model of one worker."""


@dataclass(slots=True)
class Outcome:
    """What happened to one request."""

    request: Request
    arrived_s: float
    placed_s: float | None = None
    prefill: str = ""
    """Worker that computed the prompt, if another one than `decode`."""
    decode: str = ""
    predicted_ttft_s: float | None = None
    predicted_at_s: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens that the worker which computed the prompt had in its cache or its pool."""
    promoted_tokens: int = 0
    """Part of them that it promoted from its pool."""
    borrowed_tokens: int = 0
    """Tokens that another worker's pool lent for it."""
    first_s: float | None = None
    last_s: float | None = None
    refused: str = ""
    """Code of the error, if it was refused."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        if self.first_s is None or self.last_s is None or self.request.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.request.output_tokens - 1)


@dataclass(slots=True, eq=False)
class _Flight:
    """A request on its way."""

    index: int
    arrival: Arrival
    outcome: Outcome
    source: Leg | None = None
    sink: Leg | None = None
    pull: Pull | None = None
    is_computed: bool = False


class Replay:
    """One replay. `run` returns the outcome of each request, in the order of the trace."""

    def __init__(
        self,
        trace: Trace,
        fleet: Fleet,
        new_router: RouterFactory,
        *,
        seed: int,
        steps_of: StepsOf = mocker_steps,
        output_tokens_max: int = 1024,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        # One generator per purpose: a router that draws more numbers does not change the workers.
        phases, noise, routing = (Random(f"{seed} {purpose}") for purpose in ("phases", "noise", "routing"))
        self._trace = trace
        self._fleet = fleet
        self._seen: set[int] = set()
        self._queue = EventQueue()
        self._links = Links(self._queue, fleet.link_bytes_per_s)
        self._loans = Loans(self._queue, self._links, self._tell_pool)
        self.workers: dict[str, Worker] = {}
        self._phases_s: dict[str, float] = {}
        specs = fleet.specs(trace.block_tokens)
        self._beats: list[tuple[float, int]] = []
        """Heap of the instants of the workers' next heartbeats, and of some that were sent before."""
        for number, spec in enumerate(specs):
            self.workers[spec.name] = worker = Worker(
                spec,
                self._new_cache(spec),
                steps_of(spec, noise),
                number=number,
                queue=self._queue,
                listener=self,
                pool=self._new_pool(spec),
            )
            self._phases_s[spec.name] = phases.uniform(0, fleet.beat_s)
            self._beat_next(worker, self._phases_s[spec.name])
        self._numbered = list(self.workers.values())
        self._router = new_router(specs, routing)
        self._tiered = self._router if isinstance(self._router, TieredRouter) else None
        self._holding = self._router if isinstance(self._router, HoldingRouter) else None
        self._output_tokens_max = output_tokens_max
        self._progress = progress
        self._flights: dict[str, _Flight] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._followers = {request.after: n for n, request in enumerate(trace.requests) if request.after is not None}
        self._ended = 0

    def _new_cache(self, spec: WorkerSpec) -> PrefixCache:
        if self._fleet.shared_cache:
            return SharedCache(in_use_max=spec.kv_blocks_total, seen=self._seen)
        return PrefixCache(in_use_max=spec.kv_blocks_total, blocks_max=self._fleet.kv_tokens // spec.block_tokens)

    def _new_pool(self, spec: WorkerSpec) -> WorkerPool | None:
        fleet = self._fleet
        if not spec.pool_blocks or fleet.shared_cache:
            return None
        return WorkerPool(
            slots=spec.pool_blocks,
            policy=fleet.kv_pool_policy,
            block_tokens=spec.block_tokens,
            block_bytes=spec.block_tokens * spec.kv_bytes_per_token,
            bytes_per_s=fleet.promotion_bytes_per_s,
        )

    def run(self) -> list[Outcome]:
        thresholds = gc.get_threshold()
        # Nearly all that a replay makes is in use until its end or free without a collection.
        gc.set_threshold(COLLECT_AFTER)
        try:
            return self._run()
        finally:
            gc.set_threshold(*thresholds)

    def _run(self) -> list[Outcome]:
        self._next_start(0)
        queue, holding = self._queue, self._holding
        while True:
            if holding is not None and holding.wake_at_s <= queue.next_s:
                if holding.wake_at_s == inf:
                    break
                queue.advance(holding.wake_at_s)
                self._beat_all()
                for arrival, answer in holding.wake(queue.now_s):
                    flight = self._flights[arrival.id]
                    if isinstance(answer, BatonError):
                        self._refuse(flight, answer)
                    else:
                        self._dispatch(flight, answer)
            elif not queue.step():
                break
        return [self._outcomes[n] for n in range(len(self._trace.requests))]

    # ------------------------------------------------------------ requests

    def _next_start(self, index: int) -> None:
        """Schedule the first request from `index` on that waits for no other."""
        requests = self._trace.requests
        while index < len(requests) and requests[index].after is not None:
            index += 1
        if index < len(requests):
            self._queue.add(requests[index].at_s, self._on_start, index)

    def _on_start(self, index: int) -> None:
        self._next_start(index + 1)
        self._on_arrival(index)

    def _on_arrival(self, index: int) -> None:
        request, now_s = self._trace.requests[index], self._queue.now_s
        arrival = Arrival(
            id=str(index),
            session=request.session,
            block_tokens=self._trace.block_tokens,
            blocks=request.blocks,
            prompt_tokens=request.prompt_tokens,
            output_tokens_max=max(self._output_tokens_max, request.output_tokens),
            tenant=request.tenant,
            weight=request.weight,
        )
        outcome = self._outcomes[index] = Outcome(request, now_s)
        flight = self._flights[arrival.id] = _Flight(index, arrival, outcome)
        self._beat_all()
        try:
            route = self._router.route(arrival, now_s)
        except BatonError as error:
            self._refuse(flight, error)
            return
        if route is not None:
            self._dispatch(flight, route)

    def _dispatch(self, flight: _Flight, route: Route) -> None:
        request, outcome = flight.outcome.request, flight.outcome
        outcome.placed_s = self._queue.now_s
        outcome.predicted_ttft_s, outcome.predicted_at_s = route.predicted_ttft_s, route.predicted_at_s
        outcome.decode = route.decode
        decode = self.workers[route.decode]
        leg = flight.sink = self._leg(flight, request.output_tokens)
        if not decode.can_hold(leg):
            self._router.ended(flight.arrival, self._queue.now_s)
            self._refuse(flight, ContextLengthExceeded("the worker can never hold this request"))
        elif route.prefill is None or route.prefill == route.decode:
            self._submit(leg, decode, route)
        else:
            outcome.prefill = route.prefill
            leg.is_pull = True
            flight.source = self._leg(flight, 0)
            self._submit(flight.source, self.workers[route.prefill], route)

    def _submit(self, leg: Leg, worker: Worker, route: Route) -> None:
        self._loans.submit(leg, worker, self.workers[route.lender] if route.lender else None, route.loan_s)

    def _leg(self, flight: _Flight, output_tokens: int) -> Leg:
        request, block_tokens = flight.outcome.request, self._trace.block_tokens
        blocks = -(-(request.prompt_tokens + output_tokens) // block_tokens)
        return Leg(
            flight.arrival.id,
            request.blocks,
            blocks - len(request.blocks),
            request.prompt_tokens,
            output_tokens,
        )

    def _refuse(self, flight: _Flight, error: BatonError) -> None:
        flight.outcome.refused = error.code
        self._conclude(flight)

    def _conclude(self, flight: _Flight) -> None:
        del self._flights[flight.arrival.id]
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended)
        follower = self._followers.get(flight.index)
        if follower is not None:
            gap_s = self._trace.requests[follower].gap_s
            self._queue.add(self._queue.now_s + gap_s, self._on_arrival, follower)

    # ------------------------------------------------------------ workers

    def on_admitted(self, worker: Worker, leg: Leg, evicted: Sequence[int]) -> None:
        if evicted:
            self._router.cached(worker.spec.name, (), evicted, self._queue.now_s)
        flight = self._flights[leg.request]
        if not leg.is_pull:
            outcome = flight.outcome
            outcome.cached_tokens, outcome.promoted_tokens = leg.cached_tokens, leg.promoted_tokens
            outcome.borrowed_tokens = leg.borrowed_tokens
            if leg is flight.source and flight.sink is not None:
                # Only now, so that no memory of decode waits for a queue of prompts.
                self.workers[flight.outcome.decode].submit(flight.sink)
            return
        assert flight.source is not None
        uncached_tokens = flight.source.prompt_tokens - flight.source.cached_tokens
        tail_tokens = min(uncached_tokens, self._fleet.prefill_chunk_tokens)
        bytes_per_token = self._fleet.kv_bytes_per_token
        size_bytes = (leg.prompt_tokens - leg.cached_tokens) * bytes_per_token
        flight.pull = Pull(
            source=flight.outcome.prefill,
            sink=worker.spec.name,
            size_bytes=size_bytes,
            tail_bytes=min(size_bytes, tail_tokens * bytes_per_token // self._fleet.layers),
            done=lambda pull: self._on_pulled(flight, pull),
            tail_exists=flight.is_computed,
        )
        self._links.begin(flight.pull)

    def _on_pulled(self, flight: _Flight, pull: Pull) -> None:
        assert flight.source is not None
        assert flight.sink is not None
        self.workers[pull.source].release(flight.source)
        self.workers[pull.sink].pulled(flight.sink, pull.source, pull.size_bytes, pull.moving_s)

    def on_computed(self, worker: Worker, leg: Leg) -> None:
        stored = leg.blocks[leg.cached_blocks :]
        if stored:
            self._router.cached(worker.spec.name, stored, (), self._queue.now_s)
        flight = self._flights[leg.request]
        if leg is flight.source:
            flight.is_computed = True
            if flight.pull is not None:
                self._links.release_tail(flight.pull)

    def on_saved(self, worker: Worker, stored: Sequence[int], evicted: Sequence[int]) -> None:
        if self._tiered is not None:
            self._tiered.pooled(worker.spec.name, stored, evicted, self._queue.now_s)

    def _tell_pool(self, worker: Worker) -> None:
        assert worker.pool is not None
        stored, evicted = worker.pool.take_changes()
        if stored or evicted:
            self.on_saved(worker, stored, evicted)

    def on_first_token(self, worker: Worker, leg: Leg) -> None:
        flight = self._flights[leg.request]
        flight.outcome.first_s = self._queue.now_s
        self._router.prefilled(flight.arrival, self._queue.now_s)

    def on_ended(self, worker: Worker, leg: Leg) -> None:
        flight = self._flights[leg.request]
        flight.outcome.last_s = self._queue.now_s
        self._router.ended(flight.arrival, self._queue.now_s)
        self._conclude(flight)

    # ------------------------------------------------------------ heartbeats

    def _beat_all(self) -> None:
        now_s, beats = self._queue.now_s, self._beats
        due: set[int] = set()
        while beats and beats[0][0] <= now_s:
            due.add(heappop(beats)[1])
        for number in sorted(due):
            worker = self._numbered[number]
            # Unless it was sent when the worker changed.
            if worker.beat_at_s <= now_s:
                self._beat(worker, now_s)

    def before_change(self, worker: Worker) -> None:
        now_s = self._queue.now_s
        if worker.beat_at_s <= now_s:
            self._beat(worker, now_s)
        if worker.idle_beats >= IDLE_BEATS:
            phase_s, beat_s = self._phases_s[worker.spec.name], self._fleet.beat_s
            self._beat_next(worker, phase_s + ceil((now_s - phase_s) / beat_s) * beat_s)
        worker.idle_beats = 0

    def _beat(self, worker: Worker, now_s: float) -> None:
        """Send the newest heartbeat that is due; no decision can have seen those before it."""
        beat_s = self._fleet.beat_s
        at_s = worker.beat_at_s + floor((now_s - worker.beat_at_s) / beat_s) * beat_s
        state = worker.report(at_s)
        worker.idle_beats += state.running + state.waiting == 0
        self._beat_next(worker, at_s + beat_s if worker.idle_beats < IDLE_BEATS else inf)
        self._router.beat(state, at_s)

    def _beat_next(self, worker: Worker, at_s: float) -> None:
        worker.beat_at_s = at_s
        heappush(self._beats, (at_s, worker.number))
