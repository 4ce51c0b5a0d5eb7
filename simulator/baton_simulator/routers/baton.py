"""Baton's own placement as a router: `choose`, `Loads` and the worker's measured rates, unchanged.

What is modelled here is the rest of Baton: the ledger's book of each worker, heartbeats, the index with its lag, and
the gateway's admission queue. One scheduler places, so what it places a ledger never refuses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Final

from baton_scheduler.loads import Loads, LoadsOptions
from baton_scheduler.placement import Demand, PlacementOptions, choose, soft_placements

from baton.errors import BatonError, Overloaded
from baton.messages.base import Context, WorkerAddress
from baton.messages.placement import Disaggregation, Placed, Placement
from baton.messages.workers import Heartbeat
from baton.messages.workers import Role as WorkerRole
from baton.worker.rates import Rates
from baton_simulator.routers.prefix_index import PrefixIndex
from baton_simulator.routers.protocol import Arrival, Measured, Route, WorkerSpec, WorkerState

MODEL: Final = "model"
RUNNING_MAX: Final = 256
"""Run slots of a worker, vLLM's default on a GPU of 80 GB."""
RETRY_MIN_S: Final = 0.02
RETRY_MAX_S: Final = 0.06
TICKS_MAX: Final = 100
BEAT_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class BatonOptions:
    disaggregation: Disaggregation
    index_lag_s: float = 0.05
    admission_wait_s: float = 10.0
    """Longest time in the gateway's queue."""
    placement: PlacementOptions = field(default_factory=PlacementOptions)


@dataclass(slots=True)
class _Entry:
    """One attempt in a worker's ledger."""

    blocks: int
    uncached_tokens: int
    """Prompt tokens that the worker has still to compute, as its task said."""


@dataclass(slots=True)
class _Ledger:
    """The worker's side of Baton: its ledger's book and its measured rates."""

    spec: WorkerSpec
    rates: Rates = field(default_factory=Rates)
    entries: dict[str, _Entry] = field(default_factory=dict[str, _Entry])
    blocks: int = 0
    beat_s: float = -inf

    def reserve(self, request: str, tokens: int, uncached_tokens: int) -> None:
        entry = _Entry(-(-tokens // self.spec.block_tokens), uncached_tokens)
        self.entries[request] = entry
        self.blocks += entry.blocks

    def release(self, request: str) -> None:
        entry = self.entries.pop(request, None)
        if entry is not None:
            self.blocks -= entry.blocks

    def measure(self, measured: Measured, now_s: float) -> None:
        """Feed the measurements to the worker's rates as they came."""
        began = [(at_s, 0, 0) for at_s, _ in measured.entered]
        ended = [(at_s, 1, tokens) for at_s, _, tokens in measured.computed]
        for at_s, is_end, tokens in sorted(began + ended):
            if is_end:
                self.rates.prefill_ended(tokens, at_s)
            else:
                self.rates.prefill_began(at_s)
        for _, request, _ in measured.computed:
            if request in self.entries:
                self.entries[request].uncached_tokens = 0
        for size_bytes, moving_s in measured.pulls:
            self.rates.transfer_ended(size_bytes, moving_s)
        if measured.decoded_tokens:
            self.rates.tokens_came(measured.decoded_tokens, measured.decoded_s)
        # Heartbeats that nothing could see were left out.
        ticks = 1 if self.beat_s == -inf else round((now_s - self.beat_s) / BEAT_S)
        for _ in range(min(max(ticks, 1), TICKS_MAX)):
            self.rates.tick()
        self.beat_s = now_s


class BatonRouter:
    def __init__(self, workers: Sequence[WorkerSpec], options: BatonOptions, random: Random) -> None:
        self._options = options
        self._random = random
        self._loads = Loads(LoadsOptions())
        self._index = PrefixIndex([spec.name for spec in workers], options.index_lag_s)
        self._ledgers = {spec.name: _Ledger(spec) for spec in workers}
        self._placements: dict[str, Placement] = {}
        self._queue: deque[tuple[float, Arrival]] = deque()
        """(latest time, request) of those that found all workers full, first in first out."""
        self.wake_at_s = inf
        for spec in workers:
            self.beat(WorkerState(spec.name, spec.role, 0, 0, 0, 0, spec.kv_blocks_total, 0), 0.0)

    # ------------------------------------------------------------ routing

    def route(self, arrival: Arrival, now_s: float) -> Route | None:
        if not self._queue:
            try:
                return self._place(arrival, now_s)
            except Overloaded:
                self._retry_later(now_s)
        self._queue.append((now_s + self._options.admission_wait_s, arrival))
        return None

    def wake(self, now_s: float) -> list[tuple[Arrival, Route | BatonError]]:
        answers: list[tuple[Arrival, Route | BatonError]] = []
        while self._queue:
            until_s, arrival = self._queue[0]
            try:
                answers.append((arrival, self._place(arrival, now_s)))
            except Overloaded as error:
                if now_s < until_s:
                    self._retry_later(now_s)
                    return answers
                answers.append((arrival, error))
            except BatonError as error:
                answers.append((arrival, error))
            self._queue.popleft()
        self.wake_at_s = inf
        return answers

    def _retry_later(self, now_s: float) -> None:
        self.wake_at_s = now_s + self._random.uniform(RETRY_MIN_S, RETRY_MAX_S)

    def _place(self, arrival: Arrival, now_s: float) -> Route:
        options = self._options
        demand = Demand(
            model=MODEL,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens_max=arrival.output_tokens_max,
            disaggregation=options.disaggregation,
        )
        match = self._index.match(arrival.blocks, now_s)
        placement = choose(demand, self._loads.live(now_s), match, options.placement, self._random)
        self._count(arrival, placement, now_s)
        predicted = placement.predicted
        return Route(predicted.decode, predicted.prefill or None, predicted.predicted_ttft_s)

    def _count(self, arrival: Arrival, placement: Placement, now_s: float) -> None:
        """Count a placement where schedulers, indexes and ledgers do."""
        predicted = placement.predicted
        addresses = [address for address in (placement.prefill, placement.decode) if address is not None]
        placed = Placed(
            context=Context(request=arrival.id, budget_s=self._options.admission_wait_s),
            model_digest=MODEL,
            blocks=b"",
            workers=tuple(addresses),
            prompt_tokens=arrival.prompt_tokens,
            output_tokens_max=arrival.output_tokens_max,
            predicted=predicted,
        )
        self._loads.place(arrival.id, soft_placements(placed, now_s=now_s, options=self._options.placement))
        self._placements[arrival.id] = placement
        for address in addresses:
            self._index.speculate(address.worker, arrival.blocks)
        uncached_tokens = arrival.prompt_tokens - predicted.cached_tokens
        output_tokens = min(arrival.output_tokens_max, self._options.placement.output_headroom_tokens)
        held_tokens = arrival.prompt_tokens + output_tokens
        if predicted.prefill:
            self._ledgers[predicted.prefill].reserve(arrival.id, arrival.prompt_tokens, uncached_tokens)
            uncached_tokens = 0
        self._ledgers[predicted.decode].reserve(arrival.id, held_tokens, uncached_tokens)

    # ------------------------------------------------------------ what happens on the workers

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        placement = self._placements[arrival.id]
        self._index.settle(placement.decode.worker, arrival.blocks, now_s)
        if placement.prefill is not None:
            self._index.settle(placement.prefill.worker, arrival.blocks, now_s)
            self._ledgers[placement.prefill.worker].release(arrival.id)

    def ended(self, arrival: Arrival, now_s: float) -> None:
        placement = self._placements.pop(arrival.id)
        self._ledgers[placement.decode.worker].release(arrival.id)

    def cached(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        self._index.change(worker, stored, evicted, now_s)

    def beat(self, state: WorkerState, now_s: float) -> None:
        ledger = self._ledgers[state.name]
        ledger.measure(state.measured, now_s)
        self._loads.take(_heartbeat(ledger, state), now_s)


def _heartbeat(ledger: _Ledger, state: WorkerState) -> Heartbeat:
    """Return the heartbeat that Baton's worker would send."""
    spec, rates = ledger.spec, ledger.rates
    return Heartbeat(
        address=WorkerAddress(worker=spec.name, generation=1, agents=(spec.name,)),
        role=WorkerRole.PREFILL if spec.role == "prefill" else WorkerRole.DECODE,
        model=MODEL,
        model_path=MODEL,
        model_digest=MODEL,
        engine="simulated",
        engine_kind="simulated",
        block_tokens=spec.block_tokens,
        context_tokens_max=spec.kv_blocks_total * spec.block_tokens,
        running=state.running,
        waiting=state.waiting,
        running_max=RUNNING_MAX,
        kv_blocks_used=min(max(ledger.blocks, state.kv_blocks_used), spec.kv_blocks_total),
        kv_blocks_total=spec.kv_blocks_total,
        engine_block_tokens=spec.block_tokens,
        prefill_tokens_queued=sum(entry.uncached_tokens for entry in ledger.entries.values()),
        prefill_tokens_per_s=rates.prefill_tokens_per_s.value,
        decode_tokens_per_s=rates.decode_tokens_per_s,
        transfer_bytes_per_s=rates.transfer_bytes_per_s.value,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        attempts=tuple((request, 0) for request in ledger.entries),
    )
