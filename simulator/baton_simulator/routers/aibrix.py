"""AIBrix's prefix-cache router, and its router of separated deployments."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from baton_simulator.routers.events_ignored import EventsIgnored
from baton_simulator.routers.in_flight import InFlight, decoding, prefilling
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec, WorkerState

SNAPSHOT_S = 5.0
SNAPSHOTS = 13
"""One minute of them."""
DRAIN_S_MIN = 10.0
DRAIN_RATE_MIN = 0.1


@dataclass(frozen=True, slots=True)
class AibrixOptions:
    """Defaults of the environment variables `AIBRIX_PREFIX_CACHE_*`, `AIBRIX_PREFILL_*` and `AIBRIX_DECODE_*`."""

    imbalance_abs_count: int = 8
    standard_deviation_factor: int = 1
    table_blocks_max: int = 200_000
    table_block_tokens: int = 1
    """A block of the table has four characters, which a token is taken to have: 200,000 tokens for all workers."""
    table_ttl_s: float = 1200.0
    prefill_spread_min: int = 16
    decode_spread_min: int = 16
    decode_throughput_spread_min: float = 2048.0
    decode_score_ratio: float = 1.5


class Aibrix(EventsIgnored):
    """AIBrix v0.7.0, routing strategy `prefix-cache` (`pkg/plugins/gateway/algorithms/prefix_cache.go`).

    If more than 8 requests lie between the workers, only those with the fewest take part. Of the workers to which the
    longest prefix was sent, the one with the fewest requests, without those above the mean by more than a standard
    deviation. If none is left, the one with the fewest requests of all.

    Separated: strategy `pd` (`pd_disaggregation.go`), all workers in one role set. Prefill: ten times the share of the
    prompt that is unknown plus the share of the most requests, the overloaded left out as above. Decode: requests and
    lacking token throughput over free KV memory, each relative to the most. Before that, either pool takes its least
    loaded worker if requests, throughput or times to drain lie too far apart.

    Read, not compared in a run: it is a plug-in of Envoy on Kubernetes.
    """

    def __init__(self, workers: Sequence[WorkerSpec], options: AibrixOptions, random: Random) -> None:
        self._options = options
        self._random = random
        self._table = PrefixTable(workers[0].block_tokens, options)
        self._prefill = InFlight(prefilling(workers))
        self._decode = InFlight(decoding(workers))
        self._metrics = {worker: Metrics() for worker in self._decode.counts}

    def route(self, arrival: Arrival, now_s: float) -> Route:
        if self._prefill.counts:
            prefill, decode = self._prefill_worker(arrival, now_s), self._decode_worker(now_s)
            self._prefill.start(arrival.id, prefill)
        else:
            prefill, decode = None, self._aggregated(arrival, now_s)
        self._decode.start(arrival.id, decode)
        self._table.put(arrival, prefill or decode, now_s)
        return Route(decode, prefill)

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        self._prefill.end(arrival.id)

    def ended(self, arrival: Arrival, now_s: float) -> None:
        self._prefill.end(arrival.id)
        if (worker := self._decode.end(arrival.id)) is not None:
            self._metrics[worker].completed += 1

    def beat(self, state: WorkerState, now_s: float) -> None:
        if state.name in self._metrics:
            self._metrics[state.name].beat(state, now_s)

    def _aggregated(self, arrival: Arrival, now_s: float) -> str:
        counts = self._decode.counts
        fewest, most = min(counts.values()), max(counts.values())
        candidates = {worker for worker, requests in counts.items() if requests == fewest}
        known = self._table.known(
            arrival, candidates if most - fewest > self._options.imbalance_abs_count else counts, now_s
        )
        matched = [worker for worker in self._not_overloaded(counts) if worker in known]
        longest = max((known[worker] for worker in matched), default=0)
        return self._least({worker: counts[worker] for worker in matched if known[worker] == longest} or counts)

    def _prefill_worker(self, arrival: Arrival, now_s: float) -> str:
        counts = self._prefill.counts
        if max(counts.values()) - min(counts.values()) > self._options.prefill_spread_min:
            return self._least(counts)
        known = self._table.known(arrival, counts, now_s)
        most = max(1, *counts.values())
        return self._least(
            {
                worker: (100 - known.get(worker, 0)) * 0.1 + counts[worker] / most
                for worker in self._not_overloaded(counts)
            }
        )

    def _decode_worker(self, now_s: float) -> str:
        counts, options = self._decode.counts, self._options
        if max(counts.values()) - min(counts.values()) >= options.decode_spread_min:
            return self._least(counts)
        rates = {worker: metrics.tokens_per_s for worker, metrics in self._metrics.items()}
        if max(rates.values()) - min(rates.values()) > options.decode_throughput_spread_min:
            return self._least(rates)
        drains = {worker: metrics.drained_per_s(now_s) for worker, metrics in self._metrics.items()}
        if min(drains.values()) > 0:
            times = {worker: counts[worker] / max(drain, DRAIN_RATE_MIN) for worker, drain in drains.items()}
            if min(times.values()) > 0 and max(times.values()) / min(times.values()) > options.decode_score_ratio:
                return self._least(times)
        free = {worker: metrics.free_percent for worker, metrics in self._metrics.items()}
        most, fastest, freest = max(1, *counts.values()), max(1.0, *rates.values()), max(1.0, *free.values())
        return self._least(
            {
                worker: (counts[worker] / most + 1 - rates[worker] / fastest) / (free[worker] / freest)
                for worker in counts
            }
        )

    def _not_overloaded(self, counts: Mapping[str, int]) -> Collection[str]:
        mean = sum(counts.values()) / len(counts)
        deviation = math.dist(list(counts.values()), [mean] * len(counts)) / math.sqrt(max(1, len(counts) - 1))
        limit = mean + self._options.standard_deviation_factor * deviation
        return [worker for worker, requests in counts.items() if requests <= limit]

    def _least(self, scores: Mapping[str, float]) -> str:
        """Return the worker with the lowest score, one at random if several have it."""
        lowest = min(scores.values())
        return self._random.choice([worker for worker, score in scores.items() if score == lowest])


class Metrics:
    """What the gateway knows of a decode worker."""

    def __init__(self) -> None:
        self.completed = 0
        self.tokens_per_s = 0.0
        self.free_percent = 100.0
        self._beat_at_s: float | None = None
        self._snapshots: deque[tuple[float, int]] = deque(maxlen=SNAPSHOTS)

    def beat(self, state: WorkerState, now_s: float) -> None:
        if self._beat_at_s is not None and now_s > self._beat_at_s:
            self.tokens_per_s = state.measured.decoded_tokens / (now_s - self._beat_at_s)
        self._beat_at_s = now_s
        self.free_percent = max(0.1, round(100 - 100 * state.kv_blocks_used / state.kv_blocks_total))

    def drained_per_s(self, now_s: float) -> float:
        """Return the requests completed per second over the last minute, 0 while less than ten seconds are known."""
        if not self._snapshots or now_s - self._snapshots[-1][0] >= SNAPSHOT_S:
            self._snapshots.append((now_s, self.completed))
        since_s, completed = self._snapshots[0]
        return (self.completed - completed) / (now_s - since_s) if now_s - since_s >= DRAIN_S_MIN else 0.0


class PrefixTable:
    """Prompt blocks that were sent to workers: one table for all, the least recently sent dropped first."""

    def __init__(self, block_tokens: int, options: AibrixOptions) -> None:
        self._block_tokens = block_tokens
        self._options = options
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._hashes = 0
        self._tails = count(-1, -1)

    def known(self, arrival: Arrival, candidates: Collection[str], now_s: float) -> dict[str, int]:
        """Return the percentage of the prompt that each of the candidates was sent, without those at nothing."""
        self._expire(now_s)
        known: dict[str, int] = {}
        alive = set(candidates)
        for depth, block in enumerate(arrival.blocks, 1):
            entry = self._entries.get(block)
            alive &= entry.workers if entry is not None else set()
            if not alive:
                break
            known.update(dict.fromkeys(alive, depth * self._block_tokens * 100 // arrival.prompt_tokens))
        return known

    def put(self, arrival: Arrival, worker: str, now_s: float) -> None:
        tail_tokens = arrival.prompt_tokens - len(arrival.blocks) * self._block_tokens
        for block in arrival.blocks:
            self._put(block, self._block_tokens, worker, now_s)
        if tail_tokens:
            self._put(next(self._tails), tail_tokens, worker, now_s)

    def _put(self, block: int, tokens: int, worker: str, now_s: float) -> None:
        entry = self._entries.get(block)
        if entry is None:
            entry = self._entries[block] = Entry(set(), tokens // self._options.table_block_tokens, now_s)
            self._hashes += entry.hashes
        entry.workers.add(worker)
        entry.put_at_s = now_s
        self._entries.move_to_end(block)
        while self._hashes > self._options.table_blocks_max:
            self._drop_oldest()

    def _expire(self, now_s: float) -> None:
        while self._entries and now_s - next(iter(self._entries.values())).put_at_s > self._options.table_ttl_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self._hashes -= entry.hashes

    def __len__(self) -> int:
        return self._hashes


@dataclass(slots=True)
class Entry:
    workers: set[str]
    hashes: int
    """Blocks of the table that it stands for."""
    put_at_s: float
